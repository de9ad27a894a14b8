"""Learning rates: AdamW's and Muon's, each swept by factors of two on Tiny Shakespeare, then seeds of the best two.

    python bench/learning_rates.py --threads 1                  `bench/train.py`'s 2.4M parameters
    python bench/learning_rates.py --threads 1 --shape tiny     a preset, with rows of 256 tokens (--tokenizer: of what)

Both get the same shape, rows, steps, schedule and weight decay; all that is not given is `pretrain`'s default. Muon's
rate is also AdamW's beside it, which moves the embeddings. A run counts by its loss on the whole validation split after
its last step. The grid of each grows until its best rate lies inside. The claim is the difference of the means of both
best rates, beside the seeds' spread.
"""

import json
import resource
import statistics
import tempfile
from pathlib import Path
from typing import Any, Literal

import common
import llamarium

SHAPE: Any = {
    "preset": "small", "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 6,
    "num_key_value_heads": 2, "context": 256,
}  # fmt: skip


def run(options: Any, optimizer: Literal["adamw", "muon"], rate: float, seed: int) -> dict[str, Any]:
    """Train once, or find that run in the journal; return what was tried, the validation loss and the user time."""
    tried = {"optimizer": optimizer, "rate": rate, "seed": seed, "steps": options.steps, "rows": options.batch_rows}
    shape: Any = {"preset": options.shape, "context": 256} if options.shape else SHAPE
    shape = {**shape, "tokenizer": options.tokenizer}
    tried |= {"threads": options.threads, "commit": common.commit_of(common.ROOT / "src"), **shape}
    lines = options.journal.read_text().splitlines() if options.journal and options.journal.exists() else []
    if done := [row for row in map(json.loads, lines) if row.items() >= tried.items()]:
        return done[0]
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    with tempfile.TemporaryDirectory() as folder:
        result = llamarium.pretrain(
            Path(folder) / "run", data="shakespeare", **shape, optimizer=optimizer, learning_rate=rate, seed=seed,
            steps=options.steps, batch_rows=options.batch_rows, threads=options.threads, sample_every=0,
            eval_every=options.steps, eval_rows=0, save_every=options.steps,
        )  # fmt: skip
    user = resource.getrusage(resource.RUSAGE_SELF).ru_utime - begin
    row = {**tried, "loss": result.position.best_loss, "user_s": user}
    print(json.dumps(row), flush=True)
    if options.journal:
        with options.journal.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return row


def sweep(options: Any) -> dict[Any, list[dict[str, Any]]]:
    """Try rates of both until the best lies inside, then the best few with all seeds; return each one's runs."""
    runs_of: dict[Any, list[dict[str, Any]]] = {"adamw": [], "muon": []}
    for optimizer, runs in runs_of.items():
        ahead = list(getattr(options, optimizer))
        while ahead:
            runs += [run(options, optimizer, rate, 0) for rate in ahead]
            tried = [row["rate"] for row in runs]
            best = min(runs, key=lambda row: row["loss"])["rate"]
            ahead = [best / 2] * (best == min(tried)) + [best * 2] * (best == max(tried))
    ranked = {name: sorted(runs, key=lambda row: row["loss"]) for name, runs in runs_of.items()}
    for place in range(options.best):
        for seed in range(1, options.seeds):
            for optimizer, runs in runs_of.items():
                runs.append(run(options, optimizer, ranked[optimizer][place]["rate"], seed))
    return runs_of


def main() -> None:
    """Sweep both, then repeat the best two of each, and report."""
    parser = common.parser(__doc__)
    parser.add_argument("--adamw", type=float, nargs="+", default=[1e-3, 2e-3], help="rates to begin with")
    parser.add_argument("--muon", type=float, nargs="+", default=[4e-3, 8e-3])
    parser.add_argument("--shape", help="a preset")
    parser.add_argument("--tokenizer", default="characters")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-rows", type=int, default=8)
    parser.add_argument("--journal", type=Path, help="keeps each run, and those that it holds are not repeated")
    parser.add_argument("--best", type=int, default=2, help="rates of each that are tried with all seeds")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    runs_of = sweep(options)
    table: list[dict[str, Any]] = []
    for optimizer, runs in runs_of.items():
        for rate in sorted({row["rate"] for row in runs}):
            losses = [row["loss"] for row in runs if row["rate"] == rate]
            table.append(
                {
                    "optimizer": optimizer,
                    "rate": str(rate),
                    "seeds": len(losses),
                    "loss": f"{statistics.mean(losses):.4f}",
                    "lowest": f"{min(losses):.4f}",
                    "highest": f"{max(losses):.4f}",
                    "user s": statistics.mean(row["user_s"] for row in runs if row["rate"] == rate),
                }
            )
    top = {
        name: min((row for row in table if row["optimizer"] == name and row["seeds"] == options.seeds),
                  key=lambda row: float(row["loss"]))
        for name in runs_of
    }  # fmt: skip
    claim = {
        "best": {name: float(row["rate"]) for name, row in top.items()},
        "adamw_minus_muon": float(top["adamw"]["loss"]) - float(top["muon"]["loss"]),
        "spread": max(float(row["highest"]) - float(row["lowest"]) for row in top.values()),
    }
    print(claim)
    name = "-".join(["learning-rates", *filter(None, [options.shape])])
    common.report(name, options, table, {"runs": runs_of, **claim})


if __name__ == "__main__":
    main()
