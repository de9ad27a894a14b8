"""A copy of a model's modules that computes in float32 over the stored weights.

Experiments need it because the effect of an intervention is often smaller than bfloat16's rounding error.
Half-precision weights are converted a few rows at a time as they are used, so a large model is not in memory twice.
Packed weights are multiplied with inputs of 16 bits instead of 8 (`quant/packed.py`), which changes logits by about
1e-4 compared with float32 products.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamarium.kernels.step_priority import pause
from llamarium.model import LlamaForCausalLM
from llamarium.quant.base import QuantizedEmbedding
from llamarium.quant.packed import LinearPacked
from llamarium.runtime.shell import shell_of

_HALVES = (torch.bfloat16, torch.float16)
_CHUNK_WEIGHTS = 2**20


def in_float32(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return a shell of a model that computes in float32; small parameters are copied, matrices shared."""
    shell = shell_of(model)
    for module in shell.modules():
        if isinstance(module, LinearPacked):
            module.input_bits = 16
        elif isinstance(module, QuantizedEmbedding):
            module.dtype = torch.float32
        elif type(module) is nn.Linear and module.weight.dtype in _HALVES:
            module.__class__ = _WideLinear
        elif type(module) is nn.Embedding and module.weight.dtype in _HALVES:
            module.__class__ = _WideEmbedding
        else:
            _convert(module)
    return shell


def _convert(module: nn.Module) -> None:
    attributes = vars(module)
    if any(parameter.dtype in _HALVES for parameter in module.parameters(recurse=False)):
        attributes["_parameters"] = {
            name: None if parameter is None else nn.Parameter(parameter.detach().float(), requires_grad=False)
            for name, parameter in attributes["_parameters"].items()
        }


class _WideLinear(nn.Linear):
    """A Linear with half-precision weights that multiplies in float32, a few rows at a time."""

    def forward(self, input: Tensor) -> Tensor:
        parts: list[Tensor] = []
        for rows in self.weight.split(max(1, _CHUNK_WEIGHTS // self.in_features)):
            pause()
            parts.append(F.linear(input, rows.float()))
        return torch.cat(parts, dim=-1)


class _WideEmbedding(nn.Embedding):
    """A half-precision embedding that returns float32 vectors."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float()
