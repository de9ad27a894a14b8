"""What every benchmark shares: the machine's description, alternation, a table and one JSON line.

Two programs are measured in turn, A B A B ..., so that a machine whose speed drifts slows both; the figure is the
median of the rounds, and the claim is the median of the per-round ratios.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
GENERATED = Path(os.environ.get("LLAMARIUM_BENCH_DIR", ROOT / "bench" / "generated"))


@contextmanager
def neighbours(count: int) -> Generator[None]:
    """Let so many processes compute during the body."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--rounds", type=int, default=5, help="measured rounds of each side (default 5)")
    result.add_argument("--threads", type=int, default=2, help="threads of each side (default 2)")
    result.add_argument("--save", action="store_true", help="write the JSON line to bench/results/ too")
    return result


def named(text: str) -> tuple[str, str]:
    """Parse NAME=COMMAND, for argparse."""
    name, equals, command = text.partition("=")
    if not (name and equals and command):
        raise argparse.ArgumentTypeError(f'expected NAME="PATH OPTIONS", found {text!r}')
    return name, command


def alternate(rounds: int, sides: dict[str, Callable[[], dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Run the sides in turn, one warm-up round first, and return each side's medians; keys as the sides return them.

    Under "<first side> / <other side>" are the medians of the rounds' ratios, of what both sides return.
    """
    for run in sides.values():
        run()
    results_of: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            results_of[name].append(run())
    medians = {
        name: {key: statistics.median(r[key] for r in results) for key in results[0]}
        for name, results in results_of.items()
    }
    first, *other_sides = sides
    for other_side in other_sides:
        medians[f"{first} / {other_side}"] = {
            key: statistics.median(
                a[key] / b[key] for a, b in zip(results_of[first], results_of[other_side], strict=True)
            )
            for key in results_of[first][0]
            if key in results_of[other_side][0] and all(r[key] for r in results_of[other_side])
        }
    return medians


class Worker:
    """A side in a process of its own, so that no side computes with what another one has set; each call is a step.

    The process is this program with `arguments`, and `serve` there takes the steps; `environment` is added to its own.
    """

    def __init__(self, *arguments: str, **environment: str) -> None:
        command, full_environment = [sys.executable, sys.argv[0], *arguments], environment | os.environ
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=full_environment
        )

    def __call__(self) -> dict[str, float]:
        """Take a step, and return what it measured."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def serve(step: Callable[[], dict[str, float]]) -> None:
    """Take a step for every line, until the input ends."""
    for _ in sys.stdin:
        print(json.dumps(step()), flush=True)


class Load:
    """How busy other programs kept the machine while the block ran; Linux says it, elsewhere it counts as quiet.

    Attributes:
        others: Cores that neither this process with its children used nor were idle, 0 below a tenth of one: what the
            system itself needs. Time that a hypervisor gave to other machines counts.
    """

    others = 0.0

    def __enter__(self) -> "Load":
        self._began, self._own, self._all = time.monotonic(), self._own_s(), self._busy_s()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.monotonic() - self._began
        other_s = (self._busy_s() - self._all) - (self._own_s() - self._own)
        self.others = round(other_s / seconds, 2) if other_s > 0.1 * seconds else 0.0

    def _own_s(self) -> float:
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system

    def _busy_s(self) -> float:
        fields = next((line.split()[1:] for line in _lines("/proc/stat") if line.startswith("cpu ")), [])
        if not fields:
            return 0.0
        user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def environment() -> dict[str, Any]:
    """Say what was measured where: machine, versions, commit, date."""
    flags = next((line for line in _lines("/proc/cpuinfo") if line.startswith("flags")), "")
    memory = next((int(line.split()[1]) // 2**20 for line in _lines("/proc/meminfo") if "MemTotal" in line), 0)
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "isa": [
            f for f in ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16") if f" {f}" in flags
        ],
        "memory_gib": memory,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("llamarium", "torch", "transformers", "tokenizers")},
        "commit": commit_of(ROOT),
        "clean": not _git(ROOT, "status", "--porcelain", "--", "src"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def processor() -> str:
    """Return the processor's name, with family and model on Linux: a hypervisor may say no more than "AMD EPYC"."""
    fields = dict[str, str]()
    for line in _lines("/proc/cpuinfo"):
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    if "model name" not in fields:
        return platform.processor()
    return f"{fields['model name']} (family {fields.get('cpu family')}, model {fields.get('model')})"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # a benchmark that does not need it runs without
        return None


def report(name: str, options: argparse.Namespace, rows: list[dict[str, Any]], results: dict[str, Any]) -> None:
    """Print a table, then one JSON line; with `--save` also write it to bench/results/."""
    widths = {key: max(len(key), *(len(_show(row.get(key))) for row in rows)) for key in rows[0]}
    print("  ".join(key.ljust(width) for key, width in widths.items()))
    for row in rows:
        print("  ".join(_show(row.get(key)).ljust(width) for key, width in widths.items()))
    settings = {k: _without_folders(v) for k, v in vars(options).items() if k != "save"}
    line = json.dumps({"benchmark": name, "options": settings, "results": results, "environment": environment()})
    if options.save:
        (ROOT / "bench" / "results").mkdir(exist_ok=True)
        (ROOT / "bench" / "results" / f"{name}.json").write_text(line + "\n")
    print(line)


def _without_folders(value: Any) -> Any:
    """Name files and programs without where they lie on this machine."""
    if isinstance(value, (list, tuple)):
        return [_without_folders(each) for each in value]
    if not isinstance(value, (str, Path)):
        return value
    return " ".join(Path(word).name if Path(word).is_absolute() else word for word in str(value).split(" "))


def _show(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else "" if value is None else str(value)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def commit_of(checkout: Path) -> str:
    """Return a checkout's commit, shortened."""
    return _git(checkout, "rev-parse", "--short", "HEAD")


def _git(checkout: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()
