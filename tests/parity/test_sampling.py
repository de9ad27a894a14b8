"""Each step of the sampler against transformers' logits processors.

The oracle's logits with the same noise give the token that is drawn; so equal tokens over much noise mean equal
distributions; the kept set is also compared as such.
"""

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llamarium.sampling.params import SamplingParams
from llamarium.sampling.row import SamplingRow
from llamarium.sampling.sampler import Sampler
from llamarium.sampling.steps import noise, stages

pytestmark = pytest.mark.torch

V = 1000
PROMPT = [1, 5, 5, 9, 700]


def processors(params):
    """The oracle, in the order of `GenerationMixin._get_logits_processor`."""
    made = LogitsProcessorList()
    if params.logit_bias:
        made.append(SequenceBiasLogitsProcessor({(token,): float(bias) for token, bias in params.logit_bias.items()}))
    if params.repetition_penalty != 1:
        made.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature != 1:
        made.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        made.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        made.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        made.append(MinPLogitsWarper(params.min_p))
    return made


CASES = {
    "temperature": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=3.0),
    "repetition": SamplingParams(repetition_penalty=1.3),
    "repetition below 1": SamplingParams(repetition_penalty=0.7),
    "top_k": SamplingParams(top_k=40),
    "top_k 1": SamplingParams(top_k=1),
    "top_p": SamplingParams(top_p=0.9),
    "top_p wide": SamplingParams(top_p=0.999),  # past the 256 largest
    "top_p narrow": SamplingParams(top_p=1e-6),
    "min_p": SamplingParams(min_p=0.05),
    "min_p 1": SamplingParams(min_p=1.0),
    "bias": SamplingParams(logit_bias={3: 5.0, 700: -100.0}),
    "llama": SamplingParams(temperature=0.6, top_p=0.9),
    "all": SamplingParams(
        logit_bias={3: 4.0, 8: -3.0}, repetition_penalty=1.2, temperature=1.4, top_k=50, top_p=0.8, min_p=0.02
    ),
}


@pytest.fixture(scope="module")
def logits():
    return torch.randn(64, V, generator=torch.Generator().manual_seed(0)) * 2.5


def rows_of(params):
    return [SamplingRow(params, PROMPT, V) for _ in range(64)]


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers_processors(name, logits):
    params = CASES[name]
    sampler, rows = Sampler(V), rows_of(params)
    ids = torch.tensor([PROMPT] * 64)
    for _ in range(8):
        noise_BV = torch.from_numpy(np.stack([noise(row, V) for row in rows]))
        scores = processors(params)(ids, logits).double() + noise_BV
        got = torch.tensor([chosen.token_id for chosen in sampler.sample(rows, logits)])
        lost = scores.amax(-1) - scores.gather(1, got[:, None])[:, 0]
        assert (lost < 1e-5).all()  # infinite for a token that is out; sums within rounding may go either way
        ids = torch.cat([ids, got[:, None]], 1)  # the penalty counts what both have said


@pytest.mark.parametrize("name", CASES)
def test_kept_sets_are_transformers(name, logits):
    params = CASES[name]
    probs = processors(params)(torch.tensor([PROMPT] * 64), logits).softmax(-1)
    last = [list(stages(row, own_V))[-1].logits_V for row, own_V in zip(rows_of(params), logits.numpy(), strict=True)]
    kept = torch.from_numpy(np.stack(last)).softmax(-1)
    assert torch.equal(kept > 0, probs > 0)
    torch.testing.assert_close(kept, probs, rtol=2e-5, atol=1e-7)


def test_defaults_from_generation_config_mean_the_same():
    raw = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    theirs, ours = GenerationConfig(**raw), SamplingParams.from_generation_config(raw)
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        assert getattr(ours, name) == getattr(theirs, name)
