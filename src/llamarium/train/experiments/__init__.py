"""Experiments: the same run with one thing changed, and a page that compares the runs.

| experiment | what is changed                                                       |
|------------|-----------------------------------------------------------------------|
| tied       | the head is the embedding table, or a matrix of its own               |
| rope       | queries and keys are rotated by their position, or not                |
| causal     | a token attends to those before it, or to its whole row               |
| heads      | key-value heads: one for each query head, one for some, one for all   |
| norm       | RMSNorm before every block, LayerNorm, or none                        |

All runs of an experiment have the same rows in the same order, and the same initial weights in matrices of the same
shape. Changes that no Llama config describes (no RoPE, no norm, looking ahead) are made to a model from outside, not by
a switch in it. Checkpoints of such a model have no `config.json`, and only the experiment resumes from them.

`variants` defines the comparisons, `swaps` changes models, `running` trains and writes the page; `peeking` measures
how looking ahead cheats.
"""
