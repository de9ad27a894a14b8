"""Inspection of a model's computation, per token and per layer, as plain data; `cli/views.py` prints it."""
