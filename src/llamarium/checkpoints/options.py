"""What options of loading mean for a checkpoint, and where each weight of a model came from. Never torch."""

from dataclasses import dataclass
from pathlib import Path

from llamarium.checkpoints.checkpoint import Checkpoint, TensorEntry
from llamarium.checkpoints.storage import FLOATS
from llamarium.errors import OptionError, escape
from llamarium.options.loading import DtypeName, LoadOptions

DTYPE_OF_TYPE: dict[str, DtypeName] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""What a model computes in whose Linears are stored so."""
TYPE_OF_DTYPE: dict[DtypeName, str] = {dtype: name for name, dtype in DTYPE_OF_TYPE.items()}

REQUANTIZE = "--requantize (requantize=True)"
"""What allows a quantized model's weights to be rounded again into a file."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where one weight of the model came from.

    Attributes:
        key: Its state-dict key, in Hugging Face's names.
        stored_dtype: Its type there, such as "BF16" or "Q4_1".
        dtype: Its type in memory, such as "BF16", "Q4_1" or "NF4".
        permuted: Its rows were in Meta's interleaved order and have been put into the half-split one.
        tied_to: The key whose storage it shares, or None.
        num_bytes: What it occupies in memory; 0 when tied.
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
        """Note what became of a tensor."""
        return cls(
            entry.key, entry.shape, entry.file, entry.name, entry.dtype, dtype,
            permuted=entry.permuted, tied_to=None, num_bytes=num_bytes,
        )  # fmt: skip


def natural_dtype(checkpoint: Checkpoint) -> DtypeName:
    """Return the default dtype of a checkpoint: as its Linears are stored, else bfloat16; so if some are packed."""
    if any(entry.is_packed for entry in checkpoint.entries.values()):
        return "bfloat16"
    entry = checkpoint.entries["model.layers.0.self_attn.q_proj.weight"]
    return DTYPE_OF_TYPE.get(entry.dtype, "bfloat16")


def quantized_types(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the types of a checkpoint's weights that are quantized."""
    return sorted({entry.dtype for entry in checkpoint.entries.values()} - FLOATS.keys())


def check_requantizing(checkpoint: Checkpoint, consent: str | None) -> None:
    """Refuse to round what is quantized; `consent` is the option that would allow it, None if it was given."""
    types = quantized_types(checkpoint)
    if types and consent is not None:
        raise OptionError(
            f"{escape(checkpoint.path)}: is quantized already ({', '.join(types)}), and rounding again adds its error "
            f"to that one; take the original model, or give {consent}"
        )


def check_options(checkpoint: Checkpoint, options: LoadOptions) -> None:
    """Check that options fit a checkpoint and each other."""
    if options.quantize is not None:
        consent = None if options.dequantize == "load" else "--dequantize load (dequantize='load')"
        check_requantizing(checkpoint, consent)
    if options.dequantize != "auto" and not quantized_types(checkpoint):
        raise OptionError(
            f"{escape(checkpoint.path)}: dequantize={options.dequantize!r} was asked for, but no tensor is quantized; "
            "leave it out"
        )
