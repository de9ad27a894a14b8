"""Answers of a form, on every path: alone, in a batch, streamed, several, guessed ahead, in a dialog, in the shell."""

import json
import re
from pathlib import Path

import jsonschema
import pytest

import llamarium
from llamarium.cli.main import main
from llamarium.errors import GrammarError, LlamariumError, SamplingError
from llamarium.generation.completion import Completion

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "born"],
    "additionalProperties": False,
}
PROMPT = "A person in JSON: "
WHO = "Who was Ada Lovelace? Answer in JSON."
LIST = re.compile(r"(?:(?:one|two|three)(?:, )?){5}")


@pytest.fixture(scope="module")
def llama(smollm2_path: Path) -> llamarium.Llama:
    """The model as it is loaded on a CPU."""
    return llamarium.load(smollm2_path, device="cpu")


def check(answer: Completion) -> None:
    assert answer.finish_reason == "stop", answer
    jsonschema.validate(json.loads(answer.text), PERSON, format_checker=jsonschema.FormatChecker())


HOT = {"json_schema": PERSON, "temperature": 1.8, "max_tokens": 300, "seed": 5}


def test_answers_are_valid_however_hot_and_alike_in_any_company(llama: llamarium.Llama) -> None:
    found = llama.generate([PROMPT, "Once upon a time", "{"], **HOT)
    for prompt, generation in zip([PROMPT, "Once upon a time", "{"], found, strict=True):
        check(generation.completions[0])
        assert llama.generate(prompt, **HOT).completions == generation.completions


def test_several_answers_are_those_of_their_seeds(llama: llamarium.Llama) -> None:
    found = llama.generate(PROMPT, **HOT, n=3)
    for i, answer in enumerate(found.completions):
        check(answer)
        assert llama.generate(PROMPT, **HOT | {"seed": 5 + i}).completions[0] == answer
    assert len({answer.text for answer in found.completions}) == 3


def test_a_stream_is_the_answer_and_ends_with_it(llama: llamarium.Llama) -> None:
    pieces = list(llama.stream(PROMPT, **HOT))
    whole = llama.generate(PROMPT, **HOT).completions[0]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert pieces[-1].text.endswith("}")  # the answer's last token is its text's: no pass is run for a stop token


