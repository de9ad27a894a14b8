"""N-gram drafts where a file is returned with an edit: 40 rebuilt refactoring dialogs, with drafts and without.

    python bench/edit_and_return.py                          # SmolLM2, the edited file forced
    python bench/edit_and_return.py --answers greedy         # what the model itself says
    python bench/edit_and_return.py --counts --dialogs 10    # tokens per pass alone, where the machine is busy

A dialog shows a file of this project, asks for one of five edits (a renamed class or function, an added line in each
function, no comments, other quotes, a moved function), and the answer is the edited file. Small models do not obey, so
by default the answer is forced: each pass runs in full, then the next token's logit is raised above all others. That
measures what the drafts make of such answers, not how well a model writes them. `--answers greedy` takes what the
model says instead. Timed is an answer's first token to its last, so that prompts are left out. Sides take turns, in one
engine each, with one pool for all dialogs; all sides must give the same tokens.
"""

import argparse
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

import common
import llamarium
from llamarium.cli.threads import set_threads
from llamarium.engine.engine import Engine
from llamarium.engine.request import Request
from llamarium.runtime.batch import Batch
from llamarium.runtime.runner import Runner
from llamarium.sampling.params import SamplingParams

SOURCES = common.ROOT / "src" / "llamarium"
NUM_DIALOGS = 40
SIZES = 1500, 5000  # characters of a file


@dataclass(frozen=True)
class Dialog:
    """A file, what is asked for, and the edited file."""

    edit: str
    request: str
    file: str
    edited: str

    @property
    def prompt(self) -> str:
        """The user's message."""
        return f"{self.request} Return the whole file.\n\n```python\n{self.file}```"

    @property
    def answer(self) -> str:
        """The assistant's."""
        return f"Here is the edited file:\n\n```python\n{self.edited}```\n"


def renamed(text: str) -> tuple[str, str]:
    """Rename the class or function that is mentioned most often."""
    names = re.findall(r"^\s*(?:class|def) (\w{4,})", text, re.MULTILINE)
    name = max(names, key=lambda candidate: (len(re.findall(rf"\b{candidate}\b", text)), candidate))
    new = f"New{name}" if name[0].isupper() else f"{name}_v2"
    return f"Rename {name} to {new} everywhere.", re.sub(rf"\b{name}\b", new, text)


def logged(text: str) -> tuple[str, str]:
    """Add a line to each function, after its docstring of one line."""
    pattern = r'^( *)def (\w+)\((?:[^()]|\([^()]*\))*\)[^:\n]*:\n(?:\s*""".*"""\n)?'
    edited = re.sub(pattern, lambda m: f'{m[0]}{m[1]}    logger.debug("entering {m[2]}")\n', text, flags=re.MULTILINE)
    return "Log at debug level when a function is entered.", edited


def uncommented(text: str) -> tuple[str, str]:
    """Remove comments and docstrings of one line."""
    text = re.sub(r"  # .*$", "", text, flags=re.MULTILINE)
    return "Remove comments and docstrings of one line.", re.sub(r'^ *""".*"""\n', "", text, flags=re.MULTILINE)


def requoted(text: str) -> tuple[str, str]:
    """Change the quotes of short strings."""
    return "Use single quotes for strings.", re.sub(r'(?<!")"([^"\'\n]*)"(?!")', r"'\1'", text)


def moved(text: str) -> tuple[str, str]:
    """Move the first function or class to the end of the file."""
    parts = re.split(r"(?=^(?:@\w+.*\n)?(?:def|class) )", text, flags=re.MULTILINE)
    if len(parts) > 2:
        parts = [parts[0], *parts[2:], "\n\n" + parts[1].rstrip() + "\n"]
    return "Move the first definition to the end of the file.", "".join(parts)


EDITS: dict[str, Callable[[str], tuple[str, str]]] = {
    "rename": renamed, "insert": logged, "delete": uncommented, "quotes": requoted, "move": moved,
}  # fmt: skip


def dialogs(count: int = NUM_DIALOGS) -> list[Dialog]:
    """Return dialogs over the project's files, each edit in turn; edits that change nothing are left out."""
    result: list[Dialog] = []
    for path in sorted(SOURCES.rglob("*.py")):
        text = path.read_text()
        if len(result) == count:
            break
        if not SIZES[0] <= len(text) <= SIZES[1] or not re.search(r"^\s*(class|def) \w{4,}", text, re.MULTILINE):
            continue
        name = list(EDITS)[len(result) % len(EDITS)]
        request, edited = EDITS[name](text)
        if edited != text:
            result.append(Dialog(name, request, text, edited))
    return result


