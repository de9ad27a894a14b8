"""`adapter_config.json`: conversion of PEFT's fields to a `LoRAConfig`.

An unsupported field that changes the results of the adapter is an error that names it; other unknown fields are ignored
with one warning.

Source: peft, `config.py`, `tuners/lora/config.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from llamarium.adapters.config import LoRAConfig
from llamarium.errors import CheckpointError, TrainingError, UnsupportedFormatError, escape, show_value, warn_caller

_READ = frozenset(
    "r lora_alpha lora_dropout target_modules use_rslora use_dora base_model_name_or_path exclude_modules "
    "layers_to_transform layers_pattern rank_pattern alpha_pattern modules_to_save trainable_token_indices "
    "ensure_weight_tying".split()
)
# Fields about initialization or execution, without effect on the results.
_WITHOUT_EFFECT = frozenset(
    "peft_version inference_mode revision auto_mapping megatron_config megatron_core qalora_group_size fan_in_fan_out "
    "runtime_config eva_config corda_config lora_ga_config loftq_config".split()
)
# Supported values of fields, besides "off". Initializations that changed the base are not supported.
_ALLOWED: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM",),
    "bias": ("none", "lora_only", "all"),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
# Unsupported fields that change the results.
_CHANGES_RESULTS = frozenset(
    "use_qalora lora_bias layer_replication target_parameters use_bdlora alora_invocation_tokens arrow_config "
    "monteclora_config velora_config kasa_config".split()
)


def check_fields(raw: Mapping[str, Any], path: Path) -> None:
    """Check that all fields are supported; one warning lists unknown fields.

    Raises:
        UnsupportedFormatError: For an unsupported field that changes the results.
        CheckpointError: If the base's name is not a string.
    """
    unknown: list[str] = []
    for name, value in raw.items():
        is_off = value is None or value is False or value in ("", [], {})
        if name in _ALLOWED:
            allowed = [(type(item), item) for item in _ALLOWED[name]]
            if (not is_off or name == "peft_type") and (type(value), value) not in allowed:
                raise _unsupported(path, name, value)
        elif name in _CHANGES_RESULTS and not is_off:
            raise _unsupported(path, name, value)
        elif name not in _READ and name not in _WITHOUT_EFFECT and not is_off:
            unknown.append(name)
    if "peft_type" not in raw:
        raise _unsupported(path, "peft_type", None)

    base = raw.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise CheckpointError(f"{escape(path)}: base_model_name_or_path is {show_value(base)}; expected a name")
    if unknown:
        listed = ", ".join(escape(name, 40) for name in sorted(unknown)[:10])
        warn_caller(f"{escape(path)}: unknown fields are ignored: {listed}")


def lora_config(raw: Mapping[str, Any], path: Path) -> LoRAConfig:
    """Convert PEFT's fields; CheckpointError for a value out of range."""
    try:
        return LoRAConfig(
            r=raw.get("r", 8),
            alpha=raw.get("lora_alpha", 8),
            dropout=raw.get("lora_dropout") or 0.0,
            target_modules=_names_or_pattern(raw, "target_modules"),
            use_rslora=raw.get("use_rslora") or False,
            use_dora=raw.get("use_dora") or False,
            exclude_modules=_names_or_pattern(raw, "exclude_modules"),
            layers_to_transform=_listed(raw, "layers_to_transform", int),
            layers_pattern=_listed(raw, "layers_pattern", str),
            rank_pattern=_object(raw, "rank_pattern"),
            alpha_pattern=_object(raw, "alpha_pattern"),
            modules_to_save=_listed(raw, "modules_to_save", str),
        )
    except TrainingError as error:
        raise CheckpointError(f"{escape(path)}: {error}") from None


def token_indices(raw: Mapping[str, Any], path: Path) -> dict[str, list[int]]:
    """Return the ids of tokens whose rows were trained, by the end of a module's name; CheckpointError if malformed."""
    indices = raw.get("trainable_token_indices") or {}
    by_module = cast("dict[str, Any]", indices if isinstance(indices, dict) else {"embed_tokens": indices})
    for name, ids in by_module.items():
        is_valid = isinstance(ids, list) and all(type(i) is int and i >= 0 for i in cast("list[object]", ids))
        if not is_valid or len(set(ids)) != len(ids):
            raise CheckpointError(
                f"{escape(path)}: trainable_token_indices of {escape(name, 80)} are {show_value(ids)}; expected a list "
                "of different token ids"
            )
    return by_module


def _names_or_pattern(raw: Mapping[str, Any], name: str) -> tuple[str, ...] | str:
    value = raw.get(name)
    return value if isinstance(value, str) else _listed(raw, name, str)


def _listed(raw: Mapping[str, Any], name: str, kind: type) -> tuple[Any, ...]:
    value = raw.get(name)
    if value is None:
        return ()
    items = cast("list[Any]", value if isinstance(value, list) else [value])
    if not all(type(item) is kind for item in items):
        raise TrainingError(f"LoRA: {name} is {show_value(value)}; expected {kind.__name__}, or a list of them")
    return tuple(items)


def _object(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = raw.get(name) or {}
    if not isinstance(value, dict):
        raise TrainingError(f"LoRA: {name} is {show_value(value)}; expected an object")
    return cast("dict[str, Any]", value)


def _unsupported(path: Path, name: str, value: object) -> UnsupportedFormatError:
    allowed = ", ".join(map(show_value, _ALLOWED.get(name, ()))) or "nothing"
    return UnsupportedFormatError(
        f"{escape(path)}: {escape(name, 80)} is {show_value(value)}, which is not supported; expected {allowed}. Merge "
        "the adapter with peft (merge_and_unload), and load the merged model"
    )
