"""The C kernels against the modules on PyTorch: the same weights, in float32, bfloat16 or float16, and the same work.

    python bench/floats.py [--shapes smollm2-135m,llama-3.2-1b] [--dtypes float32,bfloat16] [--layers 4] [--length 512]
        [--steps 16] [--threads 2] [--counted]

Both runners are made of one model with random weights, and take turns in one process. A round is a prompt of `--length`
tokens and `--steps` tokens after it. The figures are medians of tokens/s and of the rounds' ratios. Of the C kernels it
also says the share of the memory's bandwidth that decoding reaches, and the share of the multiply-adds that a core
gives from registers (bench/peak.c, which a C compiler has to compile) that a prompt reaches.

`--counted` is for a machine that others use: one thread, and its processor time instead of the clock's.
"""

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import common
from llamarium.checkpoints.modules import weights_of
from llamarium.config import EMBEDDING, ModelConfig
from llamarium.kernels import native
from llamarium.kernels.memory import reserve
from llamarium.model import LlamaForCausalLM
from llamarium.presets import preset
from llamarium.runtime.batch import BLOCK_SIZE, Span, pack
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.runtime.native.runner import NativeRunner
from llamarium.runtime.runner import Runner


def make_model(config: ModelConfig, dtype: torch.dtype) -> LlamaForCausalLM:
    """A model of random weights."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu") if dtype is torch.float32 else model.to(dtype).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.ndim == 1:
            parameter.fill_(1)
        else:
            rows = torch.randn(1000, parameter.shape[1]).mul_(0.02)
            parameter.copy_(rows[torch.arange(len(parameter)) % len(rows)])
    if config.tie_word_embeddings:
        model.tie_weights()
    return model.eval()


def one_round(runner: Runner, length: int, steps: int, clock: Callable[[], float]) -> dict[str, float]:
    """Read a prompt and decode some tokens; tokens/s of both."""
    ids = [int(i) for i in np.random.default_rng(0).integers(0, runner.config.vocab_size, length + steps)]
    blocks = list(range(-(-len(ids) // BLOCK_SIZE)))
    cache = runner.new_cache(len(blocks))
    begin = clock()
    runner.run(pack([Span(ids[:length], 0, blocks, num_logits=1)]), cache)
    middle = clock()
    times: list[float] = []
    for place in range(length, length + steps):
        start = clock()
        runner.run(pack([Span([ids[place]], place, blocks, num_logits=1)]), cache)
        times.append(clock() - start)
    return {"prefill": length / (middle - begin), "decode": 1 / float(np.median(times))}


def peak(dtype: str, threads: int) -> float | None:
    """Billions of multiply-adds a second that so many threads give together; None without a compiler."""
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "peak.so"
        source = Path(__file__).with_name("peak.c")
        command = ["cc", "-O3", "-march=native", "-shared", "-fPIC", str(source), "-o", str(built)]
        if subprocess.run(command, check=False).returncode:
            return None
        library = ctypes.CDLL(str(built))
        library.peak.restype = ctypes.c_double
        with ThreadPoolExecutor(threads) as pool:
            return sum(pool.map(library.peak, [int(dtype == "bfloat16")] * threads))


def work_of(config: ModelConfig, length: int) -> float:
    """Multiply-adds of a prompt's products and attention, the head's of one token."""
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * q + 2 * kv + 3 * config.intermediate_size)
    attention = q * (length + 1)  # scores and mixtures of half of the slots, on average
    return config.num_hidden_layers * length * (layer + attention) + config.vocab_size * config.hidden_size


def measure(name: str, dtype: str, options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure one model; a row of the table and all medians."""
    shape = preset(name)
    config = replace(shape, num_hidden_layers=min(options.layers or 10**9, shape.num_hidden_layers))
    model = make_model(config, getattr(torch, dtype))
    weights = weights_of(model)
    assert weights is not None
    in_c, modules = NativeRunner(config, weights), ModuleRunner(model)
    clock = time.process_time if options.counted else time.perf_counter
    with torch.inference_mode():
        medians = common.alternate(
            options.rounds,
            {
                "C": lambda: one_round(in_c, options.length, options.steps, clock),
                "PyTorch": lambda: one_round(modules, options.length, options.steps, clock),
            },
        )
    memory = reserve((2**27,), np.float32)
    memory[:] = 1
    reading = max(memory.nbytes / native.read_ns(memory) for _ in range(5))
    read = (w for key, w in weights.items() if key != EMBEDDING or config.tie_word_embeddings)
    num_bytes = sum(weight.num_bytes for weight in read)
    gives = peak(dtype if native.kernels() == "avx512_bf16" else "float32", options.threads)
    rate = work_of(config, options.length) * medians["C"]["prefill"] / options.length / 1e9
    row = {
        "model": f"{name}, {config.num_hidden_layers} layers", "dtype": dtype,
        "prefill": medians["C"]["prefill"], "PyTorch": medians["PyTorch"]["prefill"],
        "prefill ratio": medians["C / PyTorch"]["prefill"], "of the peak": gives and rate / gives,
        "decode": medians["C"]["decode"], " PyTorch": medians["PyTorch"]["decode"],
        "decode ratio": medians["C / PyTorch"]["decode"],
        "of the bandwidth": num_bytes * medians["C"]["decode"] / 1e9 / reading,
    }  # fmt: skip
    return row, medians | {"reading GB/s": reading, "peak GMAC/s": gives, "prefill GMAC/s": rate}


def main() -> None:
    """Measure each shape in each dtype."""
    parser = common.parser(__doc__)
    parser.add_argument("--shapes", default="smollm2-135m,llama-3.2-1b", help="presets (default %(default)s)")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="float32, bfloat16, float16 (default %(default)s)")
    parser.add_argument("--layers", type=int, help="at most so many (default all)")
    parser.add_argument("--length", type=int, default=512, help="tokens of the prompt (default 512)")
    parser.add_argument("--steps", type=int, default=16, help="tokens decoded after it (default 16)")
    parser.add_argument("--counted", action="store_true", help="one thread's processor time, not the clock's")
    options = parser.parse_args()
    options.threads = 1 if options.counted else options.threads
    torch.set_num_threads(options.threads)
    rows, results = list[dict[str, Any]](), dict[str, Any]()
    for name in options.shapes.split(","):
        for dtype in options.dtypes.split(","):
            row, medians = measure(name, dtype, options)
            rows.append(row)
            results[f"{name} {dtype}"] = medians
    common.report("floats-counted" if options.counted else f"floats-{native.kernels()}", options, rows, results)


if __name__ == "__main__":
    main()
