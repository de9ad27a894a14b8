"""`quantize()`: make a packed folder of a model, which a CPU runs as stored.

The layers' Linears get the type that is asked for. The head (and the embedding, which a tied model shares with it) is
chosen separately: it is large where the vocabulary is, all of it is read for each token, and its rounding errors go
straight into the probabilities. "auto" takes the smallest type with which the model's KL divergence from the original,
on windows of the calibration text, is at most a tenth more than with an unquantized head.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from llamarium.attention import CausalAttend
from llamarium.checkpoints.checkpoint import Checkpoint
from llamarium.checkpoints.open import OpenedModel, open_model
from llamarium.checkpoints.packed.save import PackedWeight, save_packed
from llamarium.errors import OptionError
from llamarium.inspect.measures.divergence import compare
from llamarium.inspect.passes import CHUNK_BYTES
from llamarium.inspect.tokens import check_count
from llamarium.io import atomic_folder
from llamarium.model import LlamaForCausalLM
from llamarium.quant.formats import FORMATS, chosen_type
from llamarium.quantization.calibrate import sample_windows
from llamarium.quantization.fit import FITTED_FORMATS
from llamarium.quantization.quantizer import CALIBRATED, QuantizeMethod, Quantizer, Recipe
from llamarium.tokenizer.base import Tokenizer

AUTO = "auto"
HEAD_SHARE = 0.10
"""How much of the KL divergence that the layers cost the head may add, for "auto"."""

SAMPLES, CONTEXT = 64, 512
"""Windows to calibrate with, and their tokens."""

_DEFAULT_HEAD = "Q8_0"
_MOST_SAMPLES = 100_000
_COMPARED_TOKENS = 4096  # on which "auto" compares heads; more would cost minutes with 128,256 words


@dataclass(frozen=True, slots=True)
class Quantized:
    """Result of `quantize`.

    Attributes:
        path: The folder.
        type: Of the layers' Linears.
        head: Type of the head and the embedding.
        method: How the scales were found.
        num_weights: In all matrices.
        num_bytes: Of all files.
        bits_per_weight: Of all matrices, scales included.
        head_kl: With "auto": KL from the original, nats per token, by the head's type; None is an unquantized head.
    """

    path: Path
    type: str
    head: str
    method: str
    num_weights: int
    num_bytes: int
    bits_per_weight: float
    head_kl: dict[str | None, float]


def quantize(
    model: str | Path,
    out: str | Path,
    *,
    type: str = "IQ4_NL",
    head: str | None = None,
    method: QuantizeMethod | None = None,
    calibration: str | None = None,
    samples: int = SAMPLES,
    context: int | None = None,
    requantize: bool = False,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Quantized:
    """Quantize a model and write it as a packed folder, which `load` takes.

    Args:
        model: As for `load`: a name, a folder, a file.
        out: The folder to make; there must be none, but for `force`.
        type: Of the layers' Linears: "Q4_0", "IQ4_NL", "Q4_1" or "Q8_0", in capital letters or not.
        head: Of the head and the embedding: a type; "auto" chooses by measurement, which needs a `calibration`; None
            is "auto" where there is one, else "Q8_0".
        method: "nearest", "fit", "importance" or "gptq"; the last two need a `calibration`. None is "gptq" where there
            is one, else "fit".
        calibration: A text like those that the model is for; a few hundred kB are enough.
        samples: Windows of it that are used.
        context: Tokens of a window; None is 512, or the model's whole context where that is shorter.
        requantize: Allow a model that is quantized already, at the price of both errors.
        force: Replace a model's folder that is there.
        progress: Called with (weights done, weights in all).

    Raises:
        LlamariumError: If the model cannot be read, the options do not fit together or the model, or the folder
            cannot be written.
    """
    method = method or ("fit" if calibration is None else "gptq")
    type = chosen_type("type", type, FITTED_FORMATS)
    head = chosen_type("head", head or (_DEFAULT_HEAD if calibration is None else AUTO), (AUTO, *FITTED_FORMATS))
    _check_options(head, method, calibration)
    opened = open_model(model)
    windows_BT = None
    if calibration is not None:
        windows_BT = _sample(opened.checkpoint, opened.tokenizer, calibration, samples, context)
    with atomic_folder(Path(out), replace=force) as folder:
        made = _quantize(opened, Recipe(type, method, requantize), head, windows_BT, folder, progress)
    return replace(made, path=Path(out))


def _quantize(
    opened: OpenedModel,
    recipe: Recipe,
    head: str,
    windows_BT: Tensor | None,
    folder: Path,
    progress: Callable[[int, int], None] | None,
) -> Quantized:
    """Quantize an opened model into a folder."""
    compared_BT = None
    if head == AUTO:
        assert windows_BT is not None
        compared_BT = windows_BT[: max(1, _COMPARED_TOKENS // windows_BT.shape[1])]
    num_compared = 0 if compared_BT is None else len(compared_BT)
    quantizer = Quantizer(opened.checkpoint, recipe, windows_BT, progress=progress, num_compared=num_compared)
    head, kl = (head, {}) if compared_BT is None else choose_head(quantizer, compared_BT)
    weights = quantizer.weights(head)
    said = {"matrices": recipe.type, "head": head, "method": recipe.method}
    if windows_BT is not None:
        said |= {"samples": str(len(windows_BT)), "context": str(windows_BT.shape[1])}
    tokenizer, recommended = opened.optional_tokenizer, opened.generation_config
    config = opened.checkpoint.config
    save_packed(weights, config, folder, tokenizer=tokenizer, generation_config=recommended, recipe=said)
    return Quantized(folder, recipe.type, head, recipe.method, *_sizes(weights, folder), kl)


def choose_head(quantizer: Quantizer, windows_BT: Tensor) -> tuple[str, dict[str | None, float]]:
    """Choose the type of the head and the embedding by what it adds to the KL divergence.

    Args:
        quantizer: Made to compare these windows; its remaining layers are quantized.
        windows_BT: The windows.

    Returns:
        The smallest type whose divergence is at most `HEAD_SHARE` above that of an unquantized head, else the one with
        the least; and the divergence of each type tried, nats per token.
    """
    types = sorted(FITTED_FORMATS, key=lambda name: FORMATS[name].bits_per_weight)
    reference_BTD = quantizer.reference()
    original = quantizer.model(None)
    kl: dict[str | None, float] = {None: _mean_kl(original, windows_BT, original, reference_BTD)}
    for name in types:
        kl[name] = _mean_kl(quantizer.model(name), windows_BT, original, reference_BTD)
        if kl[name] <= (1 + HEAD_SHARE) * kl[None]:
            return name, kl
    return min(types, key=lambda name: kl[name]), kl


@torch.inference_mode()
def _mean_kl(model: LlamaForCausalLM, windows_BT: Tensor, original: LlamaForCausalLM, reference_BTD: Tensor) -> float:
    """Return a model's mean KL from the original, of which the hidden states and the head are given."""
    total, count = 0.0, 0
    positions_1T = torch.arange(windows_BT.shape[1]).unsqueeze(0)
    for ids_T, reference_TD in zip(windows_BT, reference_BTD, strict=True):
        hidden_TD = model.model(ids_T.unsqueeze(0), positions_1T, CausalAttend())[0]
        for compared, *_ in compare(_logits(model, hidden_TD), _logits(original, reference_TD)):
            total, count = total + float(compared.kl_C.double().sum()), count + len(compared.kl_C)
    return total / count


