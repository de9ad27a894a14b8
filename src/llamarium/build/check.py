"""Checking a learner's function: on random shapes, and inside a real model in place of the right one.

Each call inside the model is compared with what the right function returns of the same arguments, in float32; the
first place that parts is the answer, and what is often done wrong is recognised by its results.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from llamarium.build.compare import Difference, first_difference, same, shape_problem
from llamarium.build.learner import Learner, LearnerError
from llamarium.build.passes import RIGHT, Pass, Weights, watched
from llamarium.build.step import Mistake, Step
from llamarium.build.steps import STEPS
from llamarium.generation.completion import stop_ids_of
from llamarium.quant.ggml.encode import encode
from llamarium.tokenizer.base import Tokenizer

SENTENCES = (
    "The capital of France is Paris.",
    "The cat that the dog chased ran away.",
    "I love to drink tea in the morning",
    "She read the book, and then she read it again.",
    "Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich.",
    "Water boils at 100 degrees; ice melts at 0.",
    "def add(a, b): return a + b",
    "Once upon a time there was a small dragon",
    "The bank of the river was muddy 🐸",
    "To be, or not to be: that is the question.",
)
"""What a check chooses from where a course names no texts of its own."""

BUDGET_S = 6.0
"""How long a learner's function may run inside the model; what was not reached by then is said."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a check found.

    Attributes:
        step: The step's name.
        status: "passed", or what was wrong: "parts", "shape", "raised", "empty", "missing", "changed", "files",
            "memory", "time", "ended".
        words: One sentence about it.
        cause: What is often done wrong and was done here, or "".
        section: Where the course explains it.
        place: Where the first number parts: "layer", its index by axis ("T" a position of the text), the "output",
            "yours" and "right"; inside a pass the "ids" that ran. Empty if none does.
        printed: What the function printed.
        checked: On what it was checked, if it passed.
        seconds: How long the check took.
    """

    step: str
    status: str
    words: str
    cause: str = ""
    section: str = ""
    place: dict[str, Any] = field(default_factory=dict)
    printed: str = ""
    checked: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong."""
        return self.status == "passed"


class _PartsError(Exception):
    """A result is not the right one: why in words, and where."""

    def __init__(self, status: str, words: str, difference: Difference | None, layer: int | None, inside: bool) -> None:
        self.status, self.words, self.difference, self.layer, self.inside = status, words, difference, layer, inside


class _EnoughError(Exception):
    """The time that a function may take inside the model is over; what was compared was right."""


class Check:
    """Checks learners' functions against one model.

    Args:
        weights: The model's weights.
        tokenizer: Its tokenizer.
        texts: What a check chooses sentences from.
        seed: Of sentences, shapes and numbers.
    """

    def __init__(self, weights: Weights, tokenizer: Tokenizer, texts: Sequence[str] = SENTENCES, seed: int = 0) -> None:
        self._weights, self._tokenizer, self._texts, self._seed = weights, tokenizer, texts, seed

    def run(self, step: Step, learner: Learner) -> Result:
        """Check a function; LearnerError if it did anything but return a result."""
        return _Run(self, step, learner).result()

    def rng(self, step: Step) -> np.random.Generator:
        """Return the numbers of a step's check."""
        return np.random.default_rng([self._seed, STEPS.index(step)])

    def sentences(self, rng: np.random.Generator, count: int = 2) -> list[list[int]]:
        """Return ids of some of the texts, at most 12 each."""
        return [self._tokenizer.encode(text)[:12] for text in self.some_texts(rng, count)]

    def some_texts(self, rng: np.random.Generator, count: int) -> list[str]:
        """Return some of the texts, each once."""
        chosen: list[int] = rng.permutation(len(self._texts))[:count].tolist()
        return [self._texts[idx] for idx in chosen]

    @property
    def weights(self) -> Weights:
        """The model's weights."""
        return self._weights

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def texts(self) -> Sequence[str]:
        """What sentences are chosen from."""
        return self._texts


