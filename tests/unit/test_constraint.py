"""What the sampler makes of an answer's form: both implementations, test by test, with masks written by hand."""

import math

import numpy as np
import pytest

from llamarium.errors import LlamariumError
from llamarium.kernels import native
from llamarium.sampling.constraint import NoToken
from llamarium.sampling.grammar.description import Grammar
from llamarium.sampling.params import SamplingParams
from llamarium.sampling.row import SamplingRow
from llamarium.sampling.sampler import Sampler

pytestmark = pytest.mark.quick

FORM = Grammar.regex("a")  # what it says is no matter here: the tests' constraints have their own masks
INF = math.inf


@pytest.fixture(autouse=True, params=["C", "NumPy"])
def way(request, monkeypatch):
    if request.param == "NumPy":
        monkeypatch.setattr(native, "library", lambda: None)
    return request.param


class Allow:
    """Allows the same ids at each token."""

    failure = NoToken.NOTHING_FITS

    def __init__(self, ids, vocab_size):
        flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        flags[list(ids)] = 1
        self.words = np.packbits(flags, bitorder="little").view(np.uint32)
        self.accepted = []
        self.is_finished = False

    def mask(self):
        return self.words

    def accept(self, token_id):
        self.accepted.append(token_id)


def row(allowed, vocab_size, **params) -> SamplingRow:
    return SamplingRow(SamplingParams(grammar=FORM, **params), [0], vocab_size, constraint=Allow(allowed, vocab_size))


def sample(rows, logits_BV):
    return Sampler(logits_BV.shape[1]).sample(rows, logits_BV)


@pytest.mark.parametrize("vocab_size", [5, 31, 32, 33, 64, 100, 1000, 128_256])
@pytest.mark.parametrize("filters", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_only_what_is_allowed_comes_and_as_if_nothing_else_were_there(vocab_size: int, filters: dict) -> None:
    rng = np.random.default_rng(vocab_size)
    for seed in range(3):
        allowed = [*rng.choice(vocab_size, min(vocab_size, 7), replace=False).tolist(), vocab_size - 1]
        logits = rng.normal(0, 3, (1, vocab_size)).astype(np.float32)
        others = np.full_like(logits, -INF)
        others[0, allowed] = logits[0, allowed]
        before = logits.copy()
        free = SamplingRow(SamplingParams(seed=seed, **filters), [0], vocab_size)
        (found,) = sample([row(allowed, vocab_size, seed=seed, **filters)], logits)
        assert found == sample([free], others)[0] and found.token_id in allowed
        assert np.array_equal(logits, before)


def test_rows_with_and_without_a_form_stand_side_by_side() -> None:
    logits = np.zeros((3, 40), np.float32)
    logits[:, 7] = 9
    free = SamplingRow(SamplingParams(temperature=0), [0], 40)
    chosen = sample([row([33, 39], 40, temperature=0.0), free, row([2], 40, temperature=0.0)], logits)
    assert [c.token_id for c in chosen] == [33, 7, 2]


def test_the_row_tells_its_form_what_came() -> None:
    asked = row([3], 8, temperature=0.0)
    sample([asked], np.zeros((1, 8), np.float32))
    assert asked.constraint.accepted == [3] and asked.num_tokens == 1


def test_a_row_that_is_taken_up_again_tells_it_all() -> None:
    form = Allow([3], 8)
    SamplingRow(SamplingParams(grammar=FORM), [0], 8, [3, 3], form)
    assert form.accepted == [3, 3]


def test_a_bias_does_not_let_in_what_is_not_allowed() -> None:
    asked = row([3, 4], 8, temperature=0.0, logit_bias={0: 100.0, 4: 1.0})
    assert sample([asked], np.zeros((1, 8), np.float32))[0].token_id == 4


def test_log_probabilities_are_the_models_own() -> None:
    (chosen,) = sample([row([3], 8, temperature=0.0, logprobs=2)], np.zeros((1, 8), np.float32))
    assert chosen.logprob == pytest.approx(-math.log(8)) and [i for i, _ in chosen.top] == [0, 1]


def test_where_nothing_fits_the_row_ends_alone_and_says_why() -> None:
    logits = np.zeros((2, 40), np.float32)
    stuck, other = sample([row([], 40), row([5], 40)], logits)
    assert stuck.token_id == NoToken.NOTHING_FITS and other.token_id == 5
    with pytest.raises(LlamariumError, match="row 0: the grammar allows no token"):
        stuck.id_of(0)


def test_logits_that_are_nan_are_told_from_a_form_without_a_token() -> None:
    (chosen,) = sample([row([5], 40)], np.full((1, 40), np.nan, np.float32))
    assert chosen.token_id == NoToken.NOT_FINITE


def test_a_grammar_without_what_it_compiles_to_is_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError, match="a grammar needs its constraint"):
        SamplingRow(SamplingParams(grammar=FORM), [0], 8)
