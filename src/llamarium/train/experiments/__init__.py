"""Experiments: the same run with one thing changed, and a page that compares the runs.

All runs of an experiment have the same rows in the same order, and the same initial weights in matrices of the same
shape. Changes that no Llama config describes (no RoPE, no norm, looking ahead) are made to a model from outside, not by
a switch in it. Checkpoints of such a model have no `config.json`, and only the experiment resumes from them.
"""
