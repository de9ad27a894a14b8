"""What the sampler chooses, on logits small enough to work out: both implementations, test by test."""

import math

import numpy as np
import pytest
import torch

from llamarium.errors import LlamariumError, LogitsProcessorError, MemoryBudgetError, SamplingError
from llamarium.kernels import native
from llamarium.sampling.constraint import NoToken
from llamarium.sampling.params import SamplingParams
from llamarium.sampling.row import SamplingRow
from llamarium.sampling.sampler import Sampler
from llamarium.sampling.steps import stages

pytestmark = pytest.mark.torch

NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True, params=["C", "NumPy"])
def way(request, monkeypatch):
    """Both ways to choose: with the kernels, and without them."""
    if request.param == "NumPy":
        monkeypatch.setattr(native, "library", lambda: None)
    return request.param


def rows_of(*params, prompts=None, vocab_size=8):
    return [
        SamplingRow(p, prompt, vocab_size) for p, prompt in zip(params, prompts or [[0]] * len(params), strict=True)
    ]


def sample(rows, logits):
    logits_BV = np.array(logits, np.float32) if isinstance(logits, list) else logits
    return Sampler(logits_BV.shape[1]).sample(rows, logits_BV)


def ids_of(rows, logits):
    return [chosen.token_id for chosen in sample(rows, logits)]


def draws(params, logits, count, prompt=(0,)):
    """Ids that one row draws from the same logits, step after step."""
    rows = rows_of(params, prompts=[prompt], vocab_size=len(logits))
    return [ids_of(rows, [logits])[0] for _ in range(count)]


def test_greedy_takes_the_largest_and_the_lowest_id_among_equals():
    logits = [[1.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0], [-5.0, -INF, -4.0, -INF]]
    assert ids_of(rows_of(*[SamplingParams(temperature=0)] * 3, vocab_size=4), logits) == [1, 0, 2]


def test_filters_at_temperature_zero_change_nothing():
    params = SamplingParams(temperature=0, top_k=1, top_p=0.1, min_p=1.0)
    assert draws(params, [1.0, 3.0, 3.0], 3) == [1, 1, 1]


def test_the_smallest_temperature_is_almost_greedy_and_the_largest_almost_uniform():
    assert set(draws(SamplingParams(temperature=1e-5, seed=0), [80.0, 80.1, -80.0], 50)) == {1}
    assert set(draws(SamplingParams(temperature=1e5, seed=0), [80.0, 0.0, -INF], 50)) == {0, 1}


def test_logits_are_the_same_afterwards_and_any_float_dtype_is_taken():
    params = SamplingParams(
        logit_bias={1: 50.0}, repetition_penalty=2, top_k=2, top_p=0.5, min_p=0.5, temperature=0.5, logprobs=1
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for prompt in ([0], [1, 2, 1]):
            logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
            before = logits.clone()
            assert ids_of(rows_of(params, prompts=[prompt]), logits) == [1]
            assert torch.equal(logits, before)
    with torch.inference_mode():
        inside = torch.zeros(1, 8)
    for logits in (inside, torch.zeros(1, 8, requires_grad=True), torch.zeros(1, 1).expand(1, 8)):
        assert ids_of(rows_of(params), logits) == [1]
    turned = np.zeros((8, 1)).T  # float64, and not in order
    assert ids_of(rows_of(params), turned) == [1] and not turned.any()


def test_logit_bias_is_added_once_per_row():
    rows = rows_of(
        SamplingParams(temperature=0, logit_bias={2: 5.0, 1: -100.0}), SamplingParams(temperature=0), vocab_size=3
    )
    assert ids_of(rows, [[0.0, 9.0, 4.5], [0.0, 9.0, 4.5]]) == [2, 1]


def test_a_logits_processor_comes_first_and_concerns_its_row_alone():
    def processor(token_ids, logits):
        assert token_ids.tolist() == [1, 2] and logits.tolist() == [0.0, 9.0, 4.5]
        return logits * np.float32(-1)

    params = SamplingParams(temperature=0, logits_processor=processor, logprobs=1, logit_bias={2: 5.0})
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.tensor([[0.0, 9.0, 4.5]] * 3, dtype=dtype)
        failing = SamplingParams(temperature=0, logits_processor=lambda token_ids, logits: None)
        rows = rows_of(params, failing, SamplingParams(temperature=0), prompts=[[1, 2], [0], [0]], vocab_size=3)
        chosen = sample(rows, logits)
        assert [one.token_id for one in chosen] == [2, NoToken.PROCESSOR_FAILED, 1]
        assert chosen[0].top[0][0] == 1, "log-probabilities are the model's own"
        assert isinstance(rows[1].failure, LogitsProcessorError) and rows[2].failure is None
        assert torch.equal(logits, torch.tensor([[0.0, 9.0, 4.5]] * 3, dtype=dtype))


def test_logits_that_are_not_finite_are_the_models_fault_and_not_the_processors():
    params = SamplingParams(temperature=0, logits_processor=lambda token_ids, logits: 1 / 0)
    assert ids_of(rows_of(params, vocab_size=3), [[0.0, NAN, 1.0]]) == [NoToken.NOT_FINITE]


def test_presence_and_frequency_count_the_answer_and_not_the_prompt():
    logits = [3.0, 2.5, 0.0]
    assert draws(SamplingParams(temperature=0, presence_penalty=1.0), logits, 4, prompt=[0, 0]) == [0, 1, 0, 0]
    assert draws(SamplingParams(temperature=0, frequency_penalty=1.0), logits, 4, prompt=[0, 0]) == [0, 1, 0, 1]


def test_repetition_counts_prompt_and_answer_and_knows_signs():
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert draws(params, [4.0, 3.0, 1.0], 1) == [1]  # 4 / 2 is below 3
    assert draws(params, [-1.0, -1.5, -9.0], 1) == [1]  # -1 x 2 is below -1.5
    assert draws(params, [4.0, 3.0, 1.0], 2, prompt=[2]) == [0, 1]  # what it has said counts too


def test_bias_comes_before_the_penalties():
    params = SamplingParams(temperature=0, logit_bias={0: 4.0}, repetition_penalty=2.0)
    assert draws(params, [-1.0, 1.75], 1) == [1]  # (-1 + 4) / 2 is below 1.75; -1 x 2 + 4 is above


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_k=2, top_p=0.5, min_p=0.1)])
def test_damaged_logits_fail_their_own_row_alone(bad, params):
    logits = np.zeros((3, 8), np.float32)
    logits[1, 5] = bad
    rows = rows_of(*[params] * 3)
    chosen = sample(rows, logits)
    assert chosen[1].token_id == -1 and chosen[0].id_of(0) >= 0 and chosen[2].id_of(2) >= 0
    assert [row.num_tokens for row in rows] == [1, 0, 1]
    with pytest.raises(LlamariumError, match="row 1: the model's logits are NaN or infinite"):
        chosen[1].id_of(1)


