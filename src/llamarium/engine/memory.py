"""How much memory keys and values get. Never torch."""

from llamarium.engine.engine import SERVING_BLOCK_SIZE
from llamarium.errors import OptionError
from llamarium.kernels.memory import free_bytes
from llamarium.runtime.batch import blocks_for
from llamarium.runtime.runner import CacheDtype, Runner

MAX_KV_BYTES = 4 * 2**30
"""Default limit of the memory of keys and values."""

_SHARE = 1 / 4  # of the memory that is free


def num_blocks_for(
    runner: Runner, kv_memory: int | None, max_num_seqs: int, kv_cache_dtype: CacheDtype, draft: Runner | None = None
) -> int:
    """Return how many blocks a cache gets; a draft model gets as many of its own out of the same memory.

    Arguments are as in `EngineOptions`; more blocks than `max_num_seqs` whole contexts take are never needed.
    OptionError if there is not room for one block.
    """
    caches = [one.new_cache(1, kv_cache_dtype, SERVING_BLOCK_SIZE) for one in (runner, draft) if one is not None]
    block_bytes = sum(cache.num_bytes for cache in caches)
    if kv_memory is None:
        kv_memory = max(block_bytes, min(MAX_KV_BYTES, round(_SHARE * free_bytes())))
    if kv_memory < block_bytes:
        raise OptionError(
            f"kv_memory is {kv_memory} bytes; expected at least {block_bytes}, which keys and values of "
            f"{SERVING_BLOCK_SIZE} tokens take"
        )
    most = max_num_seqs * blocks_for(runner.config.max_position_embeddings, SERVING_BLOCK_SIZE)
    return min(kv_memory // block_bytes, most)
