"""Rewards: what `llamarium grpo` teaches, with three seeds, and what that takes of the processor.

    python bench/rewards.py --task sums         a character model, trained whole, learns from rewards what is right
    python bench/rewards.py --task form         SmolLM2 with LoRA learns to answer in a given form

`sums`: a model of 0.4M parameters has read sums of two digits, a quarter of them right, the others one too many or one
too few; it is rewarded (`exact`) where its answer is right, on 80 of the 100 sums. `form`: SmolLM2-135M-Instruct is
asked for one word, and rewarded where its answer is a capitalised word and a full stop (a regular expression), on 32 of
40 questions. Shares are of the answers to all prompts, 8 sampled to each and the greedy one, and to held-out ones.
"""

import json
import random
import resource
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import common
import llamarium
from llamarium.api import Llama

SEEDS = (0, 1, 2)
HELD_OUT = 0.2
FORM = r"[A-Z][a-z]+\."

COUNTRIES = (
    "France Italy Spain Norway Sweden Finland Poland Greece Austria Hungary "
    "Japan China India Egypt Kenya Peru Chile Cuba Canada Brazil"
).split()
THINGS = (
    "grass snow blood milk coal gold lemon sky tomato carrot "
    "ocean rose chocolate cloud frog banana fire salt cherry ink"
).split()


def sums(folder: Path) -> None:
    """Write what the base reads, and the prompts, in an order of their own."""
    source = random.Random(0)
    lines = list[str]()
    for _ in range(40_000):
        a, b, error = source.randrange(10), source.randrange(10), source.choices((0, 1, -1), (25, 40, 35))[0]
        lines.append(f"{a}+{b}={max(0, a + b + error)}")
    (folder / "text.txt").write_text("\n".join(lines) + "\n")
    pairs = [(a, b) for a in range(10) for b in range(10)]
    source.shuffle(pairs)
    write(folder, [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs])


def form(folder: Path) -> None:
    """Write the questions."""
    questions = [f"What is the capital of {name}? Answer in one word." for name in COUNTRIES]
    questions += [f"What is the colour of {name}? Answer in one word." for name in THINGS]
    random.Random(0).shuffle(questions)
    write(folder, [{"prompt": prompt} for prompt in questions])


def write(folder: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Write prompts as JSONL."""
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


TASKS: dict[str, dict[str, Any]] = {
    "sums": {
        "reward": "exact", "method": "full", "stop": "\n", "chat_format": "none", "context": 16, "max_tokens": 4,
        "batch_rows": 128, "gradient_accumulation_steps": 1, "group_size": 8, "steps": 1200,
        "learning_rate": 5e-4, "beta": 0.0,
    },
    "form": {
        "reward": f"regex:{FORM}", "context": 64, "max_tokens": 16, "batch_rows": 8, "gradient_accumulation_steps": 4,
        "group_size": 8, "steps": 40, "learning_rate": 2e-4,
    },
}  # fmt: skip


def right(task: str, answer: str, row: Mapping[str, str]) -> bool:
    """Return whether an answer is what the task rewards, by code of its own."""
    if task == "sums":
        return answer.strip() == row["answer"]
    return answer[:1].isupper() and answer[1:-1].islower() and answer[1:-1].isalpha() and answer[-1:] == "."


def shares(task: str, llama: Llama, rows: Sequence[Mapping[str, str]]) -> tuple[float, float]:
    """Return which share of sampled and of greedy answers to some prompts is right."""
    right_shares = list[float]()
    limits: dict[str, Any] = {"max_tokens": TASKS[task]["max_tokens"], "stop": "\n" if task == "sums" else None}
    for options in ({"temperature": 1.0, "top_p": 1.0, "top_k": 0, "n": 8, "seed": 0}, {"temperature": 0.0}):
        marks = list[bool]()
        for row in rows:
            if task == "sums":
                generation = llama.generate(row["prompt"], **limits, **options)
            else:
                generation = llama.chat([{"role": "user", "content": row["prompt"]}], **limits, **options)
            marks += [right(task, completion.text, row) for completion in generation.completions]
        right_shares.append(sum(marks) / len(marks))
    return right_shares[0], right_shares[1]


def seconds() -> float:
    """Return the processor time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def one(task: str, seed: int, folder: Path) -> dict[str, float]:
    """Make the base, teach it, and measure before and after."""
    model = "smollm2-135m"
    if task == "sums":
        model = str(
            llamarium.pretrain(
                folder / "base", data=str(folder / "text.txt"), preset="tiny", tokenizer="chars", context=64,
                steps=1500, batch_rows=32, learning_rate=2e-3, eval_every=1500, sample_every=0, seed=seed,
            ).checkpoint
        )  # fmt: skip
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    held_out = rows[-round(HELD_OUT * len(rows)) :]
    dtype: Any = {} if task == "sums" else {"dtype": "float32"}
    before, begin = shares(task, llamarium.load(model, **dtype), rows), seconds()
    differences = list[float]()
    ending = llamarium.grpo(
        folder / "run", data=str(folder / "prompts.jsonl"), model=model, seed=seed, validation=HELD_OUT, sample_every=0,
        eval_every=1000, log_every=1, **TASKS[task],
        watch=lambda event: differences.append(event["largest_difference"]) if event["event"] == "step" else None,
    )  # fmt: skip
    taken = seconds() - begin
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        taught = (
            llamarium.load(ending.checkpoint)
            if task == "sums"
            else llamarium.load(adapter=ending.checkpoint, dtype="float32")
        )
        after, unseen = shares(task, taught, rows), shares(task, taught, held_out)
    return {
        "sampled before": before[0], "greedy before": before[1], "sampled after": after[0], "greedy after": after[1],
        "of unseen": unseen[0], "processor s": taken, "largest difference": max(differences),
    }  # fmt: skip


def main() -> None:
    """Run a task with every seed."""
    parser = common.parser(__doc__)
    parser.add_argument("--task", choices=TASKS, default="sums")
    options = parser.parse_args()
    rows = list[dict[str, Any]]()
    for seed in SEEDS:
        with TemporaryDirectory() as name:
            folder = Path(name)
            {"sums": sums, "form": form}[options.task](folder)
            rows.append({"seed": seed, **one(options.task, seed, folder)})
    results = {"rows": rows, "settings": TASKS[options.task]}
    common.report(f"rewards-{options.task}", options, rows, results)


if __name__ == "__main__":
    main()
