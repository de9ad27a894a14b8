"""GGUF's block types: decoding (`blocks`), encoding (`encode`, `encode_k`) and modules (`linear`)."""
