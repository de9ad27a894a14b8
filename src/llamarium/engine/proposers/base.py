"""What proposers have in common: the draft is checked in one pass, and its length is what pays. Never torch.

A pass over one new token reads every weight once, and so does a pass over sixteen. So a step runs a sequence's last
token and a draft of the next ones together. The sampler then sees the logits of each place in turn, as it would without
a draft: as long as it chooses the draft's token, the next logits are there already. The first other token ends the
draft. What the cache holds beyond it is never seen, since a slot is a position, and is overwritten.

So a draft never changes which token is chosen, only when its logits are computed. Sampling parameters, penalties and
seeds need no code here. Where a pass treats each token as it would alone (`Runner.is_row_exact`), the tokens are those
that come without a proposer, at any temperature. PyTorch's products round otherwise for several tokens than for one. In
float32 that moves a logit by about 1e-5, which changes the largest of them in perhaps one token of 100,000, but a drawn
token in one of 1,000: so there proposers serve temperature 0, and in half precision, where ties are everywhere, they
are refused.

Source: speculative decoding (https://arxiv.org/abs/2211.17192), with greedy (one-hot) drafts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Protocol

from llamarium.engine.request import Draft, EngineSequence
from llamarium.errors import OptionError, show_value
from llamarium.runtime.runner import CacheDtype, Runner

MAX_NUM_TOKENS = 64
"""The most tokens of a draft: further on, none is right often enough."""

TRIAL_TOKENS = 2
"""Tokens of a draft that may not pay, to see what drafts cost."""

MAX_COST = 0.01
"""The share of the time that drafts may cost where they do not pay."""

_COST = 0.25  # of a pass, what one more token in it costs, before it is known; some tenths on most machines
# Of the newest measurement in a moving average: a pass that another program interrupts says little, a fast one much.
_WEIGHT, _WEIGHT_OF_SLOWER = 1 / 6, 1 / 24
_MOST_EXTRA = 4.0  # passes that one more token in a pass may seem to cost
_LEAST_POWER = 0.02  # a token that is right more rarely does not decide about a draft's length


class ProposerPolicy(ABC):
    """How far ahead to propose, from what passes cost and how often drafts were right; and what has come of it.

    One object may serve one engine after another, and then begins with what it has learned. `option` is the name of the
    option that asks for it; a draft has at most `num_tokens` tokens, and OptionError if these are not 1 to 64.

    Attributes:
        passes: Passes over the model, prompts apart.
        drafted: Tokens of drafts that were run in them.
        accepted: Those of them that were right, and so saved a pass.
    """

    option: ClassVar[str]

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = _checked_length(num_tokens)
        self.passes = self.drafted = self.accepted = 0
        self._single_s: dict[int, float] = {}  # a pass over one token a sequence, by the number of sequences
        self._extra_s: float | None = None  # each further token in the same pass

    def counts(self) -> dict[str, int]:
        """Return `passes`, `drafted` and `accepted`."""
        return {"passes": self.passes, "drafted": self.drafted, "accepted": self.accepted}

    @property
    def keeps_texts(self) -> bool:
        """Whether prompts and answers are kept in memory for later drafts."""
        return False

    @property
    def num_pool_tokens(self) -> int:
        """Tokens that are kept for later drafts."""
        return 0

    @abstractmethod
    def open(
        self, num_blocks: int, block_size: int, kv_cache_dtype: CacheDtype, clock: Callable[[], float]
    ) -> "Proposer":
        """Return the proposer of an engine with such a cache; MemoryBudgetError if there is no memory for it."""

    def check(self, draft: Draft, place: int, token_id: int) -> bool:
        """Return whether the token chosen at a place of a draft is the draft's, and was run."""
        is_ahead = place < draft.num_scheduled and token_id == draft.ids[place]
        self.accepted += is_ahead
        return is_ahead

    def count_pass(self, num_drafted: int) -> None:
        """Count a pass that decodes, over `num_drafted` further tokens."""
        self.passes += 1
        self.drafted += num_drafted

    def record_pass(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        """Note the time of a pass over one token of each sequence and `num_drafted` further ones, and nothing else."""
        single_s = self._single_s.get(num_rows)
        if not num_drafted:
            is_slower = single_s is not None and seconds > single_s
            self._single_s[num_rows] = averaged(single_s, seconds, _WEIGHT_OF_SLOWER if is_slower else _WEIGHT)
        elif single_s is not None:
            self._extra_s = averaged(self._extra_s, min(_MOST_EXTRA * single_s, (seconds - single_s) / num_drafted))

    def single_s(self, num_rows: int) -> float | None:
        """Return the seconds of a pass over one token of so many sequences, if one was measured."""
        return self._single_s.get(num_rows)

    def extra_s(self, num_rows: int) -> float:
        """Return the seconds of each further token in a pass over so many sequences, of which one was measured."""
        known = self._extra_s
        return max(0.0, _COST * self._single_s[num_rows] / num_rows if known is None else known)

    def best_draft(
        self, rates: Iterable[float], num_rows: int, *, num_drafting: int = 1, token_s: float = 0.0
    ) -> tuple[int, float]:
        """Return how many tokens to propose, and the seconds that each token of the pass gains by it.

        If tokens are right with probabilities p, q, r, ... as long as all before them are, a pass over a draft of three
        for D of R sequences gives R + D (p + pq + pqr) tokens. Both numbers are 0 where that is slower than one token a
        sequence.

        Args:
            rates: p, q, r, ...; as many as tokens may be proposed.
            num_rows: R, of which a pass was measured.
            num_drafting: D.
            token_s: Seconds that it takes to propose one token for each of them.
        """
        single_s, length_s = self._single_s[num_rows], num_drafting * self.extra_s(num_rows) + token_s
        best, best_s = 0, single_s / num_rows
        power, expected, seconds = 1.0, float(num_rows), single_s
        for length, rate in enumerate(rates, 1):
            power *= rate
            expected += power * num_drafting
            seconds += length_s
            if seconds < best_s * expected:
                best, best_s = length, seconds / expected
            elif power < _LEAST_POWER:
                break
        return best, single_s / num_rows - best_s


class Proposer(Protocol):
    """Proposes the next tokens of one engine's sequences; `policy` decides how many."""

    @property
    def policy(self) -> ProposerPolicy: ...  # noqa: D102

    def reserve(self, num_blocks: int) -> None:
        """Make room for sequences with so many blocks of the model's cache; MemoryBudgetError without that memory."""

    def propose(self, sequences: Sequence[EngineSequence], num_rows: int) -> list[Draft]:
        """Return a draft for each sequence; `num_rows` sequences get a token in the same pass."""
        ...

    def release(self, sequence: EngineSequence) -> None:
        """Free what is held for a sequence that ends or is preempted."""


def averaged(average: float | None, newest: float, weight: float = _WEIGHT) -> float:
    """Return a moving average with its newest measurement."""
    return newest if average is None else average + weight * (newest - average)


def _checked_length(num_tokens: object) -> int:
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or not 1 <= num_tokens <= MAX_NUM_TOKENS:
        raise OptionError(
            f"num_tokens is {show_value(num_tokens)}; expected how many tokens to guess at once, 1 to {MAX_NUM_TOKENS}"
        )
    return num_tokens


def check_exact(runner: Runner, policy: ProposerPolicy, *, is_greedy: bool) -> None:
    """Raise an OptionError if drafts could change the tokens.

    `is_greedy` says that all sequences take the most probable token, and that keys and values are kept as they are.
    """
    if not runner.is_row_exact and not (is_greedy and runner.dtype == "float32"):
        raise OptionError(
            f"{policy.option} could change the tokens here, as PyTorch rounds a pass over several tokens otherwise"
            f" than a pass over one (in {runner.dtype}, at this temperature); take float32 and temperature 0, or "
            "on a CPU weights that the C kernels multiply (`llamarium doctor`)"
        )
