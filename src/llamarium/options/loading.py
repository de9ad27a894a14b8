"""Options for loading a model: arguments of `llamarium.load`, and flags of all commands that load a model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llamarium.kernels.input_bits import InputBits
from llamarium.options.declare import Options, option
from llamarium.quant.formats import METHODS
from llamarium.tokenizer.chat.named import NAMED_FORMATS

DtypeName = Literal["bfloat16", "float32", "float16"]
Dequantize = Literal["auto", "load", "use"]


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Options):
    """Options for loading a model.

    `llamarium.load` replaces the device "auto"; the loader expects a torch device name.

    Attributes:
        join: Load weights for the C kernels on a CPU; False for a model that is trained.
    """

    adapter: str | Path | None = option(
        None,
        "folder of a LoRA adapter to apply, and of its tokenizer; the model is the base that it names, unless another "
        "one is named",
        metavar="FOLDER",
        part="adapter",
    )
    dtype: Literal["auto"] | DtypeName = option(
        "auto", "compute dtype; auto is as stored, and bfloat16 for quantized files", part="weights"
    )
    device: str = option(
        "auto", "cpu, cuda, cuda:1, mps; auto is a GPU where there is one", metavar="DEVICE", part="weights"
    )
    quantize: str | None = option(
        None,
        f"type to quantize the Linears to while loading: {', '.join(METHODS)}; a quantized file needs dequantize load, "
        "and has both errors",
        choices=METHODS,
        part="weights",
        ignores_case=True,
    )
    dequantize: Dequantize = option(
        "auto",
        "weights of a quantized file: load dequantizes them once, use at each use (smaller, slower); auto keeps NF4, "
        "and in bfloat16 the types that the CPU kernels multiply",
        part="weights",
    )
    deterministic: bool = option(
        False,
        "same bits alone, in any batch and on any number of threads, as the C kernels have them, or no answer",
        part="passes",
    )
    input_bits: InputBits | None = option(
        None,
        "bits of packed weights' inputs on a CPU (outliers always have 16); 16 is nearer to float32, and reads prompts "
        "in 1.7 times the time (default: 8)",
        part="passes",
    )
    strict: bool = option(False, "refuse a model with NaN or infinite weights, instead of warning", part="weights")
    chat_template: str | Path | None = option(
        None,
        "dialog format: one of the model's templates by name (tool_use, rag), a Jinja file "
        f"or text, or {', '.join(NAMED_FORMATS)} (default: the model's own)",
        metavar="NAME|FILE",
        part="dialogs",
    )
    join: bool = True

    def __post_init__(self) -> None:
        """Check the values; a `torch.device` is replaced by its name."""
        if type(self.device).__module__ == "torch":
            object.__setattr__(self, "device", str(self.device))
        super().__post_init__()

    @property
    def exact_dtype(self) -> DtypeName | None:
        """Requested compute dtype, or None for "auto"."""
        return None if self.dtype == "auto" else self.dtype
