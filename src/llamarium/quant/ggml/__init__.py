"""GGUF's types: back to weights (`blocks`), from weights (`encode`, `encode_k`), and as modules (`linear`)."""
