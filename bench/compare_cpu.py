"""A model on a CPU against programs that were built for it, on the same weights, alternating.

`make peers` compares with wheels, which pip installs; this takes builds of one's own.

    python bench/compare_cpu.py --model FILE.gguf --llama-bench PATH [--peer NAME="PATH OPTIONS"] ...

| option                | what runs                                                                                    |
|-----------------------|----------------------------------------------------------------------------------------------|
| --llama-bench         | llama.cpp's `llama-bench`                                                                    |
| --peer                | any other `llama-bench`: --peer ik_llama.cpp="ik/llama-bench -rtr 1 -fa 1"                   |
| --transformers        | `transformers` in bfloat16, on this Hugging Face folder of the same model                    |
| --llama-batched-bench | llama.cpp's, for the answers side by side that --streams asks for                            |

`llama-bench` is built from llama.cpp's sources; those of the PyPI package llama-cpp-python will do:

    cmake -B build -DGGML_NATIVE=ON && cmake --build build --target llama-bench llama-batched-bench

Each program is asked for tokens/s of a prompt of `--prompt-tokens` from an empty cache, and of `--new-tokens` after
`--depth` others; with `--streams`, of that many answers at once in sum. All have the same number of threads. Every step
of decoding reads every weight once; what memory can deliver is measured in the same rounds.

Each program warms up with a prompt and a token before each round. `LLAMARIUM_KERNELS=avx2` holds us to AVX2, to be
compared with a llama.cpp that was built so.
"""

import argparse
import json
import os
import shlex
import subprocess
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import common
import llamarium
from llamarium.hub.resolve import resolve
from llamarium.inspect.measures.speed import Work, memory_speed, run_round, some_memory, step_bytes
from llamarium.kernels import native

Side = Callable[[], dict[str, float]]


def ours(llama: llamarium.Llama, options: argparse.Namespace, memory: NDArray[np.float32]) -> dict[str, float]:
    """Return our tokens/s, through the loop that users run, and the share of the memory's speed."""
    runner, prompt, step = (
        llama.runner,
        Work(num_prompt=options.prompt_tokens),
        Work(num_prompt=options.depth, num_new=options.new_tokens),
    )
    run_round(runner, Work(num_prompt=options.prompt_tokens, num_new=1))  # as llama-bench warms up
    figures = {"prefill": options.prompt_tokens / run_round(runner, prompt).seconds}
    readable = memory_speed(memory) if native.library() else 0.0
    seconds = run_round(runner, step).seconds
    figures["decode"] = 1 / seconds
    num_bytes = step_bytes(runner, step)
    if num_bytes is not None:
        figures |= {"GB/s": num_bytes / seconds / 1e9, "memory GB/s": readable / 1e9}
        figures["share"] = num_bytes / seconds / readable
    if options.streams:
        rows = Work(num_rows=options.streams, num_prompt=options.depth, num_new=options.new_tokens)
        figures["streams"] = options.streams / run_round(runner, rows).seconds
    return figures


# --- llama.cpp and what has grown from it -----------------------------------------------------------------------------


def llama_bench(options: argparse.Namespace, path: Path, command: str, batched: str | None = None) -> dict[str, float]:
    """Return what a `llama-bench`, with its own options, says of the two, and a `llama-batched-bench` of streams."""
    program, *own_options = shlex.split(command)
    after = f"-d {options.depth} -p 0 -n {options.new_tokens}"
    if not _knows_depth(program):  # as ik_llama.cpp's
        after = f"-p 0 -n 0 -gp {options.depth},{options.new_tokens}"
    tests = {"prefill": f"-p {options.prompt_tokens} -n 0", "decode": after}
    shared_options = ["-m", str(path), "-t", str(options.threads), "-r", "1", "-o", "json"]
    figures = {name: _speed([program, *shared_options, *test.split(), *own_options]) for name, test in tests.items()}
    return figures if batched is None else figures | {"streams": _batched_speed(options, path, batched)}


def _speed(command: list[str]) -> float:
    (test,) = json.loads(_output(command))
    return float(test["avg_ts"])


