"""Structured output: the form of an answer's text.

`description.py` has a request's `Grammar`; `json_schema.py` (by `schema/`) and `lark.py` restrict it to what can be
enforced, and `compiler.py` compiles it for one tokenizer, into the sampler's constraints (`sampling/constraint.py`).
Only `compiler.py` needs the package llguidance, and nothing needs torch.
"""
