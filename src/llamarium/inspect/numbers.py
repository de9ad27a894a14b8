"""Numerics of the views, in numpy and float32, and the JSON form of what they return."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

_AXES = re.compile(r"_[A-Z][A-Z0-9]*$")


class JsonView:
    """Base of a dataclass with a JSON form: its fields without the axes in their names, and computed properties."""

    __slots__ = ()
    computed: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return as_json(self)


def as_json(value: Any) -> Any:
    """Return dataclasses as dicts, sequences and arrays as lists, and other values as they are."""
    if is_dataclass(value):
        names = (*(field.name for field in fields(value)), *getattr(value, "computed", ()))
        return {_AXES.sub("", name): as_json(getattr(value, name)) for name in names}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [as_json(one) for one in cast("Sequence[Any]", value)]
    return value


Floats = NDArray[np.float32]
FloatsT = TypeVar("FloatsT", NDArray[np.float32], NDArray[np.float64])


def as_array(logits: Any) -> Floats:
    """Return a runner's logits as float32 of numpy; those of other devices are torch's."""
    return logits if isinstance(logits, np.ndarray) else logits.float().cpu().numpy()  # sync: to look at


def log_softmax(logits_TV: FloatsT) -> FloatsT:
    """Return the natural logarithm of the softmax over the last axis, in the logits' dtype."""
    shifted_TV = logits_TV - logits_TV.max(-1, keepdims=True)
    shifted_TV -= np.log(np.exp(shifted_TV).sum(-1, keepdims=True))
    return shifted_TV


def softmax(scores_TS: Floats) -> Floats:
    """Return the softmax over the last axis; a row needs one score that is finite."""
    out_TS = scores_TS - scores_TS.max(-1, keepdims=True)
    np.exp(out_TS, out=out_TS)
    out_TS /= out_TS.sum(-1, keepdims=True)
    return out_TS


def largest(values_V: NDArray[Any], k: int) -> NDArray[np.int64]:
    """Return the indices of the k largest numbers, from the largest on, the lowest index among equals."""
    floor = values_V.max() if k == 1 else np.partition(values_V, -k)[-k]  # ten times as fast
    ids = np.flatnonzero(~(values_V < floor))  # NaN is never below
    return ids[np.argsort(-values_V[ids], kind="stable")][:k]


def lengths(x_TD: NDArray[Any]) -> NDArray[Any]:
    """Return the length of each vector of the last axis."""
    return np.sqrt(np.square(x_TD).sum(-1))


def split(rows: NDArray[Any], count: int) -> Iterator[NDArray[Any]]:
    """Yield so many rows at a time, the last ones perhaps fewer."""
    return (rows[start : start + count] for start in range(0, len(rows), count))


def causal_mask(positions_T: NDArray[Any], num_keys: int, window: int | None) -> NDArray[np.bool_]:
    """Return (T, S): True where the query at a position sees a key; see `attention.base.causal_mask`."""
    distance_TS = positions_T[:, None] - np.arange(num_keys)
    return distance_TS >= 0 if window is None else (distance_TS >= 0) & (distance_TS < window)


def scores_of(q_TNH: Floats, k_SKH: Floats, visible_TS: NDArray[np.bool_]) -> Floats:
    """Return q·k / sqrt(H), -inf where the mask hides a key: (N, T, S); head n reads key-value head n // G.

    Equal to `attention.attend_eagerly`; tests hold the two together.
    """
    num_tokens, num_heads, head_dim = q_TNH.shape
    q_KGTH = q_TNH.transpose(1, 0, 2).reshape(k_SKH.shape[1], -1, num_tokens, head_dim)
    scores_NTS = (q_KGTH @ k_SKH.transpose(1, 2, 0)[:, None]).reshape(num_heads, num_tokens, -1)
    scores_NTS *= np.float32(head_dim**-0.5)
    np.copyto(scores_NTS, -np.inf, where=~visible_TS)
    return scores_NTS
