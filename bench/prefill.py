"""Prefill: prompt tokens per second, against `transformers` on the same weights.

    python bench/prefill.py --model llama-3.2-1b
    python bench/prefill.py --model smollm2-135m

Both run the prompt once into an empty KV cache and compute the last token's logits. The limit is arithmetic: GFLOP/s
against what a float32 matrix product reaches here (measured in the same run).
"""

import time

import torch

import common
from llamarium.cost import flops
from llamarium.inspect.forward import Memory, advance
from llamarium.runtime.runner import Runner
from peers import load_ours, load_theirs, token_ids


def ours(runner: Runner, prompt: list[int]) -> dict[str, float]:
    """Return tokens/s of our prefill."""
    begin = time.perf_counter()
    memory = Memory(runner, len(prompt))
    advance(runner, memory.cache, [memory.begin(prompt, len(prompt))])
    return {"tokens_per_s": len(prompt) / (time.perf_counter() - begin)}


@torch.inference_mode()
def theirs(model: torch.nn.Module, prompt: list[int]) -> dict[str, float]:
    """Return tokens/s of `transformers`' forward."""
    begin = time.perf_counter()
    model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    return {"tokens_per_s": len(prompt) / (time.perf_counter() - begin)}


def matmul_gflops() -> float:
    """Return what a large float32 product reaches: the practical peak."""
    a, b = torch.randn(512, 2048), torch.randn(8192, 2048)
    best = 0.0
    for _ in range(10):
        begin = time.perf_counter()
        torch.nn.functional.linear(a, b)
        best = max(best, 2 * 512 * 2048 * 8192 / (time.perf_counter() - begin) / 1e9)
    return best


def main() -> None:
    """Measure and report."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="llama-3.2-1b", choices=["llama-3.2-1b", "smollm2-135m"])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    llama, peer = load_ours(options.model), load_theirs(options.model)
    runner, prompt = llama.runner, token_ids(llama.config.vocab_size, options.prompt_tokens)
    medians = common.alternate(
        options.rounds, {"llamarium": lambda: ours(runner, prompt), "transformers": lambda: theirs(peer, prompt)}
    )
    work = flops(llama.config, len(prompt)) / len(prompt)
    rows = [
        {
            "model": options.model,
            "program": name,
            "tokens/s": medians[name]["tokens_per_s"],
            "GFLOP/s": medians[name]["tokens_per_s"] * work / 1e9,
            "times transformers": medians["llamarium / transformers"]["tokens_per_s"] if name == "llamarium" else 1.0,
        }
        for name in ("llamarium", "transformers")
    ]
    peak = {"float32_matmul_gflops": matmul_gflops(), "flops_per_token": work}
    common.report(f"prefill-{options.model}", options, rows, {**peak, **medians})


if __name__ == "__main__":
    main()
