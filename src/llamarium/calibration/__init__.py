"""Quantization of a model to a packed folder.

`quantize` is the entry point. `quantizer` quantizes weight by weight, `calibrated` layer by layer; `calibrate` measures
inputs, and `fit` and `gptq` fit scales. `llamarium.quant` defines the packed types and multiplies them.
"""
