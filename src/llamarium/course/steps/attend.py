"""Scores, mask and softmax, and attention over a cache."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from llamarium.course.step import Arguments, Mistake, Step
from llamarium.course.steps.attention import Heads, join, project, random_heads, rotate
from llamarium.course.steps.types import Bools, Floats, Ints, floats, softmax


def attend(q_TNH: Floats, k_SKH: Floats, v_SKH: Floats, positions_T: Ints) -> tuple[Floats, Floats]:
    """Let each query gather values: scores, mask, softmax, sum.

    The score of a query and a key is q·k / sqrt(H). A query at position p sees the keys at positions 0 to p, its own
    included. Softmax makes shares of a query's scores: exp(score), divided by the sum of them. Large scores overflow
    exp; subtracting the largest from all changes no share. A head gathers the values, each times its share. N / K query
    heads that follow each other use one head of keys and values: 0, 1 and 2 use the first where N / K is 3.

    Args:
        q_TNH: Queries, (T, N, H), rotated.
        k_SKH: Keys of positions 0 to S - 1, (S, K, H), rotated.
        v_SKH: Values of positions 0 to S - 1, (S, K, H).
        positions_T: The position of each query, (T,).

    Returns:
        The pattern, (N, T, S), which is each query's shares, and what each head gathers, (T, N, H).
    """
    (_, N, H), (S, K, _) = q_TNH.shape, k_SKH.shape
    k_SNH, v_SNH = np.repeat(k_SKH, N // K, axis=1), np.repeat(v_SKH, N // K, axis=1)
    scores_NTS = np.einsum("tnh,snh->nts", q_TNH, k_SNH) / np.sqrt(np.float32(H))
    scores_NTS = np.where(np.arange(S) <= positions_T[:, None], scores_NTS, -np.inf)
    pattern_NTS = np.exp(scores_NTS - scores_NTS.max(axis=-1, keepdims=True))
    pattern_NTS = pattern_NTS / pattern_NTS.sum(axis=-1, keepdims=True)
    return pattern_NTS, np.einsum("nts,snh->tnh", pattern_NTS, v_SNH)


def attend_cached(
    x_TD: Floats,
    k_past_SKH: Floats,
    v_past_SKH: Floats,
    project: Callable[[Floats], Heads],
    rotate: Callable[[Floats, Floats, Floats, Ints], Heads],
    attend: Callable[[Floats, Floats, Floats, Ints], tuple[Floats, Floats]],
    join: Callable[[Floats], Floats],
) -> tuple[Floats, Floats, Floats]:
    """Run attention for T new tokens that follow S earlier ones, whose keys and values were kept.

    Positions go on: the first new token stands at S.

    Args:
        x_TD: The normalised stream of the new tokens, (T, D).
        k_past_SKH: The keys that were kept, (S, K, H), rotated; S is 0 at the beginning.
        v_past_SKH: The values that were kept, (S, K, H).
        project: project(x) -> q, k, v of the new tokens.
        rotate: rotate(q, k, v, positions) -> q, k, v.
        attend: attend(q, k, v, positions) -> pattern, heads; k and v of all tokens, earlier and new.
        join: join(heads) -> (T, D).

    Returns:
        What attention adds to the stream, (T, D), and the keys and values to keep, (S + T, K, H) each.
    """
    positions_T = len(k_past_SKH) + np.arange(len(x_TD))
    q_TNH, k_TKH, v_TKH = rotate(*project(x_TD), positions_T)
    k_SKH, v_SKH = np.concatenate([k_past_SKH, k_TKH]), np.concatenate([v_past_SKH, v_TKH])
    _, heads_TNH = attend(q_TNH, k_SKH, v_SKH, positions_T)
    return join(heads_TNH), k_SKH, v_SKH


# --- what is often done wrong -----------------------------------------------------------------------------------------


def _attend_so(
    q: Floats,
    k: Floats,
    v: Floats,
    positions: Ints,
    *,
    spread: Callable[[Floats, int], Floats] = lambda x, times: np.repeat(x, times, axis=1),
    divisor: Callable[[Floats], float] = lambda q: q.shape[-1] ** 0.5,
    sees: Callable[[Ints, Ints], Bools] = lambda past, now: past <= now,
    masked: float = -np.inf,
    axis: int = -1,
    mask_after: bool = False,
    softmax: Callable[[Floats, int], Floats] = softmax,
) -> tuple[Floats, Floats]:
    """Attend with one thing changed."""
    times, num_past = q.shape[1] // k.shape[1], len(k)
    k_SNH, v_SNH = spread(k, times), spread(v, times)
    scores = np.einsum("tnh,snh->nts", q, k_SNH) / np.float32(divisor(q))
    mask = sees(np.arange(num_past), positions[:, None])
    if not mask_after:
        scores = np.where(mask, scores, np.float32(masked))
    pattern = softmax(scores, axis)
    pattern = np.where(mask, pattern, 0) if mask_after else pattern
    return pattern, np.einsum("nts,snh->tnh", pattern, v_SNH)


def _without_sum(scores: Floats, axis: int) -> Floats:
    return np.exp(scores - scores.max(axis=axis, keepdims=True))


def _hidden_by_a_number(q: Floats, k: Floats, v: Floats, positions: Ints) -> tuple[Floats, Floats]:
    """Hide a token's own key too, and keys that are not seen by a number so large that scores vanish beside it."""
    return _attend_so(q, k, v, positions, sees=lambda past, now: past < now, masked=-1e30)


