"""The OpenAI- and Anthropic-compatible HTTP server (`llamarium serve`), with one engine. Torch-free."""
