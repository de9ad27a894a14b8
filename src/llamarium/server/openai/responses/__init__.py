"""OpenAI's responses: what a client gives and gets as items. Nothing is stored between two of them."""
