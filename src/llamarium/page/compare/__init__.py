"""Comparisons with the served model: its weights in other types, its adapters, checkpoints of training runs."""
