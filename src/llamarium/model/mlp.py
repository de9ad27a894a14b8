"""SwiGLU: two projections up, one gating the other, and one back down."""

import torch.nn.functional as F
from torch import Tensor, nn

from llamarium.config import ModelConfig
from llamarium.model.replaceable import replaceable


class SiLUActivation(nn.Module):
    """x · sigmoid(x)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape and dtype."""
        return F.silu(x)


class LlamaMLP(nn.Module):
    """down(silu(gate(x)) · up(x)).

    Source: Shazeer 2020, "GLU Variants Improve Transformer", FFN_SwiGLU.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = SiLUActivation()

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return (B, T, D)."""
        return self.down_proj(self.gated(*self.project(x_BTD)))

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return gate and up, (B, T, F) each."""
        return self.gate_proj(x_BTD), self.up_proj(x_BTD)

    @replaceable
    def gated(self, gate_BTF: Tensor, up_BTF: Tensor) -> Tensor:
        """Return silu(gate) · up, (B, T, F)."""
        return self.act_fn(gate_BTF) * up_BTF
