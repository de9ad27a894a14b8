"""Stored types: one table of them all (`formats`), and the Linears that are made of them.

A `QuantizedLinear` (`base`) is one of `nf4`, `int8`, `int4`, `ggml` (GGUF's blocks as a file has them) and `packed`
(tiles for the C kernels; `packing` makes tiles and `tiles` takes them apart). `swap` puts them into a model. How good scales are found
stands in `llamarium.quantization`.
"""
