"""One chain of paths, each equal to the one before: eager, causal, paged, chunked, ragged; and cross."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from llamarium.attention import CausalAttend, CrossAttend, EagerAttend
from llamarium.attention.paged import PagedAttend, PagedCache, Segment
from llamarium.errors import InputError

pytestmark = pytest.mark.torch

B, T, N, K, H = 3, 11, 6, 2, 8
CLOSE = {"rtol": 1.3e-6, "atol": 1e-5}


def qkv(seed: int = 0, batch: int = B, tokens: int = T) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, tokens, heads, H, generator=generator) * 2 for heads in (N, K, K))


SLOTS = 32


def new_cache() -> PagedCache:
    return PagedCache(
        num_layers=1, num_blocks=B, block_size=SLOTS, num_key_value_heads=K, head_dim=H, dtype=torch.float32
    )


def paged(cache: PagedCache, starts: list[int], *qkv: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """Attention of B rows as one packed row; each sequence has a block of its own."""
    count = qkv[0].shape[1]
    segments = [
        Segment(slice(count * b, count * (b + 1)), start, slice(SLOTS * b, SLOTS * b + start + count))
        for b, start in enumerate(starts)
    ]
    return PagedAttend(cache, segments, window)(0, *(x.flatten(0, 1).unsqueeze(0) for x in qkv)).view(qkv[0].shape)


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b: int, t: int, n: int, seen: list[int]) -> torch.Tensor:
    """One query of one head, in plain loops."""
    weights = torch.stack([q[b, t, n] @ k[b, s, n // (N // K)] / H**0.5 for s in seen]).softmax(0)
    return sum(w * v[b, s, n // (N // K)] for w, s in zip(weights, seen, strict=True))


def test_eager_is_the_definition() -> None:
    q, k, v = qkv()
    out = EagerAttend()(0, q, k, v)
    for b, t, n in [(0, 0, 0), (1, 5, 2), (2, 10, 3), (2, 10, 5)]:
        torch.testing.assert_close(out[b, t, n], by_hand(q, k, v, b, t, n, list(range(t + 1))), **CLOSE)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("segmented", [False, True])
def test_causal_equals_eager(bidirectional: bool, segmented: bool) -> None:
    q, k, v = qkv()
    segments = torch.tensor([[0] * 4 + [1] * 7, [0] * 11, [0] * 3 + [1] * 5 + [2] * 3]) if segmented else None
    eager = EagerAttend(segments_BT=segments, bidirectional=bidirectional)
    causal = CausalAttend(segments_BT=segments, bidirectional=bidirectional)
    torch.testing.assert_close(causal(0, q, k, v), eager(0, q, k, v), **CLOSE)


@pytest.mark.parametrize("window", [1, 2, 5, 11, 12])
def test_a_window_ends_with_the_token_itself(window: int) -> None:
    q, k, v = qkv()
    eager, causal = EagerAttend(window=window)(0, q, k, v), CausalAttend(window=window)(0, q, k, v)
    torch.testing.assert_close(causal, eager, **CLOSE)
    for b, t, n in [(0, 0, 0), (1, 5, 2), (2, 10, 3), (2, 10, 5)]:
        seen = list(range(max(0, t - window + 1), t + 1))
        torch.testing.assert_close(eager[b, t, n], by_hand(q, k, v, b, t, n, seen), **CLOSE)


def test_a_window_does_not_reach_into_another_segment() -> None:
    q, k, v = qkv(batch=1)
    packed = CausalAttend(segments_BT=torch.tensor([[0] * 4 + [1] * 7]), window=3)(0, q, k, v)
    parts = (slice(0, 4), slice(4, 11))
    alone = [CausalAttend(window=3)(0, q[:, part], k[:, part], v[:, part]) for part in parts]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), **CLOSE)


def test_calls_of_other_lengths_have_their_own_mask() -> None:
    attend = CausalAttend(window=3)
    for length in (11, 2, 7):
        q, k, v = qkv(tokens=length)
        torch.testing.assert_close(attend(0, q, k, v), EagerAttend(window=3)(0, q, k, v), **CLOSE)


@pytest.mark.parametrize("how", [{"window": 0}, {"window": -1}, {"window": 4, "bidirectional": True}])
def test_a_window_of_nothing_or_both_ways_is_refused(how: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="window"):
        CausalAttend(**how)


def test_segments_are_separate_documents() -> None:
    q, k, v = qkv(batch=1)
    packed = CausalAttend(segments_BT=torch.tensor([[0] * 4 + [1] * 7]))(0, q, k, v)
    alone = [CausalAttend()(0, q[:, part], k[:, part], v[:, part]) for part in (slice(0, 4), slice(4, 11))]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), **CLOSE)


def test_bidirectional_sees_ahead() -> None:
    q, k, v = qkv()
    out = CausalAttend(bidirectional=True)(0, q, k, v)
    torch.testing.assert_close(out[1, 2, 4], by_hand(q, k, v, 1, 2, 4, list(range(T))), **CLOSE)


@pytest.mark.parametrize("window", [None, 1, 3, 10, 11, 30])
@pytest.mark.parametrize("cuts", [[11], [1] * 11, [4, 7], [6, 1, 1, 3]])
def test_paged_equals_causal_however_it_is_cut(cuts: list[int], window: int | None) -> None:
    q, k, v = qkv()
    cache, outs, start = new_cache(), [], 0
    for length in cuts:
        part = slice(start, start + length)
        outs.append(paged(cache, [start] * B, q[:, part], k[:, part], v[:, part], window=window))
        start += length
    torch.testing.assert_close(torch.cat(outs, dim=1), CausalAttend(window=window)(0, q, k, v), **CLOSE)


def test_what_lies_before_the_window_is_not_read() -> None:
    """Its slots may hold anything."""
    q, k, v = qkv()
    cache = new_cache()
    paged(cache, [0] * B, q[:, :8], k[:, :8], v[:, :8], window=4)
    for tensor in (*cache.k, *cache.v):
        tensor.unflatten(0, (-1, SLOTS))[:, :5] = torch.nan
    out = paged(cache, [8] * B, q[:, 8:], k[:, 8:], v[:, 8:], window=4)
    torch.testing.assert_close(out, CausalAttend(window=4)(0, q, k, v)[:, 8:], **CLOSE)


def test_rows_of_different_lengths_need_no_mask() -> None:
    """Prefill padded on the right, then decode where each row stands: each row equals itself alone."""
    lengths = [11, 4, 7]
    q, k, v = qkv()
    cache = new_cache()
    paged(cache, [0] * B, q, k, v)  # rows 1 and 2 are followed by padding
    for step in range(3):
        new_q, new_k, new_v = qkv(seed=step + 1, tokens=1)
        out = paged(cache, [n + step for n in lengths], new_q, new_k, new_v)
        for b, length in enumerate(lengths):
            history = [qkv(seed=s + 1, tokens=1) for s in range(step + 1)]
            all_k = torch.cat([k[b : b + 1, :length], *[h[1][b : b + 1] for h in history]], dim=1)
            all_v = torch.cat([v[b : b + 1, :length], *[h[2][b : b + 1] for h in history]], dim=1)
            pad_q = torch.zeros(1, all_k.shape[1], N, H)
            pad_q[:, -1] = new_q[b, 0]
            torch.testing.assert_close(out[b, 0], EagerAttend()(0, pad_q, all_k, all_v)[0, -1], **CLOSE)


def test_ragged_chunks() -> None:
    """Several tokens a row, the rows at different places."""
    q, k, v = qkv()
    cache = new_cache()
    expected = CausalAttend()(0, q, k, v)
    paged(cache, [0] * B, q[:, :6], k[:, :6], v[:, :6])
    starts = [6, 3, 5]
    take = torch.tensor([[s + i for i in range(4)] for s in starts])
    rows = torch.arange(B).unsqueeze(1)
    out = paged(cache, starts, q[rows, take], k[rows, take], v[rows, take])
    torch.testing.assert_close(out, expected[rows, take], **CLOSE)


def test_going_back_is_continuing_from_a_smaller_position() -> None:
    q, k, v = qkv()
    cache = new_cache()
    paged(cache, [0] * B, *qkv(seed=9))
    paged(cache, [0] * B, q[:, :5], k[:, :5], v[:, :5])
    out = paged(cache, [5] * B, q[:, 5:], k[:, 5:], v[:, 5:])
    torch.testing.assert_close(out, CausalAttend()(0, q, k, v)[:, 5:], **CLOSE)


def test_tokens_that_are_not_the_segments_are_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(InputError, match=r"\(1, 10\) tokens; expected \(1, 11\)"):
        PagedAttend(new_cache(), [Segment(slice(0, T), 0, slice(0, T))])(0, q[:1, :10], k[:1, :10], v[:1, :10])


@pytest.mark.parametrize("padded", [False, True])
def test_cross_attention(padded: bool) -> None:
    q, k, v = qkv()
    _, memory_k, memory_v = qkv(seed=5, tokens=7)
    visible = torch.arange(7) < torch.tensor([[7], [3], [5]]) if padded else None
    attend = CrossAttend([(memory_k, memory_v)], visible)
    repeat = N // K
    expected = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        memory_k.repeat_interleave(repeat, 2).transpose(1, 2),
        memory_v.repeat_interleave(repeat, 2).transpose(1, 2),
        attn_mask=None if visible is None else visible[:, None, None],
    ).transpose(1, 2)
    torch.testing.assert_close(attend(0, q, k, v), expected, **CLOSE)
