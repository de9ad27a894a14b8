"""Speedrun: processor time to a validation loss of 1.50 on Tiny Shakespeare, with 2.4M parameters or fewer.

    python bench/speedrun.py --threads 1                            the record's settings, three seeds
    python bench/speedrun.py --threads 1 --settings mine.toml       settings of your own, as `pretrain --config` takes
    python bench/speedrun.py --threads 1 --recipe defaults --source ../old/src --seeds 0     an older checkout

The rules:

- The data is the package's Tiny Shakespeare, as characters. `pretrain` splits it: the first 90 % to learn from, the
  rest to validate. No step learns from the validation text.
- The model has at most 2.4M parameters and begins with fresh weights; a row is of 256 tokens.
- The loss is `pretrain`'s validation loss over the whole split (`eval_rows` 0). A run ends with the first that is 1.50
  or less; when it validates is its own choice.
- The time is the processor's, user and system, of all threads of the process (on the CPU, without a compiler), from the
  moment at which the data is read and the weights are drawn to the end of that validation. Steps, validations and
  checkpoints between count.
- Every seed, 0, 1 and 2, has to arrive; the figure is the mean of their times.
- Settings are `pretrain`'s; there is no code for the record alone.
"""

import bz2
import json
import os
import resource
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import common
from learning_rates import SHAPE

TARGET, PARAMETERS, SEEDS = 1.50, 2_400_000, [0, 1, 2]
RECIPES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "record": {
        "optimizer": "muon", "learning_rate": 4e-3, "muon_learning_rate": 1e-2, "batch_rows": 16, "steps": 700,
        "schedule": "linear", "final_ratio": 0.0, "warmup_steps": 30, "eval_every": 700, "save_every": 700,
    },
}  # fmt: skip


class Ended(Exception):
    """The target is reached, or the time is over."""


def processor_s() -> float:
    """Return the seconds of user and system time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def train(settings: dict[str, Any], limit: float) -> dict[str, Any]:
    """Train in this process until the target, the last step or the limit; return its time and that of validations."""
    import llamarium

    begin, about = 0.0, {"parameters": 0, "steps": 0}
    validations: list[dict[str, float]] = []

    def watch(event: Mapping[str, Any]) -> None:
        nonlocal begin
        about["steps"] = event.get("step", about["steps"])
        if event["event"] == "start":
            begin, about["parameters"] = processor_s(), event["parameters"]
            if about["parameters"] > PARAMETERS:
                raise SystemExit(f"{about['parameters']:,} parameters; at most {PARAMETERS:,} are allowed")
        elif event["event"] == "validation":
            validations.append({"step": event["step"], "loss": event["loss"], "seconds": processor_s() - begin})
            print(validations[-1], file=sys.stderr, flush=True)
        if processor_s() - begin > limit or (validations and validations[-1]["loss"] <= TARGET):
            raise Ended

    try:
        with tempfile.TemporaryDirectory() as folder:
            llamarium.pretrain(Path(folder) / "run", watch=watch, **settings)
    except Ended:
        pass
    arrived, seconds = bool(validations) and validations[-1]["loss"] <= TARGET, processor_s() - begin
    last = validations[-1] if validations else {"step": 0, "loss": None, "seconds": 0.0}
    return {"arrived": arrived, **last, **about, "ended_s": seconds, "validations": validations}


def train_apart(settings: dict[str, Any], source: Path, limit: float) -> dict[str, Any]:
    """Train in a process of its own, with the package of `source`."""
    threads = str(settings["threads"])
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": threads}
    command = [sys.executable, __file__, "--limit", str(limit), "--train", json.dumps(settings)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def settings_of(options: Any, data: Path, seed: int) -> dict[str, Any]:
    """Return a run's settings; SystemExit if they break a rule."""
    recipe = RECIPES[options.recipe] if options.settings is None else tomllib.loads(options.settings.read_text())
    settings = {**SHAPE, "sample_every": 0, **recipe}
    fixed = {
        "data": str(data), "seed": seed, "eval_rows": 0, "context": 256, "threads": options.threads,
        "device": "cpu", "compile": False,
    }  # fmt: skip
    if forbidden := [name for name in (*fixed, "model", "tokenizer", "validation") if name in recipe]:
        raise SystemExit(f"fixed by the rules: {', '.join(forbidden)}")
    return settings | fixed


def main() -> None:
    """Train with each seed, and report."""
    parser = common.parser(__doc__)
    parser.add_argument("--recipe", default="record", choices=list(RECIPES))
    parser.add_argument("--settings", type=Path, help="a TOML file of settings, instead of a recipe")
    parser.add_argument("--source", type=Path, default=common.ROOT / "src", help="the package's folder of a checkout")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--limit", type=float, default=1e5, help="seconds after which a run has not arrived")
    parser.add_argument("--train", help="settings as JSON: train in this process and leave")
    options = parser.parse_args()
    if options.train:
        print(json.dumps(train(json.loads(options.train), options.limit)))
        return
    text = bz2.decompress((common.ROOT / "src/llamarium/datasets/shakespeare.txt.bz2").read_bytes())
    with tempfile.TemporaryDirectory() as folder:
        (data := Path(folder) / "shakespeare.txt").write_bytes(text)
        runs = [
            {"seed": seed, **train_apart(settings_of(options, data, seed), options.source.resolve(), options.limit)}
            for seed in options.seeds
        ]
    table = [{key: run[key] for key in ("seed", "step", "loss", "seconds", "arrived")} for run in runs]
    name = options.recipe if options.settings is None else options.settings.stem
    options.source_commit = common.commit_of(options.source.resolve())
    settings = settings_of(options, Path("shakespeare.txt"), 0)
    arrived = options.seeds == SEEDS and all(run["arrived"] for run in runs)
    seconds = mean(run["seconds"] for run in runs) if arrived else None
    print(f"{name}: {seconds:,.0f} s of the processor" if arrived else f"{name}: not every seed of {SEEDS} arrived")
    results = {"arrived": arrived, "seconds": seconds, "settings": settings, "runs": runs}
    common.report(f"speedrun-{name}", options, table, results)


if __name__ == "__main__":
    main()
