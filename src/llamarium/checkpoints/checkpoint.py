"""The common interface of all checkpoint formats: a table of tensors, and a way to read one at a time.

Keys are Hugging Face's state-dict keys and shapes are PyTorch's (out, in), whatever the names in the file. Opening a
checkpoint reads only headers and checks them against the config before any memory is allocated for weights.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from llamarium.config import EMBEDDING, HEAD, ModelConfig, read_json_object
from llamarium.errors import CheckpointError, counted, escape, show_value, warn_caller
from llamarium.file_names import CONFIG, GENERATION_CONFIG

CONFIG_LIMIT_BYTES = 2 * 2**20
"""Maximum size of a JSON file next to the weights, or of a safetensors header.

The header of a 405B model in 4 bits, with 6,000 tensors, takes half of it. The limit bounds memory: parsed JSON takes
up to 30 times the size of its text."""

FormatName = Literal["huggingface", "meta", "gguf", "packed", "build"]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Type, shape and location of one weight in a checkpoint.

    Attributes:
        key: State-dict key, such as `model.layers.0.self_attn.q_proj.weight`.
        shape: Logical shape, (out, in).
        dtype: Stored type, by its name in `quant/formats.py` or `quant/stored_types.py`: `BF16`, `Q4_1`, `NF4`, ...
        num_bytes: Size in the file.
        file: File that holds the tensor; the first one if the tensor is split over several.
        name: Name of the tensor in the file.
        permuted: True if rows are stored in Meta's interleaved order and are permuted when they are read.
        is_packed: True if the weight is stored in tiles, as in a packed folder.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    file: Path
    name: str
    permuted: bool = False
    is_packed: bool = False


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A weight in its stored form: raw bytes and the name of their type. `checkpoints/values.py` decodes it.

    Attributes:
        type_name: `BF16`, `F32`, `Q4_1`, `NF4`, ...
        shape: Logical shape, (out, in) or (hidden,).
        data: C-contiguous. For floats and GGUF blocks: uint8 (rows, bytes per row), where a vector is one row. For
            tiles: uint8 (panels, tiles, bytes per tile). For a type in `STORED_TYPES`: its codes, as the type's
            `decode` expects them, such as (bytes, 1) for NF4.
        state: The other tensors of a type in `STORED_TYPES`, by name. NF4 has bitsandbytes' components: `absmax`,
            `quant_map`, `quant_state.bitsandbytes__nf4`, ...
    """

    type_name: str
    shape: tuple[int, ...]
    data: NDArray[Any]
    state: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])

    @property
    def is_packed(self) -> bool:
        """True for tiles, the only data with three dimensions."""
        return self.data.ndim == 3


class Checkpoint(Protocol):
    """A model on disk, opened and validated.

    Attributes:
        format: Format of the checkpoint, which determines its reader.
        entries: Its weights by key: exactly the keys that the config implies, without a tied head.
        generation_config: Contents of `generation_config.json`; empty if there is none.
    """

    path: Path
    format: FormatName
    config: ModelConfig
    entries: Mapping[str, TensorEntry]
    generation_config: Mapping[str, Any]

    def stored(self, key: str, *, copy: bool = False) -> StoredTensor:
        """Return a weight in its stored form, with rows in half-split order.

        Args:
            key: One of `entries`.
            copy: Read the weight into newly allocated memory. Otherwise the bytes may be a view of the file's private
                mapping (copy-on-write), which takes no memory until it is written to.

        Raises:
            CheckpointError: If the file ends early.
        """
        ...

    def check_unchanged(self) -> None:
        """Check that memory-mapped files have not changed since they were opened; called before each request.

        Raises:
            CheckpointError: If a file was modified or truncated; the message names it.
        """


_WINDOWS, _WINDOW_BYTES = 8, 256


def stored_fingerprint(checkpoint: Checkpoint) -> str:
    """Return the stored types and a hex SHA-256 of a sample of each weight's bytes: "F32+Q4_1:0123...".

    The fingerprint does not depend on the type that the weights are loaded in. Merging an adapter changes it, because a
    merge changes every row of a weight.
    """
    digest = hashlib.sha256()
    for key in sorted(checkpoint.entries):
        data = checkpoint.stored(key).data.reshape(-1)
        digest.update(f"{key} {checkpoint.entries[key].dtype} {len(data)}".encode())
        for start in range(0, len(data), max(1, len(data) // _WINDOWS)):
            digest.update(data[start : start + _WINDOW_BYTES].tobytes())
    types = {entry.dtype for entry in checkpoint.entries.values()}
    return f"{'+'.join(sorted(types))}:{digest.hexdigest()}"


# Each tensor's shape as config fields.
_LAYER_SHAPES: dict[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("hidden_size",),
    "self_attn.q_proj.weight": ("num_attention_heads * head_dim", "hidden_size"),
    "self_attn.k_proj.weight": ("num_key_value_heads * head_dim", "hidden_size"),
    "self_attn.v_proj.weight": ("num_key_value_heads * head_dim", "hidden_size"),
    "self_attn.o_proj.weight": ("hidden_size", "num_attention_heads * head_dim"),
    "post_attention_layernorm.weight": ("hidden_size",),
    "mlp.gate_proj.weight": ("intermediate_size", "hidden_size"),
    "mlp.up_proj.weight": ("intermediate_size", "hidden_size"),
    "mlp.down_proj.weight": ("hidden_size", "intermediate_size"),
}
_ATTENTION_BIASES, _MLP_BIASES = (
    {f"{key.removesuffix('.weight')}.bias": shape[:1] for key, shape in _LAYER_SHAPES.items() if key.startswith(part)}
    for part in ("self_attn.", "mlp.")
)
_OTHER_SHAPES: dict[str, tuple[str, ...]] = {
    EMBEDDING: ("vocab_size", "hidden_size"),
    "model.norm.weight": ("hidden_size",),
    HEAD: ("vocab_size", "hidden_size"),
}
_LAYER_KEY = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,8})\.(.+)")