def test_a_small_model_comes_to_an_end(llama: llamarium.Llama) -> None:
    """With schemas that say nothing of other properties, as most programs send them, and with required calls."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    weather = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    free = {key: {"type": kind} for key, kind in (("name", "string"), ("age", "integer"))}
    person = {"type": "object", "properties": free, "required": ["name", "age"]}
    who, where = ([{"role": "user", "content": text}] for text in (WHO, "What is the weather in Paris?"))
    more = {"tools": [weather], "n": 8, "seed": 0, "max_tokens": 200}
    for dialog, options in (
        (who, {"json_schema": person, "tools": None}),
        (where, {"tool_choice": "required"}),
        (where, {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}),
        (where, {"json_schema": person}),
    ):
        answers = llama.chat(dialog, **more | options).completions
        assert all(answer.finish_reason != "length" for answer in answers), (options, answers)
        for answer in answers:
            assert len({call.arguments for call in answer.tool_calls}) == len(answer.tool_calls) <= 8
            assert len(answer.tool_calls) == 1 or not isinstance(options.get("tool_choice"), dict)
            assert answer.tool_calls or set(json.loads(answer.text)) == {"name", "age"}


def test_an_answer_that_is_cut_is_the_beginning_of_one(llama: llamarium.Llama) -> None:
    whole = llama.generate(PROMPT, **HOT).text
    for count in (1, 2, 7, 20):
        cut = llama.generate(PROMPT, **HOT | {"max_tokens": count}).completions[0]
        assert cut.finish_reason == "length" and whole.startswith(cut.text)


def test_a_cut_within_a_character_leaves_it_out(llama: llamarium.Llama) -> None:
    emoji = {"choice": ["\U0001fae0"], "temperature": 0.0}
    whole = llama.generate(PROMPT, **emoji).completions[0]
    assert whole.text == "\U0001fae0" and len(whole.token_ids) > 1
    assert llama.generate(PROMPT, **emoji, max_tokens=1).text == ""


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "n": 2}])
def test_guessing_ahead_changes_nothing(llama: llamarium.Llama, options: dict) -> None:
    prompt = "one, two, three, one, two, three, one, two, three, "
    options |= {"regex": LIST.pattern, "seed": 3, "max_tokens": 40}
    lookup = llamarium.PromptLookup()
    found = llama.generate(prompt, prompt_lookup=lookup, **options)
    assert found == llama.generate(prompt, **options)
    assert found == llama.generate(prompt, use_cache=False, **options)
    assert all(LIST.fullmatch(answer.text) for answer in found.completions if answer.finish_reason == "stop")
    assert lookup.drafted > 0


def test_where_an_answer_may_end_a_stop_token_may_come(llama: llamarium.Llama) -> None:
    """The expression never has to end: only a stop token ends it, which wants to come from the beginning on."""
    end = min(llama.stop_ids)
    answer = llama.generate(PROMPT, regex="[a-z]{3,}", temperature=0.0, logit_bias={end: 100.0}).completions[0]
    assert answer.finish_reason == "stop" and answer.token_ids[-1] == end
    assert re.fullmatch("[a-z]{3,}", answer.text)
    for count in range(1, len(answer.token_ids) - 1):
        assert len(llama.decode(answer.token_ids[:count])) < 3, "it ends as soon as it may"


def test_a_stop_token_with_a_text_ends_an_answer_where_it_may(llama: llamarium.Llama) -> None:
    (comma,) = llama.tokenizer.encode(",", add_special_tokens=False)
    answer = llama.generate(PROMPT, regex="one(,two)*", temperature=0.0, stop_token_ids=[comma]).completions[0]
    assert answer.finish_reason == "stop" and re.fullmatch("one(,two)*", answer.text)


def test_where_a_stop_token_stands_in_the_way_the_answer_ends_with_an_error(llama: llamarium.Llama) -> None:
    digits = [i for i in range(llama.config.vocab_size) if llama.tokenizer.token_bytes(i)[:1] in b"0123456789"]
    with pytest.raises(LlamariumError, match="the grammar allows no token"):
        llama.generate(PROMPT, regex="a1", temperature=0.0, stop_token_ids=digits)
    stuck = llama.generate([PROMPT, PROMPT], regex="a1", temperature=0.0, stop_token_ids=digits)[0].completions[0]
    assert stuck.finish_reason == "error" and stuck.text == "a" and "stop token" in str(stuck.error)


@pytest.mark.parametrize(
    "grammar",
    [
        llamarium.Grammar.lark('start: a\na: a a | "x" |'),  # at what a token makes of the text
        llamarium.Grammar.regex("(a{1,1000}){1,1000}"),  # at what may come after it
    ],
)
def test_too_much_work_at_a_token_ends_the_answer_with_an_error(llama: llamarium.Llama, grammar) -> None:
    with pytest.raises(LlamariumError, match="exceeded the work limit"):
        list(llama.stream(PROMPT, grammar=grammar, temperature=0.0, max_tokens=1000))


def test_control_tokens_never_come(llama: llamarium.Llama) -> None:
    answer = llama.generate(PROMPT, regex="(?s:.{50})", temperature=100.0, seed=1, max_tokens=100).completions[0]
    control = set(llama.tokenizer.special_tokens.values())
    assert not control & set(answer.token_ids) and len(answer.text) == 50


def test_a_dialog_goes_on_after_an_answer_of_a_form(llama: llamarium.Llama) -> None:
    messages = [{"role": "user", "content": "Is the sky blue?"}]
    options = {"choice": ["yes", "no"], "temperature": 0.0}
    dialog = llama.conversation()
    said = "".join(piece.text for piece in dialog.say("Is the sky blue?", **options))
    assert said in ("yes", "no") and said == llama.chat(messages, **options).text
    assert "".join(piece.text for piece in dialog.say("Why?", max_tokens=5, temperature=0.0))


def test_refusals_come_with_the_call(llama: llamarium.Llama) -> None:
    with pytest.raises(GrammarError, match="type is 'text'"):
        llama.stream(PROMPT, json_schema={"type": "text"})
    with pytest.raises(GrammarError, match="cannot be compiled"):
        llama.stream(PROMPT, regex="(")
    with pytest.raises(SamplingError, match="beside a grammar"):
        llama.generate(PROMPT, json_object=True, stop="}")


# --- the shell --------------------------------------------------------------------------------------------------------


@pytest.fixture
def shell(llama: llamarium.Llama, monkeypatch, capsys):
    monkeypatch.setattr("llamarium.api.load", lambda *args, **options: llama)

    def run(*words: str) -> tuple[int, str, str]:
        code = main([*words, "--temperature", "0", "-m", "smollm2-135m"])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_the_shell_takes_each_form(shell, tmp_path: Path) -> None:
    (tmp_path / "person.json").write_text(json.dumps(PERSON))
    (tmp_path / "a.lark").write_text('start: "<" /[ab]/ ">"')
    (tmp_path / "a.gbnf").write_text('root ::= "<" [ab] ">"')
    code, out, _ = shell("generate", PROMPT, "--json-schema", str(tmp_path / "person.json"))
    assert code == 0
    jsonschema.validate(json.loads(out), PERSON)
    assert shell("chat", "Say hi.", "--json-object", "-n", "9")[1].startswith("{")
    assert re.fullmatch(r"[0-9]{3}\n", shell("generate", PROMPT, "--regex", "[0-9]{3}")[1])
    assert shell("generate", PROMPT, "--choice", "yes", "--choice", "no")[1] in ("yes\n", "no\n")
    for name in ("a.lark", "a.gbnf"):
        assert shell("generate", PROMPT, "--grammar", str(tmp_path / name))[1] in ("<a>\n", "<b>\n")


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (["--json-schema", "gone.json"], 1, "gone.json: No such file"),
        (["--json-schema", "bad.json"], 1, "bad.json: the JSON schema is no JSON: "),
        (["--json-schema", "not.json"], 1, "not.json: the JSON schema, at #/properties/a: type is 'text'"),
        (["--json-schema", "latin.json"], 1, "latin.json: is no UTF-8 text"),
        (["--grammar", "a.txt"], 2, "a.txt is neither FILE.lark nor FILE.gbnf"),
        (["--regex", "("], 1, "cannot be compiled"),
        (["--regex", "a", "--json-object"], 2, "an answer has one form"),
        (["--regex", "a", "--stop", "b"], 2, "not allowed with argument --regex, which ends the answer itself"),
    ],
)  # fmt: skip
def test_the_shell_says_what_is_wrong(shell, tmp_path: Path, monkeypatch, words, code, complaint: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "not.json").write_text('{"properties": {"a": {"type": "text"}}}')
    (tmp_path / "latin.json").write_bytes(b'{"title": "\xe9"}')
    found, out, err = shell("generate", PROMPT, *words)
    assert (found, out) == (code, "") and complaint in " ".join(err.split()), err
