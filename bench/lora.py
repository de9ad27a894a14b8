"""LoRA: tokens per second and peak memory of a step of fine-tuning SmolLM2, against PEFT on `transformers`.

    python bench/lora.py

Both read the same GGUF (Q4_1), put adapters of rank 16 beside every Linear of the layers, and take AdamW's step on 4
rows of 512 tokens, of each of which the second half is learned, as an answer is. Ours is what `llamarium finetune`
takes with its defaults: the base stays as it is stored. PEFT's is the plain step: `from_pretrained(gguf_file=)`, which
unpacks the base to float32, `get_peft_model`, and under `torch.autocast` for bfloat16. Tokens per second are of the
wall's time and of the processor's (user). Memory is the peak resident set of a process that does nothing else, less
what it held before it loaded the model; in bfloat16 on both sides, and in each program's default.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

import common
from llamarium.adapters.config import LoRAConfig
from llamarium.adapters.lora import apply_lora
from llamarium.checkpoints.load import load_model
from llamarium.checkpoints.open import open_checkpoint
from llamarium.hub.resolve import resolve
from llamarium.kernels.memory import keep_freed
from llamarium.options.loading import LoadOptions
from llamarium.train.config import FinetuneConfig
from llamarium.train.data.batch import IGNORED, TrainingBatch
from llamarium.train.finetune import base_dtype
from llamarium.train.optim import make_optimizers
from llamarium.train.setup import multiplies_bfloat16
from llamarium.train.step import train_step
from train import PRECISIONS, Precision, peak_resident_bytes, timed

MODEL, ROWS, TOKENS, VOCABULARY = "smollm2-135m", 4, 512, 49152


def batch_of() -> TrainingBatch:
    """Return the same arbitrary rows every time."""
    ids = torch.randint(0, VOCABULARY, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    labels = ids[:, 1:].clone()
    labels[:, : TOKENS // 2] = IGNORED
    return TrainingBatch(ids[:, :-1].contiguous(), labels, torch.arange(TOKENS).expand(ROWS, TOKENS), None)


def our_step(precision: Precision) -> Callable[[], float]:
    """Return our step, as `llamarium finetune` takes it."""
    keep_freed()  # as a run does
    config, batch = FinetuneConfig(model=MODEL, precision=precision), batch_of()
    options = LoadOptions(dtype=base_dtype(config, "cpu"), device="cpu", dequantize=config.dequantize, join=False)
    model, _ = load_model(open_checkpoint(resolve(MODEL)), options)
    apply_lora(model, LoRAConfig(r=config.rank, alpha=config.alpha))
    optimizers = make_optimizers(model, "adamw", learning_rate=2e-4, weight_decay=0.0, betas=(0.9, 0.95))
    return lambda: train_step(model, optimizers, [batch], precision=precision).loss


def their_step(precision: Precision) -> Callable[[], float]:
    """Return the plain step of PEFT's model."""
    import peft
    import transformers

    config, path, batch = FinetuneConfig(model=MODEL), resolve(MODEL), batch_of()
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    lora = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=list(LoRAConfig().target_modules))
    model: Any = peft.get_peft_model(base, lora).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4, weight_decay=0.0, betas=(0.9, 0.95))

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            loss = model(input_ids=batch.ids_BT, labels=batch.labels_BT, shift_labels=batch.labels_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


SIDES = {"llamarium": our_step, "peft": their_step}


def measure_memory(side: str, precision: Precision) -> None:
    """Print what loading and two steps add to this process."""
    import peft  # on both sides, so that it counts for none
    import transformers

    assert peft and transformers
    before = peak_resident_bytes()
    step = SIDES[side](precision)
    for _ in range(2):
        step()
    print(json.dumps({"bytes": peak_resident_bytes() - before}))


def peak_bytes(side: str, precision: str, threads: int) -> int:
    """Return what loading and two steps add to a process of their own."""
    command = [sys.executable, __file__, "--memory", side, precision, "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["bytes"]


def run(step: Callable[[], float]) -> Callable[[], dict[str, float]]:
    """Return what takes a step and times it."""
    return lambda: timed(step, ROWS * TOKENS)


def main() -> None:
    """Measure and report."""
    parser = common.parser(__doc__)
    parser.add_argument("--memory", nargs=2, metavar=("SIDE", "PRECISION"), help="print one side's memory and leave")
    parser.add_argument("--side", nargs=2, metavar=("SIDE", "PRECISION"), help="a step for each line of input")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory:
        measure_memory(*options.memory)
        return
    if options.side:
        side, precision = options.side
        common.serve(run(SIDES[side](precision)))
        return
    names = [(name, precision) for precision in PRECISIONS for name in SIDES]
    arguments = ("--threads", str(options.threads), "--side")
    sides: Any = {f"{name} {precision}": common.Worker(*arguments, name, precision) for name, precision in names}
    medians: Any = common.alternate(options.rounds, sides)
    ours, theirs = ("bfloat16" if multiplies_bfloat16() else "float32"), "float32"
    table: list[dict[str, Any]] = []
    for side in sides:
        name, precision = side.split()
        speed, memory = medians[side]["tokens_per_user_s"], peak_bytes(name, precision, options.threads)
        table.append(
            {
                "program": side + " (default)" * (side in (f"llamarium {ours}", f"peft {theirs}")),
                "tokens/s": medians[side]["tokens_per_s"],
                "tokens/user s": speed,
                "times PEFT": speed / medians[f"peft {precision}"]["tokens_per_user_s"],
                "times PEFT's default": speed / medians[f"peft {theirs}"]["tokens_per_user_s"],
                "memory MiB": memory / 2**20,
                "loss": medians[side]["loss"],
            }
        )
    common.report("lora", options, table, {"default": ours, "table": table, **medians})


if __name__ == "__main__":
    main()
