"""Choice of the in-memory form of each weight, made for the whole checkpoint before any weight is read. Torch-free."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from llamarium.checkpoints.checkpoint import Checkpoint, TensorEntry, list_some
from llamarium.checkpoints.options import DTYPE_OF_TYPE, TYPE_OF_DTYPE, check_options, natural_dtype
from llamarium.checkpoints.storage import FLOATS
from llamarium.checkpoints.values import parts_of
from llamarium.config import EMBEDDING, HEAD
from llamarium.errors import escape, warn_caller
from llamarium.kernels import native
from llamarium.kernels.memory import free_bytes
from llamarium.options.loading import LoadOptions
from llamarium.quant.formats import FORMATS, PACKED_FORMATS, quantized_type
from llamarium.quant.stored_types import STORED_TYPES


class Form(NamedTuple):
    """The in-memory form of one weight.

    Attributes:
        type_name: The model's dtype (`BF16`, ...) or a quantized type.
        layout: `rows`: floating-point numbers; `tiles`: a type in `PACKED_FORMATS`, laid out for the C kernels;
            `blocks`: a quantized type as stored in files, which modules dequantize at each use.
        is_exact: True for tiles with exactly the values of a weight of a type in `STORED_TYPES`, converted without
            quantizing again.
    """

    type_name: str
    layout: Literal["rows", "tiles", "blocks"]
    is_exact: bool = False


@dataclass(frozen=True, slots=True)
class LoadingPlan:
    """A decision on how a checkpoint is loaded.

    Attributes:
        forms: In-memory form of each weight, by key.
        type_name: Compute dtype of the model: `BF16`, `F16` or `F32`.
        rounds_inputs: True if the C kernels multiply tiles and quantize their inputs; False if tiles are dequantized
            at each use.
        runs_in_c: True if the C kernels run the model, False if PyTorch modules do.
        unfit: Keys of Linears that stay floating-point, or get another type than `quantize` names, because their
            number of columns does not fit.
    """

    forms: Mapping[str, Form]
    type_name: str
    rounds_inputs: bool
    runs_in_c: bool
    unfit: tuple[str, ...] = ()


def loading_plan(checkpoint: Checkpoint, options: LoadOptions) -> LoadingPlan:
    """Choose the in-memory form of each weight of a checkpoint.

    A UserWarning names the Linears whose number of columns does not fit the type that `quantize` names.

    Raises:
        OptionError: If the options do not fit the checkpoint.
    """
    check_options(checkpoint, options)
    dtype = options.exact_dtype or natural_dtype(checkpoint)
    has_kernels = options.device == "cpu" and native.library() is not None
    # With quantize, weights that are not quantized keep their stored dtype. A requested dtype means exact products.
    is_half = (options.exact_dtype or "bfloat16") == "bfloat16" if options.quantize else dtype == "bfloat16"
    rounds = has_kernels and options.join and is_half and options.dequantize != "use"
    chooser = _Chooser(checkpoint, options, Form(TYPE_OF_DTYPE[dtype], "rows"), has_kernels, rounds)

    entries = checkpoint.entries
    forms = {key: chooser.form(entry) for key, entry in entries.items()}
    if options.quantize is None and options.dequantize == "auto":
        forms |= _in_memory(checkpoint, forms)
    layouts = {form.layout for form in forms.values()}
    in_c = has_kernels and options.join and "blocks" not in layouts and (rounds or "tiles" not in layouts)
    unfit = tuple(key for key in entries if chooser.is_quantized(entries[key]) and forms[key][0] != options.quantize)
    if unfit:
        _warn_of_unfit(checkpoint, options.quantize, {key: forms[key].type_name for key in unfit})
    return LoadingPlan(forms, TYPE_OF_DTYPE[dtype], rounds, in_c, unfit)


@dataclass(frozen=True, slots=True)
class _Chooser:
    checkpoint: Checkpoint
    options: LoadOptions
    floats: Form
    has_kernels: bool
    rounds_inputs: bool

    def form(self, entry: TensorEntry) -> Form:
        """Return the form of a weight. New stored types are registered in `quant/stored_types.py`, not here."""
        if len(entry.shape) != 2:
            return self.floats
        if self.is_quantized(entry):
            return self._quantized(entry)
        options = self.options
        if entry.dtype in FLOATS or options.quantize is not None or options.dequantize == "load":
            return self.floats
        if entry.dtype in STORED_TYPES and entry.key == EMBEDDING:
            return self.floats  # no embedding module dequantizes the looked-up rows of these types
        as_stored = Form(entry.dtype, "tiles" if entry.is_packed else "blocks")
        if options.dequantize == "use":
            return as_stored
        if self.rounds_inputs and (tiles := self._tiles(entry)) is not None:
            return tiles
        # Exact products: C multiplies floats; modules dequantize stored types at each use.
        runs_in_c = self.has_kernels and options.join
        if entry.dtype not in STORED_TYPES:
            return as_stored if entry.is_packed and not runs_in_c else self.floats
        is_dequantized = options.join and options.device == "cpu" and not STORED_TYPES[entry.dtype].is_kept
        return self.floats if is_dequantized else as_stored

    def _tiles(self, entry: TensorEntry) -> Form | None:
        """Return the form in tiles that represents a weight exactly; None if there is none."""
        if entry.dtype in PACKED_FORMATS:
            return Form(entry.dtype, "tiles")
        if entry.dtype not in STORED_TYPES:
            return None
        type_name = STORED_TYPES[entry.dtype].exact_type(parts_of(self.checkpoint.stored(entry.key)), entry.shape)
        return None if type_name is None else Form(type_name, "tiles", is_exact=True)

    def is_quantized(self, entry: TensorEntry) -> bool:
        """Return whether `quantize` applies to this weight: True for the Linears of the layers."""
        is_linear = len(entry.shape) == 2 and entry.key not in (EMBEDDING, HEAD)
        return is_linear and self.options.quantize is not None

    def _quantized(self, entry: TensorEntry) -> Form:
        assert self.options.quantize is not None
        type_name = quantized_type(self.options.quantize, entry.shape[1])
        if type_name is None:
            return self.floats
        in_tiles = type_name in PACKED_FORMATS and self.has_kernels
        return Form(type_name, "tiles" if in_tiles else "blocks")


def _in_memory(checkpoint: Checkpoint, forms: Mapping[str, Form]) -> dict[str, Form]:
    """Return forms in blocks for the weights that would be dequantized at loading, if memory does not suffice for that.

    A UserWarning states their size in the file and in memory.
    """
    entries = [checkpoint.entries[key] for key, form in forms.items() if form.layout == "rows"]
    entries = [entry for entry in entries if entry.dtype in STORED_TYPES]
    if not entries:
        return {}
    type_name = forms[entries[0].key].type_name
    in_file = sum(entry.num_bytes for entry in entries)
    in_memory = sum(math.prod(entry.shape) for entry in entries) * FORMATS[type_name].block_bytes
    types = ", ".join(sorted({entry.dtype for entry in entries}))
    subject = f"{escape(checkpoint.path)}: {len(entries)} weights in {types}"
    sizes = f"{in_file / 1e9:,.3f} GB in the file, {in_memory / 1e9:,.3f} GB in {DTYPE_OF_TYPE[type_name]}"
    if in_memory <= (available := free_bytes()):
        warn_caller(f"{subject} are dequantized once, as no packed type holds them exactly: {sizes}")
        return {}
    warn_caller(
        f"{subject} are dequantized at each use, which is slow: {sizes}, and {available / 1e9:,.3f} GB are available"
    )
    return {entry.key: Form(entry.dtype, "blocks") for entry in entries}


def _warn_of_unfit(checkpoint: Checkpoint, method: str | None, types: Mapping[str, str]) -> None:
    by_type = {name: [key for key, found in types.items() if found == name] for name in dict.fromkeys(types.values())}
    found = "; ".join(
        f"{len(keys)} Linears are {name} instead: {list_some((_with_columns(checkpoint, key) for key in keys), 4)}"
        for name, keys in by_type.items()
    )
    warn_caller(f"{escape(checkpoint.path)}: {method} does not fit every number of columns; {found}")


def _with_columns(checkpoint: Checkpoint, key: str) -> str:
    return f"{key.removesuffix('.weight')} ({checkpoint.entries[key].shape[1]} columns)"
