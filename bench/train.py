"""Train: tokens per second and peak memory of an optimizer step, against a plain step of `transformers`' Llama.

    python bench/train.py --model 2.4m          6 layers, 192, 6 heads, 2 key-value heads, characters
    python bench/train.py --model 10.7m         6 layers, 384, 6 heads: nanoGPT's setting
    python bench/train.py --model vocab-128k    a small trunk under Llama 3's vocabulary: what the head costs in memory
    python bench/train.py --attention           attention alone, over rows of 2,048 tokens, against PyTorch's

Same shape, rows and AdamW on both sides, whose weights begin alike; in float32 and in bfloat16 (products; weights and
optimizer stay float32). The plain step is the one that everyone writes: `model(input_ids=ids, labels=labels)`, under
`torch.autocast` for bfloat16, `loss.backward()`, clip, step, zero. With `--compile` both sides are compiled too. Tokens
per second are of the wall's time and of the processor's (user): the second is what a busy machine leaves comparable
with `--threads 1`. Each side has a process of its own, as memory that ours keeps would be the other's too; our threads
wait as the commands set it (GOMP_SPINCOUNT), the others as PyTorch does by itself. "of the products" is the share
of the rate at which the step's own matrix products run alone, attention's counted at that rate.
Memory is the peak resident set of a process that does nothing else, less what it held before the first step.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

import common
from llamarium.attention import CausalAttend, TrainingAttend
from llamarium.config import ModelConfig
from llamarium.cost import count_parameters, flops
from llamarium.kernels.memory import keep_freed
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.train.data.batch import TrainingBatch
from llamarium.train.optim import make_optimizers
from llamarium.train.setup import multiplies_bfloat16
from llamarium.train.step import causal_trunk, computing_in, train_step

Precision = Literal["float32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
_CPU = torch.device("cpu")

_SMALL = replace(
    preset("small"), vocab_size=65, hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=6,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
)  # fmt: skip
MODELS: dict[str, tuple[ModelConfig, int]] = {  # the shape, and rows a step
    "2.4m": (_SMALL, 8),
    "10.7m": (
        replace(_SMALL, hidden_size=384, intermediate_size=1024, num_key_value_heads=6, head_dim=64),
        4,
    ),
    "vocab-128k": (replace(_SMALL, vocab_size=128256), 8),
}


def batch_of(config: ModelConfig, rows: int) -> TrainingBatch:
    """Return the same arbitrary rows every time."""
    generator = torch.Generator().manual_seed(0)
    length = config.max_position_embeddings
    ids = torch.randint(0, config.vocab_size, (rows, length + 1), generator=generator)
    return TrainingBatch(
        ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.arange(length).expand(rows, length), None
    )


def our_step(config: ModelConfig, batch: TrainingBatch, precision: Precision, *, compiled: bool) -> Callable[[], float]:
    """Return our step, as `llamarium pretrain` takes it."""
    model = init_weights(LlamaForCausalLM(config), 0)
    optimizers = make_optimizers(model, "adamw", learning_rate=1e-4, weight_decay=0.1, betas=(0.9, 0.95))
    trunk = torch.compile(causal_trunk) if compiled else causal_trunk
    return lambda: train_step(model, optimizers, [batch], trunk=trunk, precision=precision).loss


def their_step(
    config: ModelConfig, batch: TrainingBatch, precision: Precision, *, compiled: bool
) -> Callable[[], float]:
    """Return the plain step of `transformers`' model."""
    import transformers

    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config.to_hf()))
    model.load_state_dict(init_weights(LlamaForCausalLM(config), 0).state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95))
    forward = torch.compile(model) if compiled else model

    def step() -> float:
        with computing_in(_CPU, precision):
            loss = forward(input_ids=batch.ids_BT, labels=batch.labels_BT, shift_labels=batch.labels_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def products(config: ModelConfig, batch: TrainingBatch, precision: Precision) -> Callable[[], float]:
    """Return what multiplies as a step's Linears do: forward, and twice backward."""
    model, dtype = LlamaForCausalLM(config), getattr(torch, precision)
    count = batch.ids_BT.numel()
    weights = [m.weight.detach().to(dtype) for m in model.modules() if isinstance(m, torch.nn.Linear)]
    sides = {width for weight in weights for width in weight.shape}
    rows = {width: torch.randn(count, width).to(dtype) for width in sides}

    def multiply() -> float:
        for weight in weights:
            x, grad = rows[weight.shape[1]], rows[weight.shape[0]]
            for a, b in ((x, weight.T), (grad, weight), (grad.T, x)):
                torch.mm(a, b)
        return 0.0

    return multiply


def timed(step: Callable[[], float], tokens: int) -> dict[str, float]:
    """Return one step's tokens/s of the wall's time and of the processor's, and its loss."""
    begin, busy = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
    loss = step()
    user = resource.getrusage(resource.RUSAGE_SELF).ru_utime - busy
    return {"tokens_per_s": tokens / (time.perf_counter() - begin), "tokens_per_user_s": tokens / user, "loss": loss}


def attention_sides(shape: tuple[int, ...], precision: Precision) -> dict[str, Callable[[], float]]:
    """Return attention forward and backward, ours and PyTorch's, and a float32 product as oneDNN computes it."""
    rows, tokens, heads, kv_heads, head_dim = shape
    dtype, side = getattr(torch, precision), torch.randn(1024, 1024)
    q, k, v = (
        torch.randn(rows, tokens, n, head_dim, dtype=dtype).requires_grad_() for n in (heads, kv_heads, kv_heads)
    )

    def run(attend: CausalAttend) -> float:
        attend(0, q, k, v).sum().backward()
        return 0.0

    def multiply() -> float:  # PyTorch's own are MKL's, which are half as fast on AMD's processors
        return float(torch.ops.mkldnn._linear_pointwise(side, side, None, "none", [], "")[0, 0])

    return {"llamarium": lambda: run(TrainingAttend()), "torch": lambda: run(CausalAttend()), "product": multiply}


def measure_attention(options: Any) -> None:
    """Report attention alone, beside PyTorch's, and the time that its products would take at a large product's rate."""
    table: list[dict[str, Any]] = []
    for shape, precision in product([(1, 2048, 9, 3, 64), (1, 2048, 8, 8, 128), (8, 256, 6, 2, 32)], PRECISIONS):
        rows, tokens, heads, kv_heads, head_dim = shape
        sides = attention_sides(shape, precision)
        medians: Any = common.alternate(options.rounds, {name: lambda s=s: timed(s, 1) for name, s in sides.items()})
        ours, theirs, large = (1 / medians[name]["tokens_per_user_s"] for name in sides)
        work = 7 * rows * heads * head_dim * tokens * (tokens + 1)  # two products forward, five back, of what is seen
        limit = work * large / (2 * 1024**3)
        table.append(
            {
                "rows x tokens": f"{rows} x {tokens}",
                "heads": f"{heads} on {kv_heads} of {head_dim}",
                "precision": precision,
                "ms": 1e3 * ours,
                "GFLOP/s": work / ours / 1e9,
                "times its products": ours / limit,
                "torch ms": 1e3 * theirs,
                "times faster": theirs / ours,
            }
        )
    common.report("train-attention", options, table, {"table": table})


def peak_bytes(side: str, model: str, threads: int) -> int:
    """Return what two steps add to a process of their own."""
    done = subprocess.run(
        [sys.executable, __file__, "--memory", side, "--model", model, "--threads", str(threads)],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])["bytes"]


