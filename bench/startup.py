"""Start-up: from the shell to something on the screen.

    python bench/startup.py [--model FILE.gguf]

`--help` and `import llamarium` import no torch. The first token of a model, the built-in one if none is named, is
measured from the start of the process to the first byte on stdout, against `import torch` alone, in turn. Modules are
compiled to bytecode before, as they are when pip installs a package.
"""

import compileall
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import common
import llamarium

PROGRAM = [sys.executable, "-m", "llamarium"]


def first_byte(command: list[str]) -> float:
    """Return seconds from the start of the process to its first byte of output."""
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - begin
        process.stdout.read()
    if not first or process.returncode:
        raise SystemExit(f"{command} failed, or printed nothing")
    return seconds


def one_round(commands: dict[str, list[str]]) -> dict[str, float]:
    """Run each command once, one after the other; the difference is of two that are neighbours in time."""
    seconds = {name: first_byte(command) for name, command in commands.items()}
    return seconds | {"first token, beyond import torch": seconds["first token"] - seconds["import torch"]}


def main() -> None:
    """Measure and report."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", help="a model of which the first token is asked for")
    options = parser.parse_args()
    compileall.compile_dir(Path(llamarium.__file__).parent, quiet=1)
    model = ["-m", options.model] if options.model else []
    commands = {
        "first token": [*PROGRAM, "generate", "Once upon a time", "-n", "1", "--temperature", "0", *model],
        "import torch": [sys.executable, "-c", "import torch; print(1)"],
        "llamarium --help": [*PROGRAM, "--help"],
        "import llamarium": [sys.executable, "-c", "import llamarium; print(1)"],
        "python": [sys.executable, "-c", "print(1)"],
    }
    found = common.alternate(options.rounds, {"seconds": partial(one_round, commands)})
    rows = [{"what": name, "seconds": seconds} for name, seconds in found["seconds"].items()]
    common.report("startup" + (f"-{Path(options.model).stem}" if model else ""), options, rows, found)


if __name__ == "__main__":
    main()
