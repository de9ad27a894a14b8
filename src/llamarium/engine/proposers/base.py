"""The interface of speculative decoding, and the choice of the draft length. Torch-free.

A forward pass reads every weight once, whether it runs one token or sixteen. So a step runs a sequence's last token
together with draft tokens. The sampler then samples position by position, as without a draft: while it samples the
draft's token, the next logits are available already. The first different token ends the draft. Slots that the KV cache
holds beyond it are overwritten before they are read, because a slot belongs to a position.

So a draft never changes which token is sampled, only when its logits are computed; sampling parameters, penalties and
seeds need no code here. With a row-exact runner (`Runner.is_row_exact`) the tokens equal those without a draft at any
temperature. PyTorch rounds products of several tokens differently from those of one. In float32 this moves a logit by
about 1e-5, which changes the most likely token about once in 100,000 tokens, but a sampled one about once in 1,000. So
with PyTorch, drafts are allowed in float32 at temperature 0 only; in half precision, where ties are frequent, they are
refused.

Source: speculative decoding (https://arxiv.org/abs/2211.17192), with greedy (one-hot) drafts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Protocol

from llamarium.engine.request import Draft, EngineSequence
from llamarium.errors import OptionError, show_value
from llamarium.runtime.runner import CacheDtype, Runner

MAX_NUM_TOKENS = 64
"""Maximum draft length; tokens further on are rarely accepted."""

TRIAL_TOKENS = 2
"""Length of a trial draft, which measures the cost of drafts that may not pay off."""

MAX_COST = 0.01
"""Fraction of the time that drafts may cost if they do not pay off."""

_COST = 0.25  # of a pass: the assumed cost of one more token in it, until measured; a few tenths on most machines
# Weights of the newest measurement in the moving averages. A slow pass may have been interrupted by another program.
_WEIGHT, _WEIGHT_OF_SLOWER = 1 / 6, 1 / 24
_MOST_EXTRA = 4.0  # passes: upper bound of the measured cost of one more token
_LEAST_POWER = 0.02  # a token accepted with a lower probability does not affect the draft length


class ProposerPolicy(ABC):
    """Chooses the draft length from the cost of passes and the acceptance rate, and counts results.

    One object may serve several engines, one after another, and keeps its measurements.

    Args:
        num_tokens: Maximum draft length, 1 to 64; OptionError otherwise.

    Attributes:
        option: Name of the option that enables it, for messages.
        passes: Passes that decode.
        drafted: Draft tokens verified in them.
        accepted: Draft tokens accepted; each saved a pass.
    """

    option: ClassVar[str]

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = _checked_length(num_tokens)
        self.passes = self.drafted = self.accepted = 0
        self._single_s: dict[int, float] = {}  # seconds of a pass with one token per sequence, by number of sequences
        self._extra_s: float | None = None  # seconds of each additional token in a pass

    def counts(self) -> dict[str, int]:
        """Return `passes`, `drafted` and `accepted`."""
        return {"passes": self.passes, "drafted": self.drafted, "accepted": self.accepted}

    @property
    def keeps_texts(self) -> bool:
        """Whether prompts and answers stay in memory for later drafts."""
        return False

    @property
    def num_pool_tokens(self) -> int:
        """Number of tokens kept for later drafts."""
        return 0

    @abstractmethod
    def open(
        self, num_blocks: int, block_size: int, kv_cache_dtype: CacheDtype, clock: Callable[[], float]
    ) -> "Proposer":
        """Return a proposer for an engine with such a KV cache; MemoryBudgetError if there is not enough memory."""

    def check(self, draft: Draft, place: int, token_id: int) -> bool:
        """Return whether the sampled token equals the draft token at `place` and was verified in this step."""
        is_ahead = place < draft.num_scheduled and token_id == draft.ids[place]
        self.accepted += is_ahead
        return is_ahead

    def count_pass(self, num_drafted: int) -> None:
        """Count a decoding pass that verified `num_drafted` draft tokens."""
        self.passes += 1
        self.drafted += num_drafted

    def record_pass(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        """Record the time of a pass over one token per sequence and `num_drafted` draft tokens, without prompts."""
        single_s = self._single_s.get(num_rows)
        if not num_drafted:
            is_slower = single_s is not None and seconds > single_s
            self._single_s[num_rows] = averaged(single_s, seconds, _WEIGHT_OF_SLOWER if is_slower else _WEIGHT)
        elif single_s is not None:
            self._extra_s = averaged(self._extra_s, min(_MOST_EXTRA * single_s, (seconds - single_s) / num_drafted))

    def single_s(self, num_rows: int) -> float | None:
        """Return the seconds of a pass over one token of each of `num_rows` sequences; None if not measured."""
        return self._single_s.get(num_rows)

    def extra_s(self, num_rows: int) -> float:
        """Return the seconds of each additional token in a pass over `num_rows` sequences (one must be measured)."""
        measured_s = self._extra_s
        return max(0.0, _COST * self._single_s[num_rows] / num_rows if measured_s is None else measured_s)

    def best_draft(
        self, rates: Iterable[float], num_rows: int, *, num_drafting: int = 1, token_s: float = 0.0
    ) -> tuple[int, float]:
        """Return the best draft length, and the seconds that it saves per generated token; zeros if drafts do not pay.

        If draft tokens are accepted with probabilities p, q, r, ..., each given that all before it are, a pass with a
        draft of three tokens for D of R sequences yields R + D (p + pq + pqr) tokens.

        Args:
            rates: p, q, r, ...; as many as tokens may be proposed.
            num_rows: R, for which a pass was measured.
            num_drafting: D.
            token_s: Seconds it takes to propose one token for each of the D sequences.
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
    """Proposes draft tokens for the sequences of one engine; `policy` decides how many."""

    @property
    def policy(self) -> ProposerPolicy: ...  # noqa: D102

    def reserve(self, num_blocks: int) -> None:
        """Grow to `num_blocks` blocks, as the model's KV cache has; MemoryBudgetError if there is not enough memory."""

    def propose(self, sequences: Sequence[EngineSequence], num_rows: int) -> list[Draft]:
        """Return a draft for each sequence; `num_rows` sequences decode in the same pass."""
        ...

    def release(self, sequence: EngineSequence) -> None:
        """Free the state of a sequence that ends or is preempted."""


def averaged(average: float | None, newest: float, weight: float = _WEIGHT) -> float:
    """Return a moving average updated with a measurement."""
    return newest if average is None else average + weight * (newest - average)


def _checked_length(num_tokens: object) -> int:
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or not 1 <= num_tokens <= MAX_NUM_TOKENS:
        raise OptionError(
            f"num_tokens is {show_value(num_tokens)}; expected a draft length of 1 to {MAX_NUM_TOKENS} tokens"
        )
    return num_tokens


def check_exact(runner: Runner, policy: ProposerPolicy, *, is_greedy: bool) -> None:
    """Raise an OptionError if speculative decoding could change the tokens.

    `is_greedy` is True if all sequences use temperature 0 and the KV cache is not quantized.
    """
    if not runner.is_row_exact and not (is_greedy and runner.dtype == "float32"):
        raise OptionError(
            f"{policy.option} could change the tokens here, because PyTorch rounds several tokens in one pass "
            f"differently from single ones (in {runner.dtype}, at this temperature); use float32 and temperature 0, or "
            "weights that the C kernels run on a CPU (`llamarium doctor`)"
        )