def peak_resident_bytes() -> int:
    """Return this process's peak; getrusage would count what its parent held when it began."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def measure_memory(side: str, model: str) -> None:
    """Print what two steps add to this process."""
    import transformers  # on both sides, so that it counts for none

    assert transformers
    config, rows = MODELS[model]
    batch = batch_of(config, rows)
    before = peak_resident_bytes()
    make = our_step if side == "llamarium" else their_step
    step = make(config, batch, "float32", compiled=False)
    for _ in range(2):
        step()
    print(json.dumps({"bytes": peak_resident_bytes() - before}))


def main() -> None:
    """Measure and report."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="2.4m", choices=list(MODELS))
    parser.add_argument("--attention", action="store_true", help="measure attention alone")
    parser.add_argument("--compile", action="store_true", help="measure both sides' steps under torch.compile too")
    parser.add_argument("--memory", choices=["llamarium", "transformers"], help="print one side's memory and leave")
    parser.add_argument("--side", metavar="SIDE", help="take a step of one side for each line of input")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if "llamarium" in f"{options.memory} {options.side}":
        keep_freed()  # as a run does
    if options.memory:
        measure_memory(options.memory, options.model)
    elif options.side:
        take_steps(options.model, *options.side.split())
    elif options.attention:
        measure_attention(options)
    else:
        measure_steps(options)


