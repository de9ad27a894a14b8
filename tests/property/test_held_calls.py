"""Whatever a tool's schema and however wild the model: a held call is read and follows its schema, or is refused."""

import re

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import llamarium
from json_schemas import NAMES, SCHEMAS, bias, random_llama
from llamarium.errors import GrammarError, ToolError
from llamarium.sampling.grammar.calls import compile_answer
from llamarium.tokenizer.tools.definition import ToolDefinition
from llamarium.tokenizer.tools.forms import ToolForm
from llamarium.tokenizer.tools.request import ToolRequest

pytestmark = pytest.mark.torch

WORDS = [name for name in NAMES if name.isidentifier()]
FORMS: tuple[ToolForm, ...] = ("llama3_json", "pythonic", "hermes")
PLAIN = st.recursive(  # what the pythonic form holds, too
    st.one_of(
        st.sampled_from([{}, {"type": ["boolean", "null"]}, {"enum": ["a", 1, None]}, {"const": [1, "x"]}]),
        st.sampled_from([{"type": name} for name in ("integer", "number", "string")]),
    ),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"type": st.just("array"), "items": inner}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)}),
        st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.dictionaries(st.sampled_from(NAMES), inner, max_size=2),
                "required": st.lists(st.sampled_from(NAMES), max_size=1),
                "additionalProperties": st.just(False),
            }
        ),
    ),
    max_leaves=4,
)
ANY = st.one_of(PLAIN, SCHEMAS)
TOOLS = st.builds(
    lambda properties, required: {
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        "$defs": {"d": {"type": "null"}},
    },
    st.dictionaries(st.sampled_from(WORDS), ANY, max_size=3),
    st.lists(st.sampled_from(WORDS), max_size=2, unique=True),
)


@pytest.fixture(scope="module")
def llama() -> llamarium.Llama:
    return random_llama()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(
    schemas=st.lists(TOOLS, min_size=1, max_size=2),
    form=st.sampled_from(FORMS),
    parallel=st.booleans(),
    seed=st.integers(0, 999),
)
def test_a_held_call_is_read_and_follows_its_schema(llama, schemas, form: ToolForm, parallel: bool, seed: int) -> None:
    if form == "pythonic":
        schemas = [{key: value for key, value in schema.items() if key != "$defs"} for schema in schemas]
    tools = tuple(ToolDefinition(f"f{i}", parameters=schema) for i, schema in enumerate(schemas))
    request = ToolRequest(tools, "required", parallel=parallel)
    try:
        held = compile_answer(llama.grammars, request, form)
        assert held is not None
        grammar, _ = held
    except ToolError as error:
        assert error.param.startswith("tools")
        assume(False)
    options = {"temperature": 1.5, "seed": seed, "logit_bias": bias(llama), "max_tokens": 120}
    try:
        answer = llama.generate("x", grammar=grammar, **options).completions[0]
    except GrammarError:
        raise AssertionError("what compiles is no error later") from None
    parser = request.parser()
    assert parser is not None
    parser.push(answer.text)
    parser.finish()
    assume(not re.search(r"\de\+?\d{3}|\d{300}", answer.text, re.IGNORECASE))  # JSON's numbers have no end; floats have
    if answer.finish_reason == "stop":
        assert parser.calls and all(call.is_complete for call in parser.calls)
    for call in parser.calls:
        if call.is_complete and not grammar.unenforced:
            schema = {"type": "object", **schemas[int(call.name[1:])]}
            checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
            checker.validate(call.values())
