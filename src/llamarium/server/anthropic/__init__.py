"""Anthropic's protocol: messages, streams, and token counts."""
