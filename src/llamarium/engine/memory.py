"""Size of the KV cache. Torch-free."""

from llamarium.engine.engine import SERVING_BLOCK_SIZE
from llamarium.errors import OptionError
from llamarium.kernels.memory import free_bytes
from llamarium.runtime.batch import blocks_for
from llamarium.runtime.runner import CacheDtype, Runner

MAX_KV_BYTES = 4 * 2**30
"""Default upper bound of the KV cache, in bytes."""

_SHARE = 1 / 4  # of the free memory


def num_blocks_for(
    runner: Runner, kv_memory: int | None, max_num_seqs: int, kv_cache_dtype: CacheDtype, draft: Runner | None = None
) -> int:
    """Return the number of blocks of the KV cache; a draft model gets as many from the same memory.

    Arguments are as in `EngineOptions`. The result is never more than `max_num_seqs` full contexts need.

    Raises:
        OptionError: If `kv_memory` is too small for one block.
    """
    caches = [model.new_cache(1, kv_cache_dtype, SERVING_BLOCK_SIZE) for model in (runner, draft) if model is not None]
    block_bytes = sum(cache.num_bytes for cache in caches)
    if kv_memory is None:
        kv_memory = max(block_bytes, min(MAX_KV_BYTES, round(_SHARE * free_bytes())))
    if kv_memory < block_bytes:
        raise OptionError(
            f"kv_memory is {kv_memory} bytes; expected at least {block_bytes}, the KV cache of "
            f"{SERVING_BLOCK_SIZE} tokens"
        )
    max_blocks = max_num_seqs * blocks_for(runner.config.max_position_embeddings, SERVING_BLOCK_SIZE)
    return min(kv_memory // block_bytes, max_blocks)
