"""Edits of activations, for one sequence of a batch. Torch-free.

    y = factor * x + add

The C kernels (`edit_row` in native/pass.h) and hooks on the modules (`runtime/shell.py`) compute the same.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from llamarium.config import ModelConfig
from llamarium.errors import InputError, check_choice, show_value

Part = Literal["embed", "attention", "head", "mlp", "residual"]
"""The activation: the embedding, the output of a layer's attention, of one head or of the MLP, or the residual stream
after a layer."""


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """An edit: multiply an activation by `factor`, then add `add`.

    Attributes:
        part: Which activation; "head" is a head's output before `o_proj`.
        layer: Index of the layer; None for "embed".
        head: Index of the head; None except for "head".
        positions: Positions from the start of the prompt, answer included; None for all.
        factor: 1 keeps the activation, 0 removes it.
        add: A numpy array or torch tensor of shape (D,), for "head" (H,); None adds nothing.
    """

    part: Part
    layer: int | None = None
    head: int | None = None
    positions: tuple[int, ...] | None = None
    factor: float = 1.0
    add: Any = None

    def added(self) -> NDArray[np.float32] | None:
        """Return `add` as a contiguous float32 array, or None."""
        if self.add is None:
            return None
        is_tensor = hasattr(self.add, "detach")
        return np.ascontiguousarray(self.add.detach().float().cpu() if is_tensor else self.add, np.float32)


@functools.lru_cache(maxsize=256)
def edits_key(edits: tuple[Edit, ...]) -> bytes:
    """Return a hash of edits, in their order."""
    digest = blake2b(digest_size=16)
    for edit in edits:
        added = edit.added()
        digest.update(repr((edit.part, edit.layer, edit.head, edit.positions, float(edit.factor))).encode())
        digest.update(b"" if added is None else added.tobytes())
    return digest.digest()


def check_edit(config: ModelConfig, edit: Edit) -> None:
    """Validate an edit against the model; InputError if an index, a shape or a value is wrong."""
    if not isinstance(edit, Edit):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"edit is {show_value(edit)}; expected the result of ablate, scale, steer or ablate_to_mean")
    part = edit.part
    check_choice("part", part, get_args(Part))
    _check_index("layer", edit.layer, None if part == "embed" else config.num_hidden_layers, part)
    _check_index("head", edit.head, config.num_attention_heads if part == "head" else None, part)
    if not isinstance(edit.positions, Iterable | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"positions is {show_value(edit.positions)}; expected integers, or None for all")
    for position in edit.positions or ():
        _check_index("position", position, config.max_position_embeddings, part)
    if isinstance(edit.factor, bool) or not isinstance(edit.factor, int | float) or not math.isfinite(edit.factor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"factor is {show_value(edit.factor)}; expected a finite number")
    if edit.add is not None:
        _check_added(edit, config.head_dim if part == "head" else config.hidden_size)


def _check_added(edit: Edit, size: int) -> None:
    shape = getattr(edit.add, "shape", None)
    if shape is None or tuple(shape) != (size,):
        actual = show_value(edit.add) if shape is None else tuple(shape)
        raise InputError(f"the shape of the vector added to {edit.part} is {actual}; expected ({size},)")
    if (added := edit.added()) is not None and not np.isfinite(added).all():
        raise InputError(f"the vector added to {edit.part} has NaN or infinite values; expected finite numbers")


def _check_index(name: str, value: object, size: int | None, part: str) -> None:
    """Validate an index: an integer from 0 to `size - 1`, or None if `size` is None."""
    if size is None:
        if value is not None:
            raise InputError(f"{name} is {show_value(value)}; expected none for {part}")
    elif isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
        raise InputError(f"{name} is {show_value(value)}; expected 0 to {size - 1} for {part}")
