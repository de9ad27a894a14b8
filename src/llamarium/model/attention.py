"""Grouped-query attention: project, rotate, attend, project back."""

from torch import Tensor, nn

from llamarium.attention.base import Attend
from llamarium.config import ModelConfig
from llamarium.model.rope import Rotary


class LlamaAttention(nn.Module):
    """Grouped-query attention: N query heads share K key-value heads. The `attend` object has the mask and the cache.

    Source: Ainslie et al. 2023, "GQA"; K = N is multi-head attention, K = 1 multi-query.
    """

    def __init__(self, config: ModelConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=config.attention_bias)

    def forward(self, x_BTD: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """Return (B, T, D)."""
        q_BTNH, k_BTKH, v_BTKH = self.project(x_BTD)
        q_BTNH, k_BTKH = rotary.rotate(q_BTNH), rotary.rotate(k_BTKH)
        out_BTNH = attend(self.layer_idx, q_BTNH, k_BTKH, v_BTKH)  # the only place where past tokens exist
        return self.o_proj(out_BTNH.flatten(-2))

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, T, N, H), k and v (B, T, K, H), before rotation."""
        heads = (-1, self.head_dim)
        q_BTNH = self.q_proj(x_BTD).unflatten(-1, heads)
        return q_BTNH, self.k_proj(x_BTD).unflatten(-1, heads), self.v_proj(x_BTD).unflatten(-1, heads)
