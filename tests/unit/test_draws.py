"""Draws: the noise and what it makes of logits, by definition, in the long run, and under rounding."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from llamarium.kernels import native
from llamarium.sampling import steps
from llamarium.sampling.params import SamplingParams
from llamarium.sampling.row import SamplingRow
from llamarium.sampling.sampler import Sampler
from llamarium.sampling.steps import splitmix64

pytestmark = pytest.mark.torch

INF = math.inf


@pytest.fixture(params=["C", "NumPy"])
def way(request, monkeypatch):
    """Both ways to choose: with the kernels, and without them."""
    if request.param == "NumPy":
        monkeypatch.setattr(native, "library", lambda: None)
    return request.param


def drawn(rows, logits_BV):
    return [chosen.token_id for chosen in Sampler(logits_BV.shape[1]).sample(rows, logits_BV)]


def normal(*shape, spread=3.0, seed=0):
    return (np.random.default_rng(seed).standard_normal(shape) * spread).astype(np.float32)


# --- the noise --------------------------------------------------------------------------------------------------------


def stream_of(states, count):
    """The first numbers of splitmix64's streams, by its paper's definition: a sum, then a mix; uint64 (..., count)."""
    z = np.asarray(states, np.uint64)[..., None] + np.arange(1, count + 1, dtype=np.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> 27)) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> 31)


def uniforms(seed, num_steps, vocab_size):
    """u of each token in a request's first steps, in (0, 1); shape (num_steps, vocab_size)."""
    steps = stream_of(stream_of(seed, 1)[0], num_steps)
    return 1 - ((stream_of(steps, vocab_size) >> 12).astype(np.float64) + 0.5) / 2**52


def noise(seed, step, vocab_size):
    return -np.log(-np.log(uniforms(seed, step + 1, vocab_size)[step]))


def test_splitmix64_is_the_published_generator():
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]  # Java's SplittableRandom(1234567)
    assert [splitmix64(1234567, n) for n in range(3)] == stream_of(1234567, 3).tolist() == expected


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_pytorchs_noise_is_the_definitions(seed):
    row = SamplingRow(SamplingParams(seed=seed), [0], 1000, answer_ids=[0] * 7)
    np.testing.assert_allclose(steps.noise(row, 1000), noise(seed, 7, 1000), rtol=1e-12)


@pytest.mark.parametrize("axis", ["tokens", "steps", "seeds"])
def test_neighbours_are_independent(axis):
    """Chi-square over 16 x 16 cells of each number and its neighbour on one axis."""
    if axis == "seeds":
        u = np.stack([uniforms(seed, 8, 128) for seed in range(128)])
        u, v = u[:-1].ravel(), u[1:].ravel()
    else:
        u = uniforms(3, 512, 512)
        u, v = (u[:-1].ravel(), u[1:].ravel()) if axis == "steps" else (u[:, :-1].ravel(), u[:, 1:].ravel())
    cells = np.bincount((u * 16).astype(int) * 16 + (v * 16).astype(int), minlength=256)
    expected = len(u) / 256
    chi_square = ((cells - expected) ** 2 / expected).sum()
    assert abs(chi_square - 255) < 4 * math.sqrt(2 * 255)  # four standard deviations
    assert 0 < u.min() < 1e-4 and 1 - 1e-4 < u.max() < 1


# --- draws ------------------------------------------------------------------------------------------------------------

FILTERS = [
    {},
    {"temperature": 0.05},
    {"temperature": 1e5},  # flat
    {"top_k": 1},
    {"top_k": 40},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"top_k": 3000, "top_p": 0.7},
    {"top_p": 0.95, "min_p": 0.01},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.1, "temperature": 0.3},
    {"temperature": 40.0, "top_p": 0.9},  # nearly flat: the nucleus is most of the vocabulary
    {"temperature": 40.0, "min_p": 0.8},
    {"temperature": 1e-4, "top_p": 0.9},
]


