"""The Llama model: embedding, L decoder layers (attention, MLP), final norm, projection onto the vocabulary.

Shape suffixes, the one legend of the project: B batch, T tokens, D hidden_size, N query heads, K key-value heads,
H head_dim, F intermediate_size, V vocab, L layers, S cached positions.

Names are Hugging Face's, so `print(model)` and state-dict keys look as in the ecosystem. There is no KV cache, no
quantization and no hook here: the `attend` object has the cache, and the loader replaces Linears by quantized ones.
"""

import torch
from torch import Tensor, nn

from llamarium.attention.base import Attend, CausalAttend
from llamarium.config import ModelConfig
from llamarium.errors import ContextLengthError, InputError
from llamarium.model.attention import LlamaAttention
from llamarium.model.mlp import LlamaMLP
from llamarium.model.norm import LlamaRMSNorm
from llamarium.model.replaceable import replaceable
from llamarium.model.rope import LlamaRotaryEmbedding, Rotary


class LlamaDecoderLayer(nn.Module):
    """Self-attention, then the MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    @replaceable
    def forward(self, x_BTD: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """Return the residual stream after this layer, (B, T, D)."""
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rotary, attend)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class LlamaModel(nn.Module):
    """The model without its head: token ids to hidden states."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        weight_VD = torch.empty(config.vocab_size, config.hidden_size)
        if not weight_VD.is_meta:  # on the meta device, normal_ would only make torch import sympy, which takes 1.8 s
            nn.init.normal_(weight_VD)
        self.embed_tokens = nn.Embedding.from_pretrained(weight_VD, freeze=False)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def forward(self, ids_BT: Tensor, positions_BT: Tensor, attend: Attend) -> Tensor:
        """Return the normalised hidden states (B, T, D).

        Args:
            ids_BT: int, token ids.
            positions_BT: int, (B, T) or (1, T); the position of each token in its sequence.
            attend: Computes attention, and stores keys and values if it has a cache.
        """
        x_BTD = self.embed_tokens(ids_BT)
        rotary = self.rotary_emb(positions_BT, x_BTD.dtype)
        for layer in self.layers:
            x_BTD = layer(x_BTD, rotary, attend)
        return self.norm(x_BTD)


class LlamaForCausalLM(nn.Module):
    """The model with its language-model head. It is not initialized: load weights, or call `init_weights`.

    >>> import torch
    >>> llama.model(torch.tensor([llama.encode("To be")])).shape
    torch.Size([1, 5, 65])

    Args:
        config: The model configuration; with `tie_word_embeddings`, the head's weight is the embedding table.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def forward(self, ids_BT: Tensor, positions: Tensor | None = None, attend: Attend | None = None) -> Tensor:
        """Return the logits of every position, (B, T, V).

        Args:
            ids_BT: int, token ids.
            positions: int, (B, T) or (1, T); None for 0, 1, 2, ...
            attend: Computes attention; None for causal attention over this call's tokens, with the config's window.

        Raises:
            InputError: If the ids are not integers (B, T) within the vocabulary, or the positions have another shape.
            ContextLengthError: If `positions` is None and there are more tokens than the context length.
        """
        self._check_ids(ids_BT)
        if positions is None:
            positions = self._default_positions(ids_BT)
        elif positions.shape not in ((1, ids_BT.shape[1]), ids_BT.shape):
            raise InputError(f"positions are {tuple(positions.shape)}; expected {tuple(ids_BT.shape)}, as the ids")
        attend = CausalAttend(window=self.config.sliding_window) if attend is None else attend
        return self.logits(self.model(ids_BT, positions, attend))

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype, to which packed weights are dequantized."""
        return self.model.norm.weight.dtype

    def logits(self, hidden: Tensor) -> Tensor:
        """Project normalised hidden states (..., D) onto the vocabulary: (..., V)."""
        return self.lm_head(hidden)

    def tie_weights(self) -> None:
        """Share the embedding's Parameter with the head, if the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _check_ids(self, ids_BT: Tensor) -> None:
        if not isinstance(ids_BT, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance] - such as a list
            kind = type(ids_BT).__name__
            raise InputError(f"token ids are a {kind}; expected a tensor (B, T) of int64: torch.tensor([[1, 2, 3]])")
        if ids_BT.ndim != 2 or ids_BT.numel() == 0 or ids_BT.dtype not in (torch.int64, torch.int32):
            shape_and_dtype = f"{tuple(ids_BT.shape)} of {ids_BT.dtype}"
            raise InputError(f"token ids are {shape_and_dtype}; expected a non-empty (B, T) of int64 or int32")
        if ids_BT.device.type == "cpu":  # on a GPU this would be a synchronisation; there the kernel asserts
            low, high = int(ids_BT.min()), int(ids_BT.max())
            if low < 0 or high >= self.config.vocab_size:
                raise InputError(f"token ids span {low}..{high}; expected 0..{self.config.vocab_size - 1}")

    def _default_positions(self, ids_BT: Tensor) -> Tensor:
        num_tokens, limit = ids_BT.shape[1], self.config.max_position_embeddings
        if num_tokens > limit:
            raise ContextLengthError(f"{num_tokens} tokens; the model's context holds {limit}")
        return torch.arange(num_tokens, device=ids_BT.device).unsqueeze(0)
