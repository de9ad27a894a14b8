"""What each way to quantize costs in quality: perplexity, KL divergence from the original, top-1 agreement.

    python bench/quantization_quality.py --model shakespeare-char --text FILE
    python bench/quantization_quality.py --model smollm2-135m --requantize --tokens 8000

The text is cut in two: the methods that calibrate see the first nine tenths, and the last tenth is measured, its first
--tokens tokens. Without --text it is the manual text that comes with Python (`pydoc_data.topics`). The original is
computed in float32, unpacked; every other line as the CPU kernels compute it, with inputs of 16 bits (older: 8).

SmolLM2's built-in file is in Q4_1, so "the original" is what Q4_1 left of it. That favours Q4_1, which is the same
grid: its lines show the cost of requantizing, not of 4 bits.
"""

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import torch

from common import parser, report
from llamarium import Llama, load
from llamarium.calibration.calibrate import sample_windows
from llamarium.calibration.calibrated import CalibratedQuantizer, choose_head
from llamarium.calibration.quantizer import METHODS, Recipe
from llamarium.checkpoints.open import open_checkpoint
from llamarium.hub.resolve import resolve
from llamarium.model import LlamaForCausalLM
from llamarium.quant.packed import LinearPacked

_CALIBRATED_SHARE = 0.9


def main() -> None:
    options = _options()
    text = Path(options.text).read_text(encoding="utf-8") if options.text else _manual()
    torch.set_num_threads(options.threads)
    cut = text.rindex("\n", 0, int(len(text) * _CALIBRATED_SHARE)) + 1
    original = load(options.model, dtype="float32", device="cpu")
    measured = _first_tokens(original, text[cut:], options.tokens)
    windows_BT = sample_windows(
        original.tokenizer, text[:cut], samples=options.samples, context=min(options.context, _limit(original))
    )
    rows: list[dict[str, Any]] = []
    for type_name, method in itertools.product(options.types.split(","), options.methods.split(",")):
        started = time.perf_counter()
        quantizer = _quantizer(options, type_name, method, windows_BT)
        quantizer.quantize_layers()
        seconds = time.perf_counter() - started
        for head in _heads(options, type_name):
            row = _measure(original, quantizer.model(None if head == "kept" else head), measured, options)
            rows.append({"type": type_name, "method": method, "head": head, **row, "seconds": seconds})
            print(rows[-1], flush=True)
        if options.auto:
            rows[-1]["auto"], kl = choose_head(quantizer, windows_BT[: options.auto])
            print(rows[-1]["auto"], kl, flush=True)
    report(options.name or f"quantization_quality_{options.model}", options, rows, {"rows": rows})


def _options() -> argparse.Namespace:
    result = parser(__doc__)
    result.add_argument("--model", default="shakespeare-char", help="an unquantized model, or one with --requantize")
    result.add_argument("--text", help="a text file in UTF-8 (default: Python's manual)")
    result.add_argument("--tokens", type=int, default=20_000, help="tokens that are measured (default %(default)s)")
    result.add_argument("--samples", type=int, default=64, help="windows to calibrate with (default %(default)s)")
    result.add_argument("--context", type=int, default=512, help="tokens of a window (default %(default)s)")
    result.add_argument("--types", default="Q4_0,Q4_1,IQ4_NL,Q8_0", help="of the layers (default %(default)s)")
    result.add_argument(
        "--heads", default="kept,Q8_0,same", help="of the head; same is the layers' (default %(default)s)"
    )
    result.add_argument("--methods", default=",".join(METHODS), help="(default %(default)s)")
    result.add_argument("--requantize", action="store_true", help="take a model that is quantized")
    result.add_argument("--auto", type=int, default=0, metavar="N", help="choose a head by N windows, too")
    result.add_argument("--name", help="of the result")
    return result.parse_args()


def _manual() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


def _limit(llama: Llama) -> int:
    return llama.config.max_position_embeddings


def _first_tokens(llama: Llama, text: str, count: int) -> str:
    return llama.tokenizer.decode(llama.tokenizer.encode(text, add_special_tokens=False)[:count])


def _quantizer(
    options: argparse.Namespace, type_name: str, method: Any, windows_BT: torch.Tensor
) -> CalibratedQuantizer:
    checkpoint = open_checkpoint(resolve(options.model))
    recipe = Recipe(type_name, method, requantize=options.requantize)
    return CalibratedQuantizer(checkpoint, recipe, windows_BT, num_compared=options.auto)


def _heads(options: argparse.Namespace, type_name: str) -> list[str]:
    heads = [type_name if head == "same" else head for head in options.heads.split(",")]
    return list(dict.fromkeys(heads))


def _measure(original: Llama, model: LlamaForCausalLM, text: str, options: argparse.Namespace) -> dict[str, Any]:
    llama = Llama("quantized", model, original.tokenizer)
    context = min(options.context, _limit(original))
    divergence = llama.divergence(text, against=original, context=context, stride=context // 2)
    return {
        "bits": _bits(model),
        "perplexity": divergence.model.perplexity,
        "original": divergence.against.perplexity,
        "kl": f"{divergence.kl:.5f}",
        "kl_error": f"{divergence.kl_error:.5f}",
        "kl_99": f"{divergence.kl_percentile:.4f}",
        "same_top": f"{divergence.same_top:.4f}",
    }


def _bits(model: LlamaForCausalLM) -> float:
    """Return bits per weight of all Linears."""
    linears = [module for name, module in model.named_modules() if name.endswith(("_proj", "lm_head"))]
    num_bits = [
        8 * linear.weight.numel() if isinstance(linear, LinearPacked) else 16 * linear.weight.numel()  # as bfloat16
        for linear in linears
    ]
    return sum(num_bits) / sum(linear.in_features * linear.out_features for linear in linears)


if __name__ == "__main__":
    main()
