"""Precision: what a model learns in bfloat16 against float32, by three seeds each, and the processor's time for it.

    python bench/precision.py                       Tiny Shakespeare, 2.4M parameters, 8 rows of 256 tokens
    python bench/precision.py --work finetune --steps 60 --eval-every 10
                                                    LoRA beside a base (--model), on the 20 of bench/examples.jsonl

All else is the default of `llamarium.pretrain` or `finetune`; a frozen base is in that precision, too. Each run counts
by its lowest validation loss, over all that is held out: a tenth of the text, four of the examples. What is claimed is
that the means differ by less than the seeds, largest less smallest, of either.
"""

import resource
import statistics
import tempfile
from pathlib import Path
from typing import Any

import common
import llamarium
from learning_rates import SHAPE

EXAMPLES = Path(__file__).with_name("examples.jsonl")


def run(options: Any, precision: str, seed: int) -> dict[str, float]:
    """Train once; return the lowest validation loss and the seconds of user time."""
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    settings: dict[str, Any] = {
        "precision": precision, "seed": seed, "steps": options.steps, "sample_every": 0, "threads": options.threads,
        "eval_every": options.eval_every, "eval_rows": 0, "save_every": options.steps,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        if options.work == "pretrain":
            result = llamarium.pretrain(
                Path(folder) / "run", data=options.data or "shakespeare", batch_rows=8, **SHAPE, **settings
            )
        else:
            settings |= {"data": options.data or str(EXAMPLES), "context": 128, "validation": 0.2}
            result = llamarium.finetune(Path(folder) / "run", model=options.model, **settings)
    user = resource.getrusage(resource.RUSAGE_SELF).ru_utime - begin
    return {"loss": result.position.best_loss, "user_s": user}


def main() -> None:
    """Train in turn, and report."""
    parser = common.parser(__doc__)
    parser.add_argument("--work", default="pretrain", choices=["pretrain", "finetune"])
    parser.add_argument("--data", help="a text, or a file of examples")
    parser.add_argument("--model", default="smollm2-135m", help="the base that is fine-tuned")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--eval-every", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    runs_of: dict[str, list[dict[str, float]]] = {"float32": [], "bfloat16": []}
    for seed in range(options.seeds):
        for precision, runs in runs_of.items():
            runs.append(run(options, precision, seed))
    losses = {precision: [row["loss"] for row in runs] for precision, runs in runs_of.items()}
    table = [
        {
            "precision": precision,
            "loss": statistics.mean(losses[precision]),
            "lowest": min(losses[precision]),
            "highest": max(losses[precision]),
            "user s": statistics.mean(row["user_s"] for row in runs),
        }
        for precision, runs in runs_of.items()
    ]
    difference = abs(statistics.mean(losses["float32"]) - statistics.mean(losses["bfloat16"]))
    spread = max(max(of) - min(of) for of in losses.values())
    claim = {"difference": difference, "spread": spread, "within": difference <= spread}
    print(f"means differ by {difference:.4f}; seeds by {spread:.4f}")
    common.report(f"precision-{options.work}", options, table, {"runs": runs_of, **claim})


if __name__ == "__main__":
    main()
