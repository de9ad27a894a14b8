"""Prompt lookup: guess the next tokens from what was said before, and check the guess in one pass.

A pass over one new token reads every weight once, and so does a pass over sixteen. Where an answer repeats its prompt
or itself (a text is summarised, a program edited, a list continued), the last few tokens have been there before, and
what followed them then is a guess that costs a dictionary look-up. One pass runs the last token and the guess after it.
The sampler then sees the logits of each place in turn, as it would without: as long as the token that it chooses is
the one that was guessed, the logits that come next are there already. The first that differs ends the guess. What the
cache holds beyond it is never seen, since a slot is a position, and is overwritten.

So a guess never changes which token is chosen, only when its logits are computed. Sampling parameters, penalties and
seeds need no code here. Where a pass treats each token as it would alone (`Runner.is_row_exact`), the
tokens are those that come without prompt lookup, at any temperature. PyTorch's products round otherwise for several
tokens than for one. In float32 that moves a logit by about 1e-5, which changes the largest of them in perhaps one token
of 100,000, but a drawn token in one of 1,000: so there prompt lookup serves temperature 0, and in half precision, where
ties are everywhere, it is refused.

Whether a guess pays depends on the text (how often guesses are right), and on the model and machine (what a wider pass
costs). Both are measured all the time, and `PromptLookup` guesses as far ahead as brings the most tokens a second; not
at all, often.

Source: prompt lookup decoding (A. Saxena, 2023); checking guesses in one pass is speculative decoding
(https://arxiv.org/abs/2211.17192), here with a guess that is certain of itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from llamarium.errors import OptionError, show_value
from llamarium.runtime.runner import CacheDtype, Runner

MAX_NUM_TOKENS = 64
"""The most tokens that may be guessed at once: further on, no guess is right often enough."""

# Sizes of n-grams that are looked up, and how often the token after one is the guessed one, before anything is known.
# Measured on this project's own guides and sources: 0.15 to 0.28 for single tokens, which rarely pays; then 0.32 to
# 0.40 and 0.46 to 0.68, and 0.68 to 0.94 from five tokens on.
_RATES = {5: 0.7, 3: 0.4, 2: 0.2}
_COST = 0.25  # of a pass, what one more token in it costs, before it is known; some tenths on most machines
_WEIGHT = 1 / 6  # of the newest measurement in a moving average
_TRIAL_TOKENS, _TRIAL_SHARE = 2, 0.01  # a guess that may not pay, and how much of the time may go into such guesses


@dataclass(slots=True)
class Guess:
    """What may come next in one answer.

    Attributes:
        size: Of the n-gram that it follows, where it comes from one.
        ids: The tokens.
        num_scheduled: How many of them are run; at least the first is compared with what comes, all the same.
    """

    size: int = 0
    ids: list[int] = field(default_factory=list[int])
    num_scheduled: int = 0


class Guesser(Protocol):
    """Knows one answer's tokens, and what was guessed of the next ones."""

    def check(self, guess: Guess, place: int, token_id: int) -> bool:
        """Note what came at a place of a guess; return whether the logits after it are there."""
        ...

    def release(self) -> None:
        """Give back what it holds, as the answer ends or has to wait."""
        ...


