"""The same weights in fewer bits, to look at: a Linear coded anew, and a pass in which all of them are.

Nothing of the model changes, and one matrix is unpacked or quantized at a time: while it is used, and not kept. So a
pass costs time, and hardly any memory, whatever the model's size.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamarium.attention.causal import CausalAttend
from llamarium.config import ModelConfig
from llamarium.errors import InputError
from llamarium.inspect.interventions.matrices import matrix_of
from llamarium.inspect.numbers import Floats
from llamarium.inspect.probes.four_bits import CodedWeights, coded_weights, rounded_inputs
from llamarium.inspect.tokens import check_ids
from llamarium.inspect.trace import Trace
from llamarium.kernels import native
from llamarium.model import LlamaForCausalLM
from llamarium.model.llama import LlamaModel
from llamarium.quant.base import QuantizedEmbedding
from llamarium.quant.formats import GROUP, chosen_type
from llamarium.quant.packed import LinearPacked
from llamarium.quant.swap import METHODS, QUANTIZED_LINEARS, Method
from llamarium.runtime.shell import on_host, shell_of
from llamarium.runtime.taps import Key

LINEARS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
)  # fmt: skip
"""Those of a layer, by their names in it."""

IN_C: tuple[Method, ...] = ("Q8_0", "Q4_1")
"""The types that the C kernels multiply, with inputs that they round."""


class _Anew(nn.Module):
    """Multiplies in float32 with a Linear's matrix, as it is or as a type would have it.

    Args:
        linear: The Linear, of any kind.
        name: What it is called, for errors.
        quantize: The type; None takes the matrix as it is.
        rounds_inputs: Whether inputs are rounded first, as the C kernels do.
    """

    def __init__(self, linear: nn.Module, name: str, quantize: Method | None, *, rounds_inputs: bool) -> None:
        super().__init__()
        self._linear = [linear]  # a list, as it is no part of this module
        self._name, self._rounds_inputs = name, rounds_inputs
        self._quantize: Method | None = quantize

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: (..., in_features) to (..., out_features)."""
        matrix = matrix_of(self._linear[0], self._name)
        if self._rounds_inputs:
            x = rounded_inputs(x.flatten(0, -2)).values_MC.to(x.device).view(x.shape)
        if self._quantize is None:
            return F.linear(x, matrix)
        return QUANTIZED_LINEARS[self._quantize].from_weight(matrix)(x)


@torch.no_grad()
def coded_anew(linear: nn.Module, rows: Sequence[int], quantize: str, *, name: str = "the Linear") -> CodedWeights:
    """Return some rows of a Linear as another type would code them, and the error beside what they mean now.

    Args:
        linear: Of any kind; of a quantized one what its codes mean is quantized once more.
        rows: Which; negative ones count from the last.
        quantize: "NF4", "Q8_0" or "Q4_1".
        name: What it is called, for errors.

    Raises:
        OptionError: For an unknown type, or a shape that it cannot take.
        InputError: For rows that there are not, or a Linear whose matrix is not known.
    """
    matrix = matrix_of(linear, name)
    plain = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
    plain.weight = nn.Parameter(matrix, requires_grad=False)
    return coded_weights(plain, rows, quantize=quantize)


@torch.inference_mode()
def streams_as(
    model: LlamaForCausalLM, ids: Sequence[int], *, quantize: str | None = None, rounds_inputs: bool = False
) -> Trace:
    """Run a text in float32 with the layers' Linears as they are, or as a type would have them.

    For `stream_errors`: without a type it is what the model's weights give in float32, be they packed or not.

    Args:
        model: Modules of any kind; they stay as they are.
        ids: The text.
        quantize: "NF4", "Q8_0" or "Q4_1"; None leaves the weights as they are.
        rounds_inputs: Round inputs too, as the C kernels do with what they multiply: Q8_0 and Q4_1, or packed weights.

    Returns:
        A trace of "resid", in all layers and at all positions.

    Raises:
        OptionError: For an unknown type, or a shape that it cannot take.
        InputError: For inputs that no kernel rounds.
        ContextLengthError: If there are more ids than the context holds.
    """
    known = check_ids(model.config, ids)
    method = None if quantize is None else chosen_type("quantize", quantize, METHODS)
    if rounds_inputs and method not in (None, *IN_C):
        raise InputError(f"inputs are rounded for {' and '.join(IN_C)}; the C kernels do not multiply {method}")
    trunk = _trunk(model, method, rounds_inputs=rounds_inputs)
    ids_1T = torch.tensor([known], device=model.device)
    x_1TD = trunk.embed_tokens(ids_1T).float()
    rotary = trunk.rotary_emb(torch.arange(len(known), device=model.device).unsqueeze(0), torch.float32)
    found: dict[Key, Floats] = {}
    for i, layer in enumerate(trunk.layers):
        x_1TD = layer(x_1TD, rotary, CausalAttend())
        found["resid", i] = on_host(x_1TD[0])
    return Trace(tuple(known), tuple(range(len(known))), found)


def can_round_inputs(config: ModelConfig) -> bool:
    """Whether all that the layers' Linears are multiplied with can be rounded as the C kernels do."""
    widths = config.hidden_size, config.num_attention_heads * config.head_dim, config.intermediate_size
    return not any(width % GROUP for width in widths)


def is_rounded(linear: nn.Module) -> bool:
    """Whether what a Linear is multiplied with is rounded: by the C kernels, on a CPU."""
    is_packed = isinstance(linear, LinearPacked) and linear.uses_kernels and linear.weight.device.type == "cpu"
    return is_packed and native.library() is not None


def _trunk(model: LlamaForCausalLM, quantize: Method | None, *, rounds_inputs: bool) -> LlamaModel:
    trunk = shell_of(model.model)
    if isinstance(trunk.embed_tokens, QuantizedEmbedding):
        trunk.embed_tokens.dtype = torch.float32  # of this shell's vectors alone
    for i, layer in enumerate(trunk.layers):
        for name in LINEARS:
            anew = _Anew(layer.get_submodule(name), f"layers.{i}.{name}", quantize, rounds_inputs=rounds_inputs)
            layer.set_submodule(name, anew)
    return trunk
