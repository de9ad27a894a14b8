"""An edit of what a part of the model computes, as runners take it: for one sequence of a batch. Never torch.

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
"""The embedding's rows; what attention, one head or the MLP of a layer computes; the stream after a layer."""


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """What a part computes, times `factor`, plus `add`.

    Attributes:
        part: Of a head, its result before `o_proj`.
        layer: None for "embed".
        head: For "head"; else None.
        positions: None is all. They count from the beginning of the text, also while an answer grows.
        factor: 1 leaves it as it is, 0 removes it.
        add: (D,), of a head (H,), an array of numpy or torch; None is nothing.
    """

    part: Part
    layer: int | None = None
    head: int | None = None
    positions: tuple[int, ...] | None = None
    factor: float = 1.0
    add: Any = None

    def added(self) -> NDArray[np.float32] | None:
        """Return what is added, contiguous."""
        if self.add is None:
            return None
        is_tensor = hasattr(self.add, "detach")
        return np.ascontiguousarray(self.add.detach().float().cpu() if is_tensor else self.add, np.float32)


@functools.lru_cache(maxsize=256)
def edits_key(edits: tuple[Edit, ...]) -> bytes:
    """Return a hash of all that edits change, in their order."""
    digest = blake2b(digest_size=16)
    for edit in edits:
        added = edit.added()
        digest.update(repr((edit.part, edit.layer, edit.head, edit.positions, float(edit.factor))).encode())
        digest.update(b"" if added is None else added.tobytes())
    return digest.digest()


def check_edit(config: ModelConfig, edit: Edit) -> None:
    """Refuse an edit of what there is not, or by what is no finite number of the right size: InputError."""
    if not isinstance(edit, Edit):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"an edit is {show_value(edit)}; expected one of ablate, scale, steer or ablate_to_mean")
    part = edit.part
    check_choice("part", part, get_args(Part))
    _check_index("layer", edit.layer, None if part == "embed" else config.num_hidden_layers, part)
    _check_index("head", edit.head, config.num_attention_heads if part == "head" else None, part)
    if not isinstance(edit.positions, Iterable | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"positions is {show_value(edit.positions)}; expected whole numbers, or None for all")
    for position in edit.positions or ():
        _check_index("a position", position, config.max_position_embeddings, part)
    if isinstance(edit.factor, bool) or not isinstance(edit.factor, int | float) or not math.isfinite(edit.factor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"factor is {show_value(edit.factor)}; expected a finite number")
    if edit.add is not None:
        _check_added(edit, config.head_dim if part == "head" else config.hidden_size)


def _check_added(edit: Edit, size: int) -> None:
    shape = getattr(edit.add, "shape", None)
    if shape is None or tuple(shape) != (size,):
        shown = show_value(edit.add) if shape is None else tuple(shape)
        raise InputError(f"what is added to {edit.part} is {shown}; expected ({size},)")
    if (added := edit.added()) is not None and not np.isfinite(added).all():
        raise InputError(f"what is added to {edit.part} has NaN or infinite values; expected finite numbers")


def _check_index(name: str, value: object, size: int | None, part: str) -> None:
    """Refuse anything but an index below `size`; where that is None, anything but None."""
    if size is None:
        if value is not None:
            raise InputError(f"{name} is {show_value(value)}; expected none, as there is one {part} for all")
    elif isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
        raise InputError(f"{name} is {show_value(value)}; expected one within 0..{size - 1} to edit {part}")
