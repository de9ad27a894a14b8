"""SamplingParams' ranges, generation_config.json, and the sampler's choices on logits small enough to work out."""

import math
import pickle
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch

from llamarium.errors import LlamariumError, MemoryBudgetError, SamplingError
from llamarium.generation.sampler import Sampler, SamplingParams, _uniform
from llamarium.kernels import native

NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True, params=["C", "PyTorch"])
def way(request, monkeypatch):
    """Both ways to choose: that of a CPU with the kernels, and that of every other device."""
    if request.param == "PyTorch":
        monkeypatch.setattr(native, "library", lambda: None)
    return request.param


def sampler(*params, prompts=None, vocab_size=8, **options):
    return Sampler(params, prompts or [[0]] * len(params), vocab_size, **options)


def draws(params, logits, count, **options):
    """Ids that one row draws from the same logits, step after step."""
    row = sampler(params, vocab_size=len(logits), **options)
    logits_1V = torch.tensor([logits])
    return [row.sample(logits_1V).ids()[0] for _ in range(count)]


# --- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("temperature", [NAN, INF, -INF, -0.1, 1e-6, 1e6, 10**5000, "1", True, None, 1j]),
        ("top_p", [NAN, INF, 0, 0.0, -0.1, 1.001, "0.9", True, None]),
        ("min_p", [NAN, INF, -0.1, 1.001, "0", False, None]),
        ("repetition_penalty", [NAN, INF, 0, -1, 0.001, 101, "1", True, None]),
        ("presence_penalty", [NAN, INF, -2.1, 2.1, "1", True, None]),
        ("frequency_penalty", [NAN, INF, -2.1, 2.1, "1", True, None]),
        ("top_k", [-1, -(10**5000), 1.0, NAN, "5", True, None]),
        ("seed", [-1, 2**63, 1.0, "5", True]),
        ("max_tokens", [0, -1, 1.0, "5", True, None]),
        ("n", [0, -1, 1.5, 1025, 10**5000, "2", True, None]),
        ("logprobs", [-1, 1.0, "5", True]),
        ("logit_bias", [None, [1], {"1": 1.0}, {-1: 1.0}, {True: 1.0}, {1: NAN}, {1: INF}, {1: 101}, {1: True}]),
        ("stop", [None, "word", ["ok", ""], [1], 5, b"x"]),
        ("stop_token_ids", [None, 5, "5", [-1], [1.0], [True], b"ab"]),
    ],
)
def test_a_value_out_of_range_names_the_parameter_and_its_range(name, bad):
    for value in bad:
        with pytest.raises(SamplingError, match=rf"^{name}.*; expected |^{name} holds .*; expected ") as caught:
            SamplingParams(**{name: value})
        assert len(str(caught.value)) < 200


def test_values_at_the_ends_of_their_ranges_are_taken():
    SamplingParams(temperature=0, top_k=10**6, top_p=1, min_p=1, repetition_penalty=0.01, presence_penalty=-2)
    SamplingParams(temperature=1e-5, top_p=1e-9, min_p=0, repetition_penalty=100, frequency_penalty=2, seed=0)
    SamplingParams(temperature=1e5, seed=2**63 - 1, max_tokens=1, n=1024, logprobs=0, logit_bias={0: -100, 1: 100})


def test_several_greedy_answers_are_refused():
    with pytest.raises(SamplingError, match="n is 2 at temperature 0"):
        SamplingParams(n=2, temperature=0)


def test_control_characters_are_shown_escaped():
    with pytest.raises(SamplingError) as caught:
        SamplingParams(temperature="\x1b[2J")
    assert "\x1b" not in str(caught.value)


def test_a_request_cannot_be_changed_from_outside():
    bias, stop, ids = {1: 2.0}, ["a"], [3]
    params = SamplingParams(logit_bias=bias, stop=stop, stop_token_ids=ids)
    bias[1], stop[0], ids[0] = NAN, "", -1
    assert (params.logit_bias, params.stop, params.stop_token_ids) == ({1: 2.0}, ("a",), (3,))
    assert pickle.loads(pickle.dumps(params)) == params and hash(params) == hash(replace(params))


def test_rows_share_everything_but_the_seed():
    params = SamplingParams(n=3, seed=2**63 - 2, top_k=5)
    assert [row.seed for row in params.rows()] == [2**63 - 2, 2**63 - 1, 0]
    assert {replace(row, seed=None) for row in params.rows()} == {SamplingParams(top_k=5)}
    assert SamplingParams(n=2).rows() == [SamplingParams(), SamplingParams()]
    assert SamplingParams(seed=7).rows() == [SamplingParams(seed=7)]


