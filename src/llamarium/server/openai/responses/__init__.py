"""OpenAI's responses: what a client gives and gets as items, and what is stored of them."""
