"""How a model is executed: one `Runner` protocol, one `Batch`, one paged cache, and taps on what is computed."""
