"""Validation of loading options for a checkpoint, and the source of each weight. Torch-free."""

from dataclasses import dataclass
from pathlib import Path

from llamarium.checkpoints.checkpoint import Checkpoint, TensorEntry
from llamarium.checkpoints.storage import FLOATS
from llamarium.errors import OptionError, escape
from llamarium.options.loading import DtypeName, LoadOptions

DTYPE_OF_TYPE: dict[str, DtypeName] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""Compute dtype of a model, by the stored type of its Linears."""
TYPE_OF_DTYPE: dict[DtypeName, str] = {dtype: name for name, dtype in DTYPE_OF_TYPE.items()}

REQUANTIZE = "--requantize (requantize=True)"
"""The option that allows quantized weights to be quantized again, for messages."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The source of one weight of a loaded model.

    Attributes:
        key: State-dict key, in Hugging Face's naming.
        shape: Logical shape, (out, in).
        file: File that it was read from.
        name: Name of the tensor in the file.
        stored_dtype: Type in the file, such as "BF16" or "Q4_1".
        dtype: Type in memory, such as "BF16", "Q4_1" or "NF4".
        permuted: True if its rows were permuted from Meta's interleaved order to half-split order.
        tied_to: Key of the weight whose storage it shares, or None.
        num_bytes: Size in memory; 0 if tied.
    """

    key: str
    shape: tuple[int, ...]
    file: Path
    name: str
    stored_dtype: str
    dtype: str
    permuted: bool
    tied_to: str | None
    num_bytes: int

    @classmethod
    def of(cls, entry: TensorEntry, dtype: str, num_bytes: int) -> "TensorSource":
        """Return the source of a weight that was loaded from `entry`."""
        return cls(
            entry.key, entry.shape, entry.file, entry.name, entry.dtype, dtype,
            permuted=entry.permuted, tied_to=None, num_bytes=num_bytes,
        )  # fmt: skip


def natural_dtype(checkpoint: Checkpoint) -> DtypeName:
    """Return the default compute dtype: the stored dtype of the Linears, or bfloat16 if any weight is quantized."""
    if any(entry.is_packed for entry in checkpoint.entries.values()):
        return "bfloat16"
    entry = checkpoint.entries["model.layers.0.self_attn.q_proj.weight"]
    return DTYPE_OF_TYPE.get(entry.dtype, "bfloat16")


def quantized_types(checkpoint: Checkpoint) -> list[str]:
    """Return the quantized types of a checkpoint's weights, sorted."""
    return sorted({entry.dtype for entry in checkpoint.entries.values()} - FLOATS.keys())


def check_requantizing(checkpoint: Checkpoint, consent: str | None) -> None:
    """Raise OptionError if quantized weights would be quantized again.

    `consent` is the option that would allow it, for the message; None means that it was given.
    """
    types = quantized_types(checkpoint)
    if types and consent is not None:
        raise OptionError(
            f"{escape(checkpoint.path)}: is quantized already ({', '.join(types)}), and rounding again adds its error "
            f"to that one; take the original model, or give {consent}"
        )


def check_options(checkpoint: Checkpoint, options: LoadOptions) -> None:
    """Check that loading options fit the checkpoint and each other; OptionError if not."""
    if options.quantize is not None:
        consent = None if options.dequantize == "load" else "--dequantize load (dequantize='load')"
        check_requantizing(checkpoint, consent)
    if options.dequantize != "auto" and not quantized_types(checkpoint):
        raise OptionError(
            f"{escape(checkpoint.path)}: dequantize={options.dequantize!r} was asked for, but no tensor is quantized; "
            "leave it out"
        )
