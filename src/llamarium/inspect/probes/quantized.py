"""A pass with the weights in fewer bits: one matrix at a time is unpacked or coded, and none is kept.

It is the model's arithmetic in float32 and numpy, as `model/` defines it: slow, but with little memory for models of
any size, and the model is unchanged.
"""

from collections.abc import Callable, Sequence

import numpy as np

from llamarium.config import EMBEDDING, ModelConfig
from llamarium.errors import InputError
from llamarium.inspect.numbers import Floats, causal_mask, scores_of, softmax
from llamarium.inspect.probes.four_bits import rounded_inputs
from llamarium.inspect.probes.rope import rotate
from llamarium.inspect.shapes import linear_key, type_of
from llamarium.inspect.tokens import check_ids
from llamarium.inspect.trace import Trace
from llamarium.kernels.input_bits import InputBits
from llamarium.quant.codes import coded
from llamarium.quant.formats import GROUP, METHODS, PACKED_FORMATS, chosen_type
from llamarium.runtime.runner import Runner
from llamarium.runtime.taps import Key

IN_C = tuple(name for name in METHODS if name in PACKED_FORMATS)
"""The types that the C kernels multiply, with inputs that they round."""

_Multiply = Callable[[str, Floats], Floats]


def streams_as(
    runner: Runner, ids: Sequence[int], *, quantize: str | None = None, rounds_inputs: bool = False
) -> Trace:
    """Run a text in float32 with the layers' matrices as they are, or as a type would have them.

    Returns a trace of "resid", in all layers and at all positions, for `stream_errors`: without a type that of the
    float32 pass of the model's weights, packed or not.

    Args:
        runner: Holds the weights.
        ids: The text.
        quantize: A type in `METHODS`, such as "NF4" or "Q4_K"; None leaves the weights as they are.
        rounds_inputs: Round inputs too, as the C kernels do for packed weights.

    Raises:
        OptionError: For an unknown type, or a shape that it cannot take.
        InputError: For inputs that no kernel rounds.
        ContextLengthError: If there are more ids than the context holds.
    """
    token_ids = check_ids(runner.config, ids)
    method = None if quantize is None else chosen_type("quantize", quantize, METHODS)
    if rounds_inputs and method not in (None, *IN_C):
        raise InputError(f"inputs are rounded for {', '.join(IN_C)}; the C kernels do not multiply {method}")

    def multiply(key: str, x_TI: Floats) -> Floats:
        type_of(runner, key)
        matrix_OI = runner.dequantize(key, adapted=True)
        if method is not None:
            matrix_OI = coded(matrix_OI, method).values_RC
        return (rounded_inputs(x_TI).values_MC if rounds_inputs else x_TI) @ matrix_OI.T

    streams: dict[Key, Floats] = {}
    x_TD = runner.dequantize(EMBEDDING, token_ids)
    for layer in range(runner.config.num_hidden_layers):
        x_TD = x_TD + _attention(runner, layer, x_TD, multiply)
        streams["resid", layer] = x_TD = x_TD + _mlp(runner, layer, x_TD, multiply)
    return Trace(tuple(token_ids), tuple(range(len(token_ids))), streams)


def _attention(runner: Runner, layer: int, x_TD: Floats, multiply: _Multiply) -> Floats:
    config, positions = runner.config, np.arange(len(x_TD))
    x_TD = _normalized(runner, f"model.layers.{layer}.input_layernorm.weight", x_TD)
    q, k, v = (multiply(linear_key(layer, name), x_TD) for name in ("q_proj", "k_proj", "v_proj"))
    q, k, v = (part.reshape(len(x_TD), -1, config.head_dim) for part in (q, k, v))
    q, k = rotate(config, q, positions), rotate(config, k, positions)
    pattern_NTS = softmax(scores_of(q, k, causal_mask(positions, len(positions), config.sliding_window)))
    v_NSH = v.transpose(1, 0, 2).repeat(q.shape[1] // v.shape[1], axis=0)
    return multiply(linear_key(layer, "o_proj"), (pattern_NTS @ v_NSH).transpose(1, 0, 2).reshape(len(x_TD), -1))


def _mlp(runner: Runner, layer: int, x_TD: Floats, multiply: _Multiply) -> Floats:
    x_TD = _normalized(runner, f"model.layers.{layer}.post_attention_layernorm.weight", x_TD)
    gate_TF, up_TF = (multiply(linear_key(layer, name), x_TD) for name in ("gate_proj", "up_proj"))
    with np.errstate(over="ignore"):  # of a large negative number: its silu is 0
        act_TF = np.divide(gate_TF, 1 + np.exp(-gate_TF), dtype=np.float32)
    return multiply(linear_key(layer, "down_proj"), act_TF * up_TF)


def _normalized(runner: Runner, key: str, x_TD: Floats) -> Floats:
    mean_T1 = np.square(x_TD).mean(-1, keepdims=True)
    return x_TD / np.sqrt(mean_T1 + np.float32(runner.config.rms_norm_eps)) * runner.dequantize(key)


def can_round_inputs(config: ModelConfig) -> bool:
    """Whether all inputs of the layers' matrices can be rounded as the C kernels do."""
    widths = config.hidden_size, config.num_attention_heads * config.head_dim, config.intermediate_size
    return not any(width % GROUP for width in widths)


def input_bits_of(runner: Runner, key: str) -> InputBits | None:
    """Return the bits that the C kernels round a matrix's inputs to; None where they are not rounded."""
    in_c = type_of(runner, key) in PACKED_FORMATS and runner.backend_of(key) != "PyTorch"
    return runner.input_bits if in_c else None