def test_parameters_need_no_torch():
    code = "import sys, llamarium.generation.params; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


# --- generation_config.json -------------------------------------------------------------------------------------------

LLAMA32 = {
    "bos_token_id": 128000,
    "do_sample": True,
    "eos_token_id": [128001, 128008, 128009],
    "temperature": 0.6,
    "top_p": 0.9,
    "transformers_version": "4.45.0.dev0",
}


def test_the_publishers_defaults():
    expected = SamplingParams(temperature=0.6, top_p=0.9, stop_token_ids=(128001, 128008, 128009))
    assert SamplingParams.from_generation_config(LLAMA32) == expected
    assert SamplingParams.from_generation_config({}) == SamplingParams()
    more = {"top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1, "max_new_tokens": 64, "stop_strings": ["###"]}
    expected = SamplingParams(top_k=40, min_p=0.1, repetition_penalty=1.1, max_tokens=64, stop=("###",))
    assert SamplingParams.from_generation_config({**more, "temperature": None}) == expected
    assert SamplingParams.from_generation_config({"eos_token_id": 2, "stop_strings": "x"}) == SamplingParams(
        stop_token_ids=(2,), stop=("x",)
    )


def test_do_sample_false_is_greedy():
    assert SamplingParams.from_generation_config({**LLAMA32, "do_sample": False}).temperature == 0


def test_the_callers_values_win_and_stops_add_up():
    params = SamplingParams.from_generation_config(
        LLAMA32, temperature=0, top_p=None, seed=5, stop=["x"], stop_token_ids=[9, 128001]
    )
    assert (params.temperature, params.top_p, params.seed, params.stop) == (0, 0.9, 5, ("x",))
    assert params.stop_token_ids == (128001, 128008, 128009, 9)
    assert SamplingParams.from_generation_config({"do_sample": False}, temperature=0.7, n=2).temperature == 0.7


def test_an_override_that_a_greedy_file_makes_idle_warns():
    with pytest.warns(UserWarning, match=r"seed, top_p: no effect, generation_config.json says greedy"):
        SamplingParams.from_generation_config({"do_sample": False}, top_p=0.5, seed=1)


def test_unsupported_active_fields_are_named():
    raw = {"num_beams": 4, "no_repeat_ngram_size": 3, "typical_p": 1.0, "num_beam_groups": 1, "suppress_tokens": None}
    with pytest.warns(UserWarning, match=r"^here: not supported and not used: num_beams 4, no_repeat_ngram_size 3$"):
        SamplingParams.from_generation_config(raw, source="here")


def test_transformers_neutral_defaults_do_not_warn():
    from transformers import GenerationConfig

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        raw = {**GenerationConfig._get_default_generation_params(), **GenerationConfig().to_dict()}
        SamplingParams.from_generation_config({k: v for k, v in raw.items() if k not in ("max_length", "do_sample")})


@pytest.mark.parametrize(
    "raw",
    [
        {"temperature": "hot"},
        {"temperature": -1},
        {"do_sample": "yes"},
        {"eos_token_id": "2"},
        {"eos_token_id": [1.5]},
        {"stop_strings": 5},
        {"top_k": 2.5},
        {"max_new_tokens": 0},
    ],
)
def test_a_malformed_file_is_named(raw):
    with pytest.raises(SamplingError, match=r"^generation_config.json: "):
        SamplingParams.from_generation_config(raw)


# --- the sampler ------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_largest_and_the_lowest_id_among_equals():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0], [-5.0, -INF, -4.0, -INF]])
    assert sampler(*[SamplingParams(temperature=0)] * 3, vocab_size=4).sample(logits).ids() == [1, 0, 2]


def test_filters_at_temperature_zero_change_nothing():
    params = SamplingParams(temperature=0, top_k=1, top_p=0.1, min_p=1.0)
    assert draws(params, [1.0, 3.0, 3.0], 3) == [1, 1, 1]


def test_the_smallest_temperature_is_almost_greedy_and_the_largest_almost_uniform():
    assert set(draws(SamplingParams(temperature=1e-5, seed=0), [80.0, 80.1, -80.0], 50)) == {1}
    assert set(draws(SamplingParams(temperature=1e5, seed=0), [80.0, 0.0, -INF], 50)) == {0, 1}


def test_logits_are_not_changed_and_any_float_dtype_is_taken():
    params = SamplingParams(logit_bias={1: 50.0}, repetition_penalty=2, top_k=2, top_p=0.5, min_p=0.5, temperature=0.5)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
        before = logits.clone()
        assert sampler(params).sample(logits).ids() == [1]
        assert torch.equal(logits, before)


def test_logit_bias_is_added_once_per_row():
    rows = [SamplingParams(temperature=0, logit_bias={2: 5.0, 1: -100.0}), SamplingParams(temperature=0)]
    logits = torch.tensor([[0.0, 9.0, 4.5], [0.0, 9.0, 4.5]])
    assert sampler(*rows, vocab_size=3).sample(logits).ids() == [2, 1]


def test_presence_and_frequency_count_the_answer_and_not_the_prompt():
    logits = torch.tensor([[3.0, 2.5, 0.0]])
    once = sampler(SamplingParams(temperature=0, presence_penalty=1.0), prompts=[[0, 0]], vocab_size=3)
    assert [once.sample(logits).ids()[0] for _ in range(4)] == [0, 1, 0, 0]
    each = sampler(SamplingParams(temperature=0, frequency_penalty=1.0), prompts=[[0, 0]], vocab_size=3)
    assert [each.sample(logits).ids()[0] for _ in range(4)] == [0, 1, 0, 1]


def test_repetition_counts_prompt_and_answer_and_knows_signs():
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    positive = torch.tensor([[4.0, 3.0, 1.0]])
    assert sampler(params, prompts=[[0]], vocab_size=3).sample(positive).ids() == [1]  # 4 / 2 is below 3
    negative = torch.tensor([[-1.0, -1.5, -9.0]])
    assert sampler(params, prompts=[[0]], vocab_size=3).sample(negative).ids() == [1]  # -1 x 2 is below -1.5
    row = sampler(params, prompts=[[2]], vocab_size=3)
    assert [row.sample(positive).ids()[0] for _ in range(2)] == [0, 1]  # what it has said counts too


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_k=2, top_p=0.5, min_p=0.1)])
def test_damaged_logits_are_an_error_that_names_the_row(bad, params):
    logits = torch.zeros(3, 8)
    logits[1, 5] = bad
    sampled = sampler(*[params] * 3).sample(logits)
    assert sampled.token_ids[1] == -1 and (sampled.token_ids[[0, 2]] >= 0).all()
    with pytest.raises(LlamariumError, match="row 1: the model's logits are NaN or infinite"):
        sampled.ids()


