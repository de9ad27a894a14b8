"""Experiments: runs that differ in one setting or component, and a page that compares them.

All runs of an experiment use the same rows in the same order, and the same initial weights in matrices of the same
shape. Changes that a Llama config cannot express (no RoPE, no norm, bidirectional attention) are applied to the model
from outside, not by a switch in its code. Checkpoints of such models have no `config.json`; only the experiment can
resume from them.
"""
