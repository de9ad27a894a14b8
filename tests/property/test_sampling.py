"""Any logits, any parameters: what is kept, that both implementations choose alike, and that no row feels another."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarium.errors import SamplingError
from llamarium.kernels import native
from llamarium.sampling.params import SamplingParams
from llamarium.sampling.row import SamplingRow
from llamarium.sampling.sampler import Sampler
from llamarium.sampling.steps import stages

pytestmark = pytest.mark.torch

FEW = settings(max_examples=60, deadline=None)
logit = st.one_of(
    st.floats(-40, 40, width=32), st.sampled_from([0.0, 1.0, 1.0, -math.inf]), st.integers(-3, 3).map(float)
)
rows_of_logits = st.lists(logit, min_size=2, max_size=40).filter(lambda row: max(row) > -math.inf)


@st.composite
def params(draw, *, vocab_size=10**9):
    return SamplingParams(
        temperature=draw(st.sampled_from([0, 0.05, 0.7, 1.0, 1.0, 3.0])),
        top_k=draw(st.integers(0, 12)),
        top_p=draw(st.one_of(st.just(1.0), st.floats(0.01, 1.0))),
        min_p=draw(st.one_of(st.just(0.0), st.floats(0.0, 1.0))),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.8, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.4, -0.4])),
        logit_bias=draw(st.dictionaries(st.integers(0, 4), st.floats(-5, 5), max_size=2)),
        seed=draw(st.integers(0, 2**63 - 1)),
        logprobs=draw(st.sampled_from([None, 0, 2])),
    )


def support(request, logits):
    """Which ids the row can draw; the one that it draws is among them."""
    logits_V, row = np.array(logits, np.float32), SamplingRow(request, [0], len(logits))
    kept = np.exp(list(stages(row, logits_V))[-1].logits_V).nonzero()[0].tolist()
    (chosen,) = Sampler(len(logits)).sample([row], logits_V[None])
    assert chosen.token_id in kept
    return set(kept)


@FEW
@given(rows_of_logits, st.integers(1, 45))
def test_top_k_keeps_the_k_largest_and_their_equals(logits, k):
    kept = support(SamplingParams(top_k=k), logits)
    possible = set(torch.tensor(logits).softmax(0).nonzero()[:, 0].tolist())
    smallest = sorted(logits, reverse=True)[min(k, len(logits)) - 1]
    # Differences below a float32's step at the row's maximum are equal to the sampler.
    assert kept >= {i for i in possible if logits[i] > smallest}
    assert kept <= {i for i in possible if logits[i] >= smallest - 1e-5}
    assert len(kept) >= min(k, len(possible))


@FEW
@given(rows_of_logits, st.floats(0.001, 0.999))
def test_top_p_keeps_the_fewest_that_reach_p(logits, p):
    kept = support(SamplingParams(top_p=p), logits)
    probs = torch.tensor(logits).softmax(0)
    kept_probs = probs[sorted(kept)].double()
    out = probs[sorted(set(range(len(logits))) - kept)]
    assert kept_probs.sum() >= p - 1e-6  # enough
    assert not len(out) or out.max() < kept_probs.min() or out.max() == 0  # the largest, equals together
    without_the_last = kept_probs[kept_probs > kept_probs.min()].sum()
    assert without_the_last < p + 1e-6  # and no more than needed


@FEW
@given(rows_of_logits, st.floats(0.0, 1.0))
def test_min_p_keeps_those_near_the_most_probable(logits, min_p):
    kept = support(SamplingParams(min_p=min_p), logits)
    probs = torch.tensor(logits).softmax(0)
    for i, prob in enumerate(probs.tolist()):
        ratio = prob / probs.max().item()
        if abs(ratio - min_p) > 1e-6:
            assert (i in kept) == (ratio > min_p and prob > 0)


@FEW
@given(st.data(), st.integers(1, 6), st.integers(5, 600))
def test_a_batch_of_mixed_requests_equals_each_alone_and_both_ways_are_one(data, batch, vocab_size):
    requests = [data.draw(params()) for _ in range(batch)]
    prompts = [data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=4)) for _ in requests]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    together, alone, in_torch = ([SamplingRow(r, p, vocab_size) for r, p in zip(requests, prompts, strict=True)]
                                 for _ in range(3))  # fmt: skip
    sampler = Sampler(vocab_size)
    with mock.patch.object(native, "library", return_value=None):
        other = Sampler(vocab_size)
    for _ in range(4):
        logits_BV = torch.randn(batch, vocab_size, generator=generator) * 3
        both = sampler.sample(together, logits_BV)
        assert [repr(sampler.sample([row], logits_BV[i : i + 1])[0]) for i, row in enumerate(alone)] == [
            *map(repr, both)
        ]
        for one, expected in zip(other.sample(in_torch, logits_BV), both, strict=True):
            assert one.token_id == expected.token_id
            assert one.logprob == pytest.approx(expected.logprob, abs=1e-5, nan_ok=True)
            assert [i for i, _ in one.top] == [i for i, _ in expected.top]


ANYTHING = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers()))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(SamplingParams.__dataclass_fields__)), ANYTHING)
def test_any_value_is_taken_or_refused_by_name(name, value):
    try:
        made = SamplingParams(**{name: value})
    except SamplingError as error:
        assert str(error).startswith(name) and "expected" in str(error)
        return
    if max(made.logprobs or 0, made.prompt_logprobs or 0) <= 300:
        (chosen,) = Sampler(300).sample([SamplingRow(made.rows()[0], [0], 300)], torch.zeros(1, 300))
        assert chosen.token_id in range(300)