def _gathered(q: Floats, k: Floats, v: Floats, positions: Ints, *, shares: Callable[[Floats], Floats]) -> Any:
    """Return the right pattern, and heads that are gathered by other shares."""
    pattern, _ = attend(q, k, v, positions)
    v_SNH = np.repeat(v, q.shape[1] // v.shape[1], axis=1)
    return pattern, np.einsum("nts,snh->tnh", shares(pattern), v_SNH)


def _shares_scaled(
    q: Floats, k: Floats, v: Floats, positions: Ints, *, divisor: Callable[[Floats], float]
) -> tuple[Floats, Floats]:
    pattern, heads = _attend_so(q, k, v, positions, divisor=divisor)
    root = np.sqrt(np.float32(q.shape[-1]))
    return pattern / root, heads / root


def _with_scores(q: Floats, k: Floats, v: Floats, positions: Ints) -> tuple[Floats, Floats]:
    """Return masked scores in place of the pattern."""
    k_SNH = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    scores = np.einsum("tnh,snh->nts", q, k_SNH) / np.sqrt(np.float32(q.shape[-1]))
    masked = np.where(np.arange(len(k)) <= positions[:, None], scores, np.float32(-np.inf))
    return masked, attend(q, k, v, positions)[1]


def _mixed_groups(q: Floats, k: Floats, v: Floats, positions: Ints, *, tiled: str) -> tuple[Floats, Floats]:
    """Repeat keys or values as a whole, and the others each by itself."""
    times = q.shape[1] // k.shape[1]
    spread = {
        name: np.tile(x, (1, times, 1)) if name == tiled else np.repeat(x, times, 1)
        for name, x in zip("kv", (k, v), strict=True)
    }
    return attend(q, spread["k"], spread["v"], positions)


def _overflowing(scores: Floats, axis: int) -> Floats:
    powers = np.exp(scores)
    return powers / powers.sum(axis=axis, keepdims=True)


def _cached_so(
    x: Floats, k_past: Floats, v_past: Floats, project: Callable[..., Heads], rotate: Callable[..., Heads],
    attend: Callable[..., tuple[Floats, Floats]], join: Callable[[Floats], Floats], *, how: str,
) -> tuple[Floats, Floats, Floats]:  # fmt: skip
    """Run attention over a cache with one thing changed."""
    now = np.arange(len(x)) + {"one later": 1, "one earlier": -min(1, len(k_past))}.get(how, 0)
    turned_at = now if how in ("from 0", "rotated from 0") else len(k_past) + now + (how == "rotated one later")
    positions = now if how in ("from 0", "seen from 0") else len(k_past) + now
    q, k_new, v_new = project(x)
    if how == "unrotated":
        k_all, v_all = np.concatenate([k_past, k_new]), np.concatenate([v_past, v_new])
        turned = rotate(q, k_new, v_new, positions)[0]
        return join(attend(turned, k_all, v_all, positions)[1]), k_all, v_all
    k_unrotated = k_new
    if how != "not rotated":
        q, k_new, v_new = rotate(q, k_new, v_new, turned_at)
    k_all, v_all = np.concatenate([k_past, k_new]), np.concatenate([v_past, v_new])
    if how == "in front":
        k_all, v_all = np.concatenate([k_new, k_past]), np.concatenate([v_new, v_past])
    if how == "rotated again":
        k_all = rotate(k_all, k_all, v_all, np.arange(len(k_all)))[1]
    if how == "past rotated again" and len(k_past):
        k_all = np.concatenate([rotate(k_past, k_past, v_past, np.arange(len(k_past)))[1], k_new])
    if how == "past alone" and len(k_past):
        return join(attend(q, k_past, v_past, positions)[1]), k_all, v_all
    if how == "new alone":
        return join(attend(q, k_new, v_new, np.arange(len(x)))[1]), k_all, v_all
    if how == "rotated late":
        k_kept = np.concatenate([k_past, k_unrotated])
        k_turned = rotate(k_kept, k_kept, v_all, np.arange(len(k_kept)))[1]
        return join(attend(q, k_turned, v_all, positions)[1]), k_kept, v_all
    out = join(attend(q, k_all, v_all, positions)[1])
    returned = {
        "kept new": (k_new, v_new),
        "kept old": (k_past, v_past),
        "no values": (k_all, v_new),
        "exchanged": (v_all, k_all),
    }
    return (out, *returned.get(how, (k_all, v_all)))


def _kept_keys(args: Arguments, yours: tuple[Any, ...] | None, right: tuple[Any, ...]) -> str:
    """Return what is wrong with keys and values that a function keeps itself."""
    del args
    if yours is not None and len(yours) == len(right) and np.shape(yours[1]) == np.shape(right[1]):
        return (
            "Keys and values of an earlier text are used again, from a cache that is never cleared; each call gets "
            "those of its own text and layer as k_past and v_past. Keep nothing else."
        )
    return (
        "Keys and values of several layers or texts are in one list that the function keeps; each call gets those of "
        "its own text and layer as k_past and v_past. Keep nothing else."
    )


# --- random shapes ----------------------------------------------------------------------------------------------------


def _attend_cases(rng: np.random.Generator) -> Iterator[Arguments]:
    for tokens, past, heads, kv_heads, size in ((6, 6, 4, 2, 8), (3, 8, 6, 3, 4), (1, 5, 6, 2, 2), (5, 5, 9, 3, 4)):
        yield *random_heads(rng, tokens, past, heads, kv_heads, size), past - tokens + np.arange(tokens)
    q, k, v = random_heads(rng, 3, 3, 2, 1, 4)
    yield q * 100, k * 100, v, np.arange(3)


def _cached_cases(rng: np.random.Generator) -> Iterator[Arguments]:
    shapes = (5, 0, 4, 2, 8, 8), (1, 6, 4, 2, 4, 8), (3, 4, 3, 3, 6, 10), (1, 2, 2, 1, 4, 6)
    for tokens, past, heads, kv_heads, size, width in shapes:
        weights = [floats(rng, count * size, width) for count in (heads, kv_heads, kv_heads)]
        w_o = floats(rng, width, heads * size)
        yield (
            floats(rng, tokens, width), floats(rng, past, kv_heads, size), floats(rng, past, kv_heads, size),
            lambda x_TD, how=(*weights, heads, kv_heads): project(x_TD, *how),
            lambda q, k, v, positions: rotate(q, k, v, positions, 10_000.0),
            attend,
            lambda heads_TNH, w_o=w_o: join(heads_TNH, w_o),
        )  # fmt: skip


_CACHE = "5-how-a-sentence-grows#Each token is computed once"

STEPS = (
    Step(
        attend,
        "Scores, mask, softmax",
        "Each query is compared with the keys of its past; softmax makes shares of the scores; the head gathers values "
        "by these shares.",
        "2-how-attention-works#One head in four lines",
        "attention",
        ("pattern NTS", "heads TNH"),
        (
            "Give every query head its keys first: each of the K heads is repeated N / K times, one after the other.",
            "Scores that a query may not see become -inf before softmax; softmax goes over the last axis, the keys.",
        ),
        _attend_cases,
        (
            Mistake("The heads of keys are repeated as a whole (0 1 0 1); each is repeated by itself (0 0 1 1): "
                    "np.repeat, torch.repeat_interleave.",
                    partial(_attend_so, spread=lambda x, times: np.tile(x, (1, times, 1))),
                    "2-how-attention-works#Groups of heads share keys and values"),
            Mistake("The scores are not divided by the root of H.", partial(_attend_so, divisor=lambda q: 1.0)),
            Mistake("The scores are multiplied by the root of H; they are divided by it.",
                    partial(_attend_so, divisor=lambda q: q.shape[-1] ** -0.5)),
            Mistake("The shares are divided by the root of H; the scores are, before softmax.",
                    partial(_shares_scaled, divisor=lambda q: 1.0)),
            Mistake("The shares are divided by the root of H, as the scores are; softmax's shares sum to 1.",
                    partial(_shares_scaled, divisor=lambda q: q.shape[-1] ** 0.5)),
            Mistake("The scores are divided by H; by its root is meant.",
                    partial(_attend_so, divisor=lambda q: q.shape[-1])),
            Mistake("The scores are divided by the root of N * H; each head has H numbers.",
                    partial(_attend_so, divisor=lambda q: (q.shape[-1] * q.shape[-2]) ** 0.5)),
            Mistake("The mask is off by one: a token does not see itself.",
                    partial(_attend_so, sees=lambda past, now: past < now)),
            Mistake("The mask is off by one: a token does not see itself. The first token sees nothing then, and its "
                    "shares are even because the hidden scores are a large negative number; use -inf and <=.",
                    _hidden_by_a_number),
            Mistake("The mask is off by one: a token sees the one after it.",
                    partial(_attend_so, sees=lambda past, now: past <= now + 1)),
            Mistake("There is no mask: a token sees those after it.",
                    partial(_attend_so, sees=lambda past, now: past <= now + 10**6)),
            Mistake("The mask is turned around: a token sees those after it and not those before.",
                    partial(_attend_so, sees=lambda past, now: past >= now)),
            Mistake("The mask begins at the first key whatever the queries' positions are: with a cache, query t "
                    "stands at positions[t].",
                    lambda q, k, v, positions: attend(q, k, v, np.arange(len(q))),
                    _CACHE),
            Mistake("Scores that are not seen are set to 0, which softmax gives a share; set them to -inf.",
                    partial(_attend_so, masked=0.0)),
            Mistake("The mask comes after softmax, and the shares no longer sum to 1; mask the scores.",
                    partial(_attend_so, mask_after=True)),
            Mistake("exp overflows: subtract the largest score of each query first.",
                    partial(_attend_so, softmax=_overflowing)),
            Mistake("The sum is missing in softmax: exp(score) is divided by the sum of a query's.",
                    partial(_attend_so, softmax=_without_sum)),
            Mistake("Scores are returned as the pattern; the shares are wanted.", _with_scores),
            Mistake("The heads gather keys; they gather values.",
                    lambda q, k, v, positions: attend(q, k, k, positions)),
            Mistake("Queries are compared with values; they are compared with keys.",
                    lambda q, k, v, positions: attend(q, v, v, positions)),
            Mistake("Keys and values are exchanged.", lambda q, k, v, positions: attend(q, v, k, positions)),
            Mistake("The pattern is transposed when the values are gathered: each query (row) has its shares of the "
                    "keys (columns).",
                    partial(_gathered, shares=lambda pattern: pattern.swapaxes(1, 2))),
            Mistake("All query heads use the first head of keys and values; N / K of them share one.",
                    lambda q, k, v, positions: attend(q, k[:, :1], v[:, :1], positions)),
            Mistake("The heads of keys are repeated as a whole (0 1 0 1), those of values each by itself; both are "
                    "repeated each by itself (0 0 1 1).", partial(_mixed_groups, tiled="k")),
            Mistake("The heads of values are repeated as a whole (0 1 0 1), those of keys each by itself; both are "
                    "repeated each by itself (0 0 1 1).", partial(_mixed_groups, tiled="v")),
            Mistake("Softmax goes over the queries; over the keys, the last axis, is meant.",
                    partial(_attend_so, axis=-2)),
            Mistake("Softmax goes over the heads; over the keys, the last axis, is meant.",
                    partial(_attend_so, axis=0, masked=-1e30)),
        ),
    ),
    Step(
        attend_cached,
        "The KV cache",
        "Keys and values of earlier tokens never change. So they are kept, and a new token costs one row: its query "
        "looks at the kept keys and its own.",
        _CACHE,
        "growth",
        ("out TD", "k SKH", "v SKH"),
        (
            "The first new token stands at position S, the number of keys that are kept.",
            "Project and rotate the new tokens alone; put their k and v behind the kept ones; attend over all.",
        ),
        _cached_cases,
        (
            Mistake("Keys from the cache are rotated again, with the new ones; they were rotated when they were kept.",
                    partial(_cached_so, how="rotated again")),
            Mistake("Keys from the cache are rotated again; they were rotated when they were kept.",
                    partial(_cached_so, how="past rotated again")),
            Mistake("Positions begin at 0 in every call; the first new token stands at S.",
                    partial(_cached_so, how="from 0")),
            Mistake("The new tokens are rotated as if they stood at 0; the first of them stands at S.",
                    partial(_cached_so, how="rotated from 0")),
            Mistake("The new tokens are rotated one position too far; the first of them stands at S.",
                    partial(_cached_so, how="rotated one later")),
            Mistake("The new tokens see as if they stood at 0; the first of them stands at S, and sees all before it.",
                    partial(_cached_so, how="seen from 0")),
            Mistake("Positions are one too large: the first new token stands at S, the number of kept keys.",
                    partial(_cached_so, how="one later")),
            Mistake("Positions are one too small where keys are kept: the first new token stands at S.",
                    partial(_cached_so, how="one earlier")),
            Mistake("Queries and keys are not rotated.", partial(_cached_so, how="not rotated")),
            Mistake("Keys are kept before their rotation, and rotated in each call; rotate once, and keep them so.",
                    partial(_cached_so, how="rotated late")),
            Mistake("Keys and values are returned in the wrong order: out, keys, values.",
                    partial(_cached_so, how="exchanged")),
            Mistake("The values are not kept: those of earlier tokens are missing in what is returned.",
                    partial(_cached_so, how="no values")),
            Mistake("The new keys and values are used, and the old ones returned: keep the new ones as well.",
                    partial(_cached_so, how="kept old")),
            Mistake("Keys are kept before their rotation, and the kept ones are used so.",
                    partial(_cached_so, how="unrotated")),
            Mistake("The new keys and values stand in front of the kept ones; they follow them.",
                    partial(_cached_so, how="in front")),
            Mistake("The new tokens see only the past; a token sees itself too.",
                    partial(_cached_so, how="past alone")),
            Mistake("The new tokens see only each other; the kept keys and values are not used.",
                    partial(_cached_so, how="new alone")),
            Mistake("Only the new keys and values are returned; all are to be kept.",
                    partial(_cached_so, how="kept new")),
        ),
        _kept_keys,
    ),
)  # fmt: skip
