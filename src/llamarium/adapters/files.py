"""Read adapters in PEFT's layout, as `peft`, vLLM and llama.cpp's converter use it. Torch-free.

    adapter_config.json         target modules, rank, alpha, the base model's name (`peft_config.py`)
    adapter_model.safetensors   base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, ...; or `.bin`
    tokenizer.json, ...         the base's tokenizer with the dialog format used in training

`save.py` writes adapters. Source: peft, `utils/save_and_load.py`, `utils/other.py`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.adapters.config import EMBED_TOKENS, LM_HEAD, LoRAConfig
from llamarium.adapters.patterns import PatternMatcher
from llamarium.adapters.peft_config import check_fields, lora_config, token_indices
from llamarium.checkpoints.checkpoint import expected_shapes, list_some
from llamarium.checkpoints.huggingface.safetensors_file import Located, SafetensorsTensor, read_safetensors_header
from llamarium.checkpoints.storage import FLOATS, TensorFile
from llamarium.config import EMBEDDING, HEAD, ModelConfig, read_json_object
from llamarium.errors import (
    CheckpointError,
    ModelNotFoundError,
    OptionError,
    TrainingError,
    UnsupportedFormatError,
    counted,
    escape,
    warn_caller,
)
from llamarium.file_names import ADAPTER, ADAPTER_BIN, ADAPTER_CONFIG, CONFIG
from llamarium.hub.builtin import BUILTINS
from llamarium.hub.folders import what_to_name
from llamarium.quant.packing import to_float32

PREFIX = "base_model.model."
BUILTIN = "llamarium_builtin"

EMBEDDING_A = f"{EMBED_TOKENS}.lora_embedding_A"
_ROWS = "trainable_tokens_delta"
# Parts of a key that PEFT's wrapper modules add.
_WRAPPERS = re.compile(r"\.(modules_to_save|base_layer|token_adapter)(?=\.)")
_NOT_TRAINED = re.compile(r"\.(original_module\.|token_adapter\.(trainable_tokens_original|token_indices)\b)")

_Floats = NDArray[np.float32]
_Table = Mapping[str, Located]


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """An adapter read from disk, validated against its base's config.

    Attributes:
        folder: Folder of the adapter.
        config: LoRA settings.
        base_name: Name of the base model in `adapter_config.json`, or None.
        metadata: Header of the tensors' file.
        linears: Full names of the Linears with a low-rank correction.
        ranks: Rank of each correction, by the module's name.
        scales: Scale of each correction, by the module's name.
        tensors: The low-rank matrices, finite float32, by the model's keys, such as `lm_head.lora_A.weight`, including
            those of the embedding.
        weights: Whole weights that replace the base's, float32, by key. The embedding and the head may have another
            number of rows.
        token_rows: By module, `model.embed_tokens` or `lm_head`: token ids and the new rows of these tokens.
        keeps_head_tied: True if a whole weight of a tied embedding also replaces the head.
        has_biases: True if `weights` includes biases that were trained without their Linears' weights.
    """

    folder: Path
    config: LoRAConfig
    base_name: str | None
    metadata: Mapping[str, str]
    linears: tuple[str, ...]
    ranks: Mapping[str, int]
    scales: Mapping[str, float]
    tensors: Mapping[str, _Floats]
    weights: Mapping[str, _Floats]
    token_rows: Mapping[str, tuple[list[int], _Floats]]
    keeps_head_tied: bool
    has_biases: bool

    @property
    def replaces_weights(self) -> bool:
        """True if the adapter does more than correct Linears, so that it cannot run together with other adapters."""
        return bool(self.weights or self.token_rows or EMBEDDING_A in self.tensors)

    def without_embedding(self) -> "SavedAdapter":
        """Return the adapter without the low-rank correction of the embedding."""
        tensors = {key: values for key, values in self.tensors.items() if not key.startswith(f"{EMBED_TOKENS}.")}
        return replace(self, tensors=tensors)


def module_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the shape (out, in) of each module that an adapter may correct, by full name, with the head last.

    The shape of the embedding is (vocab_size, hidden_size).
    """
    shapes = {
        key.removesuffix(".weight"): (shape[0], shape[1])
        for key, shape in expected_shapes(config).items()
        if len(shape) == 2
    }
    return shapes | {LM_HEAD: (config.vocab_size, config.hidden_size)}