class _Run:
    """One check of one function."""

    def __init__(self, check: Check, step: Step, learner: Learner) -> None:
        self._check, self._step, self._learner = check, step, learner
        self._rng = check.rng(step)
        self._calls: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []
        self._spent_s, self._num_calls, self._deepest = 0.0, 0, None
        self._ids: list[int] = []
        self._start = 0

    def result(self) -> Result:
        """Compare small random shapes, then the model's own numbers, then other shapes; report where it parts first."""
        cases = list(self._step.cases(self._rng))
        found: list[_PartsError | LearnerError] = []
        for tried in (
            lambda: self._compare(None, *cases[0]),
            self._inside,
            *(partial(self._compare, None, *case) for case in cases[1:]),
        ):
            try:
                tried()
            except _EnoughError:
                continue
            except (_PartsError, LearnerError) as error:
                found.append(error)
        if not found:
            return self._passed(len(cases))
        if any(isinstance(error, LearnerError) and error.kind != "raised" for error in found):
            raise next(error for error in found if isinstance(error, LearnerError) and error.kind != "raised")
        parts = [error for error in found if isinstance(error, _PartsError)]
        inside = [error for error in parts if error.inside and error.difference is not None]
        cause = self._cause()
        if isinstance(found[0], LearnerError) and cause is None:
            raise found[0]
        return self._failed(
            (inside or parts)[0] if parts else _PartsError("raised", str(found[0]), None, None, False), cause
        )

    def _compare(self, layer: int | None, *args: Any, inside: bool = False) -> Any:
        """Call the function, compare its results with the right ones, and return these as the function would."""
        right = _as_tuple(self._step.right(*args))
        started = time.perf_counter()
        yours = self._learner(*args)
        self._spent_s += (time.perf_counter() - started) if inside else 0
        self._num_calls += inside
        self._calls.append((args, yours))
        problem = shape_problem(self._step.outputs, yours, right)
        if problem is not None:
            raise _PartsError("shape", problem, None, layer, inside)
        difference = first_difference(self._step.outputs, yours, right)
        if difference is not None:
            if inside and "T" in difference.at:
                difference.at["T"] += self._start
            raise _PartsError("parts", _where(self._step, difference, layer, inside), difference, layer, inside)
        if inside and self._spent_s > BUDGET_S:
            self._deepest = layer
            raise _EnoughError
        return right[0] if len(right) == 1 else right

    def _inside(self) -> None:
        """Run it in the model's place; what is no part of a pass gets arguments that the model's numbers make."""
        for args in self._arguments_inside():
            self._compare(None, *args, inside=True)
        if self._step.name not in _OUTSIDE_OF_PASSES:
            running = Pass(self._check.weights, watched(self._step.name, lambda: running, self._watch))
            for ids in self._check.sentences(self._rng):
                prompt, rest = np.array(ids[:-2]), ids[-2:]
                past = running.empty()
                for part in (prompt, *(np.array([token]) for token in rest)):
                    self._ids, self._start = ids, len(past[0][0])
                    _, past = running.logits(part, past)
                self._calls = self._calls[:64]

    def _watch(self, layer: int | None, right: Any, args: tuple[Any, ...]) -> Any:
        return self._compare(layer, *args, inside=True)

    def _arguments_inside(self) -> Iterator[tuple[Any, ...]]:
        make = _OUTSIDE_OF_PASSES.get(self._step.name)
        return iter(()) if make is None else make(self._check, self._rng)

    def _passed(self, num_cases: int) -> Result:
        what = f"{self._num_calls} calls inside the model" + (
            "" if self._deepest is None else f", down to layer {self._deepest}: it is slow"
        )
        return Result(self._step.name, "passed", "is right", checked=f"{num_cases} random shapes, {what}")

    def _failed(self, error: _PartsError, cause: Mistake | None) -> Result:
        section = (cause.section if cause is not None else "") or self._step.section
        place = {}
        if error.difference is not None:
            found = error.difference
            place = {"inside": error.inside, "layer": error.layer, **found.at, "output": found.output}
            if error.inside and self._ids:
                place["ids"] = self._ids
            place |= {"yours": _plain(found.yours), "right": _plain(found.right)}
        words = "" if cause is None else cause.cause
        return Result(self._step.name, error.status, error.words, words, section, place)

    def _cause(self) -> Mistake | None:
        """Return the mistake whose results are the learner's in all calls, if there is one."""
        for mistake in self._step.mistakes:
            if all(_does(mistake, self._step, args, yours) for args, yours in self._calls):
                return mistake
        return None


