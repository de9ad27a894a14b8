"""One chain of paths, each equal to the one before: eager, causal, cached, chunked, ragged, recorded; and cross."""

import pytest
import torch
import torch.nn.functional as F

from llamarium.attention import CachedAttend, CausalAttend, CrossAttend, EagerAttend, KVCache, RecordingAttend
from llamarium.attention.base import Eager, attend_eagerly
from llamarium.errors import ContextLengthError, InputError

B, T, N, K, H = 3, 11, 6, 2, 8
CLOSE = {"rtol": 1.3e-6, "atol": 1e-5}


def qkv(seed: int = 0, batch: int = B, tokens: int = T) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, tokens, heads, H, generator=generator) * 2 for heads in (N, K, K))


def new_cache(batch: int = B, slots: int = 32) -> KVCache:
    return KVCache(
        num_layers=1, batch_size=batch, num_slots=slots, num_key_value_heads=K, head_dim=H, dtype=torch.float32
    )


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


def test_segments_are_separate_documents() -> None:
    q, k, v = qkv(batch=1)
    packed = CausalAttend(segments_BT=torch.tensor([[0] * 4 + [1] * 7]))(0, q, k, v)
    alone = [CausalAttend()(0, q[:, part], k[:, part], v[:, part]) for part in (slice(0, 4), slice(4, 11))]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), **CLOSE)


def test_bidirectional_sees_ahead() -> None:
    q, k, v = qkv()
    out = CausalAttend(bidirectional=True)(0, q, k, v)
    torch.testing.assert_close(out[1, 2, 4], by_hand(q, k, v, 1, 2, 4, list(range(T))), **CLOSE)


@pytest.mark.parametrize("cuts", [[11], [1] * 11, [4, 7], [6, 1, 1, 3]])
def test_cached_equals_causal_however_it_is_cut(cuts: list[int]) -> None:
    q, k, v = qkv()
    cache, outs, start = new_cache(), [], 0
    for length in cuts:
        part = slice(start, start + length)
        outs.append(CachedAttend(cache, [start] * B, length)(0, q[:, part], k[:, part], v[:, part]))
        start += length
    torch.testing.assert_close(torch.cat(outs, dim=1), CausalAttend()(0, q, k, v), **CLOSE)


def test_rows_of_different_lengths_need_no_mask() -> None:
    """Prefill padded on the right, then decode where each row stands: each row equals itself alone."""
    lengths = [11, 4, 7]
    q, k, v = qkv()
    cache = new_cache()
    CachedAttend(cache, [0] * B, T)(0, q, k, v)  # rows 1 and 2 are followed by padding
    for step in range(3):
        new_q, new_k, new_v = qkv(seed=step + 1, tokens=1)
        attend = CachedAttend(cache, [n + step for n in lengths], 1)
        assert attend.positions_BT.flatten().tolist() == [n + step for n in lengths]
        out = attend(0, new_q, new_k, new_v)
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
    CachedAttend(cache, [0] * B, 6)(0, q[:, :6], k[:, :6], v[:, :6])
    starts = [6, 3, 5]
    take = torch.tensor([[s + i for i in range(4)] for s in starts])
    rows = torch.arange(B).unsqueeze(1)
    out = CachedAttend(cache, starts, 4)(0, q[rows, take], k[rows, take], v[rows, take])
    torch.testing.assert_close(out, expected[rows, take], **CLOSE)


def test_going_back_is_continuing_from_a_smaller_position() -> None:
    q, k, v = qkv()
    cache = new_cache()
    CachedAttend(cache, [0] * B, T)(0, *qkv(seed=9))
    CachedAttend(cache, [0] * B, 5)(0, q[:, :5], k[:, :5], v[:, :5])
    out = CachedAttend(cache, [5] * B, 6)(0, q[:, 5:], k[:, 5:], v[:, 5:])
    torch.testing.assert_close(out, CausalAttend()(0, q, k, v)[:, 5:], **CLOSE)


def test_a_full_cache_and_wrong_starts_are_refused() -> None:
    cache = new_cache(slots=4)
    with pytest.raises(ContextLengthError, match="5 positions needed, and the KV cache holds 4"):
        CachedAttend(cache, [0] * B, 5)
    with pytest.raises(InputError, match="expected 3 positions"):
        CachedAttend(cache, [0], 1)
    with pytest.raises(InputError, match="0 or more"):
        CachedAttend(cache, [0, -1, 0], 1)


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
    records: list[Eager] = []
    RecordingAttend(attend, lambda i, q, context: records.append(attend_eagerly(q, context)))(0, q, k, v)
    torch.testing.assert_close(records[0].out_BTNH, expected, **CLOSE)


def test_recording_changes_nothing_and_sees_the_past() -> None:
    q, k, v = qkv()
    cache = new_cache()
    CachedAttend(cache, [0] * B, 8)(0, q[:, :8], k[:, :8], v[:, :8])
    inner = CachedAttend(cache, [8] * B, 3)
    plain = inner(0, q[:, 8:], k[:, 8:], v[:, 8:])
    records: list[tuple[int, Eager]] = []
    recording = RecordingAttend(inner, lambda i, q, context: records.append((i, attend_eagerly(q, context))))
    assert torch.equal(recording(0, q[:, 8:], k[:, 8:], v[:, 8:]), plain)
    ((layer_idx, eager),) = records
    assert layer_idx == 0
    assert eager.pattern_BNTS.shape == (B, N, 3, T)
    torch.testing.assert_close(eager.pattern_BNTS.sum(-1), torch.ones(B, N, 3))
    assert eager.pattern_BNTS[:, :, 0, 9:].abs().max() == 0, "position 8 must not see 9 and 10"
    torch.testing.assert_close(eager.out_BTNH, plain, **CLOSE)
