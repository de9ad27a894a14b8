"""Measures: how well a model predicts texts of any length, and its distance from another one."""
