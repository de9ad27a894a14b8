"""Which rounding of keys and values costs least: KL of a text that is read over a cache rounded in several ways.

    python bench/kv_rounding.py shared/data/tinyshakespeare.txt --context 4096

The C kernels keep keys and values in float32, and after each piece of a window NumPy rounds what the piece added; so
roundings that the kernels do not have are compared, too. The first 32 tokens of each 256 are a piece of their own, and
their probabilities are compared: they see nothing unrounded but each other. KL is of the next token's probabilities
without rounding against those with it, in thousandths of a nat; bits are those of a number, scales included.
docs/decisions/0058 has the results.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

import common
from kv_cache import load_native
from llamarium.kv_codes import hadamard
from llamarium.runtime.batch import Span, blocks_for, pack
from llamarium.runtime.native.cache import NativeCache
from llamarium.runtime.native.runner import NativeRunner

CHUNK, SCORED = 256, 32

Floats = NDArray[np.float32]
Rounding = Callable[[Floats], Floats]


def rounded(bits: int, group: int, form: str, spread: bool, scale_bits: int = 16) -> tuple[Rounding, float]:
    """Return a rounding of vectors (..., H) and its bits for a number.

    `form` is "symmetric" (-m to m), "signed" (the largest magnitude becomes -m - 1) or "affine" (with a minimum).
    """
    top = 2 ** (bits - 1) - 1

    def narrow(scale: Floats) -> Floats:
        return torch.from_numpy(scale).bfloat16().float().numpy() if scale_bits == 16 else scale

    def apply(x: Floats) -> Floats:
        vectors = hadamard(np, x) if spread else x
        groups = vectors.reshape(*x.shape[:-1], -1, min(group, x.shape[-1]))
        if form == "affine":
            low = narrow(groups.min(-1, keepdims=True))
            scale = narrow((groups.max(-1, keepdims=True) - low) / (2 * top + 1))
            codes = np.clip(np.rint((groups - low) / np.where(scale == 0, 1, scale)), 0, 2 * top + 1)
            values = codes * scale + low
        else:
            at = np.abs(groups).argmax(-1)[..., None]
            extreme = np.take_along_axis(groups, at, -1)
            scale = narrow(np.abs(extreme) / top if form == "symmetric" else extreme / -(top + 1))
            codes = np.clip(np.rint(groups / np.where(scale == 0, 1, scale)), -top - (form == "signed"), top)
            values = codes * scale
        values = values.reshape(x.shape).astype(np.float32)
        return hadamard(np, values) if spread else values

    return apply, bits + scale_bits * (2 if form == "affine" else 1) / group


def ways(head_dim: int) -> dict[str, tuple[Rounding, Rounding, float]]:
    """Return roundings of keys and of values by name, and their mean bits."""
    byte = rounded(8, head_dim, "symmetric", True, 32)
    roundings = {
        "8 bits, no rotation": (rounded(8, head_dim, "symmetric", False, 32),) * 2,
        "8 bits": (byte, byte),
        "8 bits, groups of 32": (rounded(8, 32, "symmetric", True),) * 2,
    }
    for spread in (False, True):
        for form in ("symmetric", "signed", "affine"):
            for group in sorted({32, head_dim}):
                four_bits = rounded(4, group, form, spread)
                name = f"4 bits {form}, groups of {group}{'' if spread else ', no rotation'}"
                roundings[f"{name}: values"] = (byte, four_bits)
                roundings[f"{name}: both"] = (four_bits, four_bits)
    return {name: (k[0], v[0], (k[1] + v[1]) / 2) for name, (k, v) in roundings.items()}


def scored(
    runner: NativeRunner, window: list[int], of_keys: Rounding | None, of_values: Rounding | None
) -> Iterator[Tensor]:
    """Yield the log-probabilities after the first tokens of each chunk, (32, V)."""
    cache = NativeCache(runner.config, blocks_for(len(window), SCORED), "float32", SCORED)
    for start in range(0, len(window) - CHUNK + 1, CHUNK):
        for begin, end in ((start, start + SCORED), (start + SCORED, start + CHUNK)):
            num_logits = SCORED if begin == start else 0
            span = Span(window[begin:end], begin, range(cache.num_blocks), num_logits=num_logits)
            logits = runner.run(pack([span], SCORED), cache)
            if num_logits:
                yield torch.from_numpy(logits).log_softmax(-1)
            blocks = slice(begin // cache.block_size, end // cache.block_size)
            for layers, rounding in ((cache.k, of_keys), (cache.v, of_values)):
                for layer in layers if rounding else ():
                    layer[blocks] = rounding(layer[blocks]) if rounding else 0


@torch.inference_mode()
def main() -> None:
    """Read the text with each rounding and compare."""
    parser = common.parser(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--context", type=int, default=4096, help="tokens of a window (default 4096)")
    parser.add_argument("--windows", type=int, default=1, help="how many are read (default 1)")
    options = parser.parse_args()
    llama, runner = load_native(options.model, options.threads)
    ids = llama.tokenizer.encode(options.text.read_text())
    roundings = ways(runner.config.head_dim)
    sums = dict.fromkeys(roundings, 0.0)
    count = 0
    for start in range(0, options.windows * options.context, options.context):
        window = ids[start : start + options.context]
        exact = list(scored(runner, window, None, None))
        for name, (of_keys, of_values, _) in roundings.items():
            for logprobs, true in zip(scored(runner, window, of_keys, of_values), exact, strict=True):
                sums[name] += float(F.kl_div(logprobs, true, reduction="sum", log_target=True))
        count += len(exact) * SCORED
    rows: list[dict[str, Any]] = [
        {"rounding": name, "bits": roundings[name][2], "KL": 1000 * total / count} for name, total in sums.items()
    ]
    results = {row["rounding"]: row for row in rows} | {"num_tokens": count}
    common.report(f"kv-rounding-{Path(options.model).stem}-{options.context}", options, rows, results)


if __name__ == "__main__":
    main()
