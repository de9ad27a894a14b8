"""Structured output: grammars that constrain an answer.

`description.py` defines a request's `Grammar`. `json_schema.py` (with `schema/`) and `lark.py` restrict it to what can
be enforced, and `compiler.py` compiles it for one tokenizer, for the sampler's constraints (`sampling/constraint.py`).
Only `compiler.py` and the conversion of GBNF need the package llguidance. Torch-free.
"""
