"""Objectives of training: the protocol and next-token loss (`base`), and its memory-saving sum (`cross_entropy`).

The objective of pairs is in `dpo`, beside the preparation of its run.
"""
