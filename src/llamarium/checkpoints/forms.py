"""How each weight of a checkpoint is held in memory: decided for all of them before any is read. Never torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from llamarium.checkpoints.checkpoint import Checkpoint, TensorEntry, list_some
from llamarium.checkpoints.options import TYPE_OF_DTYPE, LoadOptions, check_options, natural_dtype
from llamarium.checkpoints.storage import FLOATS
from llamarium.config import EMBEDDING, HEAD
from llamarium.errors import escape, warn_caller
from llamarium.kernels import native
from llamarium.quant.formats import PACKED_FORMATS, quantized_type
from llamarium.quant.stored_types import STORED_TYPES


class Form(NamedTuple):
    """How one weight is held.

    Attributes:
        type_name: Its type: the model's dtype (`BF16`, ...), or a quantized type.
        layout: `rows` are floating-point numbers; `tiles` is a type in `PACKED_FORMATS` as the C kernels read it;
            `blocks` is a quantized type as files store it, which modules dequantize at each use.
    """

    type_name: str
    layout: Literal["rows", "tiles", "blocks"]


@dataclass(frozen=True, slots=True)
class LoadingPlan:
    """How a checkpoint is loaded.

    Attributes:
        forms: How each weight is held, by key.
        type_name: What the model computes in: `BF16`, `F16` or `F32`.
        rounds_inputs: The inputs of tiles may be rounded, so that the C kernels multiply them; else tiles are
            dequantized at each use.
        runs_in_c: The C kernels run the model; else its modules do.
        unfit: Keys of Linears that stay floating-point, or take another type than `quantize` names, because of the
            number of their columns.
    """

    forms: Mapping[str, Form]
    type_name: str
    rounds_inputs: bool
    runs_in_c: bool
    unfit: tuple[str, ...] = ()


def loading_plan(checkpoint: Checkpoint, options: LoadOptions) -> LoadingPlan:
    """Decide how the weights of a checkpoint are held; OptionError if the options do not fit it.

    A UserWarning names the Linears whose number of columns does not fit the type that `quantize` names.
    """
    check_options(checkpoint, options)
    dtype = options.dtype or natural_dtype(checkpoint)
    has_kernels = options.device == "cpu" and native.library() is not None
    # Of a file's own floats, quantizing keeps what it does not round; a dtype that was asked for is exact.
    is_half = (options.dtype or "bfloat16") == "bfloat16" if options.quantize else dtype == "bfloat16"
    rounds = has_kernels and options.join and is_half and options.dequantize != "use"
    chooser = _Chooser(options, Form(TYPE_OF_DTYPE[dtype], "rows"), has_kernels, rounds)

    entries = checkpoint.entries
    forms = {key: chooser.form(entry) for key, entry in entries.items()}
    layouts = {form.layout for form in forms.values()}
    in_c = has_kernels and options.join and "blocks" not in layouts and (rounds or "tiles" not in layouts)
    unfit = tuple(key for key in entries if chooser.is_quantized(entries[key]) and forms[key][0] != options.quantize)
    if unfit:
        _warn_of_unfit(checkpoint, options.quantize, {key: forms[key].type_name for key in unfit})
    return LoadingPlan(forms, TYPE_OF_DTYPE[dtype], rounds, in_c, unfit)


@dataclass(frozen=True, slots=True)
class _Chooser:
    """Chooses the form of one weight at a time."""

    options: LoadOptions
    floats: Form
    has_kernels: bool
    rounds_inputs: bool

    def form(self, entry: TensorEntry) -> Form:
        """Return how a weight is held; a new stored type is registered in `quant/stored_types.py`, not here."""
        if len(entry.shape) != 2:
            return self.floats
        if self.is_quantized(entry):
            return self._quantized(entry)
        options = self.options
        if entry.dtype in FLOATS or options.quantize is not None or options.dequantize == "load":
            return self.floats
        as_stored = Form(entry.dtype, "tiles" if entry.is_packed else "blocks")
        if options.dequantize == "use":
            return as_stored
        tiles = entry.packs_as or (entry.dtype if entry.dtype in PACKED_FORMATS else None)
        if tiles is not None and self.rounds_inputs:
            return Form(tiles, "tiles")
        # Exact products: in C of numbers, in modules of what is stored, if that is more than GGUF's blocks.
        is_kept = entry.dtype in STORED_TYPES or (entry.is_packed and not (self.has_kernels and options.join))
        return as_stored if is_kept else self.floats

    def is_quantized(self, entry: TensorEntry) -> bool:
        """Whether `quantize` is for this weight: the Linears of the layers."""
        is_linear = len(entry.shape) == 2 and entry.key not in (EMBEDDING, HEAD)
        return is_linear and self.options.quantize is not None

    def _quantized(self, entry: TensorEntry) -> Form:
        assert self.options.quantize is not None
        type_name = quantized_type(self.options.quantize, entry.shape[1])
        if type_name is None:
            return self.floats
        in_tiles = type_name in PACKED_FORMATS and self.has_kernels
        return Form(type_name, "tiles" if in_tiles else "blocks")


def _warn_of_unfit(checkpoint: Checkpoint, method: str | None, types: Mapping[str, str]) -> None:
    by_type = {name: [key for key, found in types.items() if found == name] for name in dict.fromkeys(types.values())}
    found = "; ".join(
        f"{len(keys)} Linears are {name} instead: {list_some((_with_columns(checkpoint, key) for key in keys), 4)}"
        for name, keys in by_type.items()
    )
    warn_caller(f"{escape(checkpoint.path)}: {method} does not fit every number of columns; {found}")


def _with_columns(checkpoint: Checkpoint, key: str) -> str:
    return f"{key.removesuffix('.weight')} ({checkpoint.entries[key].shape[1]} columns)"
