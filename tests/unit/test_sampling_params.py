"""SamplingParams: the ranges, the options that become them, and generation_config.json."""

import argparse
import math
import pickle
import re
import subprocess
import sys
import warnings
from dataclasses import fields, replace
from pathlib import Path

import pytest

from llamarium.cli.sampling import add_choosing, choosing
from llamarium.errors import SamplingError
from llamarium.options.declare import Option
from llamarium.sampling.grammar.description import OPTIONS as GRAMMAR_OPTIONS
from llamarium.sampling.keywords import SamplingKeywords
from llamarium.sampling.params import SamplingParams, parameters_of

pytestmark = pytest.mark.quick

NAN, INF = math.nan, math.inf

# --- ranges -----------------------------------------------------------------------------------------------------------


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
    code = "import sys, llamarium.sampling.params; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


# --- options ----------------------------------------------------------------------------------------------------------


def test_options_go_over_the_publishers_and_get_a_seed():
    params = SamplingParams.from_options({"top_k": 5, "stop": "x", "max_new_tokens": 7}, LLAMA32)
    assert replace(params, seed=None) == SamplingParams(
        temperature=0.6, top_p=0.9, top_k=5, stop=("x",), max_tokens=7, stop_token_ids=(128001, 128008, 128009)
    )
    assert params.seed is not None and SamplingParams.from_options({"seed": None}, {}).seed is not None
    assert SamplingParams.from_options({}, {}).seed != SamplingParams.from_options({}, {}).seed
    assert SamplingParams.from_options({"seed": 5}, {}).seed == 5


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        (["max_tokns"], "unknown option max_tokns: did you mean max_tokens?"),
        (["max_new_token"], "did you mean max_new_tokens?"),
        (["topp"], "did you mean top_p?"),
        (["repetition_penality", "temprature"], "did you mean repetition_penalty?; unknown option temprature: did you"),
        (["do_sample"], "unknown option do_sample: temperature=0 is greedy"),
        (["zzz\x1b"], "there are: temperature, top_k"),
    ],
)
def test_an_unknown_option_is_named_with_the_one_that_may_be_meant(unknown, meant):
    with pytest.raises(SamplingError, match=r"^unknown option ") as caught:
        SamplingParams.from_options(dict.fromkeys(unknown, 5), {})
    assert meant in str(caught.value) and "\x1b" not in str(caught.value)


def test_two_names_of_one_option_exclude_each_other():
    with pytest.raises(SamplingError, match="max_new_tokens and max_tokens are the same parameter"):
        SamplingParams.from_options({"max_tokens": 5, "max_new_tokens": 5}, {})


def test_a_parameter_has_five_places() -> None:
    """As docs/guides/add-a-sampling-parameter.md lists them: C is one of them."""
    root = Path(__file__).parents[2]
    files = [*(root / "src").rglob("*.py"), *(root / "native").rglob("*.[ch]")]
    naming = {path.relative_to(root) for path in files if re.search(r"\bmin_p\b", path.read_text(encoding="utf-8"))}
    sampling = Path("src/llamarium/sampling")
    assert {path if path.parts[0] == "src" else Path("native") for path in naming} == {
        *(sampling / name for name in ("keywords.py", "params.py", "steps.py")),
        Path("src/llamarium/kernels/structs.py"),
        Path("native"),
    }


@pytest.mark.parametrize("parameter", parameters_of("cli"), ids=lambda parameter: parameter.name)
def test_a_parameter_of_the_table_is_checked_and_is_on_the_command_line(parameter: Option) -> None:
    flag = f"--{parameter.name.replace('_', '-')}"
    parser = argparse.ArgumentParser()
    add_choosing(parser)
    value = parameter.kind(min(parameter.high, 1))
    assert choosing(parser.parse_args([flag, str(value)])) == {parameter.name: value}
    assert re.search(rf"{flag} {parameter.metavar}\b", parser.format_help())
    assert getattr(SamplingParams(), parameter.name) == parameter.default
    with pytest.raises(SamplingError, match=rf"^{parameter.name} is .*; expected .*{re.escape(parameter.expected)}"):
        SamplingParams(**{parameter.name: parameter.low - 1})


def test_a_copy_with_values_that_are_known_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(n=3, seed=1, logit_bias={5: 1.0})
    monkeypatch.setattr(SamplingParams, "__post_init__", None)
    assert [(row.n, row.seed, row.logit_bias) for row in params.rows()] == [(1, seed, {5: 1.0}) for seed in (1, 2, 3)]


def test_the_options_typed_are_those_that_there_are():
    assert SamplingKeywords.__annotations__.keys() == {
        *(f.name for f in fields(SamplingParams)),
        *GRAMMAR_OPTIONS,
        "max_new_tokens",
    }


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


@pytest.mark.torch
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