class Forced:
    """A runner whose most probable token is always that of a text, after a pass in full."""

    def __init__(self, runner: Any) -> None:
        self._runner, self.ids = runner, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, batch: Batch, cache: Any, taps: Any = None) -> Any:
        """Run a batch, and raise the logits of the text's tokens."""
        logits = self._runner.run(batch, cache, taps)
        for row, place in enumerate(np.asarray(batch.logit_rows).tolist()):
            position = int(batch.positions[place]) + 1
            if position < len(self.ids):
                logits[row, self.ids[position]] = 1e4
        return logits


class Side:
    """One engine, with drafts or without, that answers all dialogs in turn; its pool lasts from round to round."""

    def __init__(self, llama: Any, tasks: Sequence[tuple[list[int], list[int]]], lookup: Any, max_tokens: int) -> None:
        self._forced = Forced(llama.runner)
        self._tasks, self._lookup, self._stops = tasks, lookup, llama.stop_ids
        self._max_tokens = max_tokens
        longest = max(len(prompt) + max(len(answer), max_tokens) for prompt, answer in tasks)
        self._engine = Engine(cast(Runner, self._forced), longest // 32 * 4 + 4, max_num_seqs=1, proposer=lookup)
        self.answers: list[list[int]] = []
        self.rows: list[dict[str, float]] = []

    def __call__(self) -> dict[str, float]:
        """Answer all dialogs; return tokens per second and per pass."""
        self.answers, self.rows = [], []
        for prompt, answer in self._tasks:
            self._forced.ids = [*prompt, *answer]
            self.rows.append(self._answer(prompt, len(answer) or self._max_tokens))
        tokens, seconds, passes = (sum(row[name] for row in self.rows) for name in ("tokens", "s", "passes"))
        return {"tokens_per_s": tokens / seconds, "tokens_per_pass": tokens / passes}

    def _answer(self, prompt: list[int], max_tokens: int) -> dict[str, float]:
        counts = self._engine.counts
        stops = () if self._forced.ids[len(prompt) :] else self._stops
        self._engine.add(Request(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens), stops))
        ids, begin, before = list[int](), 0.0, (0, 0, 0)
        for event in self._engine.run():
            if not ids:
                begin, before = time.perf_counter(), (counts.steps, counts.drafted_tokens, counts.accepted_tokens)
            ids.append(event.token_id)
        seconds = time.perf_counter() - begin
        self.answers.append(ids)
        after = counts.steps, counts.drafted_tokens, counts.accepted_tokens
        steps, drafted, accepted = (last - first for last, first in zip(after, before, strict=True))
        return {"tokens": len(ids) - 1, "s": seconds, "passes": steps, "drafted": drafted, "accepted": accepted}


def table(edits: Sequence[Dialog], rows: Sequence[dict[str, float]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each edit, and one for all."""
    for edit in (*EDITS, "all"):
        of_edit = [row for dialog, row in zip(edits, rows, strict=True) if edit in (dialog.edit, "all")]
        if of_edit:
            total = {name: sum(row[name] for row in of_edit) for name in of_edit[0]}
            yield {
                "edit": edit, "dialogs": len(of_edit), "tokens": int(total["tokens"]), "passes": int(total["passes"]),
                "drafted": int(total["drafted"]), "accepted": int(total["accepted"]),
                "tokens/pass": total["tokens"] / max(1, total["passes"]),
            }  # fmt: skip


def main() -> None:
    """Measure and report."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a built-in name, a folder or a .gguf file")
    parser.add_argument("--answers", choices=("forced", "greedy"), default="forced", help="see above")
    parser.add_argument("--dialogs", type=int, default=NUM_DIALOGS, metavar="N", help="how many (default 40)")
    parser.add_argument("--new-tokens", type=int, default=400, help="of a greedy answer (default 400)")
    parser.add_argument("--counts", action="store_true", help="one round with drafts: counts, no rates")
    options: argparse.Namespace = parser.parse_args()
    llama = llamarium.load(options.model, device="cpu")
    set_threads(options.threads)
    edit_dialogs, is_forced = dialogs(options.dialogs), options.answers == "forced"
    tasks = [
        (
            llama.tokenizer.chat([{"role": "user", "content": dialog.prompt}]),
            llama.encode(dialog.answer) if is_forced else [],
        )
        for dialog in edit_dialogs
    ]
    sides = {
        "drafts": Side(llama, tasks, llamarium.PromptLookup(), options.new_tokens),
        "without": Side(llama, tasks, None, options.new_tokens),
    }
    if options.counts:
        results: dict[str, Any] = {"drafts": sides["drafts"]()}
    else:
        results = common.alternate(options.rounds, dict(sides))
        if sides["drafts"].answers != sides["without"].answers:
            raise SystemExit("drafts changed the tokens")
    rows = list(table(edit_dialogs, sides["drafts"].rows))
    common.report(f"edit-and-return-{Path(options.model).stem}-{options.answers}", options, rows, results)


if __name__ == "__main__":
    main()
