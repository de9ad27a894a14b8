"""Queries, keys and values, their rotation, and the heads joined."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from llamarium.course.step import Arguments, Mistake, Step
from llamarium.course.steps.types import Floats, Ints, floats

Heads = tuple[Floats, Floats, Floats]


def project(
    x_TD: Floats, w_q: Floats, w_k: Floats, w_v: Floats, num_heads: int, num_kv_heads: int
) -> tuple[Floats, Floats, Floats]:
    """Make queries, keys and values of the normalised stream.

    A weight is (out, in): a product is x @ w.T. The out numbers lie head by head: head 0's H numbers, then head 1's.

    Args:
        x_TD: The normalised stream, (T, D).
        w_q: (N * H, D), for N query heads of H numbers each.
        w_k: (K * H, D), for the K heads of keys.
        w_v: (K * H, D), for the K heads of values.
        num_heads: N.
        num_kv_heads: K.

    Returns:
        q (T, N, H), k (T, K, H), v (T, K, H).
    """
    T = len(x_TD)
    q_TNH = (x_TD @ w_q.T).reshape(T, num_heads, -1)
    k_TKH = (x_TD @ w_k.T).reshape(T, num_kv_heads, -1)
    v_TKH = (x_TD @ w_v.T).reshape(T, num_kv_heads, -1)
    return q_TNH, k_TKH, v_TKH


def rotate(
    q_TNH: Floats, k_TKH: Floats, v_TKH: Floats, positions_T: Ints, theta: float
) -> tuple[Floats, Floats, Floats]:
    """Turn queries and keys by their positions (RoPE).

    The pairs of a head are (i, i + H/2), for i below H/2. At position p, pair i turns by the angle p * theta**(-2i/H):
    (a, b) becomes (a cos - b sin, b cos + a sin).

    Args:
        q_TNH: Queries, (T, N, H).
        k_TKH: Keys, (T, K, H).
        v_TKH: Values, (T, K, H).
        positions_T: Where each token stands, (T,); a text's first token stands at 0.
        theta: The base of the angles.

    Returns:
        q (T, N, H), k (T, K, H) and v (T, K, H), as attention shall use them.
    """
    half = q_TNH.shape[-1] // 2
    frequencies = theta ** (-np.arange(half) / half)
    angles = positions_T[:, None, None] * frequencies
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def turned(x: Floats) -> Floats:
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    return turned(q_TNH), turned(k_TKH), v_TKH


def join(heads_TNH: Floats, w_o: Floats) -> Floats:
    """Lay the heads side by side and multiply by the output weight.

    Args:
        heads_TNH: What each head gathered, (T, N, H).
        w_o: (D, N * H); a product is x @ w.T.

    Returns:
        What attention adds to the stream, (T, D).
    """
    return heads_TNH.reshape(len(heads_TNH), -1) @ w_o.T


# --- what is often done wrong -----------------------------------------------------------------------------------------


def _project_so(
    x: Floats, w_q: Floats, w_k: Floats, w_v: Floats, n: int, k: int, *, cut: Callable[[Floats, int], Floats]
) -> Heads:
    """Project, and cut the numbers into heads in another way."""
    return cut(x @ w_q.T, n), cut(x @ w_k.T, k), cut(x @ w_v.T, k)


def _normalised(x: Floats, w_q: Floats, w_k: Floats, w_v: Floats, n: int, k: int) -> Heads:
    q, keys, values = project(x, w_q, w_k, w_v, n, k)
    q, keys = (heads / np.sqrt((heads**2).mean(-1, keepdims=True) + np.float32(1e-6)) for heads in (q, keys))
    return q, keys, values


def _scaled(x: Floats, w_q: Floats, w_k: Floats, w_v: Floats, n: int, k: int) -> Heads:
    q, keys, values = project(x, w_q, w_k, w_v, n, k)
    return q / np.sqrt(np.float32(q.shape[-1])), keys, values


Turn = Callable[[Floats, Floats, Floats, Floats], tuple[Floats, Floats]]


def _turned_pair(a: Floats, b: Floats, cos: Floats, sin: Floats) -> tuple[Floats, Floats]:
    return a * cos - b * sin, b * cos + a * sin


def _turned(
    x: Floats, positions: Ints, frequencies: Floats, *, turn: Turn = _turned_pair, interleaved: bool = False
) -> Floats:
    angles = positions[:, None, None] * frequencies
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    half = x.shape[-1] // 2
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = turn(a, b, cos, sin)
    return np.stack(turned, -1).reshape(x.shape) if interleaved else np.concatenate(turned, -1)


def _rotate_so(
    q: Floats,
    k: Floats,
    v: Floats,
    positions: Ints,
    theta: float,
    *,
    rotated: str = "qk",
    start: int = 0,
    base: float | None = None,
    power: float = 1.0,
    first: int = 0,
    turn: Turn = _turned_pair,
    interleaved: bool = False,
) -> Heads:
    """Rotate with one thing changed."""
    half = q.shape[-1] // 2
    frequencies = (base or theta) ** (-np.arange(first, first + half, dtype=np.float64) / half * power)
    places = positions + start

    def turned(name: str, x: Floats) -> Floats:
        return _turned(x, places, frequencies, turn=turn, interleaved=interleaved) if name in rotated else x  # pyright: ignore[reportArgumentType]

    return turned("q", q), turned("k", k), turned("v", v)


def _mixed_pairs(q: Floats, k: Floats, v: Floats, positions: Ints, theta: float) -> Heads:
    """Pair i with i + H/2, with the angles in the order of interleaved pairs."""
    half = q.shape[-1] // 2
    angles = np.repeat(positions[:, None, None] * theta ** (-np.arange(half) / half), 2, axis=-1)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def turned(x: Floats) -> Floats:
        return x * cos + np.concatenate([-x[..., half:], x[..., :half]], axis=-1) * sin

    return turned(q), turned(k), v


def _rotate_half_of_the_pairs(q: Floats, k: Floats, v: Floats, positions: Ints, theta: float) -> Heads:
    half = q.shape[-1] // 2
    first_q, first_k, _ = rotate(q[..., :half], k[..., :half], v, positions, theta)
    return np.concatenate([first_q, q[..., half:]], -1), np.concatenate([first_k, k[..., half:]], -1), v


# --- random shapes ----------------------------------------------------------------------------------------------------


def _project_cases(rng: np.random.Generator) -> Iterator[Arguments]:
    for tokens, width, heads, kv_heads, size in ((4, 8, 4, 4, 2), (5, 12, 6, 2, 4), (3, 10, 4, 2, 3), (1, 6, 2, 1, 4)):
        weights = (floats(rng, count * size, width) for count in (heads, kv_heads, kv_heads))
        yield floats(rng, tokens, width), *weights, heads, kv_heads


def random_heads(rng: np.random.Generator, tokens: int, past: int, heads: int, kv_heads: int, size: int) -> Heads:
    """Return random queries (T, N, H), and keys and values (S, K, H)."""
    return floats(rng, tokens, heads, size), floats(rng, past, kv_heads, size), floats(rng, past, kv_heads, size)


def _rotate_cases(rng: np.random.Generator) -> Iterator[Arguments]:
    settings = (6, 4, 2, 8, 10_000.0, 0), (5, 3, 3, 6, 500_000.0, 7), (1, 2, 1, 4, 100.0, 40)
    for tokens, heads, kv_heads, size, theta, start in settings:
        yield *random_heads(rng, tokens, tokens, heads, kv_heads, size), start + np.arange(tokens), theta


def _join_cases(rng: np.random.Generator) -> Iterator[Arguments]:
    for tokens, heads, size, width in ((4, 4, 2, 8), (5, 3, 4, 10), (3, 4, 4, 16)):
        yield floats(rng, tokens, heads, size), floats(rng, width, heads * size)


_CACHE = "5-how-a-sentence-grows#Each token is computed once"
_PAIRS = "3-where-order-comes-from#A position is a rotation"

STEPS = (
    Step(
        project,
        "Queries, keys and values in groups",
        "Each token asks (query), says what it can be found by (key), and holds what it has to give (value). There are "
        "N heads of queries and fewer heads of keys and values, K: that is grouped-query attention.",
        "2-how-attention-works#Queries, keys, values",
        "qkv",
        ("q TNH", "k TKH", "v TKH"),
        (
            "Three products with x @ w.T, then each result is cut into heads.",
            "reshape(T, num_heads, -1): the numbers of a row are cut into heads one after the other.",
        ),
        _project_cases,
        (
            Mistake("The weights are transposed: a weight is (out, in), and a product is x @ w.T.",
                    lambda x, q, k, v, n, m: project(x, q.T, k.T, v.T, n, m)),
            Mistake("The weight of the queries is transposed, which its square shape allows in the model: a product "
                    "is x @ w.T.",
                    lambda x, q, k, v, n, m: project(x, q.T, k, v, n, m)),
            Mistake("The numbers of a row are cut as (H, heads); they lie head by head: reshape(T, heads, H).",
                    partial(_project_so, cut=lambda y, count: y.reshape(len(y), -1, count).swapaxes(1, 2))),
            Mistake("The rows of different tokens are mixed: reshape(heads, T, H) cuts across the tokens; reshape(T, "
                    "heads, H) does not.",
                    partial(_project_so, cut=lambda y, count: y.reshape(count, len(y), -1).swapaxes(0, 1))),
            Mistake("Keys and values are swapped.", lambda x, q, k, v, n, m: project(x, q, v, k, n, m)),
            Mistake("The keys are made with the weight of the values.",
                    lambda x, q, k, v, n, m: project(x, q, v, v, n, m)),
            Mistake("Queries and keys are normalised here, as in Qwen3; Llama does not.", _normalised),
            Mistake("Keys and values are cut into N heads; they have K.",
                    lambda x, q, k, v, n, m: project(x, q, k, v, n, n)),
            Mistake("The values are made with the weight of the keys.",
                    lambda x, q, k, v, n, m: project(x, q, k, k, n, m)),
            Mistake("The queries are divided by the root of H here already; that is done with the scores.", _scaled),
            Mistake("Keys and values are repeated for all query heads here already; there are K heads of them.",
                    lambda x, q, k, v, n, m: (
                        (p := project(x, q, k, v, n, m))[0], np.repeat(p[1], n // m, 1), np.repeat(p[2], n // m, 1)),
                    "2-how-attention-works#Groups of heads share keys and values"),
        ),
    ),
    Step(
        rotate,
        "RoPE",
        "Attention does not know where a token stands. So queries and keys are turned by their position, each pair of "
        "numbers like a hand of a clock: fast hands first, slow hands last. Their product then depends on the "
        "distance.",
        _PAIRS,
        "rope",
        ("q TNH", "k TKH", "v TKH"),
        (
            "One angle for each position and pair: positions[:, None] * frequencies. The same angles for every head.",
            "a, b = x[..., :H/2], x[..., H/2:]; joined again after turning. Only q and k are turned.",
        ),
        _rotate_cases,
        (
            Mistake("The pairs are interleaved, (0, 1), (2, 3), ...; here pair i is (i, i + H/2).",
                    partial(_rotate_so, interleaved=True)),
            Mistake("The angles lie in the order of interleaved pairs, but the numbers are paired as (i, i + H/2).",
                    _mixed_pairs),
            Mistake("The values are rotated too; only queries and keys are.", partial(_rotate_so, rotated="qkv")),
            Mistake("Only the queries are rotated; the keys are as well.", partial(_rotate_so, rotated="q")),
            Mistake("Only the keys are rotated; the queries are as well.", partial(_rotate_so, rotated="k")),
            Mistake("Positions are counted from 1; the first token stands at 0 and is not turned.",
                    partial(_rotate_so, start=1)),
            Mistake("The positions that were given are not used, but 0, 1, 2, ...: a token after a cache stands later.",
                    lambda q, k, v, positions, theta: rotate(q, k, v, np.arange(len(q)), theta),
                    _CACHE),
            Mistake("The hands turn backwards: (a, b) becomes (a cos - b sin, b cos + a sin).",
                    partial(_rotate_so, turn=lambda a, b, cos, sin: (a * cos + b * sin, b * cos - a * sin))),
            Mistake("Sine and cosine are exchanged: (a, b) becomes (a cos - b sin, b cos + a sin).",
                    partial(_rotate_so, turn=lambda a, b, cos, sin: (a * sin - b * cos, b * sin + a * cos))),
            Mistake("A sign is wrong: the first number of a pair becomes a cos - b sin.",
                    partial(_rotate_so, turn=lambda a, b, cos, sin: (a * cos + b * sin, b * cos + a * sin))),
            Mistake("A sign is wrong: the second number of a pair becomes b cos + a sin.",
                    partial(_rotate_so, turn=lambda a, b, cos, sin: (a * cos - b * sin, b * cos - a * sin))),
            Mistake("The second number of a pair is made of the first one that is turned already; both are made of the "
                    "old ones.",
                    partial(_rotate_so, turn=lambda a, b, cos, sin: ((c := a * cos - b * sin), b * cos + c * sin))),
            Mistake("a and b of a pair are exchanged in the sine's terms: (a, b) becomes (a cos - b sin, b cos + a "
                    "sin).",
                    partial(_rotate_so, turn=lambda a, b, cos, sin: (a * cos - a * sin, b * cos + b * sin))),
            Mistake("The sign of the exponent is wrong: it is -2i/H, so that later pairs turn slower.",
                    partial(_rotate_so, power=-1.0)),
            Mistake("i counts from 1 in the exponent -2i/H; the first pair has i = 0 and turns by the position.",
                    partial(_rotate_so, first=1)),
            Mistake("Only the first half of each head is turned; all its pairs are.", _rotate_half_of_the_pairs),
            Mistake("The base is always 10,000; theta is given.", partial(_rotate_so, base=10_000.0)),
            Mistake("The base is always 500,000; theta is given.", partial(_rotate_so, base=500_000.0)),
            Mistake("The exponent is half as large: it is -2i/H, for i below H/2.", partial(_rotate_so, power=0.5)),
            Mistake("The exponent is twice as large: it is -2i/H, for i below H/2.", partial(_rotate_so, power=2.0)),
            Mistake("All tokens are turned by the same angle, that of the last; each has its own position.",
                    lambda q, k, v, positions, theta: rotate(q, k, v, np.full(len(q), positions[-1]), theta)),
        ),
    ),
    Step(
        join,
        "Heads joined",
        "What the heads gathered is laid side by side, head 0 first, and one product brings it back to the stream.",
        "2-how-attention-works#Heads are joined by a sum",
        "heads",
        ("out TD",),
        ("Two axes, N and H, become one.", "heads.reshape(T, N * H), then the product with w_o.T."),
        _join_cases,
        (
            Mistake("The heads are joined in the wrong order: number by number; head 0's H numbers come first, then "
                    "head 1's.",
                    lambda heads, w_o: heads.swapaxes(1, 2).reshape(len(heads), -1) @ w_o.T),
            Mistake("The heads lie from the last to the first; head 0 comes first.",
                    lambda heads, w_o: join(heads[:, ::-1], w_o)),
            Mistake("Tokens and heads are mixed: the array is (N, T, H) when it is reshaped; swap the axes first.",
                    lambda heads, w_o: heads.swapaxes(0, 1).reshape(len(heads), -1) @ w_o.T),
            Mistake("The weight is transposed: it is (out, in), and a product is x @ w.T.",
                    lambda heads, w_o: heads.reshape(len(heads), -1) @ w_o),
            Mistake("The output weight is left out.", lambda heads, w_o: heads.reshape(len(heads), -1)),
            Mistake("The result is divided by the number of heads; the heads are summed, not averaged.",
                    lambda heads, w_o: join(heads, w_o) / heads.shape[1]),
        ),
    ),
)  # fmt: skip
