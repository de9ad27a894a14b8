"""What learning makes small.

| file | what it is |
|---|---|
| `base` | the `Objective` protocol, and the one of plain training: the next token's surprise |
| `cross_entropy` | its sum over many tokens, whose logits are never held whole |

The objective of pairs is in `dpo`, beside what prepares its run.
"""
