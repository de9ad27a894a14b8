"""One table of peers: this library, llama.cpp, ik_llama.cpp and OpenVINO GenAI on the same GGUF files.

    make peers                                   installs the peers, measures, and writes the table
    python bench/peer_table.py [--model NAME] [--side NAME] [--rounds 5]

In each round every side starts anew, reads a prompt, decodes, decodes eight answers at once and, with SmolLM2, behind
4,000 tokens; the sides take turns, and a figure is the median of the rounds. Short tasks are repeated within a round,
and their median counts. The first token is counted from the start of the process, the model read from the page cache,
modules compiled to bytecode as pip does; memory is the process's peak. Peers are the wheels that pip installs below
`bench/generated/peers`; the line above each table says which instructions they were compiled for.

A result is written only if the machine was quiet: other programs, and a hypervisor's other guests, took less than a
tenth of a core, and no speed of ours varied by more than 35 % between rounds. It goes to `bench/results/peers-*.json`,
one file for each model and processor, and all of them into `docs/reference/benchmarks.md`.
"""

import argparse
import compileall
import json
import shlex
import shutil
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import common
import llamarium
from llamarium.hub.builtin import fetch
from make_weights import make

WHEELS = {"llama.cpp": "xllamacpp", "ik_llama.cpp": "ik-llama-cpp-python", "OpenVINO": "openvino-genai"}
FOLDER = common.GENERATED / "peers"
PAGE = common.ROOT / "docs" / "reference" / "benchmarks.md"
BEGIN, END = "<!-- peers: written by `make peers` -->", "<!-- end of peers -->"

MODELS = {"1B Q4_0": "Q4_0", "1B Q4_K_M": "Q4_K_M", "1B Q8_0": "Q8_0", "1B BF16": "BF16", "SmolLM2 Q4_1": None}
"""Type of the file, of random weights in Llama 3.2's shape; None is the built-in file."""

MOST_BUSY, MOST_SPREAD = 0.1, 0.35

LEAST_S = 4.0
"""A task is repeated for so many seconds in each round, since a virtual machine stalls for fractions of one."""


class Task(NamedTuple):
    """What is asked of each side, and what its speed is: of the prompt, or of the steps."""

    num_prompt: int
    num_new: int
    num_rows: int = 1

    def tokens_per_s(self, prompt_s: float, step_s: float) -> float:
        """Return the speed."""
        return self.num_rows / step_s if self.num_new else self.num_prompt / prompt_s


TASKS = {"prompt of 512": Task(512, 0), "decode": Task(16, 64), "eight answers": Task(16, 32, 8)}
DEEP = {"behind 4,000 tokens": Task(4000, 96)}


def measure(command: list[str], tasks: dict[str, Task]) -> tuple[dict[str, float], str]:
    """Start a side; return its figures, and what it says that it runs with; SystemExit if it ends before.

    They are tokens/s by task, the seconds to its first token, and its peak memory in MB.
    """
    begin = time.perf_counter()
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        asking, answers = process.stdin, process.stdout
        assert asking is not None and answers is not None

        def answer() -> Any:
            if not (line := answers.readline()):
                raise SystemExit(f"{shlex.join(command)} ended with {process.wait()}; run it to see what it says")
            return json.loads(line)

        def ask(task: Task) -> list[float] | None:
            print(json.dumps([task.num_prompt, task.num_new, task.num_rows]), file=asking, flush=True)
            return answer()

        about = answer()
        ask(Task(16, 0))
        found = {"first token": time.perf_counter() - begin}
        ask(Task(64, 4))  # to warm up
        for name, task in tasks.items():
            speeds: list[float] = []
            until = time.perf_counter() + LEAST_S
            while (seconds := ask(task)) is not None:
                speeds.append(task.tokens_per_s(*seconds))
                if time.perf_counter() >= until:
                    found[name] = statistics.median(speeds)
                    break
        found["memory"] = _peak_mb(process.pid)
    return found, about


def _peak_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1000


# --- what is needed ---------------------------------------------------------------------------------------------------


def peers_python() -> Path:
    """Return the interpreter of the environment with the peers' wheels, making it if it is not there."""
    python = FOLDER / "venv" / "bin" / "python"
    if not python.exists():
        venv.create(FOLDER / "venv", with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "numpy", *WHEELS.values()], check=True)
    return python


def versions(python: Path) -> dict[str, str]:
    """Return the version of each peer's wheel."""
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(p) for n, p in {WHEELS}.items()}}))"
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)


