"""What one more token costs: with the keys and values of those before it kept, and with all computed again.

Operations follow from the shapes (`cost.py`). Times are measured, on this machine, beside what else it does.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from llamarium.cost import flops
from llamarium.inspect.forward import KeptSequence, Memory, advance
from llamarium.inspect.numbers import JsonView
from llamarium.inspect.tokens import check_count, check_ids
from llamarium.runtime.runner import CacheDtype, Logits, Runner

_CHUNK = 256  # tokens of a batch, so that others wait for no more than one
_MAX_ROUNDS = 100


@dataclass(frozen=True, slots=True)
class TokenCost(JsonView):
    """What the last token of a text costs.

    Attributes:
        num_tokens: T, the tokens of the text with it.
        flops: Operations with the cache: of the last token alone, over T keys.
        flops_without: Operations without it: of all T tokens. Logits are of the last one in both.
        seconds: Measured with the cache, the median of the rounds.
        seconds_without: Measured without it, the median too.
        num_rounds: How often each was measured.
        cache_bytes_per_token: The token's keys and values, in all layers.
        largest_difference: Between the logits of the two ways; 0 where the runner is exact by rows.
    """

    num_tokens: int
    flops: int
    flops_without: int
    seconds: float
    seconds_without: float
    num_rounds: int
    cache_bytes_per_token: int
    largest_difference: float


def token_cost(
    runner: Runner,
    ids: Sequence[int],
    *,
    num_rounds: int = 3,
    within_s: float = math.inf,
    adapter: int = -1,
    kv_cache_dtype: CacheDtype = "auto",
) -> TokenCost:
    """Count and measure what the last token of a text costs; see `Inspector.token_cost`.

    No further round begins after `within_s` seconds. Nothing is run before the first one, whose passes may be slower.

    Raises:
        InputError: For invalid ids, or rounds out of range.
        ContextLengthError: If there are more ids than the context holds.
        MemoryBudgetError: If memory does not hold its cache.
    """
    check_count(num_rounds, "num_rounds", _MAX_ROUNDS)
    known = check_ids(runner.config, ids)
    memory = Memory(runner, len(known), kv_cache_dtype)
    sequence = memory.begin(known, len(known), adapter)
    begin = time.perf_counter()
    without, kept = list[tuple[float, Logits]](), list[tuple[float, Logits]]()
    for _ in range(num_rounds):  # in turn, so that both have the same of what else the machine does
        without.append(_timed(runner, memory, sequence, 0))
        kept.append(_timed(runner, memory, sequence, len(known) - 1))
        if time.perf_counter() - begin > within_s:
            break
    return TokenCost(
        num_tokens=len(known),
        flops=flops(runner.config, 1, len(known) - 1),
        flops_without=flops(runner.config, len(known)),
        seconds=statistics.median(seconds for seconds, _ in kept),
        seconds_without=statistics.median(seconds for seconds, _ in without),
        num_rounds=len(kept),
        cache_bytes_per_token=memory.cache.num_bytes // (memory.cache.num_blocks * memory.cache.block_size),
        largest_difference=float(abs(kept[0][1] - without[0][1]).max()),
    )


def _timed(runner: Runner, memory: Memory, sequence: KeptSequence, num_kept: int) -> tuple[float, Logits]:
    """Run the tokens after the kept ones; return the seconds, and the last token's logits."""
    sequence.num_computed = num_kept
    begin = time.perf_counter()
    logits_1V = advance(runner, memory.cache, [sequence], _CHUNK)
    float(logits_1V[0][0])  # sync: a GPU has answered only then
    return time.perf_counter() - begin, logits_1V
