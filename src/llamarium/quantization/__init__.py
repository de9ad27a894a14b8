"""From float weights to a packed folder.

`quantize` is the whole way, `quantizer` goes layer by layer, `calibrate` looks at the inputs; `fit` and `gptq` find the
scales. How the types are stored and multiplied stands in `llamarium.quant`.
"""