def gguf_file(name: str) -> Path:
    """Return a model's file, written if it is not there: weights at random with the tokenizer of Llama 3."""
    type_name = MODELS[name]
    if type_name is None:
        return fetch("smollm2-135m")
    path = common.GENERATED / "peers" / f"llama-3.2-1b.{type_name}.gguf"
    if not path.exists():
        source = FOLDER / "llama-3.2-1b"
        shutil.copytree(make("llama-3.2-1b"), source, dirs_exist_ok=True, copy_function=_link)
        shutil.copy(fetch("llama3"), source / "tokenizer.model")
        export = ["export", "-m", source, "--format", "gguf", "--type", type_name, "--out", path]
        subprocess.run([sys.executable, "-m", "llamarium", *export], check=True)
    return path


def _link(source: str, target: str) -> None:
    Path(target).unlink(missing_ok=True)
    Path(target).hardlink_to(source)


# --- one model --------------------------------------------------------------------------------------------------------


def compare(name: str, python: Path, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure a model with every side; return the medians by side, and why they are not to be published."""
    path, tasks = gguf_file(name), TASKS | (DEEP if name.startswith("SmolLM2") else {})
    rounds: dict[str, list[dict[str, float]]] = {side: [] for side in options.side}
    about: dict[str, str] = {}

    def side(name: str) -> Callable[[], dict[str, float]]:
        interpreter = sys.executable if name == "Llamarium" else python
        command = [interpreter, Path(__file__).with_name("peer.py"), name, path, options.threads]

        def run() -> dict[str, float]:
            found, about[name] = measure(list(map(str, command)), tasks)
            rounds[name].append(found)
            return found

        return run

    with common.Load() as load:
        found = common.alternate(options.rounds, {name: side(name) for name in options.side})
    spread = {key: _spread([r[key] for r in rounds["Llamarium"][1:]]) for key in tasks}
    faults = [f"{key} varied by {value:.0%} between rounds" for key, value in spread.items() if value > MOST_SPREAD]
    if load.others > MOST_BUSY:
        faults.append(f"other programs took {load.others} cores")
    return {"results": found, "about": about, "others": load.others, "spread": spread}, faults


def _spread(values: list[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)


# --- the table --------------------------------------------------------------------------------------------------------

UNITS = {"first token": "s", "memory": "MB"}


def table(result: dict[str, Any]) -> list[str]:
    """Return a model's table, in lines: what was measured by side."""
    sides = [name for name in result["options"]["side"] if name in result["results"]]
    found, environment = result["results"], result["environment"]
    options = result["options"]
    lines = [
        f"### {result['benchmark'].removeprefix('peers ')}: {environment['cpu']}, {options['threads']} threads",
        "",
        f"{environment['date']}, commit {environment['commit']}, {options['rounds']} rounds; "
        + ", ".join(f"{name} ({version})" for name, version in result["peers"].items() if name in sides)
        + f"; compiled for: {', '.join(f'{side} {about}' for side, about in result['about'].items())}.",
        "",
        "| | " + " | ".join(sides) + " | " + " | ".join(f"to {name}" for name in sides[1:]) + " |",
        "|---" * (2 * len(sides)) + "|",
    ]
    for key in dict.fromkeys(key for side in sides for key in found[side]):
        values = [_show(found[side].get(key)) for side in sides]
        ratios = [_show(found.get(f"Llamarium / {side}", {}).get(key), 2) for side in sides[1:]]
        lines.append(f"| {key}, {UNITS.get(key, 'tokens/s')} | " + " | ".join([*values, *ratios]) + " |")
    return [*lines, ""]


def _show(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.{digits}f}"


def write_page() -> None:
    """Put the tables of all committed results into the page."""
    results = [json.loads(path.read_text()) for path in sorted(PAGE.parents[2].glob("bench/results/peers-*.json"))]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = [line for result in results for line in table(result)]
    PAGE.write_text(before + "\n".join([BEGIN, "", *lines, END]) + after)


def main() -> int:
    """Measure; 3 if a result could not be published."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="one of the models (repeatable)")
    parser.add_argument("--side", action="append", choices=list(WHEELS), help="one of the peers (repeatable)")
    options = parser.parse_args()
    options.side = ["Llamarium", *(options.side or WHEELS)]
    python = peers_python()
    compileall.compile_dir(Path(llamarium.__file__).parent, quiet=1)
    refused = False
    for name in options.model or MODELS:
        found, faults = compare(name, python, options)
        result = {
            "benchmark": f"peers {name}",
            "options": {"rounds": options.rounds, "threads": options.threads, "side": options.side},
            **found,
            "peers": versions(python),
            "environment": common.environment(),
        }
        print("\n".join(table(result)))
        if faults:
            refused = True
            print(f"{name} is not published: {'; '.join(faults)}", file=sys.stderr)
        else:
            cpu = "-".join("".join(c if c.isalnum() else " " for c in common.processor()).split())
            target = common.ROOT / "bench" / "results" / f"peers-{name.replace(' ', '-')}-{cpu}.json"
            target.write_text(json.dumps(result) + "\n")
            write_page()
    return 3 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