def _logits(model: LlamaForCausalLM, hidden_TD: Tensor) -> Iterator[Tensor]:
    """Yield the logits of hidden states (C, V), float32, a few positions at a time."""
    for part_CD in hidden_TD.split(max(1, CHUNK_BYTES // (4 * model.config.vocab_size))):
        yield model.logits(part_CD).float()


def _sizes(weights: Sequence[PackedWeight], folder: Path) -> tuple[int, int, float]:
    """Return the number of weights in the matrices, the bytes of the folder's files, and the bits per weight."""
    formats = [(math.prod(weight.shape), weight.format) for weight in weights if weight.format is not None]
    num_weights = sum(count for count, _ in formats)
    num_bits = sum(count * FORMATS[name].bits_per_weight for count, name in formats)
    return num_weights, sum(file.stat().st_size for file in folder.iterdir()), num_bits / num_weights


def _check_options(head: str, method: str, calibration: str | None) -> None:
    if calibration is None and (method in CALIBRATED or head == AUTO):
        what = f"method {method}" if method in CALIBRATED else "head auto"
        raise OptionError(f"{what} looks at a text to calibrate with, and there is none; give one, or choose another")
    if calibration is not None and method not in CALIBRATED and head != AUTO:
        raise OptionError(
            f"a text to calibrate with has no effect with method {method} and head {head}; leave it out, or choose "
            f"method {' or '.join(CALIBRATED)}"
        )


def _sample(checkpoint: Checkpoint, tokenizer: Tokenizer, text: str, samples: int, context: int | None) -> Tensor:
    """Cut the windows to calibrate with, (B, T)."""
    limit = checkpoint.config.max_position_embeddings
    check_count(samples, "samples", _MOST_SAMPLES)
    context = min(CONTEXT, limit) if context is None else context
    check_count(context, "context", limit)
    return sample_windows(tokenizer, text, samples=samples, context=context)
