"""`ModelConfig`: the shape and hyperparameters of a Llama model."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamarium.config.fields import check, is_int, is_number
from llamarium.config.huggingface import read_fields
from llamarium.config.json_file import read_json_object
from llamarium.config.rope_scaling import RopeScaling
from llamarium.errors import ConfigError
from llamarium.file_names import CONFIG

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Keys of the embedding and the head, which `tie_word_embeddings` makes one weight."""

_LARGEST = 1e30  # far below the range of float32
_LEAST_THETA = 1 / _LARGEST  # RoPE frequencies are powers of 1 / theta

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape and hyperparameters of a Llama model.

    >>> llama.config.num_hidden_layers, llama.config.hidden_size
    (6, 192)

    Attributes:
        vocab_size: Rows of the embedding table, V.
        hidden_size: Width of the residual stream, D.
        intermediate_size: Width of the SwiGLU, F.
        num_hidden_layers: Decoder layers, L.
        num_attention_heads: Query heads, N.
        num_key_value_heads: Key-value heads, K; N means multi-head, 1 multi-query, between them grouped-query.
        head_dim: Width of one head, H; even, and not necessarily D / N.
        rms_norm_eps: Epsilon added to the mean square in RMSNorm.
        rope_theta: Base of the RoPE frequencies.
        rope_scaling: Scaling of the RoPE frequencies, or None.
        max_position_embeddings: Context length, in tokens.
        sliding_window: Number of tokens that a query attends to, including its own; None for all before it (Mistral).
        attention_bias: True if the attention projections (q, k, v and o) have biases.
        mlp_bias: True if the MLP projections (gate, up and down) have biases.
        tie_word_embeddings: True if the head is the embedding table.
        initializer_range: Standard deviation of newly initialized weights.
        bos_token_id: Id of the BOS token, or None.
        eos_token_id: Ids that end an answer; may be empty.
        pad_token_id: Id of the padding token, or None.
        notes: Fields of the file that had a default or no effect, for display; ignored in comparisons.
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
    sliding_window: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check ranges and consistency of the fields; ConfigError names the field, its value and the expected range."""
        for name in _SIZES:
            value = getattr(self, name)
            check(is_int(value) and 1 <= value < 2**31, name, value, "a whole number from 1 to 2^31 - 1")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        check(heads % kv_heads == 0, "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
        check(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number: RoPE rotates pairs")
        for name, low in (("rms_norm_eps", 0), ("rope_theta", _LEAST_THETA)):
            value = getattr(self, name)
            expected = f"a finite number above {low:g}, below {_LARGEST:g}"
            check(is_number(value) and low < value < _LARGEST, name, value, expected)
        spread = self.initializer_range
        check(is_number(spread) and 0 <= spread < _LARGEST, "initializer_range", spread, "a finite number from 0")
        window = self.sliding_window
        if window is not None:
            check(is_int(window) and 1 <= window < 2**31, "sliding_window", window, "a whole number from 1, or None")
            has_bias = self.attention_bias or self.mlp_bias
            check(not has_bias, "sliding_window", window, "None beside biases: no architecture has both")
        if self.rope_scaling is not None and self.rope_scaling.rope_type == "yarn":
            check(self.rope_theta > 1, "rope_theta", self.rope_theta, "a number above 1 beside yarn")

    @property
    def num_query_groups(self) -> int:
        """Number of query heads that share a key-value head, N / K."""
        return self.num_attention_heads // self.num_key_value_heads

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of a `config.json`, with the field names of both transformers v4 and v5.

        With a sliding window the architecture is Mistral, which is otherwise the same.
        """
        is_mistral = self.sliding_window is not None
        left_out = {"rope_scaling", "notes", *(("attention_bias", "mlp_bias") if is_mistral else ("sliding_window",))}
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in left_out}
        eos = self.eos_token_id
        scaling = None if self.rope_scaling is None else self.rope_scaling.to_hf()
        return {
            "architectures": ["MistralForCausalLM" if is_mistral else "LlamaForCausalLM"],
            "model_type": "mistral" if is_mistral else "llama",
            **fields,
            "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "rope_scaling": scaling,
            "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": self.rope_theta},
            "use_cache": True,
        }

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], source: str = CONFIG) -> "ModelConfig":
        """Create a config from the contents of a Hugging Face `config.json`.

        Args:
            raw: The parsed JSON object.
            source: Name of the file, for messages.

        Raises:
            ConfigError: For a missing field, a wrong type, another architecture or an unsupported feature.
        """
        try:
            return cls(**read_fields(raw, source))
        except ConfigError as error:  # errors of __post_init__ do not name the file yet
            raise ConfigError(str(error) if str(error).startswith(source) else f"{source}: {error}") from None

    @classmethod
    def from_file(cls, path: Path) -> "ModelConfig":
        """Read a `config.json` from disk; ConfigError if it is not a JSON object, or as `from_hf`."""
        return cls.from_hf(read_json_object(path), str(path))
