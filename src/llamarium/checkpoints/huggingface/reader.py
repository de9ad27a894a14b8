"""A Hugging Face folder as a `Checkpoint`: `config.json` and safetensors or `pytorch_model.bin`, one file or several.

Keys need no mapping. With a `quantization_config` each Linear consists of several tensors, which
`checkpoints/huggingface/methods.py` combines; an unsupported quantization is an error that names it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from llamarium.checkpoints.checkpoint import (
    CONFIG_LIMIT_BYTES,
    FormatName,
    StoredTensor,
    TensorEntry,
    check_shapes,
    list_some,
    read_hf_config,
    select_weights,
)
from llamarium.checkpoints.huggingface.components import WeightGroup
from llamarium.checkpoints.huggingface.methods import quantization_of, read_groups, read_scheme
from llamarium.checkpoints.huggingface.safetensors_file import Located, read_safetensors
from llamarium.checkpoints.storage import FLOATS, TensorFile, equal_by_pieces
from llamarium.config import EMBEDDING, HEAD, read_json_object
from llamarium.errors import CheckpointError, ModelNotFoundError, UnsupportedFormatError, counted, escape, warn_caller
from llamarium.file_names import (
    ADAPTER_CONFIG,
    ANY_BIN,
    ANY_SAFETENSORS,
    BIN,
    BIN_INDEX,
    CONFIG,
    SAFETENSORS,
    SAFETENSORS_INDEX,
)

WEIGHT_FILES = (SAFETENSORS, SAFETENSORS_INDEX, BIN, BIN_INDEX)
"""Files with weights, or with an index of them; the first that exists is used."""


class HuggingFaceCheckpoint:
    """A Llama in a Hugging Face folder."""

    format: FormatName = "huggingface"

    def __init__(self, path: Path) -> None:
        self.path = path
        raw, self.config, self.generation_config = read_hf_config(path)
        quantization, source = quantization_of(raw, path / CONFIG)
        if quantization is not None:  # before the weights: the reason why a folder is not read
            read_scheme(quantization, source)
        self._tensors: dict[str, Located] = {}
        self._open(_only_file(path) or _shards(path))
        self._drop_copied_head()
        self._groups: Mapping[str, WeightGroup] = {}
        if quantization is not None:
            self._groups = read_groups(quantization, source, self._tensors, self.config)
        self._round_float64()
        self.entries: Mapping[str, TensorEntry] = select_weights(path, self.config, self._all_entries(), self._is_zero)
        self._check_dtypes()
        check_shapes(path, self.config, {key: entry.shape for key, entry in self.entries.items()})

    def stored(self, key: str, *, copy: bool = False) -> StoredTensor:
        """Return a weight's rows, or a quantized weight's components; see `Checkpoint.stored`."""
        if key in self._groups:
            return self._groups[key].stored(copy=copy)
        file, tensor = self._tensors[key]
        rows = file.rows(tensor.offset, tensor.num_bytes, tensor.shape, tensor.dtype, copy=copy)
        return StoredTensor(tensor.dtype, tensor.shape, rows)

    def check_unchanged(self) -> None:
        """See `Checkpoint.check_unchanged`."""
        for file in self._files:
            file.check_unchanged()

    def _open(self, shards: Mapping[str, frozenset[str] | None]) -> None:
        """Read the tables of all shards; of tensors with the same name, the one in the index's shard is used."""
        tables = {shard: _read_table(self.path / shard) for shard in shards}
        self._files = [next(iter(table.values()))[0] for table in tables.values() if table]

        for shard, table in tables.items():
            for name, tensor in table.items():
                if name in (shards[shard] or ()) or name not in self._tensors:
                    self._tensors[name] = tensor

        promised = {name: shard for shard, names in shards.items() for name in names or ()}
        stale = sorted(name for name, shard in promised.items() if name not in tables[shard])
        if stale:  # those that the model needs and that no other file has are reported as missing
            index = next(name for name in (SAFETENSORS_INDEX, BIN_INDEX) if (self.path / name).exists())
            warn_caller(
                f"{escape(self.path / index)}: {counted(len(stale), 'tensor is', 'tensors are')} not in "
                "the files that it names: "
                f"{list_some(stale)}"
            )

    def _drop_copied_head(self) -> None:
        """Drop the copy of the embedding table that a tied model may carry as its head; refuse a head that differs."""
        if not (self.config.tie_word_embeddings and HEAD in self._tensors and EMBEDDING in self._tensors):
            return
        pair = self._tensors.pop(HEAD), self._tensors[EMBEDDING]
        head, table = (f"{tensor.dtype} {tensor.shape}" for _, tensor in pair)
        views = (file.view(tensor.offset, tensor.num_bytes) for file, tensor in pair)
        if head != table or not equal_by_pieces(*views):
            raise CheckpointError(
                f"{escape(self.path)}: config.json says tie_word_embeddings true, but {HEAD} ({head}) differs "
                f"from {EMBEDDING} ({table}); set it to false to use that head, or remove {HEAD} from the weights"
            )

    def _round_float64(self) -> None:
        """Read float64 weights as float32, as those of `.bin` files; components keep their bits."""
        parts = {name for group in self._groups.values() for name in group.names}
        for name, (file, tensor) in self._tensors.items():
            if tensor.dtype == "F64" and name not in parts:
                from llamarium.checkpoints.pytorch.tensors import in_float32

                self._tensors[name] = in_float32(file, tensor)

    def _all_entries(self) -> dict[str, TensorEntry]:
        entries: dict[str, TensorEntry] = {}
        codes = {group.names[0]: (key, group) for key, group in self._groups.items()}
        parts = {name for group in self._groups.values() for name in group.names}
        for name, (file, tensor) in self._tensors.items():
            if name in codes:
                key, group = codes[name]
                entries[key] = TensorEntry(key, group.shape, group.type_name, group.num_bytes, file.path, name)
            elif name not in parts:
                entries[name] = TensorEntry(name, tensor.shape, tensor.dtype, tensor.num_bytes, file.path, name)
        return entries

    def _is_zero(self, entry: TensorEntry) -> bool:
        file, tensor = self._tensors[entry.key]
        return not file.view(tensor.offset, tensor.num_bytes).any()

    def _check_dtypes(self) -> None:
        for entry in self.entries.values():
            if entry.dtype not in FLOATS and entry.key not in self._groups:
                raise UnsupportedFormatError(
                    f"{escape(entry.file)}: tensor {escape(entry.key, 80)} is {entry.dtype}; expected "
                    f"{', '.join(FLOATS)}, or a quantization_config in config.json that says how it is quantized"
                )


