"""Routes outside the protocols of OpenAI and Anthropic."""
