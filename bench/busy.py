"""Train beside a busy neighbour: what a step takes when another program computes, with PyTorch's threads and with ours.

    python bench/busy.py --work pretrain     characters, 6 layers, 192: the shape of `bench/train.py`'s 2.4m
    python bench/busy.py --work finetune     LoRA beside SmolLM2-135M, rows of 128 tokens, as in the README

Both sides are the whole command. "pytorch" has PyTorch's own number of threads (--threads), which spin as libgomp
lets them; "llamarium" is the command as it is, which chooses. A neighbour is a process that computes without a pause.
A step's time is the median of a run's steps but the first; "others" is how many cores the rest of the machine, neither
run nor neighbour, kept busy meanwhile: figures are comparable where that is near zero.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import common
from llamarium.kernels.threads import default_threads

WORK: dict[str, list[str]] = {
    "pretrain": (
        "pretrain --preset small --hidden-size 192 --intermediate-size 512 --num-hidden-layers 6"
        " --num-attention-heads 6 --num-key-value-heads 2 --context 256 --batch-rows 8"
    ).split(),
    "finetune": "finetune --data examples.jsonl --context 128".split(),
}
WAITING = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
SPINS = {"GOMP_SPINCOUNT": "300000"}  # libgomp's own default. Source: its manual, "GOMP_SPINCOUNT"
_TICKS = os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """Return the seconds that all processors have computed so far."""
    times = [int(number) for number in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(times) - times[3] - times[4]) / _TICKS  # but idle and iowait


def train(options: Any, folder: Path, side: str, busy: int) -> dict[str, float]:
    """Run a command once, and return seconds a step, the threads, and what else went on."""
    shared_options = (
        f"--steps {options.steps} --log-every 1 --eval-every 10000 --sample-every 0 --save-every 10000 --device cpu"
    )
    command = [*WORK[options.work], *shared_options.split(), "--out", f"run-{time.monotonic_ns()}", "--json"]
    environment = {name: value for name, value in os.environ.items() if name not in WAITING}
    if side == "pytorch":
        command, environment = [*command, "--threads", str(options.threads)], environment | SPINS
    begin, computed, own_s = time.perf_counter(), busy_seconds(), sum(os.times()[2:4])
    with common.neighbours(busy):
        done = subprocess.run(
            [sys.executable, "-m", "llamarium", *command], cwd=folder, env=environment, capture_output=True, text=True
        )  # fmt: skip
        wall = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(done.stderr)
    other_cores = (
        busy_seconds() - computed - (sum(os.times()[2:4]) - own_s)
    ) / wall  # children that are waited for count
    events = [json.loads(line) for line in done.stdout.splitlines()]
    start = next(event for event in events if event["event"] == "start")
    steps = [start["tokens_per_step"] / event["tokens_per_s"] for event in events if event["event"] == "step"]
    return {"s a step": median(steps[1:]), "threads": start["threads"], "others": max(0.0, other_cores)}


def main() -> None:
    """Measure and report."""
    parser = common.parser(__doc__)
    parser.set_defaults(rounds=3, threads=default_threads())
    parser.add_argument("--work", default="pretrain", choices=list(WORK))
    parser.add_argument("--steps", type=int, default=6, help="of each run (default 6)")
    parser.add_argument("--neighbours", type=int, default=1, help="processes that compute beside it (default 1)")
    options = parser.parse_args()
    runs_of: dict[tuple[str, int], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        example = {"prompt": "Ahoy?", "completion": "Ahoy, matey! " * 10}
        (Path(name) / "examples.jsonl").write_text((json.dumps(example) + "\n") * 40)
        for _ in range(options.rounds):
            for busy in (0, options.neighbours):
                for side in ("pytorch", "llamarium"):
                    runs_of.setdefault((side, busy), []).append(train(options, Path(name), side, busy))
    table: list[dict[str, Any]] = []
    for (side, busy), runs in runs_of.items():
        free = median(run["s a step"] for run in runs_of[side, 0])
        step = median(run["s a step"] for run in runs)
        table.append({
            "work": options.work, "side": side, "neighbours": busy, "s a step": step, "lost": 1 - free / step,
            "threads": "/".join(str(int(run["threads"])) for run in runs), "others": median(r["others"] for r in runs),
        })  # fmt: skip
    runs = {f"{side}, {busy} neighbours": values for (side, busy), values in runs_of.items()}
    common.report(f"busy-{options.work}", options, table, {"rows": table, "runs": runs})


if __name__ == "__main__":
    main()
