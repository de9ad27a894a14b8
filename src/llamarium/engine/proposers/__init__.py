"""Speculative decoding: n-gram lookup or a draft model proposes tokens, which the model verifies in one pass."""
