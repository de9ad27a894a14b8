"""The prefix cache on disk: how soon a prompt that comes back from it has its first token, and what writing it costs.

    python bench/disk_cache.py [--model NAME] [--prompt-tokens 2000] [--streams 8] [--steps 96]

Three engines answer in turn, in one process and without HTTP: one without a disk, one that writes all that it computes
to an empty folder, and one that begins anew over a full folder. "first token" is of a prompt alone, and includes
reading its blocks; "step" is the median of steps in which all streams get a token, and "worst step" the 99th
percentile: the thread that writes has the same cores as the kernels then. Ratios are the first engine's over another's.
The folder is in the temporary folder (TMPDIR), and was written just before: it is read from the system's page cache.
"""

import itertools
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np

import common
import llamarium
from llamarium.engine.engine import Engine
from llamarium.engine.request import Request
from llamarium.engine.tiers.disk_cache import DiskCache
from llamarium.kernels.threads import set_num_threads
from llamarium.runtime.runner import Runner
from llamarium.sampling.params import SamplingParams

BLOCKS = 2000


@contextmanager
def engine_over(runner: Runner, folder: str | None) -> Iterator[Engine]:
    """Make an engine, over a folder if there is one."""
    if folder is None:
        yield Engine(runner, BLOCKS)
        return
    with closing(DiskCache(folder)) as disk, closing(Engine(runner, BLOCKS, disk=disk)) as engine:
        yield engine


def first_token(engine: Engine, prompt: list[int]) -> dict[str, float]:
    """Answer a prompt with one token, and return the milliseconds."""
    start = time.perf_counter()
    engine.add(Request(prompt, SamplingParams(temperature=0.0, max_tokens=1)))
    list(engine.run())
    return {"first token ms": 1e3 * (time.perf_counter() - start)}


def streams(engine: Engine, prompts: list[list[int]], num_steps: int) -> dict[str, float]:
    """Answer prompts side by side, and return the milliseconds of steps in which each gets a token."""
    for prompt in prompts:
        engine.add(Request(prompt, SamplingParams(temperature=0.0, max_tokens=num_steps + 1)))
    while len(engine.step()) < len(prompts):
        pass
    times: list[float] = []
    while not engine.is_idle:
        start = time.perf_counter()
        engine.step()
        times.append(1e3 * (time.perf_counter() - start))
    return {"step ms": float(np.percentile(times, 50)), "worst step ms": float(np.percentile(times, 99))}


def main() -> None:
    """Measure and report."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="what llamarium.load takes (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--steps", type=int, default=96)
    options = parser.parse_args()
    set_num_threads(options.threads)
    runner = llamarium.load(options.model, device="cpu").runner
    source, numbers = random.Random(0), itertools.count()

    def random_ids(count: int) -> list[int]:
        return [source.randrange(runner.config.vocab_size) for _ in range(count)]

    def run(folder: str | None, prompt: list[int] | None = None) -> dict[str, float]:
        with engine_over(runner, folder) as engine:
            figures = first_token(engine, prompt or random_ids(options.prompt_tokens))
            return figures | streams(engine, [random_ids(20) for _ in range(options.streams)], options.steps)

    with tempfile.TemporaryDirectory() as name:
        stored_prompt = random_ids(options.prompt_tokens)
        run(f"{name}/kept", stored_prompt)
        sides = {
            "memory alone": lambda: run(None),
            "written": lambda: run(f"{name}/{next(numbers)}"),
            "restored": lambda: run(f"{name}/kept", stored_prompt),
        }
        medians = common.alternate(options.rounds, sides)
    common.report("disk_cache", options, [{"": name} | row for name, row in medians.items()], {"found": medians})


if __name__ == "__main__":
    main()