def _batched_speed(options: argparse.Namespace, path: Path, command: str) -> float:
    num_slots = max(512, options.streams * (options.depth + options.new_tokens))  # its warm-up needs some too
    test = f"-npp {options.depth} -ntg {options.new_tokens} -npl {options.streams} -c {num_slots}"
    shared_options = f"-t {options.threads} -tb {options.threads} --output-format jsonl"
    (line,) = _output([*shlex.split(command), "-m", str(path), *test.split(), *shared_options.split()]).splitlines()
    return float(json.loads(line)["speed_tg"])


@cache
def _knows_depth(program: str) -> bool:
    return "--n-depth" in subprocess.run([program, "--help"], capture_output=True, text=True, check=False).stdout


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} failed ({done.returncode}):\n{done.stderr[-2000:]}")
    return done.stdout.strip()


# --- the others -------------------------------------------------------------------------------------------------------


def transformers_side(options: argparse.Namespace) -> Side:
    """Load `transformers`' model, and return what measures it."""
    import transformers

    from decode import Clock

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(options.transformers, dtype=torch.bfloat16).eval()

    def times(num_prompt: int, num_new: int) -> list[float]:
        clock, ids = Clock(), torch.arange(num_prompt).unsqueeze(0)
        clock.put(ids)  # the start; generate() itself begins with the prompt
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new + 1, do_sample=False, eos_token_id=None,
            pad_token_id=0, streamer=clock,
        )  # fmt: skip
        return [clock.times[0], *clock.times[2:]]

    def run() -> dict[str, float]:
        times(options.prompt_tokens, 1)  # to warm up
        start, end = times(options.prompt_tokens, 0)
        _, first, *_, last = times(options.depth, options.new_tokens)
        return {"prefill": options.prompt_tokens / (end - start), "decode": options.new_tokens / (last - first)}

    return run


# --- all of them ------------------------------------------------------------------------------------------------------


def sides_of(options: argparse.Namespace, path: Path) -> dict[str, Side]:
    """Return what was asked for besides us, by name."""
    sides: dict[str, Side] = {}
    if options.llama_bench:
        batched = options.llama_batched_bench if options.streams else None
        sides["llama.cpp"] = partial(llama_bench, options, path, options.llama_bench, batched)
    for name, command in options.peer:
        sides[name] = partial(llama_bench, options, path, command)
    if options.transformers:
        sides["transformers"] = transformers_side(options)
    return sides


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="the built-in name, or a GGUF file")
    parser.add_argument("--llama-bench", metavar="PATH")
    parser.add_argument("--llama-batched-bench", metavar="PATH")
    parser.add_argument("--peer", type=common.named, action="append", default=[], metavar='NAME="PATH OPTIONS"')
    parser.add_argument("--transformers", type=Path, metavar="FOLDER")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--depth", type=int, default=16, help="tokens before the new ones (default 16)")
    parser.add_argument("--streams", type=int, default=0, help="answers side by side (default: none)")
    options = parser.parse_args()
    if options.streams and options.llama_bench and not options.llama_batched_bench:
        parser.error("--streams compares with llama.cpp's through --llama-batched-bench PATH")
    return options


def main() -> None:
    """Measure and report."""
    options = parse()
    torch.set_num_threads(options.threads)
    path = resolve(options.model)
    llama, memory = llamarium.load(path), some_memory()
    print(f"llamarium computes with {native.kernels() or 'PyTorch, without its C kernels'}")
    other_sides = sides_of(options, path)
    medians = common.alternate(options.rounds, {"llamarium": lambda: ours(llama, options, memory), **other_sides})
    rows: list[dict[str, Any]] = []
    for name in ("llamarium", *other_sides):
        ratios = medians.get(f"llamarium / {name}", {})
        rows.append({"program": name})
        for key in ("prefill", "decode", "streams"):
            rows[-1] |= {key: medians[name].get(key), f"{key} ratio": ratios.get(key)}
        rows[-1] |= {key: medians[name].get(key) for key in ("GB/s", "memory GB/s", "share")}
    forced = f"-{native.kernels()}" if os.environ.get(native.VARIABLE) else ""
    common.report(f"compare-cpu-{path.stem}{forced}", options, rows, {**medians, "kernels": native.kernels()})


if __name__ == "__main__":
    main()
