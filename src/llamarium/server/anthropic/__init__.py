"""Anthropic's protocol: messages, their streams, and counts of their tokens."""
