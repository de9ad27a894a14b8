"""The reader of Meta's original folders: `params.json` and `consolidated.NN.pth`.

Large models were trained on several GPUs, each with a slice of every matrix, and are published with one file per GPU.
Slices are concatenated when a tensor is read. Rows of q and k are permuted from interleaved to half-split RoPE order.

Source: llama-models, `models/llama3/model.py` (which layer is cut how: Column-, RowParallelLinear,
VocabParallelEmbedding) and transformers' `convert_llama_weights_to_hf.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.checkpoints.checkpoint import (
    FormatName,
    StoredTensor,
    TensorEntry,
    check_names,
    check_shapes,
    list_some,
    permuted_heads,
    select_weights,
    state_dict_key,
)
from llamarium.checkpoints.meta.config import meta_config
from llamarium.checkpoints.meta.file import read_meta_shard
from llamarium.checkpoints.storage import FLOATS, Bytes, equal_by_pieces, open_state, unpermute
from llamarium.config import EMBEDDING, HEAD
from llamarium.errors import CheckpointError, ModelNotFoundError, counted, escape
from llamarium.file_names import META_CONFIG, META_SHARDS, meta_shard_name

_NAMES = {"tok_embeddings.weight": EMBEDDING, "norm.weight": "model.norm.weight", "output.weight": HEAD}
_LAYER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
}
_ROW_PARALLEL = ("o_proj.weight", "down_proj.weight")  # cut along their inputs; norms are copied; all others along out


class MetaCheckpoint:
    """A Llama in Meta's original folder."""

    format: FormatName = "meta"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation_config: Mapping[str, Any] = {}
        files = _find_shards(path)
        self._states = {file: open_state(file) for file in files}
        shards = [read_meta_shard(file) for file in files]
        for file, shard in zip(files, shards, strict=True):
            check_names(file, shards[0], shard, f"the tensors of {files[0].name}")
        names = {name: state_dict_key(name, "layers", _LAYER_NAMES, _NAMES) for name in shards[0]}
        self._slices = {key: (name, [shard[name] for shard in shards]) for name, key in names.items()}
        # o_proj's width in one shard, and of the whole, a norm's length: the last shards may be missing
        shard_width, full_width = (
            self._width("model.layers.0.self_attn.o_proj.weight"),
            self._width("model.norm.weight"),
        )
        if shard_width and full_width % shard_width == 0 and full_width // shard_width > len(files):
            missing = [meta_shard_name(i) for i in range(len(files), full_width // shard_width)]
            raise CheckpointError(f"{escape(path)}: {counted(len(files), 'shard')}; {list_some(missing)} is missing")
        self._vocab_on_rows = self._width(EMBEDDING) == full_width  # Llama 2 cuts by features
        head = self._slices.pop(HEAD, None)
        tied = head is None or self._is_embedding(head[1])
        self.config = meta_config(path, self._shape(EMBEDDING)[0], tied)
        if head is not None and not self.config.tie_word_embeddings:
            self._slices[HEAD] = head
        elif not tied:
            raise CheckpointError(
                f"{escape(path)}: config.json says tie_word_embeddings true, but output.weight differs from "
                "tok_embeddings.weight; set it to false to use that head"
            )
        entries = {key: self._entry(key, files[0]) for key in self._slices}
        self.entries: Mapping[str, TensorEntry] = select_weights(path, self.config, entries, self._is_zero)
        check_shapes(path, self.config, {key: entry.shape for key, entry in self.entries.items()})

    def stored(self, key: str, *, copy: bool = False) -> StoredTensor:
        """Return a weight's rows, its slices put together; see `Checkpoint.stored`."""
        entry = self.entries[key]
        slices, dim = self._slices[key][1], self._dim(key)
        values = slices[0] if len(slices) == 1 or dim is None else np.concatenate(slices, dim)
        if (heads := permuted_heads(key, self.config)) is not None:
            values = unpermute(values, heads)
        elif copy and values is slices[0]:
            values = values.copy()
        num_rows = entry.shape[0] if len(entry.shape) == 2 else 1
        return StoredTensor(entry.dtype, entry.shape, values.view(np.uint8).reshape(num_rows, -1))

    def check_unchanged(self) -> None:
        """Check that all shards are still what was opened; see `Checkpoint.check_unchanged`."""
        for file, state in self._states.items():
            state.check(file)

    def _is_zero(self, entry: TensorEntry) -> bool:
        return not any(part.any() for part in self._slices[entry.key][1])

    def _dim(self, key: str) -> int | None:
        """Return the dimension along which `key` is cut, or None where every shard has a copy."""
        if key.endswith("norm.weight"):
            return None
        if key == EMBEDDING:
            return 0 if self._vocab_on_rows else 1
        return 1 if key.endswith(_ROW_PARALLEL) else 0

    def _width(self, key: str) -> int:
        if key not in self._slices or not self._slices[key][1][0].ndim:
            raise CheckpointError(f"{escape(self.path)}: {key} is missing; this is no whole Llama")
        return self._slices[key][1][0].shape[-1]

    def _shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a whole weight; its slices must be alike."""
        name, slices = self._slices[key]
        first, dim = slices[0], self._dim(key)
        if any((s.shape, s.dtype) != (first.shape, first.dtype) for s in slices):
            variants = list_some(str((tuple(s.shape), s.dtype)) for s in slices)
            raise CheckpointError(f"{escape(self.path)}: the slices of {escape(name, 80)} differ: {variants}")
        shape = list(first.shape)
        if dim is None:
            if not all(equal_by_pieces(_bytes(s), _bytes(first)) for s in slices):
                raise CheckpointError(
                    f"{escape(self.path)}: the shards disagree on {escape(name, 80)}; expected copies"
                )
        elif dim < len(shape):
            shape[dim] *= len(slices)
        return tuple(shape)

    def _is_embedding(self, head: list[NDArray[Any]]) -> bool:
        """Say whether a head is the embedding table once more, as in Llama 3.2 1B and 3B."""
        pairs = zip(head, self._slices[EMBEDDING][1], strict=True)
        return self._vocab_on_rows and all(equal_by_pieces(*map(_bytes, pair)) for pair in pairs)

    def _entry(self, key: str, file: Path) -> TensorEntry:
        name, slices = self._slices[key]
        dtype = next(label for label, dtype in FLOATS.items() if dtype == slices[0].dtype)
        num_bytes = sum(s.nbytes for s in slices)
        permuted = permuted_heads(key, self.config) is not None
        return TensorEntry(key, self._shape(key), dtype, num_bytes, file, name, permuted)


def _bytes(values: NDArray[Any]) -> Bytes:
    return values.reshape(-1).view(np.uint8)


def _find_shards(path: Path) -> list[Path]:
    if not (path / META_CONFIG).exists():
        raise ModelNotFoundError(f"{escape(path)}: consolidated.*.pth without params.json; Meta publishes both")
    names = sorted(file.name for file in path.glob(META_SHARDS))
    expected = [meta_shard_name(i) for i in range(len(names))]
    if names != expected or not names:
        missing = [name for name in expected if name not in names]
        raise CheckpointError(f"{escape(path)}: shards are {list_some(names)}; {list_some(missing)} is missing")
    return [path / name for name in names]