class Guessing(Protocol):
    """Guesses for the answers of one engine."""

    def reserve(self, num_blocks: int) -> None:
        """Have room for answers that have so many blocks of the model's cache."""
        ...

    def begin(self, ids: list[int], salt: str) -> Guesser:
        """Return what guesses for one answer: its tokens, to which the caller appends, and what it shares with."""
        ...

    def guess(self, rows: Sequence[tuple[Guesser, int]], num_rows: int) -> list[Guess]:
        """Guess the next tokens of answers that may still get so many, beside `num_rows` in the same pass."""
        ...

    def record_pass(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        """Note what a pass over one token of each row, and so many guessed ones, took."""
        ...


class Speculation(Protocol):
    """How to guess, and what has come of it, for one engine after another.

    Attributes:
        accepted: Guesses that were right, and so saved a pass.
        drafted: Tokens that were guessed and run.
        passes: Passes over the model, prompts apart.
    """

    accepted: int
    drafted: int
    passes: int

    def open(
        self, num_blocks: int, block_size: int, kv_cache_dtype: CacheDtype, clock: Callable[[], float]
    ) -> Guessing:
        """Return what guesses for an engine with such a cache."""
        ...

    def counts(self) -> dict[str, int]:
        """Return `passes`, `drafted` and `accepted`."""
        ...


class NgramIndex:
    """Where the last tokens of a growing sequence stood before; a look-up takes the same time at any length.

    Args:
        ids: The sequence; the caller appends to it.
    """

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self._known = 0  # so many tokens have been entered as what follows an n-gram
        self._next: dict[tuple[int, ...], int] = {}  # n-gram to the place after its last occurrence

    def guess(self, count: int) -> tuple[int, list[int]]:
        """Return the size of the longest n-gram that ends the sequence and stood in it before, and what followed.

        What followed is `count` tokens: where it runs into the sequence's end, it goes on with itself, so that a
        repetition is continued. Without any such n-gram the size is 0 and nothing follows.
        """
        ids = self.ids
        for place in range(self._known, len(ids)):
            for size in _RATES:
                if size <= place:
                    self._next[tuple(ids[place - size : place])] = place
        self._known = len(ids)
        for size in _RATES:
            place = self._next.get(tuple(ids[-size:]))
            if place is not None:
                period = len(ids) - place
                return size, [ids[place + i % period] for i in range(count)]
        return 0, []


class PromptLookup:
    """How far ahead to guess, and what has come of it.

    One object may serve one answer after another and then begins with what it has learned. It counts and measures, and
    has no part in which tokens come out.

    Args:
        num_tokens: The most tokens that are guessed at once.

    Attributes:
        passes: Passes over the model, prompts apart.
        drafted: Tokens that were guessed and run.
        accepted: Those of them that were right, and so saved a pass.

    Raises:
        OptionError: If `num_tokens` is not 1 to 64.
    """

    def __init__(self, num_tokens: int = 15) -> None:
        self.num_tokens = checked_length(num_tokens)
        self.passes = self.drafted = self.accepted = 0
        self._rates = dict(_RATES)
        self._single_s: dict[int, float] = {}  # a pass over one token a row, by the number of rows
        self._extra_s: float | None = None  # each further token in the same pass
        self._trial_s = 0.0  # what a trial may cost by now

    def counts(self) -> dict[str, int]:
        """Return `passes`, `drafted` and `accepted`."""
        return {"passes": self.passes, "drafted": self.drafted, "accepted": self.accepted}

    def open(
        self, num_blocks: int, block_size: int, kv_cache_dtype: CacheDtype, clock: Callable[[], float]
    ) -> "PromptLookup":
        """Return this: it needs no memory of its own."""
        return self

    def reserve(self, num_blocks: int) -> None:
        """Do nothing, as it has no blocks."""

    def begin(self, ids: list[int], salt: str) -> "LookupGuesser":
        """Return what guesses for one answer; it sees nobody else's tokens, so the salt does not matter."""
        return LookupGuesser(self, ids)

    def guess(self, rows: Sequence[tuple[Guesser, int]], num_rows: int) -> list[Guess]:
        """Guess the next tokens of some answers."""
        return [cast(LookupGuesser, guesser).guess(num_rows, room) for guesser, room in rows]

    def best_length(self, size: int, num_rows: int = 1) -> int:
        """Return how many tokens to run of a guess that follows an n-gram of `size`: 0 where guessing does not pay.

        If a guess is right with probability p at each place, a pass over k guessed tokens of one of R rows gives
        R + p + ... + p^k of them. Where that is slower than one token a row, a guess is run all the same once the time
        for a trial has been saved up: how often guesses are right can be seen without running them, what a pass costs
        cannot.
        """
        single_s = self._single_s.get(num_rows)
        if single_s is None:
            return 0
        extra_s = max(0.0, _COST * single_s / num_rows if self._extra_s is None else self._extra_s)
        best, best_speed = 0, num_rows / single_s
        power, expected = 1.0, float(num_rows)
        for length in range(1, self.num_tokens + 1):
            power *= self._rates[size]
            expected += power
            speed = expected / (single_s + length * extra_s)
            if speed > best_speed:
                best, best_speed = length, speed
        trial = min(_TRIAL_TOKENS, self.num_tokens)
        return trial if best == 0 and self._trial_s >= trial * extra_s else best

    def record_pass(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        """Note what a pass over one token of each row, and so many guessed ones, took."""
        seconds = max(seconds, 1e-9)  # a coarse clock may say 0
        self.passes += 1
        self.drafted += num_drafted
        single_s = self._single_s.get(num_rows)
        if not num_drafted:
            self._single_s[num_rows] = averaged(single_s, seconds)
            self._trial_s += _TRIAL_SHARE * seconds
        elif single_s is not None:
            self._extra_s = averaged(self._extra_s, (seconds - single_s) / num_drafted)
            self._trial_s = 0.0

    def record_guess(self, size: int, is_right: bool) -> None:
        """Note whether the next token of a guess that follows an n-gram of `size` came, whether it was run or not."""
        self._rates[size] = averaged(self._rates[size], float(is_right))


def checked_length(num_tokens: object) -> int:
    """Return how many tokens are guessed at once.

    Raises:
        OptionError: If that is not 1 to 64.
    """
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or not 1 <= num_tokens <= MAX_NUM_TOKENS:
        raise OptionError(
            f"num_tokens is {show_value(num_tokens)}; expected how many tokens to guess at once, 1 to {MAX_NUM_TOKENS}"
        )
    return num_tokens


def averaged(average: float | None, newest: float) -> float:
    """Return a moving average with its newest measurement."""
    return newest if average is None else average + _WEIGHT * (newest - average)


def option_of(asked: object) -> str:
    """Return the name of the option that has asked for it."""
    return "prompt_lookup" if isinstance(asked, PromptLookup) else "draft_model"


def check_speculation(runner: Runner, option: str, *, is_greedy: bool) -> None:
    """Refuse to guess where that could change the tokens.

    Args:
        runner: Executes the model.
        option: What asks for it.
        is_greedy: Whether all rows take the most probable token, and keys and values are kept as they are.

    Raises:
        OptionError: If it could.
    """
    if not runner.is_row_exact and not (is_greedy and runner.dtype == "float32"):
        raise OptionError(
            f"{option} could change the tokens here, as PyTorch rounds a pass over several tokens otherwise"
            f" than a pass over one (in {runner.dtype}, at this temperature); take float32 and temperature 0, or "
            "on a CPU weights that the C kernels multiply (`llamarium doctor`)"
        )


class LookupGuesser:
    """Guesses one answer's next tokens.

    Args:
        lookup: How far ahead to guess; it learns from all answers that it serves.
        ids: The answer's tokens, prompt included; the caller appends to them.
    """

    def __init__(self, lookup: PromptLookup, ids: list[int]) -> None:
        self._lookup, self._index = lookup, NgramIndex(ids)

    def guess(self, num_rows: int, room: int) -> Guess:
        """Return a guess.

        Args:
            num_rows: Answers that get a token in the same pass.
            room: Tokens that the answer may still get, at least 1.
        """
        size, ids = self._index.guess(self._lookup.num_tokens)
        num_scheduled = min(self._lookup.best_length(size, num_rows), room - 1) if ids else 0
        return Guess(size, ids[: max(1, num_scheduled)], num_scheduled)

    def check(self, guess: Guess, place: int, token_id: int) -> bool:
        """Note what came at a place of a guess; return whether the logits after it are there."""
        if place >= len(guess.ids):
            return False
        is_right = token_id == guess.ids[place]
        self._lookup.record_guess(guess.size, is_right)
        is_ahead = is_right and place < guess.num_scheduled
        self._lookup.accepted += is_ahead
        return is_ahead

    def release(self) -> None:
        """Do nothing, as it holds no blocks."""
