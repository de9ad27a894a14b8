"""HTTP: an OpenAI-compatible server over one engine. Never torch; `llamarium serve` is its command."""
