"""Stored types: one table of them all (`formats`), and the Linears that are made of them.

A `QuantizedLinear` (`base`) is one of `nf4`, `ggml` (GGUF's blocks as a file has them) and `packed` (tiles for the C
kernels, which `packing` makes). Types that are made of several tensors are registered in `stored_types`. `codes`
defines what is rounded and what tiles hold. How good scales are found stands in `llamarium.calibration`.
"""