def test_a_row_of_minus_infinity_is_an_error():
    penalized = SamplingParams(frequency_penalty=1.0, logprobs=2)
    for params in (SamplingParams(temperature=0), SamplingParams(), penalized):
        with pytest.raises(LlamariumError, match="row 0"):
            sampler(params).sample(torch.full((1, 8), -INF)).ids()


def test_log_probabilities_are_the_models_own():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    params = SamplingParams(temperature=0, logit_bias={3: 100.0}, logprobs=2)
    sampled = sampler(params, vocab_size=4).sample(logits)
    expected = logits.log_softmax(-1)
    assert sampled.ids() == [3] and torch.equal(sampled.logprobs, expected[:, 3])
    assert sampled.top_ids.tolist() == [[0, 1]] and torch.equal(sampled.top_logprobs, expected[:, :2])


def test_log_probabilities_come_only_when_asked():
    logits = torch.zeros(2, 8)
    nothing = sampler(SamplingParams(), SamplingParams()).sample(logits)
    assert (nothing.logprobs, nothing.top_ids, nothing.top_logprobs) == (None, None, None)
    chosen = sampler(SamplingParams(logprobs=0), SamplingParams()).sample(logits)
    assert chosen.logprobs.shape == (2,) and chosen.top_ids.shape == (2, 0)
    most = sampler(SamplingParams(logprobs=1), SamplingParams(logprobs=3)).sample(logits)
    assert most.top_ids.shape == most.top_logprobs.shape == (2, 3)


def test_a_seed_repeats_and_another_differs():
    logits = [0.0] * 1000
    first = draws(SamplingParams(seed=1), logits, 20)
    assert draws(SamplingParams(seed=1), logits, 20) == first
    for other in (2, 1 + 2**32, 2**63 - 1):  # all 63 bits of a seed count
        assert draws(SamplingParams(seed=other), logits, 20) != first


