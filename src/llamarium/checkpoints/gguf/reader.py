"""A GGUF file, or all parts of one, as a `Checkpoint`: names in Hugging Face's, rows of q and k in half-split order.

Source: llama.cpp, `gguf-py/gguf/tensor_mapping.py` (names) and `convert_hf_to_gguf.py`, `LlamaModel.permute`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llamarium.checkpoints.checkpoint import (
    FormatName,
    StoredTensor,
    TensorEntry,
    check_shapes,
    permuted_heads,
    select_weights,
    state_dict_key,
)
from llamarium.checkpoints.gguf.config import ROPE_FREQS, gguf_config
from llamarium.checkpoints.gguf.file import GGUFTensor
from llamarium.checkpoints.gguf.split import read_whole_gguf
from llamarium.checkpoints.storage import TensorFile, unpermute
from llamarium.config import EMBEDDING, HEAD
from llamarium.errors import CheckpointError, escape

NAMES = {"token_embd.weight": EMBEDDING, "output_norm.weight": "model.norm.weight", "output.weight": HEAD}
LAYER_NAMES = {
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
        if (found := file.tensors.get(ROPE_FREQS)) is not None:
            if found.type_name != "F32":
                raise CheckpointError(f"{escape(path)}: {ROPE_FREQS} is {found.type_name}; expected F32")
            factors = self._files[found.path].array(found.offset, found.shape, np.float32, copy=True)
        self.config = gguf_config(file, factors)
        entries = {entry.key: entry for entry in map(self._entry, file.tensors.values())}
        self.entries: Mapping[str, TensorEntry] = select_weights(path, self.config, entries, self._is_zero)
        check_shapes(path, self.config, {key: entry.shape for key, entry in self.entries.items()})

    def stored(self, key: str, *, copy: bool = False) -> StoredTensor:
        """Return a weight's bytes by row; see `Checkpoint.stored`."""
        entry = self.entries[key]
        tensor = self._tensors[entry.name]
        heads = permuted_heads(key, self.config)
        rows = self._files[tensor.path].rows(
            tensor.offset, tensor.num_bytes, entry.shape, entry.dtype, copy=copy or heads is not None
        )
        rows = rows if heads is None else unpermute(rows, heads)
        return StoredTensor(entry.dtype, entry.shape, rows)

    def check_unchanged(self) -> None:
        """Check that the files are still what was opened; see `Checkpoint.check_unchanged`."""
        for file in self._files.values():
            file.check_unchanged()

    def _is_zero(self, entry: TensorEntry) -> bool:
        tensor = self._tensors[entry.name]
        return not self._files[tensor.path].view(tensor.offset, tensor.num_bytes).any()

    def _entry(self, tensor: GGUFTensor) -> TensorEntry:
        key = state_dict_key(tensor.name, "blk", LAYER_NAMES, NAMES)
        permuted = permuted_heads(key, self.config) is not None
        return TensorEntry(key, tensor.shape, tensor.type_name, tensor.num_bytes, tensor.path, tensor.name, permuted)
