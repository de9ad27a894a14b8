"""Anthropic's protocol: messages, their stream of events, and the counting of their tokens."""
