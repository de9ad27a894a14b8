"""OpenAI's protocol: its requests, its answers, its streams."""
