"""Calls are read alike however their text is cut, garbage is content, and what is written is what is read."""

import ast
import json
import time
from itertools import count, pairwise
from typing import Any
from warnings import catch_warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarium.tokenizer.tools.definition import ToolCall, ToolDefinition
from llamarium.tokenizer.tools.deltas import CallArguments, CallBegin, CallEnd, ContentDelta, Delta
from llamarium.tokenizer.tools.forms import TAGS, ToolForm, write_calls
from llamarium.tokenizer.tools.parser import ToolCallParser

settings.register_profile("tool_calls", deadline=None, max_examples=150)
PROFILE = settings.get_profile("tool_calls")
BLANKS = " \t\r\n"  # JSON's
NAMES = ("f", "get_weather", "a-1")
FORMS: tuple[ToolForm, ...] = ("llama3_json", "pythonic", "hermes")

_KEYS = st.text("abcXYZ_09-ä", min_size=1, max_size=6)
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**18), 10**18),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
    st.sampled_from(
        ["", "'", '"', "\\", "\\n", "\n", 'it\'s "so"', "</tool_call>", "<|python_tag|>", "😀", "{[", "]})"]
    ),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda v: st.one_of(st.lists(v, max_size=3), st.dictionaries(st.text(max_size=4), v, max_size=3)),
    max_leaves=6,
)
_ARGUMENTS = st.dictionaries(_KEYS, _VALUES, max_size=4)
_CALLS = st.lists(st.tuples(st.sampled_from(NAMES), _ARGUMENTS), min_size=1, max_size=3, unique_by=json.dumps)
_BITS = st.sampled_from(
    [
        *(*TAGS, " ", "\n", '"type": "function"', '{"name": "f", "parameters": {', '"a": 1'),
        *r"""{ } [ ] ( ) , ; : = " ' \ < > <tool </ <|python 'x' "x" ''' \u00e4 0x -1.5e3 1e999 ä 😀""".split(),
        *'"name" "parameters" "arguments" "f" f( f a= b= .call( get_weather true None f(a=1)'.split(),
    ]
)
_GARBAGE = st.lists(st.one_of(_BITS, st.text(max_size=3)), max_size=25).map("".join)


def strictly(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object without a key twice."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)


def tools(*names: str) -> list[ToolDefinition]:
    return [ToolDefinition(name) for name in names]


def read(pieces: list[str], names: tuple[str, ...] = NAMES, **options: Any) -> tuple[ToolCallParser, list[list[Delta]]]:
    ids = (f"id{i}" for i in count())
    parser = ToolCallParser(tools(*names), new_id=lambda: next(ids), **options)
    return parser, [*map(parser.push, pieces), parser.finish()]


def cut(data: st.DataObject, text: str) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=30)))
    return [text[i:j] for i, j in pairwise([0, *places, len(text)])]


def check_deltas(parser: ToolCallParser, told: list[list[Delta]]) -> None:
    """The deltas are well formed, and joined they are the parser's result."""
    deltas = [delta for some in told for delta in some]
    begun = [delta for delta in deltas if isinstance(delta, CallBegin)]
    assert [delta.index for delta in begun] == list(range(len(begun)))
    assert "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)) == parser.content
    current: int | None = None
    for delta in deltas:
        if isinstance(delta, CallBegin):
            assert current is None
            current = delta.index
        elif isinstance(delta, ContentDelta):
            assert current is None and delta.text
        else:
            assert delta.index == current
            current = None if isinstance(delta, CallEnd) else current
    assert current is None
    for call, begin in zip(parser.calls, begun, strict=True):
        fragments = [d.fragment for d in deltas if isinstance(d, CallArguments) and d.index == begin.index]
        assert all(fragments) and "".join(fragments) == call.arguments
        assert (call.id, call.name) == (begin.id, begin.name)
        if call.is_complete:
            assert isinstance(json.loads(call.arguments), dict)
            call.values()  # no two equal keys, no infinite numbers hidden in it


@PROFILE
@given(calls=_CALLS, form=st.sampled_from(FORMS), data=st.data())
def test_calls_that_are_written_are_read(calls: list[tuple[str, dict[str, Any]]], form: ToolForm, data: st.DataObject):
    text = write_calls([ToolCall("", name, json.dumps(arguments)) for name, arguments in calls], form)
    parser, told = read(cut(data, text))
    check_deltas(parser, told)
    assert [(call.name, json.loads(call.arguments), call.is_complete) for call in parser.calls] == [
        (name, arguments, True) for name, arguments in calls
    ]
    assert parser.content == ""


@PROFILE
@given(
    text=_GARBAGE,
    names=st.sampled_from([NAMES, ("f", "code_interpreter"), ()]),
    most=st.sampled_from([1, 2, 8]),
    data=st.data(),
)
def test_any_text_is_read_alike_however_it_is_cut(text: str, names: tuple[str, ...], most: int, data: st.DataObject):
    whole, told = read([text], names, most=most)
    check_deltas(whole, told)
    for pieces in (list(text), cut(data, text)):
        parser, told = read(pieces, names, most=most)
        check_deltas(parser, told)
        assert (parser.calls, parser.content, parser.is_done) == (whole.calls, whole.content, whole.is_done)


