"""Quantize float weights into a packed folder.

`quantize` is the entry point; `quantizer` goes layer by layer, `calibrate` measures inputs, `fit` and `gptq` find
scales. `llamarium.quant` stores and multiplies the packed types.
"""
