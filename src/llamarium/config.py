"""The configuration of a Llama, in Hugging Face's field names.

`ModelConfig` is the one description that building, loading, costing and exporting a model read. Nothing in it is
guessed: RoPE's theta and scaling come from a file or a preset, or the config is refused.

Source: transformers' `LlamaConfig` for names and meaning, in the v4 spelling (`rope_theta`, `rope_scaling`) and the
v5 spelling (`rope_parameters`).
"""

import dataclasses
import json
import math
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, cast

from llamarium.errors import ConfigError, escape, show_value, warn_caller

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""The keys of the two weights that `tie_word_embeddings` makes one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretching of the low RoPE frequencies (`rope_type: llama3`).

    Attributes:
        factor: How much longer the context became; 8 for Llama 3.1, 32 for the small 3.2 models.
        low_freq_factor: Wavelengths above `original / low_freq_factor` tokens are divided by `factor`.
        high_freq_factor: Wavelengths below `original / high_freq_factor` tokens are left alone.
        original_max_position_embeddings: The context length of pretraining, in tokens.

    Source: llama-models, `llama3/model.py`, `apply_scaling`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        """Check ranges; ConfigError for a factor below 1, frequency factors not in order, or a length below 1."""
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            _check(math.isfinite(getattr(self, name)), f"rope_scaling.{name}", getattr(self, name), "a finite number")
        low, high, original = self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings
        _check(self.factor >= 1, "rope_scaling.factor", self.factor, "a number of at least 1")
        _check(low > 0, "rope_scaling.low_freq_factor", low, "above 0")
        _check(high > low, "rope_scaling.high_freq_factor", high, f"above low_freq_factor ({low})")
        _check(original >= 1, "rope_scaling.original_max_position_embeddings", original, "at least 1 token")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape and constants of one Llama.

    Attributes:
        vocab_size: Rows of the embedding table, V.
        hidden_size: Width of the residual stream, D.
        intermediate_size: Width of the SwiGLU, F.
        num_hidden_layers: Decoder layers, L.
        num_attention_heads: Query heads, N.
        num_key_value_heads: Key-value heads, K; N means multi-head, 1 multi-query, between them grouped-query.
        head_dim: Width of one head, H; even, and not necessarily D / N.
        rms_norm_eps: Added to the mean square in RMSNorm.
        rope_theta: Base of the RoPE frequencies.
        rope_scaling: Llama 3.1's frequency scaling, or None.
        max_position_embeddings: The context, in tokens.
        tie_word_embeddings: The head is the embedding table itself.
        initializer_range: Standard deviation of fresh weights.
        bos_token_id: The id put before a text, or None.
        eos_token_id: The ids that end an answer; may be empty.
        pad_token_id: The id that fills short rows, or None.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int
    tie_word_embeddings: bool
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        """Check ranges and agreement between fields; ConfigError naming the field, its value and what was expected."""
        for name in _SIZES:
            value = getattr(self, name)
            _check(_is_int(value) and 1 <= value < 2**31, name, value, "a whole number from 1 to 2^31 - 1")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        _check(heads % kv_heads == 0, "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
        _check(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number: RoPE rotates pairs")
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            value = getattr(self, name)
            _check(_is_number(value) and 0 < value < float("inf"), name, value, "a finite number above 0")

    @property
    def num_query_groups(self) -> int:
        """How many query heads share one key-value head, N / K."""
        return self.num_attention_heads // self.num_key_value_heads

    def to_hf(self) -> dict[str, Any]:
        """Return the content of a `config.json`, in the v4 and v5 spellings together."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "rope_scaling"}
        eos = self.eos_token_id
        rope = {"rope_type": "default", "rope_theta": self.rope_theta}
        scaling = None
        if self.rope_scaling is not None:
            scaling = {"rope_type": "llama3", **dataclasses.asdict(self.rope_scaling)}
            rope = {**scaling, "rope_theta": self.rope_theta}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **fields,
            "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "rope_scaling": scaling,
            "rope_parameters": rope,
            "use_cache": True,
        }

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], source: str = "config.json") -> "ModelConfig":
        """Read the content of a Hugging Face `config.json`.

        Args:
            raw: The parsed JSON object.
            source: The file's name, for messages.

        Raises:
            ConfigError: For a missing field, a wrong type, another architecture or a feature that is not
                supported, by name and value.
        """
        try:
            return cls(**_read_fields(raw, source))
        except ConfigError as error:  # a range that __post_init__ checked: the file is not named yet
            raise ConfigError(str(error) if str(error).startswith(source) else f"{source}: {error}") from None

    @classmethod
    def from_file(cls, path: Path) -> "ModelConfig":
        """Read a `config.json` from disk; ConfigError if the file is no JSON object, or for what `from_hf` refuses."""
        return cls.from_hf(read_json_object(path), str(path))


def read_json_object(path: Path, limit_bytes: int = 2 * 2**20) -> dict[str, Any]:
    """Read one JSON object from a small file.

    ConfigError if the file is missing, no regular file, larger than `limit_bytes`, no UTF-8, no JSON, nested too
    deeply, no object, has a key twice, or has NaN or an infinity, which JSON lacks.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device might never end
            raise ConfigError(f"{escape(path)}: is no regular file; expected a JSON file")
        if status.st_size > limit_bytes:
            raise ConfigError(f"{escape(path)}: {status.st_size} bytes; expected at most {limit_bytes} for a JSON file")
        text = path.read_bytes().decode("utf-8")
        value = json.loads(text, object_pairs_hook=without_duplicates, parse_constant=no_constant)
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{escape(path)}: cannot be read as JSON: {escape(why)}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{escape(path)}: expected a JSON object, found {type(value).__name__}")
    return value


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse, by a ValueError, two equal keys, of which json would take the last; an `object_pairs_hook`."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen = set[str]()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the key {show_value(twice)} stands there twice")
    return found


def without_nulls(value: Any) -> Any:
    """Return JSON's values without fields that are null, within lists and objects, too; null means left out."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in cast("dict[str, Any]", value).items() if item is not None}
    return [without_nulls(item) for item in cast("list[Any]", value)] if isinstance(value, list) else value


def no_constant(name: str) -> float:
    """Refuse NaN and infinities, which JSON lacks, by a ValueError. A `parse_constant`."""
    raise ValueError(f"{name} is no number of JSON")


_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings",
)  # fmt: skip

# Fields whose only supported value is the one given: anything else changes the mathematics.
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1.0, None),
    "sliding_window": (None,),
    "embedding_multiplier": (1.0, None),
    "attention_multiplier": (None,),
    "residual_multiplier": (1.0, None),
    "logits_scaling": (1.0, None),
}

# Fields that do not change what the model computes.
_IGNORED = frozenset(
    "attention_dropout use_cache torch_dtype dtype transformers_version quantization_config "
    "_name_or_path is_llama_config rope_interleaved transformers.js_config _attn_implementation_autoset "
    "unsloth_fixed unsloth_version max_length return_dict output_attentions output_hidden_states "
    "chunk_size_feed_forward id2label label2id problem_type is_encoder_decoder vocab_file name".split()
)

_READ = frozenset((*_SIZES, *_FIXED)) | frozenset(
    "architectures rms_norm_eps rope_theta rope_scaling rope_parameters tie_word_embeddings initializer_range "
    "bos_token_id eos_token_id pad_token_id".split()
)


def _read_fields(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Translate a `config.json` into `ModelConfig`'s fields, checking types."""
    _reject_unsupported(raw, source)
    theta, scaling = _read_rope(raw, source)
    heads = _require(raw, "num_attention_heads", int, source)
    hidden = _require(raw, "hidden_size", int, source)
    head_dim = raw.get("head_dim")
    if head_dim is None:
        if heads < 1 or hidden % heads:
            raise ConfigError(
                f"{source}: hidden_size {hidden} is no multiple of num_attention_heads {heads} and head_dim is "
                "not given; add head_dim"
            )
        head_dim = hidden // heads
    return {
        "vocab_size": _require(raw, "vocab_size", int, source),
        "hidden_size": hidden,
        "intermediate_size": _require(raw, "intermediate_size", int, source),
        "num_hidden_layers": _require(raw, "num_hidden_layers", int, source),
        "num_attention_heads": heads,
        "num_key_value_heads": _optional(raw, "num_key_value_heads", int, heads, source),
        "head_dim": head_dim,
        "rms_norm_eps": _require(raw, "rms_norm_eps", float, source),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": _require(raw, "max_position_embeddings", int, source),
        "tie_word_embeddings": _optional(raw, "tie_word_embeddings", bool, False, source),
        "initializer_range": _optional(raw, "initializer_range", float, 0.02, source),
        "bos_token_id": _token_id(raw, "bos_token_id", source),
        "eos_token_id": _token_ids(raw, "eos_token_id", source),
        "pad_token_id": _token_id(raw, "pad_token_id", source),
    }


def _reject_unsupported(raw: Mapping[str, Any], source: str) -> None:
    if "model_type" not in raw:
        raise ConfigError(f'{source}: model_type is missing; expected "llama"')
    architectures = _optional(raw, "architectures", list, [], source)
    if architectures and "LlamaForCausalLM" not in architectures:
        raise ConfigError(f'{source}: architectures is {show_value(architectures)}; supported is "LlamaForCausalLM"')
    for name, allowed in _FIXED.items():
        if name in raw and raw[name] not in allowed:
            raise ConfigError(
                f"{source}: {name} is {escape(json.dumps(raw[name]))}; supported is {json.dumps(allowed[0])} only"
            )
    if raw.get("rope_interleaved"):
        raise ConfigError(f"{source}: rope_interleaved is true; supported is the half-split order only")
    unknown = sorted(escape(name, 60) for name in raw if name not in _READ and name not in _IGNORED)
    if unknown:
        warn_caller(f"{source}: fields not known and not used: {', '.join(unknown[:10])}")


def _read_rope(raw: Mapping[str, Any], source: str) -> tuple[float, RopeScaling | None]:
    """Read theta and scaling from either spelling; both together must agree."""
    v4 = _optional(raw, "rope_scaling", dict, {}, source) if raw.get("rope_scaling") is not None else {}
    v5 = _optional(raw, "rope_parameters", dict, {}, source) if raw.get("rope_parameters") is not None else {}
    thetas = {float(_require(d, "rope_theta", float, source)) for d in (raw, v5) if "rope_theta" in d}
    if len(thetas) != 1:
        found = "missing" if not thetas else f"given twice: {sorted(thetas)}"
        raise ConfigError(f"{source}: rope_theta is {found}; expected one value, from the model's publisher")
    scalings = [_read_scaling(d, source) for d in (v4, v5) if d]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise ConfigError(f"{source}: rope_scaling says {scalings[0]} and rope_parameters {scalings[1]}")
    return thetas.pop(), scalings[0] if scalings else None


def _read_scaling(raw: Mapping[str, Any], source: str) -> RopeScaling | None:
    kind = raw.get("rope_type", raw.get("type"))
    known = {"rope_type", "type", "rope_theta", *(f.name for f in dataclasses.fields(RopeScaling))}
    if kind == "default":
        known = {"rope_type", "type", "rope_theta"}
    elif kind != "llama3":
        raise ConfigError(f'{source}: rope_type is {escape(kind)!r}; supported are "llama3" and "default"')
    partial = raw.get("partial_rotary_factor", 1.0)
    extra = sorted(set(raw) - known - ({"partial_rotary_factor"} if partial == 1.0 else set()))
    if extra:
        raise ConfigError(f"{source}: RoPE scaling has fields that are not supported: {escape(', '.join(extra))}")
    if kind == "default":
        return None
    return RopeScaling(
        factor=float(_require(raw, "factor", float, source)),
        low_freq_factor=float(_require(raw, "low_freq_factor", float, source)),
        high_freq_factor=float(_require(raw, "high_freq_factor", float, source)),
        original_max_position_embeddings=_require(raw, "original_max_position_embeddings", int, source),
    )


def _check(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {escape(value)}; expected {expected}")


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (_is_int(value) and abs(value) < 2**63)  # a longer one is no float


def _require(raw: Mapping[str, Any], name: str, kind: type, source: str) -> Any:
    if name not in raw:
        raise ConfigError(f"{source}: {name} is missing; a Llama config needs it")
    return _typed(raw[name], name, kind, source)


def _optional(raw: Mapping[str, Any], name: str, kind: type, default: Any, source: str) -> Any:
    return default if raw.get(name) is None else _typed(raw[name], name, kind, source)


def _typed(value: Any, name: str, kind: type, source: str) -> Any:
    checks: dict[type, Callable[[object], bool]] = {int: _is_int, float: _is_number}
    ok = checks[kind](value) if kind in checks else isinstance(value, kind)
    if not ok:
        raise ConfigError(f"{source}: {name} is {show_value(value)}; expected {kind.__name__}")
    return value


def _token_id(raw: Mapping[str, Any], name: str, source: str) -> int | None:
    ids = _token_ids(raw, name, source)
    if len(ids) > 1:
        raise ConfigError(f"{source}: {name} is {list(ids)}; expected one id")
    return ids[0] if ids else None


def _token_ids(raw: Mapping[str, Any], name: str, source: str) -> tuple[int, ...]:
    value = raw.get(name)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if name == "pad_token_id" and values == [-1]:  # Llama 2's way to say none
        return ()
    for item in values:
        if not _is_int(item) or item < 0:
            raise ConfigError(f"{source}: {name} is {show_value(value)}; expected ids of 0 or more")
    return tuple(values)
