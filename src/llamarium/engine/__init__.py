"""Continuous batching: many requests over one runner and one paged cache, from ids to ids. Never torch, never text."""
