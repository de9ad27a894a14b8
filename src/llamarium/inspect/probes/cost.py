"""What one more token costs: with the KV cache, and with all tokens computed again.

Operations are counted from the shapes (`cost.py`). Nothing is timed: for texts of a few tokens, a time shows what else
the machine does; `llamarium bench` measures speed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llamarium.cost import flops
from llamarium.inspect.forward import KeptSequence, Memory, advance
from llamarium.inspect.numbers import JsonView
from llamarium.inspect.tokens import check_ids
from llamarium.runtime.runner import CacheDtype, Logits, Runner

_CHUNK = 256  # tokens of a batch, so that others wait for no more than one


@dataclass(frozen=True, slots=True)
class TokenCost(JsonView):
    """What the last token of a text costs.

    Attributes:
        num_tokens: T, the tokens of the text with it.
        flops: Operations with the cache: of the last token alone, over T keys.
        flops_without: Operations without it: of all T tokens. Logits are of the last one in both.
        cache_bytes_per_token: The token's keys and values, in all layers.
        largest_difference: Between the logits of the two ways; 0 where the runner is exact by rows.
    """

    num_tokens: int
    flops: int
    flops_without: int
    cache_bytes_per_token: int
    largest_difference: float


def token_cost(
    runner: Runner,
    ids: Sequence[int],
    *,
    adapter: int = -1,
    kv_cache_dtype: CacheDtype = "auto",
) -> TokenCost:
    """Count what the last token of a text costs, and compare the logits of both ways; see `Inspector.token_cost`.

    Raises:
        InputError: For invalid ids.
        ContextLengthError: If there are more ids than the context holds.
        MemoryBudgetError: If memory does not hold its cache.
    """
    token_ids = check_ids(runner.config, ids)
    memory = Memory(runner, len(token_ids), kv_cache_dtype)
    sequence = memory.begin(token_ids, len(token_ids), adapter)
    without = _run_after(runner, memory, sequence, 0)
    cached = _run_after(runner, memory, sequence, len(token_ids) - 1)
    return TokenCost(
        num_tokens=len(token_ids),
        flops=flops(runner.config, 1, len(token_ids) - 1),
        flops_without=flops(runner.config, len(token_ids)),
        cache_bytes_per_token=memory.cache.num_bytes // (memory.cache.num_blocks * memory.cache.block_size),
        largest_difference=float(abs(cached - without).max()),
    )


def _run_after(runner: Runner, memory: Memory, sequence: KeptSequence, num_cached: int) -> Logits:
    """Run the tokens after the cached ones, and return the last token's logits, (1, V)."""
    sequence.num_computed = num_cached
    return advance(runner, memory.cache, [sequence], _CHUNK)