def test_without_a_seed_a_fresh_one_is_reported():
    free = sampler(SamplingParams(), SamplingParams())
    assert free.seeds[0] != free.seeds[1]
    logits = torch.zeros(2, 8)
    got = [free.sample(logits).ids() for _ in range(10)]
    again = sampler(*(SamplingParams(seed=seed) for seed in free.seeds))
    assert [again.sample(logits).ids() for _ in range(10)] == got


def test_the_process_seed_and_generator_are_not_touched():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = draws(SamplingParams(seed=3), [0.0] * 100, 5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert draws(SamplingParams(seed=3), [0.0] * 100, 5) == first


def test_rows_that_stay_are_not_disturbed_by_those_that_leave():
    rows = [
        SamplingParams(seed=1, repetition_penalty=1.5),
        SamplingParams(temperature=0, frequency_penalty=0.5),
        SamplingParams(seed=3, top_p=0.9, logit_bias={4: 2.0}),
        SamplingParams(seed=4, presence_penalty=1.0, top_k=5),
    ]
    generator = torch.Generator().manual_seed(0)
    steps = [torch.randn(4, 8, generator=generator) for _ in range(30)]
    alone = [sampler(row, prompts=[[i]]) for i, row in enumerate(rows)]
    expected = [[one.sample(step[i : i + 1]).ids()[0] for i, one in enumerate(alone)] for step in steps]
    batch, order = sampler(*rows, prompts=[[0], [1], [2], [3]]), [0, 1, 2, 3]
    for t, step in enumerate(steps):
        if t in (10, 20):
            rows_kept = [3, 1, 0] if t == 10 else [2, 0]
            batch.keep(rows_kept)
            order = [order[row] for row in rows_kept]
        assert batch.sample(step[order]).ids() == [expected[t][i] for i in order]
    assert order == [0, 3] and batch.seeds == (1, 4)


def test_a_request_taken_up_again_goes_on_as_if_never_stopped():
    params = SamplingParams(seed=9, repetition_penalty=1.3, frequency_penalty=0.7)
    generator = torch.Generator().manual_seed(0)
    steps = torch.randn(20, 1, 8, generator=generator)
    whole = sampler(params, prompts=[[5]])
    expected = [whole.sample(step).ids()[0] for step in steps]
    resumed = sampler(params, prompts=[[5]], answers=[expected[:8]])
    assert [resumed.sample(step).ids()[0] for step in steps[8:]] == expected[8:]


def test_requests_that_do_not_fit_the_vocabulary_are_refused():
    with pytest.raises(SamplingError, match="logit_bias names token 8; expected ids below the vocabulary's 8"):
        sampler(SamplingParams(logit_bias={8: 1.0}))
    with pytest.raises(SamplingError, match="logprobs is 9; expected at most"):
        sampler(SamplingParams(logprobs=9))
    with pytest.raises(SamplingError, match=r"n is 2; .* expected SamplingParams.rows\(\)"):
        sampler(SamplingParams(n=2))
    assert len(set(draws(SamplingParams(seed=0, top_k=100), [0.0] * 8, 200))) == 8  # top_k above V is off


def test_in_inference_mode_and_out_of_it():
    params = SamplingParams(seed=0, repetition_penalty=1.5)
    with torch.inference_mode():
        inside = sampler(params)
        logits = torch.zeros(1, 8)
        first = inside.sample(logits).ids()
    rest = inside.sample(logits).ids()
    outside = sampler(params)
    assert [outside.sample(torch.zeros(1, 8, requires_grad=True)).ids() for _ in range(2)] == [first, rest]


@pytest.mark.parametrize(("uniform", "chosen"), [(0.0, 1), (0.5, 2), (1 - 2**-53, 2)])
def test_the_ends_of_the_uniform_numbers_never_draw_what_is_impossible(uniform, chosen, monkeypatch):
    monkeypatch.setattr("llamarium.generation.sampler._uniform", lambda seed, step: uniform)
    logits = torch.tensor([[-INF, 0.0, 0.0, -INF]])
    for wide in (torch.float64, torch.float32):  # float32 on devices without float64
        row = sampler(SamplingParams(top_p=0.999), vocab_size=4)
        row._wide = wide
        assert row.sample(logits).ids() == [chosen]


# --- distributions ----------------------------------------------------------------------------------------------------

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
def test_draws_follow_the_distribution(params):
    """Chi-square with the expectation worked out in float64 by the definitions; fixed seeds, so it never flickers."""
    scaled = torch.tensor(LOGITS, dtype=torch.float64) / params.temperature
    if params.top_k:
        scaled[scaled < scaled.sort(descending=True).values[params.top_k - 1]] = -INF
    probs = scaled.softmax(0)
    ordered = probs.sort(descending=True).values
    inside = int((ordered.cumsum(0) - ordered < params.top_p - 1e-12).sum())
    probs[probs < ordered[inside - 1]] = 0
    probs[probs < params.min_p * probs.max()] = 0
    probs /= probs.sum()
    count, batch = 4000, 50  # 50 rows with seeds of their own, 80 steps each: both axes of the stream
    rows = sampler(*(replace(params, seed=1000 * params.seed + i) for i in range(batch)))
    logits = torch.tensor([LOGITS] * batch)
    got = torch.cat([rows.sample(logits).token_ids for _ in range(count // batch)]).bincount(minlength=8)
    possible = probs > 0
    assert (got[~possible] == 0).all()
    expected = probs[possible] * count
    chi_square = ((got[possible] - expected) ** 2 / expected).sum().item()
    degrees = int(possible.sum()) - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)  # four standard deviations


def test_every_part_of_a_large_vocabulary_is_drawn_as_often_as_it_should():
    """2**17 equal tokens: the mean of the ids tells, and almost no id comes twice."""
    logits = torch.zeros(32, 2**17)
    rows = Sampler([SamplingParams(seed=i) for i in range(32)], [[0]] * 32, 2**17)
    ids = torch.cat([rows.sample(logits).token_ids for _ in range(16)]).double()
    assert abs(ids.mean() / 2**17 - 0.5) < 4 * math.sqrt(1 / 12 / 512)
    assert ids.unique().numel() > 500


# --- the choice in C --------------------------------------------------------------------------------------------------

FILTERS = [
    {},
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


def kept_by_definition(logits_V, params):
    """The filters in float64, by whole sorted rows: probabilities, 0 for what is out."""
    scaled = (logits_V.double() - logits_V.double().max()) / params.temperature
    if 0 < params.top_k < len(scaled):
        scaled[scaled < scaled.topk(params.top_k).values[-1]] = -INF
    probs = scaled.softmax(0)
    if params.top_p < 1:
        ordered = probs.sort(descending=True).values
        probs[probs < ordered[int((ordered.cumsum(0) < params.top_p).sum())]] = 0
    if params.min_p > 0:
        probs[probs < params.min_p * probs.max()] = 0
    return probs


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab_size", [3, 64, 1001, 49152])
def test_draws_are_those_of_the_definition(filters, vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    for number, params in enumerate(SamplingParams(**{"temperature": 0.8, **filters}, seed=seed) for seed in range(4)):
        logits_1V = torch.randn(1, vocab_size, generator=generator) * 3
        logits_1V[0, ::5] = -INF
        mass = kept_by_definition(logits_1V[0], params).cumsum(0)
        row = sampler(params, vocab_size=vocab_size)
        for step in range(5):
            target = _uniform(number, step) * mass[-1]
            found = row.sample(logits_1V).ids()[0]
            before = mass[found - 1] if found else 0.0
            assert before - 1e-5 <= target <= mass[found] + 1e-5  # rounding moves the edges
            assert mass[found] > before, "that token was out"


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 1.0}], ids=str)
def test_equals_stay_together(filters):
    logits = [1.0, 5.0, 5.0, 0.0, 5.0, 5.0] * 60  # more equals than a filter asks for
    found = draws(SamplingParams(temperature=1.0, seed=1, **filters), logits, 400)
    assert {logits[i] for i in found} == {5.0} and len(set(found)) > 150


@pytest.mark.parametrize("top_k", [4, 2**31, 2**32 + 1])
def test_a_top_k_beyond_the_vocabulary_keeps_all(top_k):
    found = draws(SamplingParams(temperature=1.0, top_k=top_k, seed=1), [1.0, 1.1, 1.2, 1.3], 60)
    assert set(found) == {0, 1, 2, 3}


@pytest.mark.parametrize("way", ["C"], indirect=True)
def test_c_finds_no_memory(monkeypatch):
    monkeypatch.setattr(native.library(), "lm_choose", lambda *_: 1)
    with pytest.raises(MemoryBudgetError):
        draws(SamplingParams(), [1.0, 2.0], 1)
