"""A load generator for OpenAI-compatible servers, over HTTP alone. Never torch."""
