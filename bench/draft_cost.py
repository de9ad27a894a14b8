"""What n-gram drafts cost where nothing repeats: dialogs of one user, drawn at temperature 1, with drafts and without.

    python bench/draft_cost.py --rounds 15 --save
    python bench/draft_cost.py --model some.gguf --new-tokens 64 --rounds 9 --save

Two engines answer the same prompts with the same seeds in turn, as `llamarium serve` does: one pool of earlier texts
lasts from round to round, and each round has another prompt and other answers. Timed from an answer's first token to
its last, by the clock and in seconds of the processor. Both sides must give the same tokens.
"""

import time
from pathlib import Path
from typing import Any

import common
import llamarium
from llamarium.cli.threads import set_threads

PROSE = (common.ROOT / "docs" / "architecture.md").read_text()


class Side:
    """One engine; each call answers the next prompt."""

    def __init__(self, llama: llamarium.Llama, options: Any, lookup: llamarium.PromptLookup | None) -> None:
        self._engine = llama.engine(prompt_lookup=lookup or False)
        self._options, self._round = options, 0
        self.ids: list[int] = []

    def __call__(self) -> dict[str, float]:
        """Return tokens per second, and per second of the processor."""
        self._round += 1
        prompt, times = PROSE[self._round * 300 :][: self._options.characters], list[tuple[float, float]]()
        answers = self._engine.submit(
            prompt, temperature=1.0, seed=self._round, max_tokens=self._options.new_tokens, ngram_pool="one user"
        )
        for piece in answers:
            self.ids += piece.token_ids
            times.append((time.perf_counter(), time.process_time()))
        seconds, computed = (last - first for first, last in zip(times[0], times[-1], strict=True))
        count = len(times) - 1
        return {"tokens_per_s": count / seconds, "tokens_per_cpu_s": count / computed, "tokens": count}


def main() -> None:
    """Measure and report."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a built-in name, a folder or a .gguf file")
    parser.add_argument("--new-tokens", type=int, default=200, help="of an answer (default 200)")
    parser.add_argument("--characters", type=int, default=300, help="of a prompt (default 300)")
    options = parser.parse_args()
    llama = llamarium.load(options.model, device="cpu")
    set_threads(options.threads)
    lookup = llamarium.PromptLookup()
    sides = {"drafts": Side(llama, options, lookup), "without": Side(llama, options, None)}
    medians = common.alternate(options.rounds, dict(sides))
    if sides["drafts"].ids != sides["without"].ids:
        raise SystemExit("drafts changed the tokens")
    rows: list[dict[str, Any]] = [
        {
            "tokens/s": medians["drafts"]["tokens_per_s"],
            "without": medians["without"]["tokens_per_s"],
            "times": medians["drafts / without"]["tokens_per_s"],
            "by CPU time": medians["drafts / without"]["tokens_per_cpu_s"],
            **lookup.counts(),
        }
    ]
    common.report(f"draft-cost-{Path(options.model).stem}", options, rows, medians | {"counts": lookup.counts()})


if __name__ == "__main__":
    main()
