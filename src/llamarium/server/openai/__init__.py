"""OpenAI's protocol: requests, responses and streams."""
