"""Quantized types: a table of all of them (`formats`), and the Linear modules that use them.

The subclasses of `QuantizedLinear` (`base`) are in `nf4`, `ggml` (GGUF blocks, as stored in a file), `packed` (tiles
for the C kernels, made by `packing`) and `stored_linear`. Types that consist of several tensors are registered in
`stored_types`. `codes` is the reference for quantization and the layout of tiles. `llamarium.calibration` fits scales.
"""