def read_adapter(folder: Path, config: ModelConfig) -> SavedAdapter:
    """Read an adapter for a base with this config.

    Raises:
        ModelNotFoundError: If the folder or a file does not exist.
        ConfigError: If `adapter_config.json` is not a JSON object.
        UnsupportedFormatError: For another kind of adapter, or a field that is not supported.
        CheckpointError: If the adapter is malformed, or does not fit this base.
    """
    raw = read_adapter_config(folder)
    settings, token_ids = lora_config(raw, folder / ADAPTER_CONFIG), token_indices(raw, folder / ADAPTER_CONFIG)
    path, table, metadata = _open(folder)
    tensors = _tensors_by_key(path, table)
    ranks, scales, names = _low_rank(folder, config, settings)
    if raw.get("ensure_weight_tying") and config.tie_word_embeddings and (EMBED_TOKENS in names) != (LM_HEAD in names):
        settings = _with_partner(settings, ranks, scales, names)
    biases = _trained_biases(raw.get("bias"), config, names)
    whole_keys = _whole_weights(path, config, settings, tensors, biases)

    sized = _with_rows(path, config, whole_keys, tensors)
    rows = _modules_of_tokens(path, sized, token_ids, tensors)
    expected = _low_rank_shapes(sized, names, ranks, settings)
    expected |= {f"{name}.{_ROWS}": (len(ids), config.hidden_size) for name, ids in rows.items()}
    _check(path, expected, tensors, whole_keys)

    values = {key: _values(path, key, *tensors[key]) for key in (*expected, *whole_keys)}
    return SavedAdapter(
        folder=folder,
        config=settings,
        base_name=raw.get("base_model_name_or_path"),
        metadata=metadata,
        linears=tuple(name for name in names if name != EMBED_TOKENS),
        ranks=ranks,
        scales=scales,
        tensors={key: value for key, value in values.items() if ".lora_" in key},
        weights={key: values[key] for key in whole_keys},
        token_rows={name: (ids, values[f"{name}.{_ROWS}"]) for name, ids in rows.items()},
        keeps_head_tied=bool(raw.get("ensure_weight_tying"))
        or not (settings.saves(EMBED_TOKENS) or settings.saves(LM_HEAD)),
        has_biases=bool(biases),
    )


def _low_rank(
    folder: Path, config: ModelConfig, settings: LoRAConfig
) -> tuple[dict[str, int], dict[str, float], list[str]]:
    """Return the ranks and scales of the modules with a low-rank correction, and their names."""
    try:
        names = settings.choose(list(module_shapes(config)))
        matcher = PatternMatcher()
        ranks = {name: settings.rank_of(name, matcher) for name in names}
        scales = {name: settings.scale_of(name, matcher) for name in names}
    except TrainingError as error:
        raise CheckpointError(f"{escape(folder / ADAPTER_CONFIG)}: {error}") from None
    if not names and not settings.modules_to_save:
        raise CheckpointError(f"{escape(folder / ADAPTER_CONFIG)}: target_modules match no module of this base")
    return ranks, scales, names


def _with_partner(
    settings: LoRAConfig, ranks: dict[str, int], scales: dict[str, float], names: list[str]
) -> LoRAConfig:
    """Add the embedding or its tied head if only the other one is targeted; return the new settings.

    Both use the same matrices, transposed; each module has the scale that its name gets.

    Source: peft, `tuners/lora/model.py`, `ensure_weight_tying`.
    """
    name, partner = (EMBED_TOKENS, LM_HEAD) if EMBED_TOKENS in names else (LM_HEAD, EMBED_TOKENS)
    names.append(partner)
    ranks[partner], scales[partner] = ranks[name], settings.scale_of(partner)
    targets = settings.target_modules
    joint_targets = (*targets, partner) if isinstance(targets, tuple) else f"(?:{targets})|{re.escape(partner)}"
    rank = ranks[partner]
    alpha = scales[partner] * (rank**0.5 if settings.use_rslora else rank)
    return replace(
        settings,
        target_modules=joint_targets,
        rank_pattern={partner: rank, **settings.rank_pattern},
        alpha_pattern={partner: alpha, **settings.alpha_pattern},
    )


def _trained_biases(bias: str | None, config: ModelConfig, names: list[str]) -> list[str]:
    """Return the keys of the base's biases that are trained according to the field `bias`."""
    biases = [key for key in expected_shapes(config) if key.endswith(".bias")]
    if bias == "lora_only":
        return [key for key in biases if key.removesuffix(".bias") in names]
    return biases if bias == "all" else []


def base_name(folder: Path) -> str | None:
    """Return the name of an adapter's base for `load`, or None if the adapter names none; raises as `read_adapter`.

    For a built-in model, `adapter_config.json` has the original repository, and the header of the tensors' file has the
    built-in name.
    """
    name = read_adapter_config(folder).get("base_model_name_or_path")
    if any(item.origin == name for item in BUILTINS.values()):
        builtin = read_metadata(folder).get(BUILTIN, "")
        if builtin in BUILTINS and BUILTINS[builtin].origin == name:
            return builtin
    return name


