"""Put faults into copies of the sources, one at a time, and expect a test to fail: `make mutants`.

    python tests/mutants/run.py [--match WORD] [--jobs N]

Each fault of `faults.toml` names the tests that must catch it. Exit status 1 if a fault survives, or if its tests do
not even begin.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 600
FAILED = 1  # pytest's exit status where tests fail


@dataclass(frozen=True)
class Fault:
    """A change of one place in one file, and the test files of which one has to fail."""

    name: str
    file: str
    find: str
    replace: str
    tests: list[str]

    def put_into(self, root: Path) -> None:
        """Change the file below `root`; ValueError unless the place is there once."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.find) != 1:
            raise ValueError(f"{self.file}: {text.count(self.find)} places read {self.find!r}; expected 1")
        path.write_text(text.replace(self.find, self.replace), encoding="utf-8")


def faults() -> list[Fault]:
    """Return all faults, in the order of the file."""
    listed = tomllib.loads((ROOT / "tests" / "mutants" / "faults.toml").read_text(encoding="utf-8"))
    return [Fault(**entry) for entry in listed["fault"]]


def verdict(fault: Fault) -> str:
    """Run a fault's tests on a copy that has it: "caught", or what happened instead."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src", Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__"))
        fault.put_into(Path(folder))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *fault.tests]
        environment = os.environ | {"PYTHONPATH": f"{folder}/src", "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return "caught"  # the suite has limits of time, too
    if done.returncode == FAILED:
        return "caught"
    return "SURVIVED" if done.returncode == 0 else f"did not run: {(done.stdout + done.stderr)[-500:]}"


def main() -> int:
    """Run the chosen faults and print a line for each; return the exit status."""
    parser = argparse.ArgumentParser(description="Expect the suite to catch faults that are put into the sources.")
    parser.add_argument("--match", default="", help="only faults whose name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time (default: 1)")
    options = parser.parse_args()

    chosen = [fault for fault in faults() if options.match in fault.name]
    num_missed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for fault, found in zip(chosen, pool.map(verdict, chosen), strict=True):
            num_missed += found != "caught"
            print(f"{found:8}  {fault.name}", flush=True)
    print(f"{len(chosen) - num_missed} of {len(chosen)} faults caught")
    return 1 if num_missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
