"""The first token of a model file: where the seconds go, from the start of the process, by the clock.

    python bench/first_token.py --model some.gguf --save

Two processes in turn. `whole` imports the package, loads the model as users do, and runs a prompt of 16 tokens. `parts`
does the same work one piece after the other: `load` reads the header, then builds the tokenizer in one thread while
others read and pack the weights. The file is in the page cache, and modules are compiled to bytecode. `system` are
seconds of the processor in which the system gave the process memory and the file's bytes: on a virtual machine whose
host takes freed pages back, that is most of what loading takes.
"""

import compileall
import json
import subprocess
import sys
import time
from pathlib import Path

import common
import llamarium

CHILD = """
import json, resource, sys, time
marks = [("begin", time.perf_counter())]
def mark(name): marks.append((name, time.perf_counter()))
side, path, threads = sys.argv[1:]
import numpy; mark("import numpy")
import llamarium.api; mark("import llamarium")
from llamarium.kernels import native
from llamarium.kernels.threads import set_num_threads
native.library(); set_num_threads(int(threads)); mark("open the kernels")
if side == "whole":
    runner = llamarium.load(path).runner; mark("load")
else:
    from llamarium.checkpoints.choose_runner import load_weights
    from llamarium.checkpoints.open import open_model, read_tokenizer
    from llamarium.options.loading import LoadOptions
    opened = open_model(path, with_tokenizer=False); mark("header")
    read_tokenizer(opened); mark("tokenizer")
    runner = load_weights(opened.checkpoint, LoadOptions(device="cpu"))[0].runner(); mark("read and pack weights")
from llamarium.generation.loop import generate_tokens
from llamarium.sampling.params import SamplingParams
next(iter(generate_tokens(runner, [list(range(1000, 1016))], [SamplingParams(temperature=0.0, max_tokens=1)])))
mark("first pass")
seconds = {name: now - before for (_, before), (name, now) in zip(marks, marks[1:])}
print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_stime]))
"""


def measure(side: str, path: str, threads: int) -> dict[str, float]:
    """Run one side in a fresh process; return the seconds of each piece, and of all."""
    begin = time.perf_counter()
    command = [sys.executable, "-c", CHILD, side, path, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    total = time.perf_counter() - begin
    pieces, system = json.loads(done.stdout.splitlines()[-1])
    return {"start and end Python": total - sum(pieces.values())} | pieces | {"all": total, "system": system}


def main() -> None:
    """Measure and report."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", required=True, help="a .gguf file")
    options = parser.parse_args()
    compileall.compile_dir(Path(llamarium.__file__).parent, quiet=1)
    sides = {side: lambda side=side: measure(side, options.model, options.threads) for side in ("whole", "parts")}
    medians = common.alternate(options.rounds, sides)
    last = ("all", "system")
    names = [*dict.fromkeys(name for side in ("parts", "whole") for name in medians[side] if name not in last), *last]
    rows = [{"seconds": name, **{side: medians[side].get(name) for side in sides}} for name in names]
    common.report(f"first-token-{Path(options.model).stem}", options, rows, medians)


if __name__ == "__main__":
    main()
