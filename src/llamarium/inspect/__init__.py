"""Inspection: what the model computes, token by token and layer by layer, as data; `cli/views.py` prints it."""
