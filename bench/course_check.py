"""`llamarium build check`: how many planted mistakes it names, and whether right functions pass on a busy machine.

    python bench/course_check.py mistakes             the share of planted mistakes that are named, over five seeds
    python bench/course_check.py styles --load 8      right functions in all styles, beside so many busy processes

`mistakes` checks the functions of `tests/planted_mistakes.py` on a small random model, `styles` those of
`tests/learner_styles.py`, loops over single numbers among them, inside SmolLM2 as a learner does.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import common
from learner_styles_2 import LOOPS
from learners import STYLES, check_source
from llamarium.course import start
from llamarium.course.outline import file_of, step_named
from llamarium.course.process import check_in_process
from llamarium.course.steps import STEPS
from planted_mistakes import planted_in

SEEDS = range(5)


def mistakes() -> bool:
    """Print how many planted mistakes of each step are named; return whether 97 % of all are."""
    num_named = total = 0
    with tempfile.TemporaryDirectory() as folder:
        for step in STEPS:
            planted = list(planted_in(step.name, STYLES))
            are_named = [
                not result.passed and mistake.is_named(result.cause)
                for mistake in planted
                for seed in SEEDS
                for result in [check_source(Path(folder), step.name, mistake.source, seed)]
            ]
            num_named, total = num_named + sum(are_named), total + len(are_named)
            print(
                f"{step.name:14} {len(planted):3} planted, {sum(are_named)} of {len(are_named)} checks name them",
                flush=True,
            )
    print(f"all: {num_named} of {total}, {100 * num_named / total:.1f} %")
    return num_named >= 0.97 * total


def styles(load: int) -> bool:
    """Check right functions in all styles beside busy processes; return whether all pass."""
    num_wrong = total = 0
    with tempfile.TemporaryDirectory() as folder, common.neighbours(load):
        os.environ["LLAMARIUM_CACHE"] = folder
        learner = Path(folder) / "my_llama"
        start(learner)
        tried = [(step.name, style, source) for step in STEPS for style, source in sources_of(step.name)]
        results = check_in_process(learner, [step for step, _, _ in tried], seed=0)
        for step, style, source in tried:
            (learner / file_of(step_named(step))).write_text("import numpy as np\n" + source)
            began = time.perf_counter()
            result = next(results)  # which reads the file now
            seconds = time.perf_counter() - began
            total, num_wrong = total + 1, num_wrong + (not result.passed)
            outcome = result.checked if result.passed else f"{result.status}: {result.message}"
            print(f"{step:14} {style:16} {seconds:6.1f} s, load {os.getloadavg()[0]:.1f}: {outcome}", flush=True)
    print(f"all: {total - num_wrong} of {total} right functions pass")
    return not num_wrong


def sources_of(step: str) -> Iterator[tuple[str, str]]:
    """Yield the styles of a step's right functions."""
    yield from STYLES.get(step, {}).items()
    if step in LOOPS:
        yield "single numbers", LOOPS[step]


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("mistakes", "styles"))
    parser.add_argument("--load", type=int, default=0, help="busy processes beside it")
    args = parser.parse_args()
    return 0 if (mistakes() if args.what == "mistakes" else styles(args.load)) else 1


if __name__ == "__main__":
    sys.exit(main())
