"""A GGUF file, or all parts of one, as a `Checkpoint`: names in Hugging Face's, rows of q and k in half-split order.

Source: llama.cpp, `gguf-py/gguf/tensor_mapping.py` (names) and `convert_hf_to_gguf.py`, `LlamaModel.permute`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llamarium.checkpoints.checkpoint import (
    FormatName,
    StoredTensor,
    TensorEntry,
    check_shapes,
    expected_shapes,
    permuted_heads,
    select_weights,
    state_dict_key,
)
from llamarium.checkpoints.gguf.config import ROPE_FREQS, gguf_config
from llamarium.checkpoints.gguf.file import GGUFTensor
from llamarium.checkpoints.gguf.split import read_whole_gguf
from llamarium.checkpoints.storage import FLOATS, TensorFile, unpermute
from llamarium.config import EMBEDDING, HEAD
from llamarium.errors import CheckpointError, UnsupportedFormatError, escape

NAMES = {"token_embd.weight": EMBEDDING, "output_norm.weight": "model.norm.weight", "output.weight": HEAD}
_WEIGHT_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_BIAS_NAMES = {
    name.replace(".weight", ".bias"): key.replace(".weight", ".bias")
    for name, key in _WEIGHT_NAMES.items()
    if "_proj" in key
}
LAYER_NAMES = {**_WEIGHT_NAMES, **_BIAS_NAMES}


class FilePlace(NamedTuple):
    """The location of a weight's rows.

    Attributes:
        path: File.
        offset: Offset in the file, in bytes.
        head_rows: Rows per head if rows are in interleaved RoPE order (see `unpermute`), else 0.
    """

    path: Path
    offset: int
    head_rows: int


class GGUFCheckpoint:
    """A Llama in a GGUF file, or in all parts of a split one.

    Attributes:
        metadata: The file's metadata, whose `tokenizer.*` keys make its tokenizer.
    """

    format: FormatName = "gguf"

    def __init__(self, path: Path) -> None:
        file = read_whole_gguf(path)
        self.path = path
        self.metadata: Mapping[str, Any] = file.metadata
        self.generation_config: Mapping[str, Any] = {}
        self._tensors = file.tensors
        self._files = {part: TensorFile(part) for part in file.paths}
        factors = None
        if (tensor := file.tensors.get(ROPE_FREQS)) is not None:
            if tensor.type_name != "F32":
                raise CheckpointError(f"{escape(path)}: {ROPE_FREQS} is {tensor.type_name}; expected F32")
            factors = self._files[tensor.path].array(tensor.offset, tensor.shape, np.float32, copy=True)
        self.config = gguf_config(file, factors)
        entries = {entry.key: entry for entry in map(self._entry, file.tensors.values())}
        entries |= self._zero_biases(entries)
        self.entries: Mapping[str, TensorEntry] = select_weights(path, self.config, entries, self._is_zero)
        check_shapes(path, self.config, {key: entry.shape for key, entry in self.entries.items()})

    def stored(self, key: str, *, copy: bool = False) -> StoredTensor:
        """Return a weight's bytes by row; see `Checkpoint.stored`."""
        entry = self.entries[key]
        if entry.num_bytes == 0:
            return StoredTensor("F32", entry.shape, np.zeros((1, entry.shape[0] * 4), np.uint8))
        tensor = self._tensors[entry.name]
        heads = permuted_heads(key, self.config)
        rows = self._files[tensor.path].rows(
            tensor.offset, tensor.num_bytes, entry.shape, entry.dtype, copy=copy or heads is not None
        )
        if heads is not None:  # a bias moves as its rows do
            rows = unpermute(rows.reshape(entry.shape[0], -1), heads).reshape(rows.shape)
        return StoredTensor(entry.dtype, entry.shape, rows)

    def place(self, key: str) -> FilePlace:
        """Return the location of a weight's blocks."""
        tensor, heads = self._tensors[self.entries[key].name], permuted_heads(key, self.config)
        return FilePlace(tensor.path, tensor.offset, 0 if heads is None else tensor.shape[0] // heads)

    def check_unchanged(self) -> None:
        """See `Checkpoint.check_unchanged`."""
        for file in self._files.values():
            file.check_unchanged()

    def _is_zero(self, entry: TensorEntry) -> bool:
        tensor = self._tensors[entry.name]
        return not self._files[tensor.path].view(tensor.offset, entry.num_bytes).any()

    def _zero_biases(self, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
        """Return entries of the biases that a file with some biases leaves out, which are zero.

        A file may have those of q, k and v alone, for example, and a bias of no bytes takes no place in the file.
        """
        layers = {key.split(".")[2] for key in entries if key.startswith("model.layers.")}
        if len(layers) != self.config.num_hidden_layers:  # which is refused next
            return {}
        shapes = {key: shape for key, shape in expected_shapes(self.config).items() if key.endswith(".bias")}
        return {
            key: TensorEntry(key, shape, "F32", 0, self.path, "(none, zero)")
            for key, shape in shapes.items()
            if key not in entries
        }

    def _entry(self, tensor: GGUFTensor) -> TensorEntry:
        key = state_dict_key(tensor.name, "blk", LAYER_NAMES, NAMES)
        if key.endswith(".bias") and tensor.type_name not in FLOATS:
            raise UnsupportedFormatError(
                f"{escape(self.path)}: {escape(tensor.name, 80)} is {tensor.type_name}; expected floats for a bias"
            )
        permuted = permuted_heads(key, self.config) is not None
        return TensorEntry(key, tensor.shape, tensor.type_name, tensor.num_bytes, tensor.path, tensor.name, permuted)
