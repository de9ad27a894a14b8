"""Prompt lookup: tokens per second of one stream with it and without, on a text that repeats itself and on prose.

    python bench/prompt_lookup.py --model smollm2-135m
    python bench/prompt_lookup.py --model some.gguf --new-tokens 200
    python bench/prompt_lookup.py --task "prose, drawn" --characters 600 --rounds 9 --save    # what drafts cost

`repeat` shows a source file and asks for it again; `prose` continues an ordinary text, greedily and drawn. Timed from
the first new token to the last, so that the prompt is left out, by the clock and in seconds of the processor; both
sides must give the same tokens. The model has to
be one whose passes are exact: packed weights, or bfloat16, with the C kernels.
"""

import argparse
import time
from pathlib import Path

import torch

import common
import llamarium
from llamarium.generation.loop import generate_tokens
from llamarium.sampling.params import SamplingParams

TASKS = {"repeat": 0.0, "prose": 0.0, "prose, drawn": 1.0}
SOURCE = (common.ROOT / "src" / "llamarium" / "checkpoints/tokenizers.py").read_text()
PROSE = (common.ROOT / "docs" / "architecture.md").read_text()


def prompt_of(task: str, llama: llamarium.Llama, num_characters: int) -> list[int]:
    """Return a task's token ids."""
    if task == "repeat":
        first_half = SOURCE[: len(SOURCE) // 2]
        return llama.encode(f"# The file:\n{first_half}\n# The same file once more:\n{first_half[:200]}")
    return llama.encode(PROSE[:num_characters])


class Side:
    """One of the two programs, on one task; keeps the tokens and the counts of its last run."""

    def __init__(self, llama: llamarium.Llama, task: str, options: argparse.Namespace, *, looks_up: bool) -> None:
        self.runner, self.looks_up = llama.runner, looks_up
        self.prompt = prompt_of(task, llama, options.characters)
        self.params = SamplingParams(temperature=TASKS[task], seed=1, max_tokens=options.new_tokens)
        self.ids: list[int] = []
        self.counts: dict[str, int] = {}

    def __call__(self) -> dict[str, float]:
        """Return tokens per second, and per second of the processor."""
        lookup = llamarium.PromptLookup() if self.looks_up else None
        self.ids, times = [], []
        for event in generate_tokens(self.runner, [self.prompt], [self.params], proposer=lookup):
            self.ids.append(event.token_id)
            times.append((time.perf_counter(), time.process_time()))
        self.counts = {} if lookup is None else lookup.counts()
        seconds, computed = (last - first for first, last in zip(times[0], times[-1], strict=True))
        return {"tokens_per_s": (len(times) - 1) / seconds, "tokens_per_cpu_s": (len(times) - 1) / computed}


def main() -> None:
    """Measure and report."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a built-in name, a folder or a .gguf file")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--task", action="append", choices=list(TASKS), help="one of the tasks (repeatable)")
    parser.add_argument("--characters", type=int, default=2000, help="of the prose that is continued (default 2000)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    llama = llamarium.load(options.model, device="cpu")
    rows, results = [], {}
    for task in options.task or TASKS:
        sides = {name: Side(llama, task, options, looks_up=name == "lookup") for name in ("lookup", "without")}
        medians = common.alternate(options.rounds, dict(sides))
        if sides["lookup"].ids != sides["without"].ids:
            raise SystemExit(f"{task}: prompt lookup changed the tokens")
        results[task] = medians | {"counts": sides["lookup"].counts}
        rows.append(
            {
                "task": task,
                "tokens/s": medians["lookup"]["tokens_per_s"],
                "without": medians["without"]["tokens_per_s"],
                "times": medians["lookup / without"]["tokens_per_s"],
                "by CPU time": medians["lookup / without"]["tokens_per_cpu_s"],
                **sides["lookup"].counts,
            }
        )
    common.report(f"prompt-lookup-{Path(options.model).stem}", options, rows, results)


if __name__ == "__main__":
    main()