def _does(mistake: Mistake, step: Step, args: tuple[Any, ...], yours: tuple[Any, ...]) -> bool:
    try:
        with np.errstate(all="ignore"):
            wrong = _as_tuple(mistake.wrong(*args))
    except Exception:  # noqa: BLE001 - a mistake may fail where shapes do not fit it
        return False
    return same(step.outputs, yours, wrong)


def _where(step: Step, found: Difference, layer: int | None, inside: bool) -> str:
    """Say where two results part."""
    names = {"T": "position", "N": "head", "K": "head", "S": "key", "L": "layer"}
    places = [] if layer is None else [f"layer {layer}"]
    places += [f"{names.get(axis, 'number')} {number}" for axis, number in found.at.items()]
    where = f"parts in {found.output} at {', '.join(places)}" if found.output else "parts"
    within = "inside the model" if inside else "on random numbers"
    return f"{where} ({within}): yours {_shown(found.yours)}, right {_shown(found.right)}"


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(_plain(value))[:120]


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value.item() if isinstance(value, (np.generic, np.ndarray)) else value


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


# --- arguments from the model for what is no part of a pass -----------------------------------------------------------


def _pieces(check: Check, rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    vocabulary = check.tokenizer.backend.byte_level_bpe()
    for text in check.some_texts(rng, 4):
        for piece in vocabulary.cut(text):
            yield piece.encode(), vocabulary.rank


def _rows(check: Check, rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    for ids in check.sentences(rng):
        yield np.array(ids), check.weights.table


def _model_logits(check: Check, ids: Sequence[int]) -> Any:
    running = Pass(check.weights)
    return running.logits(np.array(ids), running.empty())[0]


def _choices(check: Check, rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    for logits_V in _model_logits(check, check.sentences(rng, 1)[0]):
        for temperature, top_p in ((0.0, 1.0), (0.8, 0.9), (1.0, 0.5), (1.3, 1.0)):
            yield logits_V, temperature, top_p, float(rng.random())


def _writings(check: Check, rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    ids = check.sentences(rng, 1)[0][:4]

    def next_logits(ids: list[int]) -> Any:
        return _model_logits(check, ids)[-1]

    def greedy(logits_V: Any) -> int:
        return int(np.asarray(logits_V).argmax())

    yield (
        ids,
        check.tokenizer.bos_token_id,
        sorted(stop_ids_of(check.weights.config, check.tokenizer, ())),
        3,
        next_logits,
        greedy,
    )


def _blocks(check: Check, rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    for layer in rng.choice(check.weights.config.num_hidden_layers, 3):
        rows = check.weights[f"model.layers.{layer}.mlp.up_proj.weight"][:2, :64]
        packed = encode(rows, "Q4_0").reshape(-1, 18)
        for block in packed:
            yield (block.tobytes(),)


def _answers(check: Check, rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    for ids in check.sentences(rng):
        is_answer = np.arange(len(ids)) >= rng.integers(1, len(ids) - 2)
        yield _model_logits(check, ids), np.array(ids), is_answer


def _updates(check: Check, rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    w = check.weights["model.layers.0.self_attn.q_proj.weight"][:16, :32]
    m = v = np.zeros_like(w)
    for step in (1, 2, 3):
        gradient = rng.normal(size=w.shape).astype(np.float32)
        args = (w, gradient, m, v, step, 1e-3, 0.9, 0.95, 1e-8, 0.1)
        yield args
        w, m, v = RIGHT["adamw_step"](*args)


def _corrections(check: Check, rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    x_TD = check.weights.table[check.sentences(rng, 1)[0]]
    for layer in rng.choice(check.weights.config.num_hidden_layers, 3):
        w = check.weights[f"model.layers.{layer}.self_attn.k_proj.weight"]
        factors = (rng.normal(size=shape).astype(np.float32) for shape in ((8, w.shape[1]), (w.shape[0], 8)))
        yield x_TD, w, *factors, 16.0


_OUTSIDE_OF_PASSES = {
    "merge": _pieces, "embed": _rows, "choose": _choices, "generate": _writings, "unpack_q4_0": _blocks,
    "loss": _answers, "adamw_step": _updates, "lora": _corrections,
}  # fmt: skip
