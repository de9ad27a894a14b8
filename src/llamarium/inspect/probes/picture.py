"""A pass seen from far: some numbers for each column and layer. A column is a token; of a long text, every so many.

`far_view` returns the numbers of C columns one after the other, row by row:

| part               | shape    | what it is                                                                         |
|--------------------|----------|------------------------------------------------------------------------------------|
| `lengths`          | (L+1, C) | length of the residual stream: as embedded, then after each layer                  |
| `attention_added`  | (L, C)   | length of what attention adds, for the length of the stream after it               |
| `mlp_added`        | (L, C)   | the same of the MLP                                                                |
| `keys`, `values`   | (L, C)   | length of a key, and of a value, mean over the key-value heads                     |
| `attention`        | (L, E)   | mean over the heads of the share that a token takes of each column up to its own   |

A column's key is its token and the ones behind the column before: their shares are added up. E counts the pairs: the
first column's row ends with its own share; where an experiment lets tokens look ahead, every row has all columns.

In blocks a column is all of these tokens, not the last one alone: its numbers are their means, and the share of a pair
of columns is the largest that one of the tokens takes.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.inspect.numbers import Floats, lengths
from llamarium.inspect.trace import Trace

OF_A_TOKEN = ("embed", "attn_out", "resid_mid", "mlp_out", "resid", "pattern")
OF_ALL = ("k", "v")


def far_view(
    layer_traces: Sequence[Trace], traces: Iterable[Trace], columns: range, *, in_blocks: bool = False
) -> Floats:
    """Return the numbers of the module's table, one part after the other.

    Args:
        layer_traces: Traces of `OF_ALL`, of some layers each, in their order.
        traces: Traces of `OF_A_TOKEN`, all layers, of some of the columns each, in their order.
        columns: The tokens.
        in_blocks: The traces have all tokens of their columns, as `tokens_of` says.
    """
    parts = [_columns_of(trace, columns, in_blocks) for trace in traces]
    rows = [np.concatenate(some, -1) for some in zip(*(part[:3] for part in parts), strict=True)]
    shares_LCS = np.concatenate([part[3] for part in parts], 1)
    _, num_columns, num_keys = shares_LCS.shape
    first = columns.start // columns.step
    looks_ahead = np.triu(shares_LCS[:, :, first:], 1).any()
    pairs = np.tri(num_columns, num_keys, num_keys if looks_ahead else first, np.bool_)
    cached = [
        np.stack(
            [
                _cached(traced.arrays[name, layer], columns, in_blocks)
                for traced in layer_traces
                for layer in traced.layers
            ]
        )
        for name in OF_ALL
    ]
    return np.concatenate([part.ravel() for part in (*rows, *cached, shares_LCS[:, pairs])]).astype(np.float32)


def tokens_of(columns: range) -> range:
    """Return all tokens of these columns: theirs, and those behind the column before."""
    return range(max(0, columns.start - columns.step + 1), columns[-1] + 1)


def num_pairs(columns: range) -> int:
    """Return E, the fewest that it may be, for these columns."""
    first = columns.start // columns.step
    return len(columns) * (2 * first + len(columns) + 1) // 2


def _cached(x_SKH: Floats, columns: range, in_blocks: bool) -> NDArray[Any]:
    if not in_blocks:
        return lengths(x_SKH[columns]).mean(-1)
    tokens = tokens_of(columns)
    return _means(lengths(x_SKH[tokens]).mean(-1), _begins(tokens, columns))


def _begins(tokens: range, columns: range) -> list[int]:
    """Return which of these tokens begin a block, as indices."""
    return [i for i, token in enumerate(tokens) if i == 0 or (token - columns.start - 1) % columns.step == 0]


def _means(rows: NDArray[Any], begins: Sequence[int]) -> NDArray[Any]:
    return np.add.reduceat(rows, begins, axis=-1) / np.diff([*begins, rows.shape[-1]])


def _columns_of(trace: Trace, columns: range, in_blocks: bool) -> tuple[NDArray[Any], ...]:
    """Return the rows (., C) of some tokens, and their shares (L, C, columns from the first token on)."""
    arrays, layers = trace.arrays, trace.layers
    size = {name: [lengths(arrays[name, layer]) for layer in layers] for name in OF_A_TOKEN[1:5]}
    streams = [lengths(arrays["embed", None]), *size["resid"]]
    attention = [a / b for a, b in zip(size["attn_out"], size["resid_mid"], strict=True)]
    mlp = [a / b for a, b in zip(size["mlp_out"], size["resid"], strict=True)]
    starts = [0, *range(columns.start % columns.step + 1, columns[-1] + 1, columns.step)]
    shares = [np.add.reduceat(arrays["pattern", layer].mean(0), starts, axis=1) for layer in layers]
    parts = np.stack(streams), np.stack(attention), np.stack(mlp), np.stack(shares)
    if not in_blocks:
        return parts
    begins = _begins(range(trace.positions[0], trace.positions[-1] + 1), columns)
    return *(_means(rows, begins) for rows in parts[:3]), np.maximum.reduceat(parts[3], begins, axis=1)
