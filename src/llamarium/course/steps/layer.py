"""The norm, the MLP, and the layer that joins them."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from llamarium.course.step import Arguments, Mistake, Step
from llamarium.course.steps.types import Floats, floats

OnRows = Callable[[Floats], Floats]


def rms_norm(x_TD: Floats, gamma_D: Floats, eps: float) -> Floats:
    """Divide each row by the root of its mean square, then multiply by gamma.

    Args:
        x_TD: The residual stream, a row for each token, (T, D).
        gamma_D: A learned factor for each of the D numbers.
        eps: A small number, added to the mean square inside the root.

    Returns:
        (T, D).
    """
    mean_square_T1 = (x_TD**2).mean(axis=-1, keepdims=True)
    return x_TD / np.sqrt(mean_square_T1 + np.float32(eps)) * gamma_D


def swiglu(x_TD: Floats, w_gate_FD: Floats, w_up_FD: Floats, w_down_DF: Floats) -> Floats:
    """Return what the MLP adds to the stream: down(silu(gate(x)) * up(x)).

    silu(z) is z / (1 + exp(-z)). A weight is (out, in): a product is x @ w.T.

    Args:
        x_TD: The normalised stream, (T, D).
        w_gate_FD: The gate's weight, (F, D).
        w_up_FD: The weight of up, (F, D).
        w_down_DF: The weight of down, (D, F).

    Returns:
        (T, D).
    """
    gate_TF = x_TD @ w_gate_FD.T
    up_TF = x_TD @ w_up_FD.T
    return (gate_TF / (1 + np.exp(-gate_TF)) * up_TF) @ w_down_DF.T


def layer(x_TD: Floats, norm_1: OnRows, attention: OnRows, norm_2: OnRows, mlp: OnRows) -> Floats:
    """Run one layer: attention and the MLP each read the normalised stream and add to the stream itself.

    Args:
        x_TD: The residual stream, (T, D).
        norm_1: The norm before attention; it takes and returns (T, D), as the other functions do.
        attention: The attention.
        norm_2: The norm before the MLP.
        mlp: The MLP.

    Returns:
        The stream after this layer, (T, D).
    """
    x_TD = x_TD + attention(norm_1(x_TD))
    return x_TD + mlp(norm_2(x_TD))


def _silu(z: Floats) -> Floats:
    return z / (1 + np.exp(-z))


def _gelu(z: Floats) -> Floats:
    return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi).astype(np.float32) * (z + 0.044715 * z**3)))


def _erf_gelu(z: Floats) -> Floats:
    return 0.5 * z * (1 + np.vectorize(math.erf, otypes=[float])(z / math.sqrt(2)))


def _mlp(x: Floats, gate: Floats, up: Floats, down: Floats, *, gated: Callable[[Floats, Floats], Floats]) -> Floats:
    return gated(x @ gate.T, x @ up.T) @ down.T


def _norm(x: Floats, gamma: Floats, eps: float, *, axis: int = -1, sums: bool = False) -> Floats:
    squares = (x**2).sum(axis=axis, keepdims=True) if sums else (x**2).mean(axis=axis, keepdims=True)
    return x / np.sqrt(squares + np.float32(eps)) * gamma


def _root_mean_square(x: Floats) -> Floats:
    return np.sqrt((x**2).mean(axis=-1, keepdims=True))


def _norm_cases(rng: np.random.Generator) -> Iterator[Arguments]:
    for (tokens, width), scale, eps in (((5, 8), 1.0, 1e-5), ((3, 12), 1e-3, 1e-5), ((6, 6), 0.02, 1e-2)):
        yield floats(rng, tokens, width, scale=scale) + np.float32(scale / 2), floats(rng, width) + 1, eps


def _mlp_cases(rng: np.random.Generator) -> Iterator[Arguments]:
    for tokens, width, inner in ((5, 8, 8), (4, 6, 14), (1, 5, 7)):
        weights = (floats(rng, *shape) for shape in ((inner, width), (inner, width), (width, inner)))
        yield floats(rng, tokens, width), *weights


def _layer_cases(rng: np.random.Generator) -> Iterator[Arguments]:
    """Yield layers whose parts are random products, with a bend in them so that their order counts."""

    def part(matrix: Floats, bias: Floats, x: Floats) -> Floats:
        return np.tanh(x @ matrix) + bias

    for tokens, width in ((5, 8), (3, 6)):
        parts = [partial(part, floats(rng, width, width, scale=0.4), floats(rng, width)) for _ in range(4)]
        yield floats(rng, tokens, width), *parts


STEPS = (
    Step(
        rms_norm,
        "RMSNorm",
        "Before attention, before the MLP and before the head, each token's row is brought to the same size: divided "
        "by the root of the mean of its squares. gamma then gives each of the D numbers a size of its own.",
        "4-what-a-layer-does#The norm comes before, and the stream runs past it",
        "norm",
        ("y TD",),
        (
            "One number for each row: the mean over the last axis of the squares. keepdims=True keeps it divisible.",
            "x / sqrt(mean(x**2, last axis) + eps) * gamma. Nothing is subtracted, and eps stands inside the root.",
        ),
        _norm_cases,
        (
            Mistake("The mean is subtracted, as LayerNorm does; RMSNorm only divides.",
                    lambda x, gamma, eps: rms_norm(x - x.mean(axis=-1, keepdims=True), gamma, eps)),
            Mistake("eps is added outside of the root; it belongs inside, to the mean square.",
                    lambda x, gamma, eps: x / (_root_mean_square(x) + np.float32(eps)) * gamma),
            Mistake("eps is added to the result; it belongs inside the root, to the mean square.",
                    lambda x, gamma, eps: x / _root_mean_square(x) * gamma + np.float32(eps)),
            Mistake("eps is left out.", lambda x, gamma, eps: x / _root_mean_square(x) * gamma),
            Mistake("gamma is left out.", lambda x, gamma, eps: rms_norm(x, np.ones_like(gamma), eps)),
            Mistake("gamma is added; it is multiplied.",
                    lambda x, gamma, eps: rms_norm(x, np.ones_like(gamma), eps) + gamma),
            Mistake("The row is divided by gamma; it is multiplied by it.",
                    lambda x, gamma, eps: rms_norm(x, 1 / gamma, eps)),
            Mistake("The row is divided by its standard deviation (np.var, np.std), from which the mean is taken; "
                    "RMSNorm divides by the root of the mean square.",
                    lambda x, gamma, eps: x / np.sqrt(x.var(axis=-1, keepdims=True) + np.float32(eps)) * gamma),
            Mistake("The mean is of absolute values; of the squares is meant.",
                    lambda x, gamma, eps: x / (np.abs(x).mean(axis=-1, keepdims=True) + np.float32(eps)) * gamma),
            Mistake("keepdims=True is missing: the size of row t divides column t.",
                    lambda x, gamma, eps: x / np.sqrt((x**2).mean(axis=-1) + np.float32(eps)) * gamma),
            Mistake("Rows are multiplied by the root; they are divided by it.",
                    lambda x, gamma, eps: x * np.sqrt((x**2).mean(axis=-1, keepdims=True) + np.float32(eps)) * gamma),
            Mistake("gamma counts from 0 here, as in Gemma: 1 + gamma is multiplied; Llama multiplies by gamma.",
                    lambda x, gamma, eps: rms_norm(x, 1 + gamma, eps)),
            Mistake("The squares are summed; their mean is wanted.", partial(_norm, sums=True)),
            Mistake("The mean is taken over the tokens; each token's row is normalised by itself (the last axis).",
                    partial(_norm, axis=0)),
            Mistake("The mean is taken over all numbers at once; each token's row is normalised by itself (the last "
                    "axis).",
                    lambda x, gamma, eps: x / np.sqrt((x**2).mean() + np.float32(eps)) * gamma),
            Mistake("The root is missing: the row is divided by its mean square.",
                    lambda x, gamma, eps: x / ((x**2).mean(axis=-1, keepdims=True) + np.float32(eps)) * gamma),
        ),
    ),
    Step(
        swiglu,
        "SwiGLU",
        "The MLP works on each token alone. Two products make F numbers each; silu of the first opens or closes the "
        "second, and a third product brings the result back to D.",
        "4-what-a-layer-does#SwiGLU: each token for itself",
        "mlp",
        ("out TD",),
        (
            "Three products: gate and up from D to F, down from F to D. silu bends the gate alone.",
            "down(silu(gate) * up): the two halves are multiplied number by number, before down.",
        ),
        _mlp_cases,
        (
            Mistake("The product with up is left out: down(silu(gate)).",
                    partial(_mlp, gated=lambda gate, up: _silu(gate))),
            Mistake("SiLU is on the wrong half: on up; it belongs on gate.",
                    partial(_mlp, gated=lambda gate, up: gate * _silu(up))),
            Mistake("SiLU is on both halves; it belongs on gate alone.",
                    partial(_mlp, gated=lambda gate, up: _silu(gate) * _silu(up))),
            Mistake("SiLU is missing: gate * up.", partial(_mlp, gated=lambda gate, up: gate * up)),
            Mistake("silu is applied to the product of the two; it belongs on gate alone.",
                    partial(_mlp, gated=lambda gate, up: _silu(gate * up))),
            Mistake("The gate is left out: down(up(x)).", partial(_mlp, gated=lambda gate, up: up)),
            Mistake("The exponent's sign is wrong: silu(z) is z / (1 + exp(-z)).",
                    partial(_mlp, gated=lambda gate, up: gate / (1 + np.exp(gate)) * up)),
            Mistake("SiLU is applied to the result; it belongs on gate.",
                    lambda x, gate, up, down: _silu(_mlp(x, gate, up, down, gated=lambda g, u: g * u))),
            Mistake("The stream is added to the result; the layer does that.",
                    lambda x, gate, up, down: x + swiglu(x, gate, up, down)),
            Mistake("The gate is GELU, computed with erf; Llama uses SiLU.",
                    partial(_mlp, gated=lambda gate, up: _erf_gelu(gate) * up)),
            Mistake("The gate is QuickGELU, z times the sigmoid of 1.702 z; Llama uses SiLU.",
                    partial(_mlp, gated=lambda gate, up: gate / (1 + np.exp(-1.702 * gate)) * up)),
            Mistake("The halves are added; they are multiplied.",
                    partial(_mlp, gated=lambda gate, up: _silu(gate) + up)),
            Mistake("The gate is a sigmoid, as in the first GLU; silu(z) is z times the sigmoid of z.",
                    partial(_mlp, gated=lambda gate, up: up / (1 + np.exp(-gate)))),
            Mistake("The gate is GELU; Llama uses SiLU.", partial(_mlp, gated=lambda gate, up: _gelu(gate) * up)),
            Mistake("The gate is ReLU; Llama uses SiLU.",
                    partial(_mlp, gated=lambda gate, up: np.maximum(gate, 0) * up)),
            Mistake("The weights are transposed: a weight is (out, in), and a product is x @ w.T.",
                    lambda x, gate, up, down: _mlp(x, gate.T, up.T, down.T, gated=lambda g, u: _silu(g) * u)),
        ),
    ),
    Step(
        layer,
        "A layer",
        "A layer is two steps of the same form: normalise the stream, compute, add the result to the stream. The "
        "stream itself is never normalised; it runs past the norms.",
        "4-what-a-layer-does#Everything is added to one stream",
        "residual",
        ("x TD",),
        (
            "Write it in two lines, one for attention and one for the MLP.",
            "x = x + attention(norm_1(x)), and the same with norm_2 and mlp on the new x.",
        ),
        _layer_cases,
        (
            Mistake("The norms come after (post-norm), as in the first Transformer; Llama's come before.",
                    lambda x, n1, a, n2, m: n2((y := n1(x + a(x))) + m(y))),
            Mistake("What comes out of attention and MLP is normalised, not what goes in.",
                    lambda x, n1, a, n2, m: (y := x + n1(a(x))) + n2(m(y))),
            Mistake("The stream is lost: the results are not added to it.", lambda x, n1, a, n2, m: m(n2(a(n1(x))))),
            Mistake("Attention's result is not added to the stream.",
                    lambda x, n1, a, n2, m: (y := a(n1(x))) + m(n2(y))),
            Mistake("The MLP's result is not added to the stream.", lambda x, n1, a, n2, m: m(n2(x + a(n1(x))))),
            Mistake("The MLP reads the stream from before attention; it reads what attention has added to.",
                    lambda x, n1, a, n2, m: x + a(n1(x)) + m(n2(x))),
            Mistake("The normalised stream is added to, not the stream itself.",
                    lambda x, n1, a, n2, m: (z := n2((y := n1(x)) + a(y))) + m(z)),
            Mistake("norm_1 is used twice; the MLP has a norm of its own.",
                    lambda x, n1, a, n2, m: (y := x + a(n1(x))) + m(n1(y))),
            Mistake("norm_2 is used twice; attention has a norm of its own.",
                    lambda x, n1, a, n2, m: (y := x + a(n2(x))) + m(n2(y))),
            Mistake("The norms are exchanged: norm_1 is attention's, norm_2 is the MLP's.",
                    lambda x, n1, a, n2, m: (y := x + a(n2(x))) + m(n1(y))),
            Mistake("The residual is added twice: the stream of before attention is in the result of attention's line "
                    "already.",
                    lambda x, n1, a, n2, m: x + (y := x + a(n1(x))) + m(n2(y))),
            Mistake("The residual is added twice: x + attention(...) is added to x again.",
                    lambda x, n1, a, n2, m: (y := x + x + a(n1(x))) + m(n2(y))),
            Mistake("The residual is added twice in the MLP's line.",
                    lambda x, n1, a, n2, m: (y := x + a(n1(x))) + y + m(n2(y))),
            Mistake("The residual is added twice, in both lines.",
                    lambda x, n1, a, n2, m: (y := x + x + a(n1(x))) + y + m(n2(y))),
            Mistake("The MLP's line adds to the stream from before attention, and attention's result is lost.",
                    lambda x, n1, a, n2, m: x + m(n2(x + a(n1(x))))),
            Mistake("Attention and the MLP both read norm_1 of the same stream (as in GPT-J); the MLP reads norm_2 of "
                    "what attention has added to.",
                    lambda x, n1, a, n2, m: x + a(y := n1(x)) + m(y)),
            Mistake("The MLP reads attention's result alone; it reads the stream.",
                    lambda x, n1, a, n2, m: x + (y := a(n1(x))) + m(n2(y))),
            Mistake("Both norms are left out.", lambda x, n1, a, n2, m: (y := x + a(x)) + m(y)),
            Mistake("Attention runs twice; the second part is the MLP.",
                    lambda x, n1, a, n2, m: (y := x + a(n1(x))) + a(n2(y))),
            Mistake("The MLP's norm is left out.", lambda x, n1, a, n2, m: (y := x + a(n1(x))) + m(y)),
            Mistake("Attention's norm is left out.", lambda x, n1, a, n2, m: (y := x + a(x)) + m(n2(y))),
            Mistake("The MLP comes before attention.", lambda x, n1, a, n2, m: (y := x + m(n2(x))) + a(n1(y))),
        ),
    ),
)  # fmt: skip