def test_a_row_of_minus_infinity_has_no_token():
    penalized = SamplingParams(frequency_penalty=1.0, logprobs=2)
    for params in (SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=3), penalized):
        rows = rows_of(params)
        (chosen,) = sample(rows, np.full((1, 8), -INF, np.float32))
        assert chosen.token_id == -1 and math.isnan(chosen.logprob) and chosen.top == () and rows[0].num_tokens == 0


def test_a_penalty_that_overflows_fails_its_row():
    params = SamplingParams(temperature=0, repetition_penalty=0.01)
    assert draws(params, [3e38, 1.0], 1) == [-1]


@pytest.mark.parametrize("temperature", [0, 0.01])
def test_log_probabilities_are_the_models_own(temperature):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    params = SamplingParams(temperature=temperature, logit_bias={3: 100.0}, logprobs=2, repetition_penalty=2)
    (chosen,) = sample(rows_of(params, vocab_size=4), logits)
    expected = logits.double().log_softmax(-1)[0].tolist()
    assert chosen.token_id == 3 and chosen.logprob == pytest.approx(expected[3], rel=1e-6)
    assert chosen.top == tuple((i, pytest.approx(expected[i], rel=1e-6)) for i in range(2))


def test_log_probabilities_come_only_when_asked():
    rows = rows_of(*(SamplingParams(logprobs=count) for count in (None, 0, 1, 3)))
    nothing, chosen, one, three = sample(rows, np.zeros((4, 8), np.float32))
    assert math.isnan(nothing.logprob) and nothing.top == ()
    assert chosen.logprob == pytest.approx(-math.log(8)) and chosen.top == ()
    assert [i for i, _ in one.top] == [0] and [i for i, _ in three.top] == [0, 1, 2]  # the lowest ids among equals


def test_all_of_a_vocabulary_can_be_reported():
    (chosen,) = sample(rows_of(SamplingParams(logprobs=8)), [[0.0, 2.0, -INF, 1.0, 2.0, -1.0, 0.0, 5.0]])
    assert [i for i, _ in chosen.top] == [7, 1, 4, 3, 0, 6, 5, 2] and chosen.top[-1][1] == -INF


@pytest.mark.parametrize("count", [1, 5, 16, 17, 1000])
def test_the_most_probable_are_those_of_a_whole_sort(count):
    logits = np.random.default_rng(0).integers(-9, 9, (1, 1000)).astype(np.float32)  # with many equals
    (chosen,) = sample(rows_of(SamplingParams(logprobs=count), vocab_size=1000), logits)
    assert [i for i, _ in chosen.top] == np.argsort(-logits[0], kind="stable")[:count].tolist()


def test_a_seed_repeats_and_another_differs():
    logits = [0.0] * 1000
    first = draws(SamplingParams(seed=1), logits, 20)
    assert draws(SamplingParams(seed=1), logits, 20) == first
    for other in (2, 1 + 2**32, 2**63 - 1):  # all 63 bits of a seed count
        assert draws(SamplingParams(seed=other), logits, 20) != first


