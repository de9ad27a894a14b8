"""Decode and prefill on a CPU against llama.cpp, on the same GGUF file, alternating.

    python bench/compare_cpu.py --llama-bench PATH                     the built-in SmolLM2, Q4_1
    python bench/compare_cpu.py --llama-bench PATH --model FILE.gguf

`llama-bench` is built from llama.cpp's sources; those of the PyPI package llama-cpp-python will do:

    cmake -B build -DGGML_NATIVE=ON && cmake --build build --target llama-bench

Each program is asked for tokens/s of a prompt of `--prompt-tokens` from an empty cache, and of `--new-tokens` after
`--depth` others, with the same number of threads. ik_llama.cpp's llama-bench takes the same arguments;
`--llama-bench-options "-rtr 1 -fa 1"` adds some. The machine's read bandwidth is measured in the same rounds: every
step of decoding reads every weight once.
"""

import argparse
import json
import shlex
import subprocess
import time
from pathlib import Path

import torch

import common
import llamarium
from llamarium.generate import generate_tokens
from llamarium.kernels import native
from llamarium.sampling import SamplingParams
from llamarium.weights.hub import resolve


def ours(llama: llamarium.Llama, options: argparse.Namespace) -> dict[str, float]:
    """Return our tokens/s of both kinds, greedy, through the loop that users run."""
    prefill = _times(llama, options.prompt_tokens, 0)
    decode = _times(llama, options.depth, options.new_tokens)
    return {
        "prefill": options.prompt_tokens / (prefill[1] - prefill[0]),
        "decode": options.new_tokens / (decode[-1] - decode[1]),
    }


def _times(llama: llamarium.Llama, num_prompt: int, num_new: int) -> list[float]:
    """Return when the prompt was given, and when each token came; the first belongs to the prompt."""
    ids = [5 + i % 1000 for i in range(num_prompt)]
    params = SamplingParams(temperature=0.0, max_tokens=num_new + 1)
    begin = time.perf_counter()
    return [begin, *(time.perf_counter() for _ in generate_tokens(llama.model, [ids], [params]))]


def llama_bench(options: argparse.Namespace, path: Path) -> dict[str, float]:
    """Return llama.cpp's."""
    prefill = _bench(options, path, "-p", str(options.prompt_tokens), "-n", "0")
    decode = _bench(options, path, "-p", "0", "-n", str(options.new_tokens), "-d", str(options.depth))
    return {"prefill": prefill, "decode": decode}


def _bench(options: argparse.Namespace, path: Path, *test: str) -> float:
    more = ["-t", str(options.threads), "-r", "1", "-o", "json", *shlex.split(options.llama_bench_options)]
    command = [options.llama_bench, "-m", str(path), *test, *more]
    (found,) = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return float(found["avg_ts"])


def bandwidth() -> float:
    """Return GB/s of reading memory that is in no cache, on torch's threads: the best of three times."""
    data = torch.ones(2**26)  # written, so that each page is there
    seconds: list[float] = []
    for _ in range(3):
        begin = time.perf_counter()
        data.sum()
        seconds.append(time.perf_counter() - begin)
    return data.nbytes / min(seconds) / 1e9


def main() -> None:
    """Measure and report."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--llama-bench", required=True, metavar="PATH")
    parser.add_argument("--llama-bench-options", default="", metavar="TEXT")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--depth", type=int, default=16, help="tokens before the new ones (default 16)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = resolve(options.model)
    llama = llamarium.load(path)
    found = common.alternate(
        options.rounds,
        {
            "llamarium": lambda: ours(llama, options),
            "llama.cpp": lambda: llama_bench(options, path),
            "memory": lambda: {"GB/s": bandwidth()},
        },
    )
    weights = {tensor.data_ptr(): tensor.nbytes for tensor in llama.model.state_dict(keep_vars=True).values()}
    found["weights"] = {"bytes": sum(weights.values())}
    rows = [
        {
            "program": name,
            "prefill": found[name]["prefill"],
            "decode": found[name]["decode"],
            "GB/s": found[name]["decode"] * sum(weights.values()) / 1e9,
            "prefill ratio": found["ratio"]["prefill"] if name == "llamarium" else 1.0,
            "decode ratio": found["ratio"]["decode"] if name == "llamarium" else 1.0,
        }
        for name in ("llamarium", "llama.cpp")
    ]
    common.report(f"compare-cpu-{path.stem}", options, rows, {**found, "kernels": native.kernels()})
    print(f"memory: {found['memory']['GB/s']:.1f} GB/s read")


if __name__ == "__main__":
    main()
