"""Model execution: the `Runner` protocol, the `Batch`, the paged KV cache, and taps on activations."""
