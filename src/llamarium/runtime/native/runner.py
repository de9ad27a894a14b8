"""The C kernels' runner: one call runs a whole batch, from ids to logits. Torch-free.

A decode step costs mainly the reading of the weights; starting hundreds of small operations from Python would cost as
much again. So C gets the addresses of all weights once, and those of a batch's arrays with each call. The residual
stream, activations and logits are float32, whereas the PyTorch modules round to the model's dtype after each operation.
"""

# ruff: noqa: D102 - `Runner` documents its methods

import copy
import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.config import EMBEDDING, HEAD, ModelConfig
from llamarium.errors import InputError
from llamarium.kernels import native, structs
from llamarium.kernels.input_bits import INPUT_BITS, InputBits
from llamarium.kernels.threads import num_threads
from llamarium.quant.codes import Codes, unpack_rows
from llamarium.quant.formats import PACKED_FORMATS
from llamarium.quant.packing import matrix_of, to_float32
from llamarium.rope import attention_factor, rope_frequencies
from llamarium.runtime.adapter import LAYER_LINEARS, Adapter, LowRank
from llamarium.runtime.batch import BLOCK_SIZE, Batch
from llamarium.runtime.native.adapters import describe, describe_edits
from llamarium.runtime.native.cache import C_DTYPES, NativeCache
from llamarium.runtime.native.weights import Weight
from llamarium.runtime.runner import Cache, CacheDtype, Floats, Logits
from llamarium.runtime.taps import Key, Taps, sizes_of


