"""Experiments of one flag: the same run twice or three times, one thing changed, and a page that compares them.

| experiment | what is changed                                                         |
|------------|-------------------------------------------------------------------------|
| tied       | the head is the embedding table, or a matrix of its own                 |
| rope       | queries and keys are turned by their position, or nothing knows it      |
| causal     | a token sees those before it, or its whole row                          |
| heads      | key-value heads: one for each query head, one for some, one for all     |
| norm       | RMSNorm before every block, LayerNorm, or none                          |

All runs of an experiment see the same rows in the same order, and begin with the same weights where they have the same
matrices. What no Llama config can say (no RoPE, no norm, looking ahead) is done to a model from outside, never by a
switch within it. Such a model is no Llama, and its checkpoints do not look like one: they have no `config.json`, and
nothing but the experiment goes on from them.

`variants` says what is compared, `swaps` what is done to a model, `running` trains and writes the page; `peeking`
measures how looking ahead cheats, `seeds` what chance does.
"""
