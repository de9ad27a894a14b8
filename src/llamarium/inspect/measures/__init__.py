"""Measures: how well a model predicts long texts, its distance from another one, kinds of heads, and speed."""
