"""RoPE: a token's position turns its queries and keys, so that q·k depends on the distance between two tokens.

Feature i and feature i + H/2 form a pair (the half-split order). At position p the pair is turned by the angle
p · theta^(-2i/H): fast pairs tell neighbours apart, slow ones tell far from near. Llama 3.1 divides the slow
frequencies by a factor, which stretches the context it was trained on.

Source: Su et al. 2021, "RoFormer"; llama-models, `llama3/model.py`, for the scaling.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llamarium.config import ModelConfig, RopeScaling
from llamarium.model.replaceable import replaceable


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotation for one forward pass's positions.

    Attributes:
        cos_BT1H: The cosine of each pair's angle, for both halves.
        sin_BT1H: Its sine, negated in the first half: what the partner feature is multiplied by.
    """

    cos_BT1H: Tensor
    sin_BT1H: Tensor

    @replaceable
    def rotate(self, x_BTNH: Tensor) -> Tensor:
        """Turn every pair (x_i, x_{i + H/2}) by its angle; shape and dtype stay."""
        partner_BTNH = x_BTNH.roll(x_BTNH.shape[-1] // 2, dims=-1)
        return torch.addcmul(x_BTNH * self.cos_BT1H, partner_BTNH, self.sin_BT1H)


class LlamaRotaryEmbedding(nn.Module):
    """Makes a `Rotary` from positions.

    The frequencies are a constant of the config, not a weight: they are computed in float32 on the positions' device,
    so neither loading onto the meta device nor casting the model to bfloat16 can touch them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self._frequencies: dict[torch.device, Tensor] = {}

    def forward(self, positions_BT: Tensor, dtype: torch.dtype) -> Rotary:
        """Return the rotation for `positions_BT` (int), to be applied to tensors of `dtype`."""
        frequencies = self.frequencies(positions_BT.device)
        wide = torch.float32 if positions_BT.device.type == "mps" else torch.float64  # rounded once, to the bits of C
        angles_BT1H = (torch.cat((frequencies, frequencies)) * positions_BT[..., None, None].float()).to(wide)
        sin_BT1H = angles_BT1H.sin()
        sin_BT1H[..., : frequencies.shape[0]].neg_()
        return Rotary(angles_BT1H.cos().to(dtype), sin_BT1H.to(dtype))

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the H/2 angles per position, in radians, float32."""
        if device not in self._frequencies:
            self._frequencies[device] = rope_frequencies(self.config, device)
        return self._frequencies[device]


def rope_frequencies(config: ModelConfig, device: torch.device | str = "cpu") -> Tensor:
    """Return theta^(-2i/H) for i < H/2, with the config's scaling: (H/2,) float32, radians per position."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    return frequencies if config.rope_scaling is None else _scale(frequencies, config.rope_scaling)


def _scale(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's scaling: long waves divided by the factor, short ones kept, a linear blend between."""
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((scaling.original_max_position_embeddings / wavelengths - low) / (high - low)).clamp(0, 1)
    # In this order of operations the last bit is the publishers' own; at position 131,071 it is seen.
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def rotate_complex(x_BTNH: Tensor, positions_BT: Tensor, frequencies: Tensor) -> Tensor:
    """RoPE as the paper writes it, each pair a complex number times e^(i·angle); float32.

    The reference that `Rotary.rotate` is tested against, and the shorter one to read.
    """
    first, second = x_BTNH.float().chunk(2, dim=-1)
    angles_BT1P = positions_BT[..., None, None].float() * frequencies
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles_BT1P), angles_BT1P)
    return torch.cat((turned.real, turned.imag), dim=-1)
