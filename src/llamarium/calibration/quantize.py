"""`quantize()`: write a model as a packed folder, whose weights the CPU kernels use as stored.

The layers' Linears get the given type. The type of the head (and of the embedding, which a tied model shares with it)
is separate: a large vocabulary makes it large, all of it is read for each token, and its errors directly affect the
probabilities. "auto" selects the smallest type with which the model's KL divergence from the original, on windows of
the calibration text, is at most 10 % higher than with an unquantized head.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from llamarium.calibration.fit import FITTED_FORMATS
from llamarium.calibration.quantizer import CALIBRATED, QuantizeMethod, Quantizer, Recipe
from llamarium.checkpoints.open import OpenedModel, open_model
from llamarium.checkpoints.packed.save import PackedWeight, save_packed
from llamarium.config import EMBEDDING
from llamarium.errors import OptionError, escape
from llamarium.extras import need_torch
from llamarium.io import atomic_folder
from llamarium.keywords import shows_options
from llamarium.quant.formats import FORMATS, GROUP, chosen_type

if TYPE_CHECKING:
    from torch import Tensor

AUTO = "auto"
SAMPLES, CONTEXT = 64, 512
"""Default number of calibration windows, and tokens per window."""

_DEFAULT_HEAD = "Q8_0"
_MOST_SAMPLES = 100_000
_COMPARED_TOKENS = 4096  # for "auto"; more would take minutes with a vocabulary of 128,256


@dataclass(frozen=True, slots=True)
class Quantized:
    """Result of `quantize`.

    Attributes:
        path: The packed folder.
        type: Type of the layers' Linears.
        head: Type of the head and the embedding; "F16" if their rows are not a multiple of 32.
        method: Quantization method.
        num_weights: Number of weights in all matrices.
        num_bytes: Size of the folder's files.
        bits_per_weight: Average over all matrices, including scales and matrices in F16.
        head_kl: With "auto", KL divergence from the original in nats per token, by type of the head; None for an
            unquantized head.
    """

    path: Path
    type: str
    head: str
    method: str
    num_weights: int
    num_bytes: int
    bits_per_weight: float
    head_kl: dict[str | None, float]


@shows_options()
def quantize(
    model: str | Path,
    out: str | Path,
    *,
    type: str = "IQ4_NL",
    head: str | None = None,
    method: QuantizeMethod | None = None,
    calibration: str | Path | None = None,
    samples: int = SAMPLES,
    context: int | None = None,
    requantize: bool = False,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
    layer_done: Callable[[int, int], None] | None = None,
) -> Quantized:
    """Quantize a model and write it as a packed folder, which `load` can read.

    A UserWarning names matrices whose number of columns is not a multiple of 32; they are written in F16.
    >>> llamarium.quantize("shakespeare-char", "packed", type="Q8_0").bits_per_weight
    8.5

    Args:
        model: As for `load`: a name, a folder or a file.
        out: Output folder; must not exist unless `force` is set.
        type: Type of the layers' Linears: "Q4_0", "IQ4_NL", "Q4_1" or "Q8_0", in upper or lower case.
        head: Type of head and embedding; "auto" (default with a `calibration`) measures, otherwise "Q8_0".
        method: "nearest", "fit", or with a `calibration` "importance" or "gptq"; default: "gptq" with one, else "fit".
        calibration: Typical text, a few hundred kB, or the `Path` of a text file.
        samples: Number of calibration windows.
        context: Tokens per window; None means 512, or the model's whole context if that is shorter.
        requantize: Allow a model that is already quantized; the errors add up.
        force: Replace an existing model folder.
        progress: Called with (weights done, total weights).
        layer_done: Called with (layers done, total layers) when a layer is quantized.

    Raises:
        LlamariumError: If the model cannot be read or quantized, the options do not fit, or `out` cannot be written.
    """
    method = method or ("fit" if calibration is None else "gptq")
    type = chosen_type("type", type, FITTED_FORMATS)
    head = chosen_type("head", head or (_DEFAULT_HEAD if calibration is None else AUTO), (AUTO, *FITTED_FORMATS))
    _check_options(head, method, calibration)
    opened = open_model(model)
    sample = None if calibration is None else _sample(opened, calibration, samples, context)
    with atomic_folder(Path(out), replace=force) as folder:
        watch = _Watch(progress=progress, layer_done=layer_done)
        quantizer, head, kl = _quantizer(opened, Recipe(type, method, requantize), head, sample, watch)
        weights = quantizer.weights(head)
        _save(weights, opened, folder, {"matrices": type, "head": head, "method": method}, sample)
    return Quantized(Path(out), type, head, method, *_sizes(weights, Path(out)), kl)


def _save(
    weights: Sequence[PackedWeight],
    opened: OpenedModel,
    folder: Path,
    recipe: dict[str, str],
    windows_BT: "Tensor | None",
) -> None:
    """Write the weights with config and tokenizer; `recipe` and the size of the sample are stored in the file."""
    if windows_BT is not None:
        recipe |= {"samples": str(len(windows_BT)), "context": str(windows_BT.shape[1])}
    save_packed(
        weights,
        opened.checkpoint.config,
        folder,
        tokenizer=opened.optional_tokenizer,
        generation_config=opened.generation_config,
        recipe=recipe,
    )


class _Watch(TypedDict):
    """Callbacks for a quantizer's progress, by weights and by layers."""

    progress: Callable[[int, int], None] | None
    layer_done: Callable[[int, int], None] | None


