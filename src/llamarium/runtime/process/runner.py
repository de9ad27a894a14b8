"""A runner whose passes run in another process, with functions that are not part of the library. Torch-free."""

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
    """Runs a model in another process, in float32.

    Args:
        config: The model configuration.
        shapes: Shapes of all weights by key, as in the process.
        child: The process.
        name: Display name.
        weights_of: Name of the model whose weights are used.
    """

    is_row_exact: bool = False
    is_native: bool = False
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
        """Return an empty KV cache; see `Runner.new_cache`. OptionError unless the dtype is "auto"."""
        if dtype != "auto":
            raise OptionError(f"kv_cache_dtype is {dtype}, but the KV cache of {self.name} is float32; leave it out")
        return SharedCache(self.config, num_blocks, block_size)

    def run(self, batch: Batch, cache: Cache, taps: Taps | None = None) -> Logits:
        """Run the batch's tokens; see `Runner.run`. FunctionError if a function fails."""
        if not isinstance(cache, SharedCache) or cache.config != self.config:
            raise InputError("the KV cache belongs to another model; expected one from this runner's new_cache")
        num_tokens, keys = len(batch.token_ids), [] if taps is None else list(taps.keys)
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
        row_arrays = (
            [] if rows is None else [np.arange(shape[0])[np.array(rows, np.int64)]]
        )  # raises the documented IndexError
        values = np.empty(shape if rows is None else (len(rows), *shape[1:]), np.float32)
        self._child.ask({"ask": "weight", "key": key}, row_arrays, [values])
        return values

    def product(self, key: str, x_MI: Floats) -> Floats:
        return x_MI @ self.dequantize(key).T

    def codes(self, key: str, rows: Sequence[int]) -> Codes:
        """Raise an InputError: the weights are float32."""
        raise InputError(f"the weights of {self.name} are float32, which has no codes; load {self.weights_of}")

    def backend_of(self, key: str) -> str:
        return self.name

    def with_adapters(self, adapters: Sequence[Adapter], default: int = -1) -> NoReturn:
        """Raise an OptionError: adapters are not supported."""
        raise OptionError(f"{self.name} does not support adapters; load {self.weights_of} with them instead")

    def fresh(self) -> "ProcessRunner":
        return copy.copy(self)
