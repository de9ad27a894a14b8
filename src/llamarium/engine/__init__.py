"""Continuous batching: many requests over one runner and one paged KV cache, from ids to ids. Torch-free, no text."""
