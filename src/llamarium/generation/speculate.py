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
at all, often. Several rows go in step: all of them have to be right.

Source: prompt lookup decoding (A. Saxena, 2023); checking guesses in one pass is speculative decoding
(https://arxiv.org/abs/2211.17192), here with a guess that is certain of itself.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from llamarium.errors import OptionError, show_value
from llamarium.generation.kept import KeptSequence
from llamarium.runtime.batch import Span, pack
from llamarium.runtime.runner import Cache, Logits, Runner

MAX_NUM_TOKENS = 64
"""The most tokens that may be guessed at once: further on, no guess is right often enough."""

# Sizes of n-grams that are looked up, and how often the token after one is the guessed one, before anything is known.
# Measured on this project's own guides and sources: 0.15 to 0.28 for single tokens, which rarely pays; then 0.32 to
# 0.40 and 0.46 to 0.68, and 0.68 to 0.94 from five tokens on.
_RATES = {5: 0.7, 3: 0.4, 2: 0.2}
_COST = 0.25  # of a pass, what one more token in it costs, before it is known; some tenths on most machines
_WEIGHT = 1 / 6  # of the newest measurement in a moving average
_TRIAL_TOKENS, _TRIAL_SHARE = 2, 0.01  # a guess that may not pay, and how much of the time may go into such guesses


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
        clock: Returns seconds.

    Attributes:
        passes: Passes over the model, prompts apart.
        drafted: Tokens that were guessed and run.
        accepted: Those of them that were right, and so saved a pass.

    Raises:
        OptionError: If `num_tokens` is not 1 to 64.
    """

    def __init__(self, num_tokens: int = 15, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.num_tokens = _checked(num_tokens)
        self.clock = clock
        self.passes = self.drafted = self.accepted = 0
        self._rates = dict(_RATES)
        self._single_s: float | None = None  # a pass over one token a row
        self._extra_s: float | None = None  # each further token of a row in the same pass
        self._trial_s = 0.0  # what a trial may cost by now

    def counts(self) -> dict[str, int]:
        """Return `passes`, `drafted` and `accepted`."""
        return {"passes": self.passes, "drafted": self.drafted, "accepted": self.accepted}

    def best_length(self, size: int) -> int:
        """Return how many tokens to run of a guess that follows an n-gram of `size`: 0 where guessing does not pay.

        If a guess is right with probability p at each place, a pass over k guessed tokens gives 1 + p + ... + p^k of
        them. Where that is slower than one token a pass, a guess is run all the same once the time for a trial has
        been saved up: how often guesses are right can be seen without running them, what a pass costs cannot.
        """
        if self._single_s is None:
            return 0
        extra_s = max(0.0, _COST * self._single_s if self._extra_s is None else self._extra_s)
        best, best_speed = 0, 1 / self._single_s
        power = expected = 1.0
        for length in range(1, self.num_tokens + 1):
            power *= self._rates[size]
            expected += power
            speed = expected / (self._single_s + length * extra_s)
            if speed > best_speed:
                best, best_speed = length, speed
        trial = min(_TRIAL_TOKENS, self.num_tokens)
        return trial if best == 0 and self._trial_s >= trial * extra_s else best

    def record_pass(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Note what a pass of `num_rows` rows of `num_tokens` tokens took."""
        seconds = max(seconds, 1e-9)  # a coarse clock may say 0
        self.passes += 1
        self.drafted += num_rows * (num_tokens - 1)
        if num_tokens == 1:
            self._single_s = _averaged(self._single_s, seconds)
            self._trial_s += _TRIAL_SHARE * seconds
        elif self._single_s is not None:
            self._extra_s = _averaged(self._extra_s, (seconds - self._single_s) / (num_tokens - 1))
            self._trial_s = 0.0

    def record_guess(self, size: int, is_right: bool) -> None:
        """Note whether the next token of a guess that follows an n-gram of `size` came, whether it was run or not."""
        self._rates[size] = _averaged(self._rates[size], float(is_right))


def _checked(num_tokens: object) -> int:
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or not 1 <= num_tokens <= MAX_NUM_TOKENS:
        raise OptionError(
            f"num_tokens is {show_value(num_tokens)}; expected how many tokens to guess at once, 1 to {MAX_NUM_TOKENS}"
        )
    return num_tokens


def _averaged(average: float | None, newest: float) -> float:
    return newest if average is None else average + _WEIGHT * (newest - average)


class Lookahead:
    """Gives the logits of each next token, and runs a guess at the tokens after it along.

    Args:
        runner: Executes the model.
        cache: With the keys and values of all of the sequences' tokens but the last.
        lookup: How far ahead to guess.
        is_greedy: Whether all rows take the most probable token, and keys and values are kept as they are.

    Raises:
        OptionError: If guessing could change the tokens.
    """

    def __init__(self, runner: Runner, cache: Cache, lookup: PromptLookup, *, is_greedy: bool) -> None:
        if not runner.is_row_exact and not (is_greedy and runner.dtype == "float32"):
            raise OptionError(
                "prompt_lookup could change the tokens here, as PyTorch rounds a pass over several tokens otherwise"
                f" than a pass over one (in {runner.dtype}, at this temperature); take float32 and temperature 0, or "
                "on a CPU weights that the C kernels multiply (`llamarium doctor`)"
            )
        self._runner, self._cache, self._lookup = runner, cache, lookup
        self._indexes: dict[int, NgramIndex] = {}  # by the sequence's identity
        self._rows: list[KeptSequence] = []  # those of the last pass
        self._size = 0  # of the n-gram that the guess follows
        self._guess: list[tuple[int, ...]] = []  # for each place the rows' tokens; the first alone, if none was run
        self._num_checked = 0
        self._ahead_BTV: Logits | None = None  # logits of the last token and of the guess's

    def next_logits(self, sequences: Sequence[KeptSequence], room: int) -> Logits:
        """Return the logits that follow each sequence's last token: (B, V).

        Args:
            sequences: Those of the last call, or some of them, each with one more token.
            room: The tokens that every one may still get, at least 1.
        """
        self._keep(sequences)
        if self._is_ahead():
            self._lookup.accepted += len(self._rows)
            for sequence in self._rows:
                sequence.num_run += 1
        else:
            self._run(room)
        assert self._ahead_BTV is not None
        return self._ahead_BTV[:, self._num_checked]

    def _keep(self, sequences: Sequence[KeptSequence]) -> None:
        """Go on with these sequences alone."""
        if len(sequences) != len(self._rows):
            places = {id(row): place for place, row in enumerate(self._rows)}
            rows = [places[id(row)] for row in sequences if id(row) in places]
            self._guess = [tuple(tokens[row] for row in rows) for tokens in self._guess]
            if self._ahead_BTV is not None:
                self._ahead_BTV = self._ahead_BTV[rows]
            self._rows = list(sequences)
        for sequence in sequences:
            if id(sequence) not in self._indexes:
                self._indexes[id(sequence)] = NgramIndex(sequence.ids)

    def _is_ahead(self) -> bool:
        """Whether the tokens that have just been chosen were guessed, and run."""
        if self._num_checked == len(self._guess):
            return False
        is_right = tuple(row.ids[-1] for row in self._rows) == self._guess[self._num_checked]
        self._lookup.record_guess(self._size, is_right)
        self._num_checked += 1
        assert self._ahead_BTV is not None
        return is_right and self._num_checked < self._ahead_BTV.shape[1]

    def _run(self, room: int) -> None:
        """Run each row's last token and a guess."""
        found = [self._indexes[id(row)].guess(self._lookup.num_tokens) for row in self._rows]
        self._size = min(size for size, _ in found)
        guess = list(zip(*(tokens for _, tokens in found), strict=False))  # none, if any row has none
        length = min(self._lookup.best_length(self._size), room - 1) if guess else 0
        self._guess, self._num_checked = guess[: max(1, length)], 0
        start = self._lookup.clock()
        spans = [self._span(row, [tokens[i] for tokens in guess[:length]]) for i, row in enumerate(self._rows)]
        logits = self._runner.run(pack(spans), self._cache)
        if not isinstance(logits, np.ndarray):
            import torch

            torch.accelerator.synchronize()  # sync: the clock is to see the pass's end
        self._ahead_BTV = logits.reshape(len(self._rows), 1 + length, -1)
        for row in self._rows:
            row.num_run = len(row.ids)
        self._lookup.record_pass(len(self._rows), 1 + length, self._lookup.clock() - start)

    @staticmethod
    def _span(row: KeptSequence, guess: list[int]) -> Span:
        ids = [row.ids[-1], *guess]
        return Span(ids, len(row.ids) - 1, row.table.blocks, num_logits=len(ids), adapter=row.adapter)