def _read_table(path: Path) -> dict[str, Located]:
    """Return the tensors of one file, each with the file that it is read from."""
    if path.suffix == ".bin":
        from llamarium.checkpoints.pytorch.tensors import read_torch_file

        return read_torch_file(path)
    tensors = read_safetensors(path)
    file = TensorFile(path)
    return {name: (file, tensor) for name, tensor in tensors.items()}


def _shards(path: Path) -> dict[str, frozenset[str] | None]:
    """Return the files of a folder's weights, each with the names that the index says are in it."""
    for single, index in ((SAFETENSORS, SAFETENSORS_INDEX), (BIN, BIN_INDEX)):
        if (path / single).exists() or (path / single).is_symlink():
            return {single: None}
        if (path / index).exists():
            return _read_index(path / index)
    is_adapter = (path / ADAPTER_CONFIG).exists()
    adapter = "it is an adapter: give it with --adapter, or merge it (llamarium merge --adapter)"
    why = adapter if is_adapter else "the folder holds no weights"
    raise ModelNotFoundError(f"{escape(path)}: none of {', '.join(WEIGHT_FILES)}; {why}")


def _read_index(path: Path) -> dict[str, frozenset[str] | None]:
    weight_map = read_json_object(path, CONFIG_LIMIT_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{escape(path)}: weight_map is missing or empty; expected tensor names with their files")
    names: dict[str, set[str]] = {}
    for name, shard in cast(Mapping[str, Any], weight_map).items():
        if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard or "\0" in shard:
            raise CheckpointError(
                f"{escape(path)}: tensor {escape(name, 80)} is in {escape(shard, 80)}; expected a file name without a "
                "folder: a shard lies beside its index"
            )
        names.setdefault(shard, set()).add(name)
    return {shard: frozenset(tensors) for shard, tensors in sorted(names.items())}


def _only_file(path: Path) -> dict[str, frozenset[str] | None] | None:
    """Return a folder's only safetensors file if it has a name of its own, as AutoGPTQ gives one; else None."""
    names = {file.name for file in path.glob(ANY_SAFETENSORS)}
    has_others = any(path.glob("*.index.json")) or any(path.glob(ANY_BIN))
    if len(names) != 1 or has_others or (path / ADAPTER_CONFIG).exists():
        return None
    return dict.fromkeys(names)