def test_without_a_seed_a_fresh_one_is_reported():
    free = rows_of(SamplingParams(), SamplingParams())
    assert free[0].seed != free[1].seed
    logits = np.zeros((2, 8), np.float32)
    got = [ids_of(free, logits) for _ in range(10)]
    again = rows_of(*(SamplingParams(seed=row.seed) for row in free))
    assert [ids_of(again, logits) for _ in range(10)] == got


def test_the_process_seed_and_generator_are_not_touched():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = draws(SamplingParams(seed=3), [0.0] * 100, 5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert draws(SamplingParams(seed=3), [0.0] * 100, 5) == first


REQUESTS = [
    SamplingParams(seed=1, repetition_penalty=1.5),
    SamplingParams(temperature=0, frequency_penalty=0.5),
    SamplingParams(seed=3, top_p=0.9, logit_bias={4: 2.0}),
    SamplingParams(seed=4, presence_penalty=1.0, top_k=5),
]


def test_rows_are_not_disturbed_by_those_that_join_and_leave():
    steps = np.random.default_rng(0).standard_normal((30, 4, 8)).astype(np.float32)
    alone = rows_of(*REQUESTS, prompts=[[0], [1], [2], [3]])
    expected = {i: [ids_of([row], step[i : i + 1])[0] for step in steps] for i, row in enumerate(alone)}
    rows, done = rows_of(*REQUESTS, prompts=[[0], [1], [2], [3]]), dict.fromkeys(range(4), 0)
    for t in range(40):
        here = [i for i in ((2, 0), (3, 1, 0), (1, 2, 3, 0), (3,), (0, 1))[t % 5] if done[i] < 30]
        logits = np.stack([steps[done[i], i] for i in here]) if here else np.zeros((0, 8), np.float32)
        for i, token_id in zip(here, ids_of([rows[i] for i in here], logits) if here else [], strict=True):
            assert token_id == expected[i][done[i]]
            done[i] += 1
    assert min(done.values()) > 10


def test_a_request_taken_up_again_goes_on_as_if_never_stopped():
    params = SamplingParams(seed=9, repetition_penalty=1.3, frequency_penalty=0.7)
    steps = np.random.default_rng(0).standard_normal((20, 1, 8)).astype(np.float32)
    whole = rows_of(params, prompts=[[5]])
    expected = [ids_of(whole, step)[0] for step in steps]
    resumed = [SamplingRow(params, [5], 8, expected[:8])]
    assert [ids_of(resumed, step)[0] for step in steps[8:]] == expected[8:]


def test_requests_that_do_not_fit_the_vocabulary_are_refused():
    with pytest.raises(SamplingError, match="logit_bias has token id 8; expected less than 8"):
        rows_of(SamplingParams(logit_bias={8: 1.0}))
    with pytest.raises(SamplingError, match="logprobs is 9; expected at most"):
        rows_of(SamplingParams(logprobs=9))
    with pytest.raises(SamplingError, match=r"n is 2; .*SamplingParams.rows\(\)"):
        rows_of(SamplingParams(n=2))


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 1.0}], ids=str)
def test_equals_stay_together(filters):
    logits = [1.0, 5.0, 5.0, 0.0, 5.0, 5.0] * 60  # more equals than a filter asks for
    found = draws(SamplingParams(temperature=1.0, seed=1, **filters), logits, 400)
    assert {logits[i] for i in found} == {5.0} and len(set(found)) > 150


@pytest.mark.parametrize("top_k", [4, 2**31, 2**32 + 1])
def test_a_top_k_beyond_the_vocabulary_keeps_all(top_k):
    found = draws(SamplingParams(temperature=1.0, top_k=top_k, seed=1), [1.0, 1.1, 1.2, 1.3], 60)
    assert set(found) == {0, 1, 2, 3}


def test_an_end_may_not_come_before_min_tokens():
    logits_BV = np.array([[0.0, 5.0, 1.0, 4.0]], np.float32)
    for temperature in (0, 1e-5):
        params = SamplingParams(temperature=temperature, top_p=0.9, min_tokens=2)
        row = SamplingRow(params, [0], 4, stops=[1, 3, 99])  # publishers name ids that there are not
        assert [stage.is_on for stage in stages(row, logits_BV[0]) if stage.name == "grammar"] == [True]
        assert [ids_of([row], logits_BV) for _ in range(3)] == [[2], [2], [1]]
        assert ids_of([SamplingRow(params, [0], 4, [2, 2], stops=[1])], logits_BV) == [1]  # taken up again
    assert logits_BV.tolist() == [[0.0, 5.0, 1.0, 4.0]]
    with pytest.raises(SamplingError, match=r"^min_tokens is 2, but every token"):
        SamplingRow(params, [0], 4, stops=[0, 1, 2, 3, 3])


@pytest.mark.parametrize("way", ["C"], indirect=True)
def test_c_finds_no_memory(monkeypatch):
    monkeypatch.setattr(native.library(), "lm_choose", lambda *_: 1)
    with pytest.raises(MemoryBudgetError):
        draws(SamplingParams(), [1.0, 2.0], 1)
