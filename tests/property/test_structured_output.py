"""Whatever the schema, and however wild the model: what is finished is valid, and what is streamed is its beginning.

A model of random weights writes characters at a high temperature, through the whole path; `jsonschema` is the oracle.
"""

import json
import re

import hypothesis.strategies as st
import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings

import llamarium
from json_schemas import SCHEMAS, bias, random_llama
from llamarium.errors import GrammarError
from llamarium.sampling.grammar.description import Grammar

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def llama() -> llamarium.Llama:
    return random_llama()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(schema=SCHEMAS, inner=SCHEMAS, seed=st.integers(0, 1000))
def test_what_is_finished_is_valid_and_what_is_cut_begins_it(llama, schema, inner, seed: int) -> None:
    schema = {**(schema if isinstance(schema, dict) else {"allOf": [schema]}), "$defs": {"d": inner}}
    try:
        grammar = Grammar.json_schema(schema)
        assume(not grammar.unenforced)
        options = {"grammar": grammar, "temperature": 1.5, "seed": seed, "logit_bias": bias(llama)}
        answer = llama.generate("x", max_tokens=100, **options).completions[0]
    except GrammarError:
        assume(False)
    cut = llama.generate("x", max_tokens=1 + seed % 20, **options).completions[0]
    assert answer.text.startswith(cut.text)
    if answer.finish_reason == "stop":
        checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        try:
            checker.validate(json.loads(answer.text))
        except RecursionError:  # "$defs/d" refers to itself at the same place: the oracle has no answer
            assume(False)


@pytest.mark.parametrize("regex", ["(?s:.){5,9}", r"[^\n]*!", "(a|b)*abb", r"(\d{1,3}\.){3}\d{1,3}", "a{3,5}😀+"])
def test_a_regex_is_matched_from_end_to_end(llama, regex: str) -> None:
    for seed in range(5):
        answer = llama.generate("x", regex=regex, temperature=1.5, seed=seed, max_tokens=60).completions[0]
        whole = llama.generate("x", regex=regex, temperature=1.5, seed=seed, max_tokens=5).text
        assert answer.text.startswith(whole)
        assert answer.finish_reason == "length" or re.fullmatch(regex, answer.text), answer.text
