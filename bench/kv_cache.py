"""What 8 and 4 bits for keys and values cost in quality: perplexity of a text that is read over a cache.

    python bench/kv_cache.py story.txt --model smollm2-135m --context 8192 --tokens 16384

Each window is read in chunks over a cache, as a prompt is, once for each kind of cache, on the same weights, by the C
kernels. The first kind is float32, which rounds nothing; bfloat16 is what models keep by default. KL is of the next
token's probabilities with the first kind, against those with this one, in thousandths of a nat; top-1 is how often both
have the same best token.
"""

import math
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

import common
import llamarium
from llamarium.kv_codes import CacheDtype
from llamarium.runtime.batch import Span, blocks_for, pack
from llamarium.runtime.native.cache import NativeCache
from llamarium.runtime.native.runner import NativeRunner

KINDS = ("float32", "bfloat16", *(dtype for dtype in get_args(CacheDtype) if dtype != "auto"))
CHUNK = 256  # tokens whose logits are held at once


def main() -> None:
    """Read the text with each kind of cache and compare."""
    parser = common.parser(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a window (default 2048)")
    parser.add_argument("--tokens", type=int, default=20480, help="tokens that are read (default 20480)")
    options = parser.parse_args()
    llama, runner = load_native(options.model, options.threads)
    ids = llama.tokenizer.encode(options.text.read_text())[: options.tokens]
    windows = [ids[i : i + options.context] for i in range(0, len(ids), options.context)]
    sums = {name: torch.zeros(4, dtype=torch.float64) for name in KINDS}
    for window in windows:
        for name, figures in compare(runner, window).items():
            sums[name] += figures
    rows: list[dict[str, Any]] = []
    for name, figures in sums.items():
        nats, kl, num_same, count = figures.tolist()
        rows.append(
            {"cache": name, "perplexity": math.exp(nats / count), "KL": 1000 * kl / count, "top-1": num_same / count}
        )
    results = {row["cache"]: row for row in rows} | {"num_tokens": len(ids)}
    common.report(f"kv-cache-{Path(options.model).stem}-{options.context}", options, rows, results)


def load_native(model: str, threads: int) -> tuple[llamarium.Llama, NativeRunner]:
    """Load a model that the C kernels run on some threads, or exit."""
    torch.set_num_threads(threads)
    llama = llamarium.load(model, device="cpu")
    if not isinstance(runner := llama.runner, NativeRunner):
        raise SystemExit(f"{model} runs through {runner.name}; this measures caches of the C kernels")
    return llama, runner


@torch.inference_mode()
def compare(runner: NativeRunner, window: list[int]) -> dict[str, Tensor]:
    """Return, for each kind of cache, the sums of nats, KL and equal best tokens, and the number of tokens."""
    caches = {name: NativeCache(runner.config, blocks_for(len(window)), name) for name in KINDS}
    sums = {name: torch.zeros(4, dtype=torch.float64) for name in KINDS}
    for start in range(0, len(window) - 1, CHUNK):
        targets = torch.tensor(window[start + 1 : start + 1 + CHUNK])
        exact_TV = None
        for name, cache in caches.items():
            logprobs_TV = read(runner, cache, window[start : start + len(targets)], start)
            exact_TV = logprobs_TV if exact_TV is None else exact_TV
            kl_T = F.kl_div(logprobs_TV, exact_TV, reduction="none", log_target=True).sum(-1)
            nats_T = -logprobs_TV.gather(1, targets.unsqueeze(1))
            same_T = logprobs_TV.argmax(-1) == exact_TV.argmax(-1)
            sums[name] += torch.tensor([*(float(t.double().sum()) for t in (nats_T, kl_T, same_T)), len(targets)])
    return sums


def read(runner: NativeRunner, cache: NativeCache, ids: list[int], start: int) -> Tensor:
    """Run some tokens over a cache; return the log-probabilities of what follows each, (T, V), float32."""
    span = Span(ids, start, range(cache.num_blocks), num_logits=len(ids))
    return torch.from_numpy(runner.run(pack([span]), cache)).log_softmax(-1)


if __name__ == "__main__":
    main()
