"""Reward functions: score an answer from its text and the row of its prompt.

    exact                   1 if the answer equals the row's "answer", ignoring surrounding whitespace, else 0
    regex:PATTERN           1 if the pattern (Python syntax) matches the whole answer, else 0
    schema:FILE.json        1 if the answer is JSON that conforms to the schema, else 0
    length:N                1 at N characters, decreasing linearly to 0 at 0 and 2 N characters
    FILE.py:NAME            a custom function: NAME(answer: str, row: dict) -> float

The file of a custom function is executed as trusted code: only the user names it, never data or a model.
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

_SLOW_S = 10.0  # a slower call causes a warning
_LARGEST = 1e30  # mean and standard deviation of larger rewards could overflow float64

FORMS = "exact, regex:PATTERN, schema:FILE.json, length:N, or FILE.py:NAME"


class StoppedError(BaseException):
    """A signal arrived while a reward is computed. A BaseException, so that a reward function does not catch it."""


@dataclass(slots=True)
class Reward:
    """A reward function with statistics of its calls.

    Attributes:
        name: Name in the setting `reward`.
        function: The function.
        digest: SHA-256, hex, of its file; "" if it has none.
        reads: Field of a row that it requires, or None.
        num_failed: Answers without a reward, as the function raised or exited, or did not return a finite number.
        seconds: Time spent in the function.
        signals: Signals that stop the run; once it is not empty, a call raises StoppedError.
        is_running: True during a call, in which a signal handler raises StoppedError.
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
        """Return an answer's reward, or NaN with a warning (once per reason) if the function fails."""
        value = self.value(answer, row)
        return self.fail(answer, "returned None; expected a number") if value is None else value

    def value(self, answer: str, row: Mapping[str, Any]) -> float | None:
        """Return an answer's reward as `__call__`, but None if the function returns None."""
        printed, begin = _Kept(), time.perf_counter()
        self.is_running = True
        try:
            if self.signals:
                raise StoppedError
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                reward = self.function(answer, copy.deepcopy(dict(row)))  # a function may modify its arguments
            value = math.nan if reward is None or isinstance(reward, str | bytes | bytearray) else float(reward)
            good = reward is None or abs(value) <= _LARGEST
            why = "" if good else f"returned {show_value(reward)}; expected a number"
        except (KeyboardInterrupt, StoppedError):
            raise
        except BaseException as error:  # noqa: BLE001 - a caller's function may raise anything
            reward, value, why = error, math.nan, f"raised {_words(error)}"
        finally:
            self.is_running = False
            self.seconds += (took := time.perf_counter() - begin)
        if self.signals:  # a signal arrived during the call, and the function caught the StoppedError
            raise StoppedError
        if took >= _SLOW_S:
            self._warn("slow", f"took {took:.0f} s for the answer {show_value(answer)}; a run waits for every reward")
        if printed.getvalue():
            self._warn("printed", f"prints: {escape(printed.getvalue().strip(), 80)}; a reward returns a number")
        if why:
            return self.fail(answer, why)
        return None if reward is None else value

    def fail(self, answer: str, why: str) -> float:
        """Count an answer without a reward, warn once per reason, and return NaN."""
        self.num_failed += 1
        self._warn(why[:20], f"{why} for the answer {show_value(answer)}; it has no reward, and no weight")
        return math.nan

    def _warn(self, kind: str, words: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            warn_caller(f"reward {self.name}: {words}")


@dataclass(frozen=True, slots=True)
class Rewards:
    """The reward functions of a run and their weights."""

    functions: Sequence[Reward]
    weights: Sequence[float]

    @property
    def names(self) -> list[str]:
        """Names of the functions."""
        return [function.name for function in self.functions]

    @property
    def digest(self) -> str:
        """Digests of the functions, joined by "+"."""
        return "+".join(function.digest for function in self.functions)

    @property
    def seconds(self) -> float:
        """Time spent in all functions."""
        return sum(function.seconds for function in self.functions)

    @property
    def is_running(self) -> bool:
        """True while a function is called."""
        return any(function.is_running for function in self.functions)

    def listen_to(self, signals: list[int]) -> None:
        """Stop calls once this list has a signal."""
        for function in self.functions:
            function.signals = signals

    def of_group(self, answers: Sequence[str], row: Mapping[str, Any]) -> list[tuple[float, dict[str, float]]]:
        """Return, for each answer to a prompt, its reward and the value of each function; NaN for a missing one.

        The reward is the weighted sum. If there are several functions, one that returns None for all answers does not
        apply to this prompt and is left out. Otherwise an answer needs a value from every function to have a reward.
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
    """The output that a reward function prints; it remains readable if the function closes the stream."""

    def close(self) -> None:
        """Do nothing."""


def rewards_of(asked: RewardNames, tokenizer: Tokenizer, vocab_size: int) -> Rewards:
    """Return the rewards of a parsed setting with their weights; errors as `reward_of`."""
    weights = asked if isinstance(asked, Mapping) else dict.fromkeys([asked] if isinstance(asked, str) else asked, 1.0)
    return Rewards([reward_of(name, tokenizer, vocab_size) for name in weights], [*weights.values()])


def reward_of(asked: str, tokenizer: Tokenizer, vocab_size: int) -> Reward:
    """Return the reward function with a name, as in the module's docstring.

    Raises:
        TrainingError: If the name is unknown, or its file, pattern or number is invalid.
        GrammarError: If a schema is not supported.
        MissingPackageError: If a schema needs a package that is not installed.
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
    assert spec is not None  # the name ends in .py
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look up their module there
    try:
        source = path.read_bytes()
        exec(compile(source, path, "exec"), vars(module))  # exactly the bytes of the digest, not a cached .pyc
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
    except Exception:  # noqa: BLE001 - str() of a user's exception may raise anything
        return type(error).__name__
