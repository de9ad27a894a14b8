"""RoPE: queries and keys are rotated by their positions, so that q·k depends on the distance between two tokens.

Feature i and feature i + H/2 form a pair (half-split order). At position p, the pair is rotated by the angle
p · theta^(-2i/H): fast pairs distinguish neighbouring tokens, slow ones distant from near ones. `llamarium/rope.py` has
the frequencies, and the scalings that extend a model's context.

Source: Su et al. 2021, "RoFormer".
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llamarium.config import ModelConfig
from llamarium.model.replaceable import replaceable
from llamarium.rope import attention_factor, rope_frequencies


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotation for one forward pass's positions.

    Attributes:
        cos_BT1H: Cosine of each pair's angle, for both halves; times the attention factor with YaRN.
        sin_BT1H: Sine, likewise, negated in the first half: the factor of the partner feature.
    """

    cos_BT1H: Tensor
    sin_BT1H: Tensor

    @replaceable
    def rotate(self, x_BTNH: Tensor) -> Tensor:
        """Rotate every pair (x_i, x_{i + H/2}) by its angle; shape and dtype are kept."""
        partner_BTNH = x_BTNH.roll(x_BTNH.shape[-1] // 2, dims=-1)
        return torch.addcmul(x_BTNH * self.cos_BT1H, partner_BTNH, self.sin_BT1H)


class LlamaRotaryEmbedding(nn.Module):
    """Creates a `Rotary` from positions.

    The frequencies are not a buffer, so neither the meta device nor casting the model to bfloat16 affects them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.attention_factor = attention_factor(config)
        self._frequencies: dict[torch.device, Tensor] = {}

    def forward(self, positions_BT: Tensor, dtype: torch.dtype) -> Rotary:
        """Return the rotation for `positions_BT` (int), to be applied to tensors of `dtype`."""
        frequencies = self.frequencies(positions_BT.device)
        wide = torch.float32 if positions_BT.device.type == "mps" else torch.float64  # rounded once, to the bits of C
        angles_BT1H = (torch.cat((frequencies, frequencies)) * positions_BT[..., None, None].float()).to(wide)
        cos_BT1H = angles_BT1H.cos() * self.attention_factor
        sin_BT1H = angles_BT1H.sin() * self.attention_factor
        sin_BT1H[..., : frequencies.shape[0]].neg_()
        return Rotary(cos_BT1H.to(dtype), sin_BT1H.to(dtype))

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the H/2 angles per position, in radians, float32."""
        if device not in self._frequencies:
            self._frequencies[device] = torch.from_numpy(rope_frequencies(self.config)).to(device)
        return self._frequencies[device]


def rotate_complex(x_BTNH: Tensor, positions_BT: Tensor, frequencies: Tensor, factor: float = 1.0) -> Tensor:
    """Apply RoPE as in the paper, each pair as a complex number times factor · e^(i·angle), in float32.

    The reference for tests of `Rotary.rotate`.
    """
    first, second = x_BTNH.float().chunk(2, dim=-1)
    angles_BT1P = positions_BT[..., None, None].float() * frequencies
    turned = torch.complex(first, second) * torch.polar(torch.full_like(angles_BT1P, factor), angles_BT1P)
    return torch.cat((turned.real, turned.imag), dim=-1)
