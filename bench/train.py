"""Train: tokens per second and peak memory of an optimizer step, against a plain step of `transformers`' Llama.

    python bench/train.py --model 2.4m          6 layers, 192, 6 heads, 2 key-value heads, characters
    python bench/train.py --model 10.7m         6 layers, 384, 6 heads: nanoGPT's setting
    python bench/train.py --model vocab-128k    a small trunk under Llama 3's vocabulary: what the head costs in memory

Same shape, dtype (float32), rows and AdamW on both sides, whose weights begin alike. The plain step is the one that
everyone writes: `model(input_ids=ids, labels=labels).loss.backward()`, clip, step, zero. Memory is the peak resident
set of a process that does nothing else, less what it held before the first step.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import common
from llamarium.config import ModelConfig
from llamarium.cost import count_parameters, flops
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.train.data.batch import TrainingBatch
from llamarium.train.optim import make_optimizers
from llamarium.train.step import causal_trunk, train_step

_SMALL = replace(
    preset("small"), vocab_size=65, hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=6,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
)  # fmt: skip
MODELS: dict[str, tuple[ModelConfig, int]] = {  # the shape, and rows a step
    "2.4m": (_SMALL, 32),
    "10.7m": (
        replace(_SMALL, hidden_size=384, intermediate_size=1024, num_key_value_heads=6, head_dim=64),
        16,
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


def our_step(config: ModelConfig, batch: TrainingBatch, *, compiled: bool) -> Callable[[], float]:
    """Return our step, as `llamarium pretrain` takes it."""
    model = init_weights(LlamaForCausalLM(config), 0)
    optimizers = make_optimizers(model, "adamw", learning_rate=1e-4, weight_decay=0.1, betas=(0.9, 0.95))
    trunk = torch.compile(causal_trunk) if compiled else causal_trunk
    return lambda: train_step(model, optimizers, [batch], trunk=trunk).loss


def their_step(config: ModelConfig, batch: TrainingBatch) -> Callable[[], float]:
    """Return the plain step of `transformers`' model."""
    import transformers

    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config.to_hf()))
    model.load_state_dict(init_weights(LlamaForCausalLM(config), 0).state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95))

    def step() -> float:
        loss = model(input_ids=batch.ids_BT, labels=batch.labels_BT, shift_labels=batch.labels_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def timed(step: Callable[[], float], tokens: int) -> dict[str, float]:
    """Return tokens/s of one step, and its loss."""
    begin = time.perf_counter()
    loss = step()
    return {"tokens_per_s": tokens / (time.perf_counter() - begin), "loss": loss}


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
    step = our_step(config, batch, compiled=False) if side == "llamarium" else their_step(config, batch)
    step(), step()
    print(json.dumps({"bytes": peak_resident_bytes() - before}))


def main() -> None:
    """Measure and report."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="2.4m", choices=list(MODELS))
    parser.add_argument("--compile", action="store_true", help="measure our step under torch.compile too")
    parser.add_argument("--memory", choices=["llamarium", "transformers"], help="print one side's memory and leave")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory:
        measure_memory(options.memory, options.model)
        return
    config, rows = MODELS[options.model]
    batch = batch_of(config, rows)
    tokens = batch.ids_BT.numel()
    steps = {"llamarium": our_step(config, batch, compiled=False), "transformers": their_step(config, batch)}
    if options.compile:
        steps["llamarium --compile"] = our_step(config, batch, compiled=True)
    found: Any = common.alternate(
        options.rounds, {name: lambda step=step: timed(step, tokens) for name, step in steps.items()}
    )
    memory = {side: peak_bytes(side, options.model, options.threads) for side in ("llamarium", "transformers")}
    work = 3 * flops(config, config.max_position_embeddings, num_logits=config.max_position_embeddings)
    work /= config.max_position_embeddings
    table = [
        {
            "model": options.model,
            "program": name,
            "tokens/s": found[name]["tokens_per_s"],
            "GFLOP/s": found[name]["tokens_per_s"] * work / 1e9,
            "times transformers": found[name]["tokens_per_s"] / found["transformers"]["tokens_per_s"],
            "peak MB": memory[name] / 1e6 if name in memory else None,
            "of transformers": memory[name] / memory["transformers"] if name in memory else None,
        }
        for name in steps
    ]
    extra = {"parameters": count_parameters(config).total, "rows": rows, "flops_per_token": work, "memory": memory}
    common.report(f"train-{options.model}", options, table, {**extra, **found})


if __name__ == "__main__":
    main()
