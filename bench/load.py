"""Load: seconds until a model is ready, and the process's peak memory, against `transformers`.

    python bench/load.py --model llama-3.2-1b
    python bench/load.py --model smollm2-135m

Each load is a process of its own. `ready_s` is the load call alone, after the imports; `first_logits_s` adds one token
through the model, which is when lazily mapped weights are really read; `process_s` is everything. Memory is the peak
resident set, interpreter included, and torch where it is imported: our side does so only if loading needs it.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import common
from llamarium.hub.builtin import fetch
from make_weights import make

CHILD = """
import json, resource, sys, time
side, name, folder, bench = sys.argv[1:]
sys.path.insert(0, bench)
if side == "llamarium":
    import llamarium.api
else:
    import torch, transformers, peers
begin = time.perf_counter()
if side == "llamarium":
    model = llamarium.load(folder, dtype="bfloat16", device="cpu", dequantize="load").runner
else:
    model = peers.load_theirs(name)
ready = time.perf_counter()
if side == "llamarium":
    from llamarium.inspect.forward import Memory, advance
    memory = Memory(model, 1)
    advance(model, memory.cache, [memory.begin([1], 1)])
else:
    with torch.inference_mode():
        model(torch.tensor([[1]]))
first = time.perf_counter()
print(json.dumps({
    "ready_s": ready - begin, "first_logits_s": first - begin,
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
}))
"""


def measure(side: str, name: str, path: Path, threads: int) -> dict[str, float]:
    """Load once in a fresh process."""
    begin = time.perf_counter()
    arguments = [sys.executable, "-c", CHILD, side, name, str(path), str(Path(__file__).parent)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment)
    return {**json.loads(done.stdout.splitlines()[-1]), "process_s": time.perf_counter() - begin}


def main() -> None:
    """Measure and report."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="llama-3.2-1b", choices=["llama-3.2-1b", "smollm2-135m"])
    options = parser.parse_args()
    path = fetch(options.model) if options.model == "smollm2-135m" else make(options.model)
    size = (path if path.is_file() else path / "model.safetensors").stat().st_size
    medians = common.alternate(
        options.rounds,
        {
            side: lambda side=side: measure(side, options.model, path, options.threads)
            for side in ("llamarium", "transformers")
        },
    )
    rows = [
        {
            "model": options.model,
            "program": name,
            "ready s": medians[name]["ready_s"],
            "first logits s": medians[name]["first_logits_s"],
            "process s": medians[name]["process_s"],
            "peak MB": medians[name]["peak_bytes"] / 1e6,
            "peak / file": medians[name]["peak_bytes"] / size,
        }
        for name in ("llamarium", "transformers")
    ]
    common.report(f"load-{options.model}", options, rows, {"file_bytes": size, **medians})


if __name__ == "__main__":
    main()
