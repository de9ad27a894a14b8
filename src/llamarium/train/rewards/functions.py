"""Rewards: what an answer is worth, as a function of its text and of its prompt's line.

    exact                   1 where the answer is the line's "answer", blanks around both apart, else 0
    regex:PATTERN           1 where the pattern (Python's) matches the whole answer, else 0
    schema:FILE.json        1 where the answer is JSON that the schema accepts, else 0
    length:N                1 at N characters, falling evenly to 0 at none and at 2 N
    FILE.py:NAME            a function of your own: NAME(answer: str, row: dict) -> float

A function's file is run as a program of the caller's: it is named by hand, never by data or a model.
"""

import contextlib
import copy
import hashlib
import importlib.util
import io
import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamarium.errors import TrainingError, escape, show_value, warn_caller
from llamarium.sampling.grammar.description import Grammar
from llamarium.tokenizer.base import Tokenizer
from llamarium.train.rewards.names import RewardNames

Function = Callable[[str, dict[str, Any]], Any]

_SLOW_S = 10.0  # of one call; slower ones are named
_LARGEST = 1e30  # larger ones have no mean and no spread in float64

FORMS = "exact, regex:PATTERN, schema:FILE.json, length:N, or FILE.py:NAME"


class StoppedError(BaseException):
    """A signal asks the run to stop, and a reward is being computed; no `except Exception` of a reward catches it."""


