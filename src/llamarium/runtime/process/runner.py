"""A runner whose passes run in another process: functions that are not the library's own compute. Never torch."""

# ruff: noqa: D102 - `Runner` documents its methods

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

import numpy as np

from llamarium.config import EMBEDDING, HEAD, ModelConfig
from llamarium.errors import InputError, OptionError
from llamarium.quant.codes import Codes
from llamarium.runtime.adapter import Adapter
from llamarium.runtime.batch import BLOCK_SIZE, Batch
from llamarium.runtime.process.cache import SharedCache
from llamarium.runtime.process.child import Child
from llamarium.runtime.runner import Cache, CacheDtype, Floats, HeldWeight, Logits
from llamarium.runtime.taps import Taps, sizes_of


class ProcessRunner:
    """Runs a model in a process, in float32.

    Args:
        shapes: Of all weights by key, as the process has them.
        name: Display name.
        weights_of: The model whose weights they are, which can be loaded beside.
    """

    is_row_exact: bool = False
    reads_in_place: bool = False
    takes_edits: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    kv_dtype: str = "float32"
    input_bits: None = None
    adapters: tuple[Adapter, ...] = ()

    def __init__(
        self, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], child: Child, name: str, weights_of: str
    ) -> None:
        self._config, self._child, self.name, self.weights_of = config, child, name, weights_of
        self.weights = {key: HeldWeight(key, "F32", shape, 4 * math.prod(shape)) for key, shape in shapes.items()}
        self.addresses: Collection[int] = ()

    @property
    def config(self) -> ModelConfig:
        return self._config

    def new_cache(self, num_blocks: int, dtype: CacheDtype = "auto", block_size: int = BLOCK_SIZE) -> SharedCache:
        """Return an empty cache; see `Runner.new_cache`. OptionError for 8 bits."""
        if dtype != "auto":
            raise OptionError(
                f"kv_cache_dtype is {dtype}, and {self.name} keep keys and values in float32; leave it out"
            )
        return SharedCache(self.config, num_blocks, block_size)

    def run(self, batch: Batch, cache: Cache, taps: Taps | None = None) -> Logits:
        """Run the batch's tokens; see `Runner.run`. FunctionError if a function does not return a result."""
        if not isinstance(cache, SharedCache) or cache.config != self.config:
            raise InputError("the cache is another model's; expected one that this runner's new_cache made")
        num_tokens, keys = len(batch.token_ids), [] if taps is None else list(taps.wanted)
        logits_WV = np.empty((len(batch.logit_rows), self.config.vocab_size), np.float32)
        tapped = [np.empty((num_tokens, *sizes_of(name, self.config)), np.float32) for name, _ in keys]
        arrays = (batch.token_ids, batch.positions, batch.sequences, batch.block_tables, batch.logit_rows)
        header = {"ask": "run", "block_size": cache.block_size, "taps": keys}
        self._child.ask(header, arrays, [logits_WV, *tapped], cache.descriptor, num_tokens=num_tokens)
        for key, array in zip(keys, tapped, strict=True):
            assert taps is not None
            taps.put(key, array)
        return logits_WV

    def read_stream(self, x_MD: Floats) -> Floats:
        logits_MV = np.empty((len(x_MD), self.config.vocab_size), np.float32)
        self._child.ask({"ask": "read_stream"}, [x_MD], [logits_MV], num_tokens=len(x_MD))
        return logits_MV

    def dequantize(self, key: str, rows: Sequence[int] | None = None, *, adapted: bool = False) -> Floats:
        shape = self.weights[EMBEDDING if key == HEAD and self._config.tie_word_embeddings else key].shape
        wanted = [] if rows is None else [np.arange(shape[0])[np.array(rows, np.int64)]]  # IndexError, as promised
        found = np.empty(shape if rows is None else (len(rows), *shape[1:]), np.float32)
        self._child.ask({"ask": "weight", "key": key}, wanted, [found])
        return found

    def product(self, key: str, x_MI: Floats) -> Floats:
        return x_MI @ self.dequantize(key).T

    def codes(self, key: str, rows: Sequence[int]) -> Codes:
        """Refuse: the functions multiply by numbers."""
        raise InputError(f"{self.name} multiply by float32 weights, which have no codes; load {self.weights_of}")

    def backend_of(self, key: str) -> str:
        return self.name

    def with_adapters(self, adapters: Sequence[Adapter], default: int = -1) -> NoReturn:
        """Refuse: no step has adapters."""
        raise OptionError(f"{self.name} take no adapters; load {self.weights_of} with them instead")

    def fresh(self) -> "ProcessRunner":
        return copy.copy(self)