def base_of(folder: Path) -> str:
    """Return `base_name`; OptionError if it is None."""
    name = base_name(folder)
    if name is None:
        raise OptionError(
            f"{escape(folder / ADAPTER_CONFIG)}: names no base model; name it with -m (in Python: model=)"
        )
    return name


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read `adapter_config.json` and check that all its fields are supported; raises as `read_adapter`."""
    if (advice := what_to_name(folder, adapter=True)) is not None:
        raise ModelNotFoundError(advice)
    if not folder.is_dir():
        raise ModelNotFoundError(f"{escape(folder)}: no such folder; expected one with {ADAPTER_CONFIG} and {ADAPTER}")
    path = folder / ADAPTER_CONFIG
    if not path.exists():
        problem = "is a model, no adapter; expected a folder with" if (folder / CONFIG).exists() else "has no"
        raise ModelNotFoundError(f"{escape(folder)}: {problem} {ADAPTER_CONFIG}")
    raw = read_json_object(path)
    check_fields(raw, path)
    return raw


def read_metadata(folder: Path) -> Mapping[str, str]:
    """Return the header of an adapter's file (see `adapter_metadata`); LlamariumError if it cannot be read."""
    return _open(folder)[2]


def _open(folder: Path) -> tuple[Path, _Table, Mapping[str, str]]:
    """Return the path of an adapter's tensors, their table, and the header."""
    if (folder / ADAPTER_BIN).exists() and not (folder / ADAPTER).exists():
        from llamarium.checkpoints.pytorch.tensors import read_torch_file

        return folder / ADAPTER_BIN, read_torch_file(folder / ADAPTER_BIN), {}
    path = folder / ADAPTER
    table, metadata = read_safetensors_header(path)
    file = TensorFile(path)
    return path, {name: (file, tensor) for name, tensor in table.items()}, metadata


def _tensors_by_key(path: Path, table: _Table) -> dict[str, Located]:
    """Return the trained tensors by the model's keys; CheckpointError if two tensors with the same key differ.

    PEFT writes a saved module twice if the vocabulary was resized.
    """
    tensors: dict[str, Located] = {}
    for name, tensor in table.items():
        if _NOT_TRAINED.search(name):
            continue
        key = _model_key(name)
        if key in tensors and not _are_equal(tensors[key], tensor):
            raise CheckpointError(
                f"{escape(path)}: {escape(key, 80)} is there twice with different values, once as {escape(name, 80)}"
            )
        tensors[key] = tensor
    return tensors


def _are_equal(left: Located, right: Located) -> bool:
    a, b = left[1], right[1]
    if (a.dtype, a.shape) != (b.dtype, b.shape) or a.dtype not in FLOATS:
        return False
    left_values, right_values = (file.array(t.offset, t.shape, FLOATS[t.dtype]) for file, t in (left, right))
    return np.array_equal(left_values, right_values)


def _model_key(name: str) -> str:
    """Return a tensor's key in the model, without PEFT's prefix, wrappers and adapter name."""
    while name.startswith(PREFIX):
        name = name.removeprefix(PREFIX)
    name = _WRAPPERS.sub("", name)
    name = re.sub(r"\.default(?=\.|$)", "", name)
    name = re.sub(r"\.lora_magnitude_vector\.weight$", ".lora_magnitude_vector", name)
    return f"model.{name}" if re.match(r"(layers|embed_tokens|norm)\.", name) else name


def _whole_weights(
    path: Path, config: ModelConfig, settings: LoRAConfig, tensors: _Table, biases: list[str]
) -> list[str]:
    """Return the keys of an adapter's whole weights; CheckpointError if one is missing or has the wrong shape."""
    shapes = expected_shapes(config) | {HEAD: (config.vocab_size, config.hidden_size)}
    required = [key for key in shapes if settings.saves(key.rpartition(".")[0]) or key in biases]
    missing = [key for key in required if key not in tensors]
    if missing:
        raise CheckpointError(
            f"{escape(path)}: {counted(len(missing), 'tensor is', 'tensors are')} missing: {list_some(missing)}"
        )

    present = [key for key in shapes if key in tensors]
    for key in present:
        shape, expected = tensors[key][1].shape, shapes[key]
        fits = shape[1:] == expected[1:] and len(shape) == 2 if key in (EMBEDDING, HEAD) else shape == expected
        if not fits:
            raise CheckpointError(f"{escape(path)}: {key} has shape {shape}; this base needs {expected}")
    return present