def _quantizer(
    opened: OpenedModel,
    recipe: Recipe,
    head: str,
    windows_BT: "Tensor | None",
    watch: _Watch,
) -> tuple[Quantizer, str, dict[str | None, float]]:
    """Return a quantizer, the head's type, and with "auto" the KL divergence by type."""
    if opened.checkpoint.entries[EMBEDDING].shape[1] % GROUP:
        head = "F16"
    if windows_BT is None:
        return Quantizer(opened.checkpoint, recipe, **watch), head, {}
    from llamarium.calibration.calibrated import CalibratedQuantizer, choose_head

    num_compared = max(1, _COMPARED_TOKENS // windows_BT.shape[1]) if head == AUTO else 0
    checkpoint = opened.checkpoint
    quantizer = CalibratedQuantizer(checkpoint, recipe, windows_BT, num_compared=num_compared, **watch)
    if head != AUTO:
        return quantizer, head, {}
    return quantizer, *choose_head(quantizer, windows_BT[:num_compared])


def _sizes(weights: Sequence[PackedWeight], folder: Path) -> tuple[int, int, float]:
    """Return the number of weights in the matrices, the bytes of the folder's files, and the bits per weight."""
    formats = [(math.prod(weight.shape), weight.format or "F16") for weight in weights if len(weight.shape) == 2]
    num_weights = sum(count for count, _ in formats)
    num_bits = sum(count * FORMATS[name].bits_per_weight for count, name in formats)
    return num_weights, sum(file.stat().st_size for file in folder.iterdir()), num_bits / num_weights


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{escape(path)}: cannot be read as the text to calibrate with: {escape(error)}") from None


def _check_options(head: str, method: str, calibration: str | Path | None) -> None:
    if calibration is not None:
        need_torch("a calibration")
    if calibration is None and (method in CALIBRATED or head == AUTO):
        choice = f"method {method}" if method in CALIBRATED else "head auto"
        raise OptionError(f"{choice} looks at a text to calibrate with, and there is none; give one, or choose another")
    if calibration is not None and method not in CALIBRATED and head != AUTO:
        raise OptionError(
            f"a text to calibrate with has no effect with method {method} and head {head}; leave it out, or choose "
            f"method {' or '.join(CALIBRATED)}"
        )


def _sample(opened: OpenedModel, calibration: str | Path, samples: int, context: int | None) -> "Tensor":
    from llamarium.calibration.calibrate import sample_windows
    from llamarium.inspect.tokens import check_count

    text = _text_of(calibration) if isinstance(calibration, Path) else calibration
    limit = opened.checkpoint.config.max_position_embeddings
    check_count(samples, "samples", _MOST_SAMPLES)
    context = min(CONTEXT, limit) if context is None else context
    check_count(context, "context", limit)
    return sample_windows(opened.tokenizer, text, samples=samples, context=context)