@dataclass(slots=True)
class Reward:
    """A reward function, and what it has done so far besides returning numbers.

    Attributes:
        name: As it was asked for.
        digest: SHA-256, hex, of the file that it is read from; "" without one.
        reads: The field of a line that it cannot do without, if any.
        num_failed: Answers without a reward, as the function raised, left, or returned no finite number.
        seconds: Time in the function.
        signals: Those that ask the run to stop; once there is one, a call raises StoppedError.
        is_running: Whether a call is under way; a signal's handler is to raise StoppedError there.
    """

    name: str
    function: Function
    digest: str = ""
    reads: str | None = None
    num_failed: int = 0
    seconds: float = 0.0
    signals: list[int] = field(default_factory=list[int])
    is_running: bool = False
    _said: set[str] = field(default_factory=set[str])

    def __call__(self, answer: str, row: Mapping[str, Any]) -> float:
        """Return an answer's reward; NaN where the function gives none, with a warning, once for each reason."""
        value = self.value(answer, row)
        return self.fail(answer, "returned None; expected a number") if value is None else value

    def value(self, answer: str, row: Mapping[str, Any]) -> float | None:
        """Return what a call does, but None where the function returns None."""
        printed, begin = _Kept(), time.perf_counter()
        self.is_running = True
        try:
            if self.signals:
                raise StoppedError
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                found = self.function(answer, copy.deepcopy(dict(row)))  # it may change what it gets
            value = math.nan if found is None or isinstance(found, str | bytes | bytearray) else float(found)
            good = found is None or abs(value) <= _LARGEST
            why = "" if good else f"returned {show_value(found)}; expected a number"
        except (KeyboardInterrupt, StoppedError):
            raise
        except BaseException as error:  # noqa: BLE001 - a caller's function may raise anything
            found, value, why = error, math.nan, f"raised {_words(error)}"
        finally:
            self.is_running = False
            self.seconds += (took := time.perf_counter() - begin)
        if self.signals:  # one came meanwhile, and the function has caught what it raised
            raise StoppedError
        if took >= _SLOW_S:
            self._warn("slow", f"took {took:.0f} s for the answer {show_value(answer)}; a run waits for every reward")
        if printed.getvalue():
            self._warn("printed", f"prints: {escape(printed.getvalue().strip(), 80)}; a reward returns a number")
        if why:
            return self.fail(answer, why)
        return None if found is None else value

    def fail(self, answer: str, why: str) -> float:
        """Count an answer that gets no reward, and warn once for each reason; return NaN."""
        self.num_failed += 1
        self._warn(why[:20], f"{why} for the answer {show_value(answer)}; it has no reward, and no weight")
        return math.nan

    def _warn(self, kind: str, words: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            warn_caller(f"reward {self.name}: {words}")


@dataclass(frozen=True, slots=True)
class Rewards:
    """The reward functions of a run, and the weight of each one's value in an answer's reward."""

    functions: Sequence[Reward]
    weights: Sequence[float]

    @property
    def names(self) -> list[str]:
        """The functions' names."""
        return [function.name for function in self.functions]

    @property
    def digest(self) -> str:
        """The functions' digests."""
        return "+".join(function.digest for function in self.functions)

    @property
    def seconds(self) -> float:
        """Time in all functions."""
        return sum(function.seconds for function in self.functions)

    @property
    def is_running(self) -> bool:
        """Whether a function is being called."""
        return any(function.is_running for function in self.functions)

    def listen_to(self, signals: list[int]) -> None:
        """Let the calls end once there is a signal in this list."""
        for function in self.functions:
            function.signals = signals

    def of_group(self, answers: Sequence[str], row: Mapping[str, Any]) -> list[tuple[float, dict[str, float]]]:
        """Return the reward of each answer to one prompt, and what each function gave; NaN where there is none.

        The reward is the weighted sum. Of several functions, one that returns None for all answers does not apply to
        this prompt, and is left out of their sums; else an answer without a value of each function has no reward.
        """
        columns: list[tuple[Reward, float, list[float]]] = []
        for function, weight in zip(self.functions, self.weights, strict=True):
            values = [function.value(answer, row) for answer in answers]
            if len(self.functions) > 1 and all(value is None for value in values):
                continue
            missing = "returned None; expected a number, or None for all answers to a prompt"
            numbers = [function.fail(a, missing) if v is None else v for a, v in zip(answers, values, strict=True)]
            columns.append((function, weight, numbers))
        parts = [{function.name: numbers[i] for function, _, numbers in columns} for i in range(len(answers))]
        totals = [
            sum(weight * numbers[i] for _, weight, numbers in columns if weight) if columns else math.nan
            for i in range(len(answers))
        ]
        return [*zip(totals, parts, strict=True)]


class _Kept(io.StringIO):
    """What a reward prints; also after it has closed it."""

    def close(self) -> None:
        """Do nothing."""


def rewards_of(asked: RewardNames, tokenizer: Tokenizer, vocab_size: int) -> Rewards:
    """Return the rewards that a parsed setting names, with their weights; errors as `reward_of`."""
    weights = asked if isinstance(asked, Mapping) else dict.fromkeys([asked] if isinstance(asked, str) else asked, 1.0)
    return Rewards([reward_of(name, tokenizer, vocab_size) for name in weights], [*weights.values()])


def reward_of(asked: str, tokenizer: Tokenizer, vocab_size: int) -> Reward:
    """Return the reward that a setting names.

    Raises:
        TrainingError: If there is none of that name, or its file, pattern or number cannot be read.
        GrammarError: If a schema is not supported.
        MissingPackageError: If a schema needs a package that is missing.
    """
    kind, _, argument = asked.partition(":")
    if found := re.fullmatch(r"(.+\.py):(\w+)", asked):
        return Reward(asked, *_from_file(Path(found[1]).expanduser(), found[2]))
    if asked == "exact":
        return Reward(asked, lambda answer, row: answer.strip() == str(row["answer"]).strip(), reads="answer")
    if kind == "regex" and argument:
        return Reward(asked, _matching(argument))
    if kind == "schema" and argument:
        return Reward(asked, *_valid(Path(argument).expanduser(), tokenizer, vocab_size))
    if kind == "length" and re.fullmatch("[0-9]{1,9}", argument) and int(argument):
        length = int(argument)
        return Reward(asked, lambda answer, row: max(0.0, 1 - abs(len(answer) - length) / length))
    raise TrainingError(f"reward is {show_value(asked)}; expected {FORMS}")


def _matching(pattern: str) -> Function:
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise TrainingError(f"reward: {escape(pattern)} is no regular expression: {escape(error)}") from None
    return lambda answer, row: compiled.fullmatch(answer) is not None


def _valid(path: Path, tokenizer: Tokenizer, vocab_size: int) -> tuple[Function, str]:
    from llamarium.sampling.grammar.compiler import GrammarCompiler

    try:
        schema = path.read_bytes()
        grammar = Grammar.json_schema(schema.decode())
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(f"reward: {escape(path)} cannot be read: {escape(error)}") from None
    compiled = GrammarCompiler(tokenizer, vocab_size).compile(grammar)
    accepts: Function = lambda answer, row: compiled.accepts(tokenizer.encode(answer, add_special_tokens=False))  # noqa: E731
    return accepts, hashlib.sha256(schema).hexdigest()


def _from_file(path: Path, name: str) -> tuple[Function, str]:
    spec = importlib.util.spec_from_file_location(f"rewards_in_{path.stem}", path)
    assert spec is not None  # its name ends in .py
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look it up
    try:
        source = path.read_bytes()
        exec(compile(source, path, "exec"), vars(module))  # the bytes of the digest, not a cached file's
    except (Exception, SystemExit) as error:
        raise TrainingError(f"reward: {escape(path)} cannot be run: {_words(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(key for key, value in vars(module).items() if callable(value) and key[0] != "_")
        raise TrainingError(f"reward: {escape(path)} has no function {name}; there are: {escape(there) or 'none'}")
    return function, hashlib.sha256(source).hexdigest()


def _words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {escape(error)}"
    except Exception:  # noqa: BLE001 - it is of a caller's class
        return type(error).__name__