def _with_rows(path: Path, config: ModelConfig, whole_keys: list[str], tensors: _Table) -> ModelConfig:
    """Return the config with the vocabulary size of the adapter's embedding and head."""
    rows = {key: tensors[key][1].shape[0] for key in (EMBEDDING, HEAD) if key in whole_keys}
    if not rows or set(rows.values()) == {config.vocab_size}:
        return config
    if len(set(rows.values())) > 1 or (len(rows) == 1 and not config.tie_word_embeddings):
        counts = ", ".join(f"{key} {count}" for key, count in rows.items())
        raise CheckpointError(
            f"{escape(path)}: the rows of the embedding and the head differ ({counts}; the base has "
            f"{config.vocab_size}); expected both with one vocabulary"
        )
    return replace(config, vocab_size=next(iter(rows.values())))


def _modules_of_tokens(
    path: Path, config: ModelConfig, token_ids: Mapping[str, list[int]], tensors: _Table
) -> dict[str, list[int]]:
    """Return the trained token ids by full module name; in a tied base the embedding's rows may apply to the head."""
    rows: dict[str, list[int]] = {}
    for end, ids in token_ids.items():
        names = [name for name in (EMBED_TOKENS, LM_HEAD) if f".{name}".endswith(f".{end}")]
        if not names or any(i >= config.vocab_size for i in ids):
            raise CheckpointError(
                f"{escape(path.parent / ADAPTER_CONFIG)}: trainable_token_indices of {escape(end, 80)} are not tokens "
                f"of the embedding or the head; expected ids below {config.vocab_size}"
            )
        if names[0] == EMBED_TOKENS or f"{LM_HEAD}.{_ROWS}" in tensors or not config.tie_word_embeddings:
            rows[names[0]] = ids
    if config.tie_word_embeddings and EMBED_TOKENS in rows and f"{LM_HEAD}.{_ROWS}" in tensors:
        rows.setdefault(LM_HEAD, rows[EMBED_TOKENS])  # a copy that PEFT writes for a resized vocabulary
    return rows


def _low_rank_shapes(
    config: ModelConfig, names: list[str], ranks: Mapping[str, int], settings: LoRAConfig
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the low-rank tensors, by key."""
    modules, shapes = module_shapes(config), dict[str, tuple[int, ...]]()
    for name in names:
        num_rows, num_columns = modules[name]
        if name == EMBED_TOKENS:
            shapes[f"{name}.lora_embedding_A"] = (ranks[name], num_rows)
            shapes[f"{name}.lora_embedding_B"] = (num_columns, ranks[name])
        else:
            shapes[f"{name}.lora_A.weight"] = (ranks[name], num_columns)
            shapes[f"{name}.lora_B.weight"] = (num_rows, ranks[name])
        if settings.use_dora:
            shapes[f"{name}.lora_magnitude_vector"] = (num_columns if name == EMBED_TOKENS else num_rows,)
    return shapes


def _check(path: Path, expected: Mapping[str, tuple[int, ...]], tensors: _Table, whole_keys: list[str]) -> None:
    """Check names and shapes of the low-rank tensors; one warning lists other tensors that are not used."""
    if missing := [key for key in expected if key not in tensors]:
        raise CheckpointError(
            f"{escape(path)}: {counted(len(missing), 'tensor is', 'tensors are')} missing: "
            f"{list_some(missing)}; expected those that "
            f"{ADAPTER_CONFIG} and this base ask for"
        )
    extra = [key for key in tensors if key not in expected and key not in whole_keys]
    if unexpected := [key for key in extra if ".lora_" in key or key.endswith(_ROWS)]:
        raise CheckpointError(
            f"{escape(path)}: {counted(len(unexpected), 'tensor is', 'tensors are')} not known: "
            f"{list_some(unexpected)}; {ADAPTER_CONFIG} and this base "
            "ask for no such corrections"
        )
    if extra:
        warn_caller(f"{escape(path)}: {counted(len(extra), 'tensor is', 'tensors are')} not used: {list_some(extra)}")
    for key, shape in expected.items():
        if tensors[key][1].shape != shape:
            raise CheckpointError(
                f"{escape(path)}: {key} has shape {tensors[key][1].shape}; {ADAPTER_CONFIG} and this base need {shape}"
            )


def _values(path: Path, key: str, file: TensorFile, tensor: SafetensorsTensor) -> _Floats:
    """Read a tensor as float32; CheckpointError if it is not finite, UnsupportedFormatError for other dtypes."""
    if tensor.dtype not in FLOATS:
        supported = ", ".join(FLOATS)
        raise UnsupportedFormatError(f"{escape(path)}: {key} has dtype {tensor.dtype}; expected {supported}")
    values = to_float32(file.array(tensor.offset, tensor.shape, FLOATS[tensor.dtype], copy=True))
    if not np.isfinite(values).all():
        raise CheckpointError(f"{escape(path)}: {key} has NaN or infinite values; the adapter is damaged")
    return values
