"""A pass seen from far: some numbers for each column and layer. A column is a token, or a block of tokens and its mean.

`far_view` returns the numbers of C columns one after the other, row by row:

| part               | shape    | what it is                                                                         |
|--------------------|----------|------------------------------------------------------------------------------------|
| `lengths`          | (L+1, C) | length of the residual stream: as embedded, then after each layer                  |
| `attention_added`  | (L, C)   | length of what attention adds, for the length of the stream after it               |
| `mlp_added`        | (L, C)   | the same of the MLP                                                                |
| `keys`, `values`   | (L, C)   | length of a key, and of a value, mean over the key-value heads                     |
| `attention`        | (L, E)   | mean over the heads of the share that a column takes of each column up to itself   |

Of a block of keys the shares are added up. E counts the pairs: the first column's row ends with its own share; where
an experiment lets tokens look ahead, every row has all columns.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.inspect.numbers import Floats, lengths
from llamarium.inspect.trace import Trace

OF_A_TOKEN = ("embed", "attn_out", "resid_mid", "mlp_out", "resid", "pattern")
OF_ALL = ("k", "v")


def far_view(kept: Sequence[Trace], traces: Iterable[Trace], start: int, block: int = 1) -> Floats:
    """Return the numbers above, in one axis.

    Args:
        kept: Traces of `OF_ALL`, of some layers each, in their order.
        traces: Traces of `OF_A_TOKEN`, all layers, of some tokens each: those from `start` on, in their order. Each but
            the text's last one holds whole blocks.
        start: The first token, a multiple of `block`.
        block: Tokens of a column.
    """
    parts = [_columns_of(trace, block) for trace in traces]
    rows = [np.concatenate(some, -1) for some in zip(*(part[:3] for part in parts), strict=True)]
    shares_LCS = np.concatenate([part[3] for part in parts], 1)
    _, num_columns, num_keys = shares_LCS.shape
    first, stop = start // block, start // block + num_columns
    looks_ahead = np.triu(shares_LCS[:, :, first:], 1).any()
    pairs = np.tri(num_columns, num_keys, num_keys if looks_ahead else first, np.bool_)
    cached = [
        np.stack([_means(lengths(one.arrays[name, layer]).mean(-1), block) for one in kept for layer in one.layers])
        for name in OF_ALL
    ]
    every = (*rows, *(one[:, first:stop] for one in cached), shares_LCS[:, pairs])
    return np.concatenate([part.ravel() for part in every]).astype(np.float32)


def _columns_of(trace: Trace, block: int) -> tuple[Floats, ...]:
    """Return the rows (., C) of some tokens, and their shares (L, C, columns of all tokens)."""
    arrays, layers = trace.arrays, trace.layers
    size = {name: [lengths(arrays[name, layer]) for layer in layers] for name in OF_A_TOKEN[1:5]}
    streams = [lengths(arrays["embed", None]), *size["resid"]]
    attention = [a / b for a, b in zip(size["attn_out"], size["resid_mid"], strict=True)]
    mlp = [a / b for a, b in zip(size["mlp_out"], size["resid"], strict=True)]
    shares = [_look(arrays["pattern", layer], block) for layer in layers]
    return (*(np.stack([_means(one, block) for one in some]) for some in (streams, attention, mlp)), np.stack(shares))


def _look(pattern_NTS: Floats, block: int) -> Floats:
    shares_TS = pattern_NTS.mean(0)
    if block == 1:
        return shares_TS
    return _means(np.add.reduceat(shares_TS, range(0, shares_TS.shape[1], block), axis=1).T, block).T


def _means(values: NDArray[Any], block: int) -> Floats:
    """Return the means of blocks of the last axis; the last one may be shorter."""
    if block == 1:
        return values
    starts: Sequence[int] = range(0, values.shape[-1], block)
    counts = np.minimum(block, values.shape[-1] - np.array(starts))
    return np.add.reduceat(values, starts, axis=-1) / counts.astype(np.float32)