def state_dict_key(name: str, layers: str, of_layer: Mapping[str, str], others: Mapping[str, str]) -> str:
    """Return the state-dict key for a tensor's name in a file.

    An unknown name is returned quoted, so that it cannot be mistaken for a key.
    """
    first, idx, rest = (*name.split(".", 2), "", "")[:3]
    if first == layers and rest in of_layer:
        return f"model.layers.{idx}.{of_layer[rest]}"
    return others.get(name, repr(name))


def permuted_heads(key: str, config: ModelConfig) -> int | None:
    """Return the number of heads of a weight that Meta and GGUF store in interleaved RoPE order; None for others."""
    if key.endswith(("q_proj.weight", "q_proj.bias")):
        return config.num_attention_heads
    return config.num_key_value_heads if key.endswith(("k_proj.weight", "k_proj.bias")) else None


def read_hf_config(folder: Path) -> tuple[dict[str, Any], ModelConfig, Mapping[str, Any]]:
    """Read the JSON files of a Hugging Face folder.

    Returns:
        `config.json` as raw JSON; the config parsed from it; `generation_config.json`, empty if there is none.
    """
    path, generation = folder / CONFIG, folder / GENERATION_CONFIG
    raw = read_json_object(path, CONFIG_LIMIT_BYTES)
    config = ModelConfig.from_hf(raw, str(path))
    return raw, config, read_json_object(generation, CONFIG_LIMIT_BYTES) if generation.exists() else {}


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of a model with `config`, by key, without a tied head."""
    layer = {suffix: _shape(config, fields) for suffix, fields in _layer_shapes(config).items()}
    other = {key: _shape(config, fields) for key, fields in _OTHER_SHAPES.items()}
    shapes = {EMBEDDING: other[EMBEDDING]}
    for i in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{i}.{suffix}": shape for suffix, shape in layer.items()}
    shapes["model.norm.weight"] = other["model.norm.weight"]
    return shapes if config.tie_word_embeddings else shapes | {HEAD: other[HEAD]}


def select_weights(
    path: Path, config: ModelConfig, entries: Mapping[str, TensorEntry], is_zero: Callable[[TensorEntry], bool]
) -> dict[str, TensorEntry]:
    """Return the entries of the weights that `config` implies; one warning lists the tensors that are not used.

    Types and shapes are not checked here: a reader checks types first, then calls `check_shapes`.

    Args:
        path: Path of the checkpoint, for messages.
        config: Config of the model.
        entries: Every tensor of the checkpoint by key; a tensor with an unknown name has its quoted name as key.
        is_zero: Returns whether all values of a tensor in the file are zero.

    Raises:
        CheckpointError: For a missing weight, or an extra tensor that would change the model's results.
    """
    _check_present(path, config, entries)
    expected = expected_shapes(config)
    extra = [entry for key, entry in entries.items() if key not in expected]

    def changes_results(entry: TensorEntry) -> bool:
        is_part = entry.key == HEAD or _OTHER_PARTS.search(entry.name) is not None
        return is_part or (_BIAS.search(entry.name) is not None and not is_zero(entry))

    if changing := [entry.name for entry in extra if changes_results(entry)]:
        raise CheckpointError(
            f"{escape(path)}: {counted(len(changing), 'tensor')} would change the results, and a Llama "
            "with this config "
            f"has no such parts: {list_some(changing)}; check architectures, attention_bias, mlp_bias and "
            "tie_word_embeddings in the config"
        )
    if unused := [entry.name for entry in extra if not _ROPE_TABLE.search(entry.name)]:
        warn_caller(
            f"{escape(path)}: {counted(len(unused), 'tensor is', 'tensors are')} not used by this "
            f"model: {list_some(unused)}"
        )
    return {key: entry for key, entry in entries.items() if key in expected}


# RoPE frequencies, which old converters saved; they follow from the config.
_ROPE_TABLE = re.compile(r"rotary_emb\.inv_freq$|\battn_rot_embd\b|^rope\.freqs$|^rope_freqs\.weight$")
# Layer parts of other architectures, by their names in Hugging Face and GGUF files.
_OTHER_PARTS = re.compile(
    r"\b(layers|blk)\.\d+\..*(norm\b|experts?\b|_exps\b|_shexp\b|gate_inp|block_sparse_moe|router|lora_)"
)
_BIAS = re.compile(r"\b(layers|blk)\.\d+\..*(proj|attn_(q|k|v|output)|ffn_(gate|up|down)|w[qkvo123])\.bias$")


def expected_shape(config: ModelConfig, key: str) -> tuple[int, ...] | None:
    """Return the shape of one weight of a model with `config`; None if no layer has such a weight."""
    match = _LAYER_KEY.fullmatch(key)
    fields = _LAYER_SHAPES.get(match[2]) if match else _OTHER_SHAPES.get(key)
    return None if fields is None else _shape(config, fields)


def check_weights(path: Path, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that all weights of `config` are present, with the right shapes, before memory is allocated for them."""
    _check_present(path, config, shapes)
    check_shapes(path, config, shapes)


