"""Sampling of the next token: parameters, the state of a request, the sampler in C and in PyTorch."""
