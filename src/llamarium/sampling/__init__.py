"""Sampling of the next token: parameters, the state of an answer, and the sampler in C and NumPy."""