def scores_by_definition(logits_V, params, step):
    """Steps 5 to 9 in float64, by whole sorted rows: -infinity for what is out."""
    scaled = (logits_V.astype(np.float64) - logits_V.max()) / np.float32(params.temperature)
    if 0 < params.top_k < len(scaled):
        scaled[scaled < np.sort(scaled)[-params.top_k]] = -INF
    probs = np.exp(scaled) / np.exp(scaled).sum()
    if params.top_p < 1:
        ordered = np.sort(probs)[::-1]
        probs[probs < ordered[(ordered.cumsum() < params.top_p).sum()]] = 0
    if params.min_p > 0:
        probs[probs < params.min_p * probs.max()] = 0
    scaled[probs == 0] = -INF
    return scaled + noise(params.seed, step, len(scaled))


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab_size", [3, 64, 1001, 49152])
def test_draws_are_those_of_the_definition(filters, vocab_size, way):
    for seed in range(4):
        params = SamplingParams(**{"temperature": 0.8, **filters}, seed=seed)
        logits_1V = normal(1, vocab_size, seed=vocab_size + seed)
        logits_1V[0, ::5] = -INF
        rows = [SamplingRow(params, [0], vocab_size)]
        for step in range(5):
            scores = scores_by_definition(logits_1V[0], params, step)
            assert drawn(rows, logits_1V) == [int(scores.argmax())]


LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, -2.0, -INF, 1.0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=0),
        SamplingParams(seed=1, temperature=0.5),
        SamplingParams(seed=2, temperature=2.0),
        SamplingParams(seed=3, top_k=3),
        SamplingParams(seed=4, top_p=0.7),
        SamplingParams(seed=5, min_p=0.2),
        SamplingParams(seed=6, temperature=1.5, top_k=6, top_p=0.9, min_p=0.1),
    ],
)
def test_draws_follow_the_distribution(params, way):
    """Chi-square with the expectation worked out in float64 by the definitions; fixed seeds, so it never flickers."""
    scaled = torch.tensor(LOGITS, dtype=torch.float64) / params.temperature
    if params.top_k:
        scaled[scaled < scaled.sort(descending=True).values[params.top_k - 1]] = -INF
    probs = scaled.softmax(0)
    ordered = probs.sort(descending=True).values
    inside = int((ordered.cumsum(0) - ordered < params.top_p - 1e-12).sum())
    probs[probs < ordered[inside - 1]] = 0
    probs[probs < params.min_p * probs.max()] = 0
    probs = (probs / probs.sum()).numpy()
    count, batch = 8000, 100  # 100 rows with seeds of their own, 80 steps each: both axes of the noise
    rows = [SamplingRow(replace(params, seed=1000 * params.seed + i), [0], 8) for i in range(batch)]
    logits_BV = np.array([LOGITS] * batch, np.float32)
    got = np.bincount([i for _ in range(count // batch) for i in drawn(rows, logits_BV)], minlength=8)
    possible = probs > 0
    assert (got[~possible] == 0).all()
    expected = probs[possible] * count
    chi_square = ((got[possible] - expected) ** 2 / expected).sum()
    degrees = int(possible.sum()) - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)  # four standard deviations


def test_every_part_of_a_large_vocabulary_is_drawn_as_often_as_it_should(way):
    """2**17 equal tokens: the mean of the ids tells, and almost no id comes twice."""
    logits_BV = np.zeros((8, 2**17), np.float32)
    rows = [SamplingRow(SamplingParams(seed=i), [0], 2**17) for i in range(8)]
    ids = np.array([drawn(rows, logits_BV) for _ in range(16)])
    assert abs(ids.mean() / 2**17 - 0.5) < 4 * math.sqrt(1 / 12 / ids.size)
    assert np.unique(ids).size > ids.size - 5


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 40, "min_p": 0.05}], ids=str)
def test_rounding_does_not_shift_draws(filters):
    """Each logit changes by up to 1e-5 of itself, more than float32 rounds: fewer than one draw in 10,000 changes."""
    num_steps, batch, vocab_size = 50, 400, 2048
    sampler, random = Sampler(vocab_size), np.random.default_rng(1)
    rows = [SamplingRow(SamplingParams(seed=seed, **filters), [0], vocab_size) for seed in range(batch)]
    others = [SamplingRow(row.params, [0], vocab_size) for row in rows]
    changed = 0
    for step in range(num_steps):
        logits_BV = normal(batch, vocab_size, seed=step)
        rounded_BV = logits_BV * random.uniform(1 - 1e-5, 1 + 1e-5, logits_BV.shape).astype(np.float32)
        pairs = zip(sampler.sample(rows, logits_BV), sampler.sample(others, rounded_BV), strict=True)
        changed += sum(one.token_id != other.token_id for one, other in pairs)
    assert changed < num_steps * batch / 10_000
