"""Seeing: what the model computes, token by token and layer by layer, as data and as tables."""
