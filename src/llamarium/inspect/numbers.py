"""Numerical helpers of inspections, in numpy and float32, and the JSON form of their results."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

_AXES = re.compile(r"_[A-Z][A-Z0-9]*$")


class JsonView:
    """Base of dataclasses with a JSON form: fields, without axis suffixes in their names, and computed properties."""

    __slots__ = ()
    computed: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return as_json(self)


def as_json(value: Any) -> Any:
    """Convert dataclasses to dicts, and sequences and arrays to lists; return other values unchanged."""
    if is_dataclass(value):
        names = (*(field.name for field in fields(value)), *getattr(value, "computed", ()))
        return {_AXES.sub("", name): as_json(getattr(value, name)) for name in names}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [as_json(item) for item in cast("Sequence[Any]", value)]
    return value


Floats = NDArray[np.float32]
FloatsT = TypeVar("FloatsT", NDArray[np.float32], NDArray[np.float64])


def as_array(logits: Any) -> Floats:
    """Return a runner's logits, an array or a tensor on any device, as a float32 array."""
    return logits if isinstance(logits, np.ndarray) else logits.float().cpu().numpy()  # sync: inspection only


def log_softmax(logits_TV: FloatsT) -> FloatsT:
    """Return the natural logarithm of the softmax over the last axis, in the logits' dtype."""
    shifted_TV = logits_TV - logits_TV.max(-1, keepdims=True)
    shifted_TV -= np.log(np.exp(shifted_TV).sum(-1, keepdims=True))
    return shifted_TV


def softmax(scores_TS: Floats) -> Floats:
    """Return the softmax over the last axis; each row needs a finite score."""
    out_TS = scores_TS - scores_TS.max(-1, keepdims=True)
    np.exp(out_TS, out=out_TS)
    out_TS /= out_TS.sum(-1, keepdims=True)
    return out_TS


def largest(values_V: NDArray[Any], k: int) -> NDArray[np.int64]:
    """Return the indices of the k largest numbers, in descending order; ties are broken by the lower index."""
    floor = values_V.max() if k == 1 else np.partition(values_V, -k)[-k]  # max is ten times faster than partition
    ids = np.flatnonzero(~(values_V < floor))  # includes NaN, which compares false
    return ids[np.argsort(-values_V[ids], kind="stable")][:k]


def lengths(x_TD: NDArray[Any]) -> NDArray[Any]:
    """Return the Euclidean norm over the last axis."""
    return np.sqrt(np.square(x_TD).sum(-1))


def split(rows: NDArray[Any], count: int) -> Iterator[NDArray[Any]]:
    """Yield up to `count` rows at a time."""
    return (rows[start : start + count] for start in range(0, len(rows), count))


def causal_mask(positions_T: NDArray[Any], num_keys: int, window: int | None) -> NDArray[np.bool_]:
    """Return the causal mask, bool (T, S), True where a query attends to a key; see `attention.base.causal_mask`."""
    distance_TS = positions_T[:, None] - np.arange(num_keys)
    return distance_TS >= 0 if window is None else (distance_TS >= 0) & (distance_TS < window)


def scores_of(q_TNH: Floats, k_SKH: Floats, visible_TS: NDArray[np.bool_]) -> Floats:
    """Return the attention scores q·k / sqrt(H), -inf where masked: (N, T, S); head n uses key-value head n // G.

    Tests compare it with `attention.attend_eagerly`.
    """
    num_tokens, num_heads, head_dim = q_TNH.shape
    q_KGTH = q_TNH.transpose(1, 0, 2).reshape(k_SKH.shape[1], -1, num_tokens, head_dim)
    scores_NTS = (q_KGTH @ k_SKH.transpose(1, 2, 0)[:, None]).reshape(num_heads, num_tokens, -1)
    scores_NTS *= np.float32(head_dim**-0.5)
    np.copyto(scores_NTS, -np.inf, where=~visible_TS)
    return scores_NTS