def _check_present(path: Path, config: ModelConfig, keys: Iterable[str]) -> None:
    keys = set(keys)
    layers = {match[1] for key in keys if (match := _LAYER_KEY.fullmatch(key))}
    if len(layers) != config.num_hidden_layers:  # first, so that a huge num_hidden_layers cannot exhaust memory below
        raise CheckpointError(
            f"{escape(path)}: the config says num_hidden_layers {config.num_hidden_layers}, the weights have "
            f"{counted(len(layers), 'layer')}; the config is another model's or the weights are incomplete"
        )
    if HEAD not in keys and not config.tie_word_embeddings:
        raise CheckpointError(
            f"{escape(path)}: the config says tie_word_embeddings false, but there is no {HEAD}; if this model's head "
            "is its embedding table, set tie_word_embeddings to true, else the weights are incomplete"
        )
    expected = expected_shapes(config)
    if missing := [key for key in expected if key not in keys]:
        unused = sorted(keys - expected.keys())
        raise CheckpointError(
            f"{escape(path)}: {counted(len(missing), 'tensor is', 'tensors are')} missing: {list_some(missing)}; "
            + (f"{len(unused)} others are not known: {list_some(unused)}; " if unused else "")
            + "expected those of a Llama with this config"
        )


def check_shapes(path: Path, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check the shapes of a complete set of weights, and the token ids in the config."""
    check_token_ids(path, config)
    for key, shape in expected_shapes(config).items():
        if shapes[key] != shape:
            raise CheckpointError(
                f"{escape(path)}: {key} has shape {shapes[key]}; by the config's {_fields(key)} it is {shape}"
            )


def check_token_ids(path: Path, config: ModelConfig) -> None:
    """Check that BOS and EOS ids are in the vocabulary; the padding id is not used, so it is not checked."""
    ids = {"bos_token_id": (config.bos_token_id,), "eos_token_id": config.eos_token_id}
    for name, values in ids.items():
        for value in values:
            if value is not None and not 0 <= value < config.vocab_size:
                raise CheckpointError(
                    f"{escape(path)}: {name} is {show_value(value)}, and there are {config.vocab_size} rows in the "
                    f"vocabulary; expected an id of 0 to {config.vocab_size - 1}"
                )


def check_names(path: Path, expected: Iterable[str], actual: Iterable[str], why: str) -> None:
    """Check that two sets of tensor names are equal; CheckpointError lists missing and unknown ones."""
    expected, actual = dict.fromkeys(expected), dict.fromkeys(actual)
    missing, extra = [k for k in expected if k not in actual], [k for k in actual if k not in expected]
    faults = [f"{counted(len(names), 'tensor is', 'tensors are')} {kind}: {list_some(names)}" for kind, names in
              (("missing", missing), ("not known", extra)) if names]  # fmt: skip
    if faults:
        raise CheckpointError(f"{escape(path)}: {'; '.join(faults)}; expected {why}")


def list_some(names: Iterable[str], limit: int = 10) -> str:
    """Join up to `limit` escaped names, followed by the number of the others."""
    names = list(names)
    text = ", ".join(escape(name, 80) for name in names[:limit])
    return text if len(names) <= limit else f"{text}, and {len(names) - limit} more"


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    biases = _ATTENTION_BIASES if config.attention_bias else {}
    return _LAYER_SHAPES | biases | (_MLP_BIASES if config.mlp_bias else {})


def _shape(config: ModelConfig, fields: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(math.prod(getattr(config, name) for name in field.split(" * ")) for field in fields)


def _fields(key: str) -> str:
    match = _LAYER_KEY.fullmatch(key)
    of_layer = _LAYER_SHAPES | _ATTENTION_BIASES | _MLP_BIASES
    return ", ".join(of_layer[match[2]] if match else _OTHER_SHAPES[key])
