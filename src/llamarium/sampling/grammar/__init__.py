"""Structured output: which texts an answer may be.

`description.py` is what a request says (a `Grammar`), `json_schema.py`, `patterns.py` and `lark.py` hold it to what can
be kept, and `compiler.py` makes of it, for one tokenizer, what a row of the sampler asks (`sampling/constraint.py`).
Only `compiler.py` needs the package llguidance, and nothing needs torch.
"""
