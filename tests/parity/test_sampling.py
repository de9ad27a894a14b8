"""Each step of the sampler against transformers' logits processors.

The oracle's probabilities give, by the same inverse of the cumulated mass, the token that each uniform number selects;
so equal tokens over many uniform numbers mean equal distributions; the kept set is also compared as such.
"""

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

from llamarium.generation.sampler import Sampler, SamplingParams, _uniform

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


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers_processors(name, logits):
    params = CASES[name]
    sampler = Sampler([params] * 64, [PROMPT] * 64, V)
    ids = torch.tensor([PROMPT] * 64)
    for step in range(8):
        probs = processors(params)(ids, logits).softmax(-1)
        mass = probs.double().cumsum(-1)
        uniform = torch.tensor([[_uniform(seed, step)] for seed in sampler.seeds], dtype=torch.float64)
        expected = torch.searchsorted(mass, uniform * mass[:, -1:], right=True)[:, 0]
        got = sampler.sample(logits).token_ids
        differ = got != expected
        # A uniform number within rounding of a border may fall on either side.
        border = (mass / mass[:, -1:] - uniform).abs().min(-1).values
        assert (border[differ] < 1e-5).all()
        assert (probs.gather(1, got[:, None]) > 0).all()
        ids = torch.cat([ids, got[:, None]], 1)  # the penalty counts what both have said


@pytest.mark.parametrize("name", CASES)
def test_kept_sets_are_transformers(name, logits):
    params = CASES[name]
    probs = processors(params)(torch.tensor([PROMPT] * 64), logits).softmax(-1)
    sampler = Sampler([params] * 64, [PROMPT] * 64, V)
    adjusted = sampler._adjusted(logits)
    kept = sampler._kept(adjusted, adjusted.amax(-1, keepdim=True))
    assert torch.equal(kept > 0, probs > 0)
    torch.testing.assert_close(kept / kept.sum(-1, keepdim=True), probs, rtol=2e-5, atol=1e-7)


def test_defaults_from_generation_config_mean_the_same():
    raw = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    theirs, ours = GenerationConfig(**raw), SamplingParams.from_generation_config(raw)
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        assert getattr(ours, name) == getattr(theirs, name)