@PROFILE
@given(text=_GARBAGE)
def test_text_without_calls_is_content_to_the_letter(text: str):
    parser, _ = read(list(text))
    if not parser.calls:
        assert parser.content == text
    parser, _ = read([text], names=("other",))
    assert parser.content == text


@PROFILE
@given(before=_GARBAGE, calls=_CALLS, after=st.text("ab .\n", max_size=6))
def test_nothing_is_lost_around_calls(before: str, calls: list[tuple[str, dict[str, Any]]], after: str):
    text = write_calls([ToolCall("", name, json.dumps(arguments)) for name, arguments in calls], "hermes")
    before = before.replace("<", "")
    if read([before])[0].calls or before.lstrip(BLANKS)[:1] in ("{", "["):
        return
    parser, _ = read([before, text, after])
    assert [call.name for call in parser.calls] == [name for name, _ in calls]
    expected = before if before.strip(BLANKS) else ""
    assert parser.content == expected + (after if after.strip(BLANKS) else "")


@PROFILE
@given(value=_VALUES, data=st.data())
def test_values_are_those_of_python_and_of_json(value: Any, data: st.DataObject):
    """`ast` and `json` are the oracles."""
    in_python, in_json = repr(value), json.dumps(value, indent=data.draw(st.sampled_from([None, 0, 3])))
    for text, oracle in (
        (f"[f(x={in_python})]", ast.literal_eval(in_python)),
        (f'{{"name": "f", "parameters": {{"x": {in_json}}}}}', json.loads(in_json)),
    ):
        parser, _ = read(cut(data, text))
        assert [json.loads(call.arguments) for call in parser.calls] == [{"x": oracle}]


_SPELLED = st.lists(
    st.sampled_from(
        [
            *"0123456789'\"\\/nrtbfavxuUN{}[],:. _eE+-",
            "\\x41",
            "\\u00e4",
            "\\U0001F600",
            "\\101",
            "\n",
            "True",
            "null",
            "ä",
        ]
    ),
    max_size=12,
).map("".join)


@PROFILE
@given(text=_SPELLED)
def test_json_decides_what_a_value_is(text: str):
    """The oracle is `json`, but that control characters may stand in texts, as models write them."""
    arguments = f'{{"x": {text}}}'
    try:
        decoder = json.JSONDecoder(strict=False, object_pairs_hook=strictly, parse_constant=refuse)
        expected = decoder.raw_decode(arguments + "}")[0]
    except ValueError:
        expected = None
    parser, _ = read([f'{{"name": "f", "parameters": {arguments}}}'])
    read_as = [json.loads(call.arguments) for call in parser.calls if call.is_complete]
    assert read_as == ([] if expected is None or "Infinity" in json.dumps(expected) else [expected])


def refuse(name: str) -> None:
    raise ValueError(name)


@PROFILE
@given(text=_SPELLED)
def test_what_python_reads_is_read_alike(text: str):
    """The oracle is `ast`, but for line ends in texts and JSON's constants, which are taken, too."""
    parser, _ = read([f"[f(x={text})]"])
    if parser.content or len(parser.calls) != 1 or not parser.calls[0].is_complete:
        return
    if any(word in text for word in ("true", "false", "null", "\n")):
        return
    with catch_warnings(action="ignore"):  # Python warns of escapes that are none
        call = ast.parse(f"f(x={text})", mode="eval").body
    assert isinstance(call, ast.Call)
    expected = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    assert parser.calls[0].values() == expected


HARD = {
    "tags": "<tool_call>" * 4000,
    "near tags": "<tool_cal" * 4000,
    "openings": '<tool_call>{"arguments": {"a": "' * 2000,
    "quotes": "<|python_tag|>[f(a='<|python_tag|>[f(a=\"" * 1500,
    "arguments first": '{"arguments": {"a": "' + "<tool_call>{ " * 4000,
    "one long text": '{"name": "f", "parameters": {"a": "' + "x\\n" * 20000,
    "a number": '{"name": "f", "parameters": {"a": ' + "1" * 50000,
    "blanks": "<tool_call>" + " " * 50000 + "x",
    "brackets": '{"name": "f", "parameters": {"a": ' + "[" * 50000,
    "triple": "[f(a='''" + "''x" * 20000,
    "calls": '{"name": "f"};' * 4000,
    "a call again": ('{"name": "f", "parameters": {"a": "' + "x\\n" * 10000 + '"}}; ') * 2,
    "list": "[" + "f(), " * 8000,
}


@pytest.mark.alone
@pytest.mark.parametrize("name", HARD)
def test_time_grows_with_the_text_alone(name: str):
    """Character by character, which is the worst; twice the text may take three times as long, and a little."""
    text = HARD[name]

    def seconds(text: str) -> float:
        start = time.process_time()
        parser, _ = read(list(text))
        len(parser.content)
        return time.process_time() - start

    half, whole = min(seconds(text[: len(text) // 2]) for _ in range(4)), min(seconds(text) for _ in range(4))
    assert whole < 3 * half + 0.05
