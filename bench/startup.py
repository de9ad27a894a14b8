"""Start-up: from the shell to something on the screen.

    python bench/startup.py

`--help` and `import llamarium` import no torch. The first token of the built-in model is measured from the start of the
process to the first byte on stdout, against `import torch` alone, in turn.
"""

import subprocess
import sys
import time

import common

COMMANDS = {
    "first token": [sys.executable, "-m", "llamarium", "generate", "Once upon a time", "-n", "1", "--temperature", "0"],
    "import torch": [sys.executable, "-c", "import torch; print(1)"],
    "llamarium --help": [sys.executable, "-m", "llamarium", "--help"],
    "import llamarium": [sys.executable, "-c", "import llamarium; print(1)"],
    "python": [sys.executable, "-c", "print(1)"],
}


def first_byte(command: list[str]) -> dict[str, float]:
    """Return seconds from the start of the process to its first byte of output."""
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - begin
        process.stdout.read()
    return {"seconds": seconds}


def main() -> None:
    """Measure and report."""
    options = common.parser(__doc__).parse_args()
    found = common.alternate(
        options.rounds, {name: lambda command=command: first_byte(command) for name, command in COMMANDS.items()}
    )
    rows = [{"command": name, "seconds": found[name]["seconds"]} for name in COMMANDS]
    rows.append({"command": "first token / import torch", "seconds": found["first token / import torch"]["seconds"]})
    common.report("startup", options, rows, found)


if __name__ == "__main__":
    main()