def take_steps(model: str, side: str, precision: Any, compiled: str = "") -> None:
    """Take one side's steps in this process."""
    config, rows = MODELS[model]
    batch = batch_of(config, rows)
    if side == "products":
        step = products(config, batch, precision)
    else:
        step = (our_step if side == "llamarium" else their_step)(config, batch, precision, compiled=bool(compiled))
    common.serve(lambda: timed(step, batch.ids_BT.numel()))


def measure_steps(options: Any) -> None:
    """Report whole steps, each side's in a process of its own."""
    config, rows = MODELS[options.model]
    kinds = product(PRECISIONS, ["", " compiled"][: 1 + options.compile], ["llamarium", "transformers"])
    names = [f"{side} {precision}{compiled}" for precision, compiled, side in kinds]
    names += [f"products {precision}" for precision in PRECISIONS]
    arguments = ("--model", options.model, "--threads", str(options.threads), "--side")
    ours = {"GOMP_SPINCOUNT": "1000"}  # as the commands that train set before PyTorch is imported
    steps = {name: common.Worker(*arguments, name, **(ours if name.startswith("llamarium") else {})) for name in names}
    medians: Any = common.alternate(options.rounds, steps)
    memory = {side: peak_bytes(side, options.model, options.threads) for side in ("llamarium", "transformers")}
    work = 3 * flops(config, config.max_position_embeddings, num_logits=config.max_position_embeddings)
    work /= config.max_position_embeddings
    linear = 6 * sum(m.weight.numel() for m in LlamaForCausalLM(config).modules() if isinstance(m, torch.nn.Linear))
    default = f"llamarium {'bfloat16' if multiplies_bfloat16() else 'float32'}"
    table: list[dict[str, Any]] = []
    for name in steps:
        program, precision = name.split()[:2]
        of_work = linear if program == "products" else work
        rate = medians[f"products {precision}"]["tokens_per_user_s"] * linear
        best = max(medians[side]["tokens_per_user_s"] for side in steps if side.startswith(f"transformers {precision}"))
        speed = medians[name]["tokens_per_user_s"]
        table.append(
            {
                "model": options.model,
                "program": name + " (default)" * (name in (default, "transformers float32")),
                "tokens/s": medians[name]["tokens_per_s"],
                "tokens/user s": speed,
                "GFLOP/s": speed * of_work / 1e9,
                "of the products": speed * of_work / rate,
                "times transformers": speed / medians[f"transformers {precision}"]["tokens_per_user_s"],
                "times its best": speed / best,
                "times its default": speed / medians["transformers float32"]["tokens_per_user_s"],
            }
        )
    extra = {"parameters": count_parameters(config).total, "rows": rows, "flops_per_token": work, "memory": memory}
    print(f"memory of transformers': {memory['llamarium'] / memory['transformers']:.2f}")
    common.report(f"train-{options.model}", options, table, {**extra, "default": default, **medians})


if __name__ == "__main__":
    main()
