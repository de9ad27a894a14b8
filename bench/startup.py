"""Start-up: from the shell to something on the screen.

    python bench/startup.py [--model FILE.gguf] [--peer NAME="COMMAND {model}"] ...

`--help` and `import llamarium` import no torch. The first token of a model, the built-in one if none is named, is
measured from the start of the process to the first byte on stdout, against `import torch` alone and against other
programs on the same file, in turn; so is the first answer of `llamarium serve`, one token over HTTP. Modules are
compiled to bytecode before, as they are when pip installs a package.

A peer is a command that prints one token after "Once upon a time", and nothing before it; {model} stands for the file:

    --peer "llama.cpp=llama-completion -m {model} -no-cnv --no-display-prompt -n 1 -t 2 --temp 0 -p 'Once upon a time'"
    --peer "llama-cpp-python=python bench/llama_cpp_python_peer.py {model}"
"""

import compileall
import json
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path

import common
import llamarium
from llamarium.hub.resolve import resolve

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


def first_answer(model: list[str]) -> float:
    """Return seconds from the start of a server to its first answer, of one token; it is asked until it gives one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 1, "temperature": 0}).encode()
    kind = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, kind)
    begin = time.perf_counter()
    with subprocess.Popen([*PROGRAM, "serve", "--port", str(port), *model], stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            try:
                with urllib.request.urlopen(request) as answer:
                    answer.read()
                break
            except OSError:  # nobody listens yet, or 503: the model is loading
                time.sleep(0.005)
        seconds = time.perf_counter() - begin
        process.terminate()
    if process.returncode:
        raise SystemExit(f"llamarium serve failed with {process.returncode}")
    return seconds


def one_round(commands: dict[str, list[str]], model: list[str]) -> dict[str, float]:
    """Run each command once, one after the other; the difference is of two that are neighbours in time."""
    seconds = {name: first_byte(command) for name, command in commands.items()}
    seconds["serve, first answer"] = first_answer(model)
    return seconds | {"first token, beyond import torch": seconds["first token"] - seconds["import torch"]}


def main() -> None:
    """Measure and report."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", help="a model of which the first token is asked for")
    parser.add_argument("--peer", type=common.named, action="append", default=[], metavar="NAME=COMMAND")
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
    path = str(resolve(options.model or "smollm2-135m"))
    for name, command in options.peer:
        commands[name] = [word.format(model=path) for word in shlex.split(command)]
    medians = common.alternate(options.rounds, {"seconds": partial(one_round, commands, model)})
    rows = [{"what": name, "seconds": seconds} for name, seconds in medians["seconds"].items()]
    common.report(
        "startup" + (f"-{Path(options.model).name.removesuffix('.gguf')}" if model else ""), options, rows, medians
    )


if __name__ == "__main__":
    main()