class NativeRunner:
    """Runs a model with the C kernels on a CPU.

    Args:
        config: The model configuration.
        weights: All weights by key, without a tied head.
        adapters: The adapters that `Batch.adapters` indexes.
        default_adapter: Index of the adapter for batches without `adapters`, -1 for none.
        input_bits: Bits to which activations are quantized before they are multiplied by packed weights: 8 is faster
            in prefill, 16 is closer to float32.
    """

    is_row_exact: bool = True
    is_native: bool = True
    takes_edits: bool = True
    device: str = "cpu"
    dtype: str = "float32"

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        adapters: Sequence[Adapter] = (),
        default_adapter: int = -1,
        input_bits: InputBits = INPUT_BITS,
    ) -> None:
        self.config, self.weights = config, weights
        self.adapters: tuple[Adapter, ...] = tuple(adapters)
        self._default_adapter = default_adapter
        self._bits: InputBits = input_bits
        self._fingerprints = dict[int, str]()  # of adapters, computed when needed
        self._frequencies = rope_frequencies(config)
        vectors = {key: weight for key, weight in weights.items() if len(weight.shape) == 1}
        # C reads norms as float32 or as bfloat16 bits, and biases as float32.
        self._norms = {k: w.data.astype(np.float32) if w.type_name == "F16" else w.data for k, w in vectors.items()}
        self._biases = {k: to_float32(w.data) for k, w in vectors.items() if k.endswith(".bias")}
        self._layers = (structs.CLayer * config.num_hidden_layers)(*map(self._layer, range(config.num_hidden_layers)))
        norm = self._norms["model.norm.weight"]
        self.kv_dtype = "bfloat16" if norm.dtype == np.uint16 else "float32"
        self._model = structs.CModel(
            config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads,
            config.num_key_value_heads, config.head_dim, config.rms_norm_eps, C_DTYPES[self.kv_dtype],
            self._frequencies.ctypes.data, attention_factor(config), norm.ctypes.data, self._layers,
            self._matrix(EMBEDDING), self._matrix(HEAD),
            len(adapters), describe(adapters, config.num_hidden_layers), input_bits, config.sliding_window or 0,
        )  # fmt: skip

    @property
    def input_bits(self) -> InputBits | None:
        return self._bits if any(weight.type_name in PACKED_FORMATS for weight in self.weights.values()) else None

    @property
    def name(self) -> str:
        return f"C ({native.kernels()})"

    def new_cache(self, num_blocks: int, dtype: CacheDtype = "auto", block_size: int = BLOCK_SIZE) -> NativeCache:
        return NativeCache(self.config, num_blocks, self.kv_dtype if dtype == "auto" else dtype, block_size)

    def run(self, batch: Batch, cache: Cache, taps: Taps | None = None) -> Logits:
        """Run the batch's tokens; see `Runner.run`. InputError if the KV cache belongs to another model."""
        if not isinstance(cache, NativeCache) or cache.config != self.config:
            raise InputError("the KV cache belongs to another model; expected one from this runner's new_cache")
        logits_WV = np.empty((len(batch.logit_rows), self.config.vocab_size), np.float32)
        sizes = {key: (len(batch.token_ids), *sizes_of(key[0], self.config)) for key in (taps.keys if taps else ())}
        tapped = {key: np.empty(shape, np.float32) for key, shape in sizes.items()}
        if batch.adapters is None and self._default_adapter >= 0:
            batch = replace(batch, adapters=np.full(len(batch.block_tables), self._default_adapter, np.int32))
        described = _describe_taps(tapped, self.config) if tapped else None
        edits = None if batch.edits is None else describe_edits(batch.edits)
        adapters = None if batch.adapters is None else batch.adapters.ctypes.data
        c_batch = structs.CBatch(  # it refers to the batch's arrays
            len(batch.token_ids), *batch.block_tables.shape, len(batch.logit_rows), batch.token_ids.ctypes.data,
            batch.positions.ctypes.data, batch.sequences.ctypes.data, batch.block_tables.ctypes.data,
            batch.logit_rows.ctypes.data, adapters, edits,
        )  # fmt: skip
        native.run(self._model, cache.described, c_batch, described, logits_WV.ctypes.data)
        for key, array in tapped.items():
            assert taps is not None
            taps.put(key, array)
        return logits_WV

    @property
    def addresses(self) -> list[int]:
        copied = {key for key, bias in self._biases.items() if bias is not self.weights[key].data}
        return [weight.data.ctypes.data for key, weight in self.weights.items() if key not in copied]

    def dequantize(self, key: str, rows: Sequence[int] | None = None, *, adapted: bool = False) -> Floats:
        weight = self._weight(key)
        if len(weight.shape) == 1:
            return to_float32(weight.data)
        row_indices = np.arange(weight.shape[0]) if rows is None else np.array(rows, np.int64)
        values = native.lookup(self._matrix(key), row_indices)
        correction = self._correction(key) if adapted else None
        return (
            values
            if correction is None
            else correction.added_to(values, correction.b[row_indices] @ correction.a, row_indices)
        )

    def product(self, key: str, x_MI: Floats) -> Floats:
        matrix = self._matrix(key)
        matrix.bias = None
        out_MO = native.product(matrix, np.ascontiguousarray(x_MI, np.float32), self._bits)
        correction = self._correction(key)
        return out_MO if correction is None else correction.added_to(out_MO.T, correction.b @ (correction.a @ x_MI.T)).T

    def codes(self, key: str, rows: Sequence[int]) -> Codes:
        weight = self._weight(key)
        if weight.type_name not in PACKED_FORMATS:
            raise InputError(f"{key} is stored as {weight.type_name}, which has no codes; load the model with quantize")
        return unpack_rows(weight.data, np.array(rows, np.int64), PACKED_FORMATS[weight.type_name])

    def read_stream(self, x_MD: Floats) -> Floats:
        squares_M1 = np.square(x_MD).mean(-1, keepdims=True)
        factor_M1 = (
            1 / np.sqrt(squares_M1 + np.float32(self.config.rms_norm_eps)) + 0 * squares_M1
        )  # NaN if it overflowed
        return self.product(HEAD, x_MD * (factor_M1 * to_float32(self.weights["model.norm.weight"].data)))

    def backend_of(self, key: str) -> str:
        return self.name

    def with_adapters(self, adapters: Sequence[Adapter], default: int = -1) -> "NativeRunner":
        return NativeRunner(self.config, self.weights, adapters, default, self._bits)

    def replaced(self, config: ModelConfig, weights: Mapping[str, Weight]) -> "NativeRunner":
        """Return a runner for another model with the same adapters and options."""
        return NativeRunner(config, weights, self.adapters, self._default_adapter, self._bits)

    def fingerprint(self) -> str:
        """Return a hash of everything that keys and values depend on besides tokens and adapters; reads all weights."""
        weights = [self.weights[key] for key in sorted(self.weights)]
        described = [(weight.key, weight.type_name, weight.shape) for weight in weights]
        identity = self.config, self._bits, native.arithmetic(), described
        return _sha256(identity, [self._frequencies, *(weight.data for weight in weights)])

    def adapter_fingerprint(self, adapter: int) -> str:
        """Return a hash of the adapter with this index, or of the default adapter for -1."""
        index = adapter if adapter >= 0 else self._default_adapter
        if index >= 0 and index not in self._fingerprints:
            parts = sorted(self.adapters[index].items())
            arrays = [array for _, correction in parts for array in correction.arrays()]
            self._fingerprints[index] = _sha256([(name, correction.scale) for name, correction in parts], arrays)
        return self._fingerprints.get(index, "")

    def fresh(self) -> "NativeRunner":
        return copy.copy(self)

    def _correction(self, key: str) -> LowRank | None:
        """Return the default adapter's correction of a matrix, if any."""
        adapter = self.adapters[self._default_adapter] if self._default_adapter >= 0 else {}
        return adapter.get(key.removesuffix(".weight"))

    def _weight(self, key: str) -> Weight:
        is_tied_head = key == HEAD and self.config.tie_word_embeddings
        return self.weights[EMBEDDING if is_tied_head else key]

    def _layer(self, layer: int) -> structs.CLayer:
        norms = ("input_layernorm", "post_attention_layernorm")
        addresses = [self._norms[f"model.layers.{layer}.{name}.weight"].ctypes.data for name in norms]
        matrices = {key: self._matrix(f"model.layers.{layer}.{name}.weight") for key, name in LAYER_LINEARS.items()}
        return structs.CLayer(*addresses, **matrices)

    def _matrix(self, key: str) -> structs.CMatrix:
        weight, bias = self._weight(key), self._biases.get(_bias_key(key))
        matrix = matrix_of(weight.type_name, weight.shape, weight.data.ctypes.data)
        matrix.bias = None if bias is None else bias.ctypes.data
        return matrix


def _bias_key(key: str) -> str:
    return key.removesuffix(".weight") + ".bias"


def _sha256(described: object, arrays: Sequence[NDArray[Any]]) -> str:
    """Return the hex SHA-256 of a description and of arrays, hashed in parallel."""
    with ThreadPoolExecutor(num_threads()) as pool:
        parts = [part.digest() for part in pool.map(hashlib.sha256, [array.data for array in arrays])]
    return hashlib.sha256(repr((described, parts)).encode()).hexdigest()


def _describe_taps(tapped: Mapping[Key, Floats], config: ModelConfig) -> structs.CTaps:
    """Return the C struct with the addresses of the tapped activations."""
    layer_arrays = [
        tapped.get((name, layer)) for layer, name in product(range(config.num_hidden_layers), structs.TAPS_OF_A_LAYER)
    ]
    addresses = (ctypes.c_void_p * len(layer_arrays))(
        *(None if array is None else array.ctypes.data for array in layer_arrays)
    )
    outer_arrays = [tapped.get((name, None)) for name in ("embed", "final_norm")]
    return structs.CTaps(*(None if array is None else array.ctypes.data for array in outer_arrays), addresses)
