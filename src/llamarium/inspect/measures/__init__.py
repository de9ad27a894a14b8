"""How well a model predicts texts of any length, and how far from another one."""
