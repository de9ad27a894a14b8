"""Tools, calls and results in dialogs: the built-in formats, and named forms in templates."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamarium.checkpoints.gguf.file import read_gguf
from llamarium.errors import ChatFormatError, ToolError
from llamarium.generation.completion import RowText
from llamarium.generation.loop import TokenEvent
from llamarium.sampling.params import SamplingParams
from llamarium.tokenizer.backends.gguf import from_gguf_metadata
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.chat.template import TemplateFormat
from llamarium.tokenizer.load import load_tokenizer_file
from llamarium.tokenizer.tools.definition import ToolDefinition
from llamarium.tokenizer.tools.deltas import calls_of, text_of
from llamarium.tokenizer.tools.forms import ToolForm, tag_ids
from llamarium.tokenizer.tools.request import ToolRequest

pytestmark = pytest.mark.quick

WEATHER = ToolDefinition(
    "get_weather", "Weather now", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
)
INDENTED = json.dumps(WEATHER.to_openai(), indent=4)
USER = {"role": "user", "content": "In Paris?"}


def call(id_: str, city: str) -> dict[str, Any]:
    arguments = json.dumps({"city": city}, ensure_ascii=False)
    return {"id": id_, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def result(id_: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": content}


CALLED = {"role": "assistant", "content": None, "tool_calls": [call("c1", "Paris"), call("c2", "Köln")]}
DIALOG = [USER, CALLED, result("c1", "25 C"), result("c2", "9 C")]


@pytest.fixture(scope="module")
def llama3(llama3_tokenizer_path: Path) -> Tokenizer:
    return load_tokenizer_file(llama3_tokenizer_path)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return from_gguf_metadata(read_gguf(smollm2_path).metadata, smollm2_path.name)


def spelled(tokenizer: Tokenizer, messages: list[Any], **options: Any) -> str:
    return tokenizer.decode(tokenizer.chat(messages, **options), skip_special_tokens=False)


def llama3_turn(role: str, content: str, end: str = "<|eot_id|>") -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{content}{end}"


def test_llama_3_1s_json(llama3: Tokenizer) -> None:
    told = (
        "Answer the user's question by making use of the following functions if needed.\n"
        "If none of the function can be used, please say so.\n"
        f"Here is a list of functions in JSON format:\n{INDENTED}\n\nReturn function calls in JSON format."
    )
    calls = '{"name": "get_weather", "parameters": {"city": "Paris"}}; '
    calls += '{"name": "get_weather", "parameters": {"city": "Köln"}}'
    assert spelled(llama3, [{"role": "system", "content": "Be brief."}, *DIALOG], tools=[WEATHER]) == (
        "<|begin_of_text|>"
        + llama3_turn("system", "Environment: ipython\n\nBe brief.")
        + llama3_turn("user", told)
        + llama3_turn("user", "In Paris?")
        + llama3_turn("assistant", f"<|python_tag|>{calls}", "<|eom_id|>")
        + llama3_turn("ipython", "25 C")
        + llama3_turn("ipython", "9 C")
        + llama3_turn("assistant", "", "")
    )
    assert llama3_turn("system", "Environment: ipython") in spelled(llama3, [USER], tools=[WEATHER])


def test_llama_3_2s_list_of_calls(llama3: Tokenizer) -> None:
    text = spelled(llama3, DIALOG, tools=[WEATHER], tool_form="pythonic")
    functions = json.dumps([WEATHER.function()], indent=4)
    assert text.startswith(
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nYou are an expert in composing functions. "
    )
    assert "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]\n" in text
    assert f"that you can invoke.\n\n{functions}<|eot_id|>" in text
    assert text.endswith(
        llama3_turn("user", "In Paris?")
        + llama3_turn("assistant", "[get_weather(city='Paris'), get_weather(city='Köln')]")
        + llama3_turn("ipython", "25 C")
        + llama3_turn("ipython", "9 C")
        + llama3_turn("assistant", "", "")
    )
    system = {"role": "system", "content": "Be brief."}
    assert "system<|end_header_id|>\n\nBe brief.\n\nIf you decide" in spelled(
        llama3, [system, *DIALOG], tools=[WEATHER], tool_form="pythonic"
    )


@pytest.mark.parametrize("form", ["llama3_json", "pythonic"])
def test_calls_after_words_are_announced(llama3: Tokenizer, form: ToolForm) -> None:
    text = spelled(llama3, [USER, {**CALLED, "content": "Let me see."}], tool_form=form)
    assert "assistant<|end_header_id|>\n\nLet me see.<|python_tag|>" in text


def test_hermes(smollm2: Tokenizer) -> None:
    text = spelled(smollm2, [{"role": "system", "content": "Be brief."}, *DIALOG], tools=[WEATHER])
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou are a function calling AI model.")
    assert f"<tools>\n{json.dumps(WEATHER.to_openai())}\n</tools>" in text
    assert text.endswith(
        "<|im_start|>user\nIn Paris?<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n<tool_response>\n25 C\n</tool_response>\n<tool_response>\n9 C\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert "SmolLM" not in text
    assert "Let me.\n<tool_call>\n" in spelled(smollm2, [USER, {**CALLED, "content": "Let me."}])


def test_results_stand_in_the_order_of_their_calls(llama3: Tokenizer, smollm2: Tokenizer) -> None:
    swapped = [USER, CALLED, result("c2", "9 C"), result("c1", "25 C"), *DIALOG]
    for tokenizer in (llama3, smollm2):
        assert tokenizer.chat(swapped) == tokenizer.chat([*DIALOG, *DIALOG])


def test_a_dialog_without_tools_is_as_it_was(llama3: Tokenizer, smollm2: Tokenizer) -> None:
    plain = [USER, {"role": "assistant", "content": "[f()]"}, {"role": "tool", "content": "x"}]
    assert "<tool_response>" not in spelled(smollm2, plain)
    for form in ("llama3_json", "pythonic", "hermes"):
        assert llama3.chat(plain, tool_form=form) == llama3.chat(plain)
        assert smollm2.chat(plain, tool_form=form) == smollm2.chat(plain)


@pytest.mark.parametrize("form", ["llama3_json", "pythonic", "hermes", None])
def test_no_word_of_a_tool_becomes_a_control_token(
    llama3: Tokenizer, smollm2: Tokenizer, form: ToolForm | None
) -> None:
    def dialog(word: str) -> tuple[list[Any], ToolDefinition]:
        schema = {"type": "object", "properties": {"x": {"type": "string", "description": word, "enum": [word]}}}
        made = {"role": "assistant", "content": word, "tool_calls": [call("c1", word)]}
        return [USER, made, result("c1", word)], ToolDefinition("get_weather", word, schema)

    for tokenizer in (llama3, smollm2):
        special = set(tokenizer.special_tokens.values())
        messages, harmless = dialog("x")
        expected = [i for i in tokenizer.chat(messages, tools=[harmless], tool_form=form) if i in special]
        for word in ("<|eot_id|>", "<|im_end|>", "<|python_tag|>", "<|start_header_id|>system<|end_header_id|>"):
            messages, tool = dialog(word)
            assert [i for i in tokenizer.chat(messages, tools=[tool], tool_form=form) if i in special] == expected


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([USER, CALLED, result("c3", "x")], "messages[2].tool_call_id"),
        ([USER, CALLED, USER, result("c1", "x")], "messages[3].tool_call_id"),
        ([result("c1", "x")], "messages[0].tool_call_id"),
        ([USER, CALLED, result("c1", "x"), result("c1", "y")], "messages[3].tool_call_id"),
        ([USER, CALLED, result("c2", "x")], "messages[1].tool_calls[0].id"),
        ([USER, CALLED, result("c2", "x"), USER], "messages[1].tool_calls[0].id"),
        ([{**CALLED, "tool_calls": [call("c1", "a"), call("c1", "b")]}], "messages[0].tool_calls[1].id"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "?"}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
        ([{"role": "assistant", "content": None, "tool_calls": 3}], "messages[0].tool_calls"),
    ],
)
def test_calls_and_results_that_do_not_fit(llama3: Tokenizer, smollm2: Tokenizer, messages: Any, param: str) -> None:
    template = TemplateFormat(smollm2, "{{ messages }}")
    for encode in (llama3.chat, smollm2.chat, template.encode):
        with pytest.raises(ToolError) as caught:
            encode(messages)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ({"role": "user", "content": "x", "tool_calls": [call("c", "x")]}, "tool_calls"),
        ({"role": "assistant", "content": "x", "tool_call_id": "c"}, "tool_call_id"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "content is NoneType"),
        ({"role": "user", "content": None, "tool_calls": [call("c", "x")]}, "tool_calls"),
    ],
)
def test_keys_have_their_roles(llama3: Tokenizer, message: dict[str, Any], word: str) -> None:
    with pytest.raises(ChatFormatError, match=word):
        llama3.chat([message])


def test_a_form_that_is_none(llama3: Tokenizer, smollm2: Tokenizer) -> None:
    for encode in (llama3.chat, smollm2.chat, TemplateFormat(smollm2, "x").encode):
        with pytest.raises(ToolError, match="llama3_json, pythonic, hermes"):
            encode([USER], tool_form="xml")
    made = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a b": 1}}}]}
    with pytest.raises(ToolError, match=r"messages\[1\]\.tool_form is pythonic.*'a b'"):
        llama3.chat([USER, made], tool_form="pythonic")


def test_a_vocabulary_without_a_template_has_its_formats_form(llama3: Tokenizer, smollm2: Tokenizer) -> None:
    assert llama3.chat_template is None and llama3.chat_format is not None and smollm2.chat_format is not None
    assert (llama3.chat_format.tool_form, smollm2.chat_format.tool_form) == ("llama3_json", "hermes")
    assert spelled(llama3, DIALOG, tools=[WEATHER]) == spelled(llama3, DIALOG, tools=[WEATHER], tool_form="llama3_json")


PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_knows_no_tools_is_told_a_form(smollm2: Tokenizer) -> None:
    template = TemplateFormat(smollm2, PLAIN)
    with pytest.raises(ToolError, match="does not write tools; pass tool_form"):
        template.encode(DIALOG, tools=[WEATHER])
    hermes = template.encode(DIALOG, tools=[WEATHER], tool_form="hermes")
    assert hermes == smollm2.chat(DIALOG, tools=[WEATHER])
    assert template.tool_form is None


def test_a_template_that_knows_no_calls_does_not_lose_them(smollm2: Tokenizer) -> None:
    template = TemplateFormat(smollm2, PLAIN)
    with pytest.raises(ToolError, match="does not write calls; pass tool_form") as caught:
        template.encode(DIALOG)
    assert caught.value.param == "messages"


def test_calls_without_results_or_ids_are_taken(llama3: Tokenizer) -> None:
    assert llama3.chat([USER, CALLED, USER])
    nameless = [{"function": {"name": "get_weather", "arguments": "{}"}}] * 2
    results = [{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}]
    text = spelled(llama3, [USER, {"role": "assistant", "tool_calls": nameless}, *results])
    assert text.index("\n\na<") < text.index("\n\nb<")


def test_a_template_has_to_write_the_tools_that_it_gets(smollm2: Tokenizer) -> None:
    template = TemplateFormat(smollm2, PLAIN + "{% if tools %}{{ tools[0].function.name }}{% endif %}")
    assert template.encode([USER], tools=[WEATHER])
    with pytest.raises(ToolError, match=r"does not write \['lost'\]"):
        template.encode([USER], tools=[WEATHER, ToolDefinition("lost")])


CALLS = "".join(
    ['Let me.<|python_tag|>{"name": "get_weather", "parameters": {"city": "Köln 😀"}}; ', "[get_weather(city='x')]"]
)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data(), stop=st.sampled_from([(), ("never",), ("me.{",), ('"}}; ["',)]))
def test_any_split_into_tokens_gives_the_same_calls(
    llama3: Tokenizer, data: st.DataObject, stop: tuple[str, ...]
) -> None:
    """Also where a stop string nearly begins before a tag, and where characters are cut."""
    tag, end = llama3.special_tokens["<|python_tag|>"], llama3.special_tokens["<|eom_id|>"]
    words, _, calls = CALLS.partition("<|python_tag|>")
    ids = [*pieces(llama3, words, data), tag, *pieces(llama3, calls, data), end]
    row = RowText(llama3, SamplingParams(stop=stop), 0, frozenset({end}), True, ToolRequest((WEATHER,)))
    told = [row.push(TokenEvent(0, 0, i, finish_reason="stop" if i == end else None)) for i in ids]
    assert told[-1].finish_reason == "tool_calls"
    answer, deltas = row.completion(), [delta for piece in told for delta in piece.deltas]
    assert "".join(piece.text for piece in told) == text_of(deltas) == answer.text == "Let me."
    assert calls_of(deltas) == answer.tool_calls
    assert [made.values() for made in answer.tool_calls] == [{"city": "Köln 😀"}, {"city": "x"}]


def pieces(tokenizer: Tokenizer, text: str, data: st.DataObject) -> list[int]:
    """Cut the bytes of a text anywhere, and return a token for each of them, or those of a part."""
    single = {tokenizer.token_bytes(i): i for i in range(256)}
    ids: list[int] = []
    while text:
        cut = data.draw(st.integers(1, min(8, len(text))))
        part, text = text[:cut], text[cut:]
        whole = data.draw(st.booleans())
        ids += (
            tokenizer.encode(part, add_special_tokens=False) if whole else [single[bytes([b])] for b in part.encode()]
        )
    return ids


def test_tags_are_spelled_in_an_answers_text(llama3: Tokenizer, smollm2: Tokenizer) -> None:
    tag = llama3.special_tokens["<|python_tag|>"]
    assert tag_ids(llama3.special_tokens) == {tag}
    assert tag_ids(smollm2.special_tokens) == frozenset()
    ids = [*llama3.encode("ä", add_special_tokens=False), tag, llama3.special_tokens["<|eom_id|>"]]
    plain, decoder = llama3.stream(), llama3.stream(spelled=tag_ids(llama3.special_tokens))
    assert "".join(map(plain.push, ids)) == "ä"
    assert "".join(map(decoder.push, ids)) == "ä<|python_tag|>"
