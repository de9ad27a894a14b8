"""Dialogs in the page without a server, held to Python: the same ids for messages, and the same tokens for a seed."""

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import llamarium
from llamarium.kernels import native
from llamarium.tokenizer.backends.gguf import from_gguf_metadata
from llamarium.tokenizer.chat.named import KNOWN_TEMPLATES, NAMED_FORMATS
from wasm_engine import PACKED, ROOT, Engine, build_engine, byte_level_vocabulary, write_model

SMOLLM2 = next(template for template, name in KNOWN_TEMPLATES.items() if name == "smollm2")
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{% for c in m.content %}{% if c.type == 'text' %}[{{ c.text }}]"
    "{% endif %}{% endfor %}<|endoftext|>{% endfor %}"
)
REASONING = (
    "{% for m in messages %}{% set ns = namespace(text=m.content) %}{% if '</think>' in ns.text %}"
    "{% set ns.text = ns.text.split('</think>')[-1] %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ ns.text | trim }}<|im_end|>\n"
    "{% endfor %}{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {name: one.template for name, one in NAMED_FORMATS.items()} | {
    "smollm2": SMOLLM2, "parts": PARTS, "reasoning": REASONING, "none": None,
}  # fmt: skip
DIALOGS = [
    [("user", "Hello, world! ")],
    [("system", "Be brief."), ("user", "  a\n"), ("assistant", "Zürich 😀"), ("user", "The price was 12,345")],
    [("user", "a<|im_end|>\n<|im_start|>system\nb"), ("assistant", "x<|endoftext|>"), ("user", "<|im_")],
    [("user", "end|> 'quoted' {{ messages }}"), ("assistant", "let me think</think> so"), ("user", "|>")],
]

pytestmark = [
    pytest.mark.torch("it compiles for browsers, with the dev extra"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        platform.machine() not in ("x86_64", "AMD64"), reason="the portable kernels of this processor fuse additions"
    ),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return build_engine(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def vocabulary() -> dict[str, Any]:
    found = byte_level_vocabulary((ROOT / "LICENSE").read_text(), 400)
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    return {**found, "tokenizer.ggml.tokens": [*tokens, "</think>"], "tokenizer.ggml.token_type": [*types, 4]}


@pytest.fixture
def portable() -> Iterator[None]:
    library = native.library()
    assert library is not None
    library.lm_use_kernels(b"portable")
    yield
    library.lm_use_kernels(None)


def messages_of(dialog: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in dialog]


def ask(engine: Engine, model: Path, *bodies: dict[str, Any], path: str = "/v1/chat/completions") -> list[Any]:
    return engine.ask(model=str(model), questions=[{"method": "POST", "path": path, "body": body} for body in bodies])


@pytest.mark.parametrize("name", TEMPLATES)
def test_dialogs_get_the_ids_that_python_gives_them(
    engine: Engine, vocabulary: dict[str, Any], tmp_path: Path, name: str
) -> None:
    template = {} if TEMPLATES[name] is None else {"tokenizer.chat_template": TEMPLATES[name]}
    metadata = {**vocabulary, **template}
    write_model(tmp_path / "chat.gguf", ("Q8_0",), metadata, 406)
    tokenizer = from_gguf_metadata(metadata, "chat.gguf")
    assert tokenizer.chat_format is not None
    bodies = [{"messages": messages_of(dialog), "max_tokens": 1, "temperature": 0} for dialog in DIALOGS]
    answers = ask(engine, tmp_path / "chat.gguf", *bodies)
    for dialog, answer in zip(DIALOGS, answers, strict=True):
        expected = tokenizer.chat_format.encode(messages_of(dialog))
        assert answer[0]["prompt_token_ids"] == expected, dialog


def test_the_same_seed_gives_the_tokens_that_python_gives(
    engine: Engine, vocabulary: dict[str, Any], tmp_path: Path, portable: None
) -> None:
    path = tmp_path / "chat.gguf"
    write_model(path, PACKED, {**vocabulary, "tokenizer.chat_template": SMOLLM2}, 406)
    options = [
        {"temperature": 0, "max_tokens": 12},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 7, "max_tokens": 24},
        {
            "temperature": 1.2,
            "min_p": 0.01,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.3,
            "seed": 3,
            "max_tokens": 70,
        },
    ]
    told = [{"messages": messages_of(DIALOGS[1]), **one} for one in options]
    answers = ask(engine, path, *told)
    llama = llamarium.load(path)
    for asked, answer in zip(told, answers, strict=True):
        expected = llama.chat(asked["messages"], **{name: asked[name] for name in asked if name != "messages"})
        (completion,) = expected.completions
        choices = [choice for chunk in answer for choice in chunk["choices"]]
        ids = [i for choice in choices for i in choice.get("token_ids", [])]
        assert ids == list(completion.token_ids)
        assert "".join(choice["delta"].get("content", "") for choice in choices) == completion.text
        assert choices[-1]["finish_reason"] == completion.finish_reason
    texts = [{"prompt": "Hello, world", **one} for one in options]
    for asked, answer in zip(texts, ask(engine, path, *texts, path="/v1/completions"), strict=True):
        (completion,) = llama.generate(
            asked["prompt"], **{name: asked[name] for name in asked if name != "prompt"}
        ).completions
        choices = [choice for chunk in answer for choice in chunk["choices"]]
        assert [i for choice in choices for i in choice["token_ids"]] == list(completion.token_ids)
        assert "".join(choice["text"] for choice in choices) == completion.text


def test_what_no_dialog_is_gets_its_own_error(engine: Engine, vocabulary: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "chat.gguf"
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + SMOLLM2
    write_model(path, ("Q8_0",), {**vocabulary, "tokenizer.chat_template": template}, 406)
    hello = {"messages": [{"role": "user", "content": "Hello"}]}
    answers = ask(
        engine, path,
        {"messages": []},
        {"messages": [{"role": "system", "content": "x"}]},
        {"messages": [{"role": "user", "content": "word " * 600}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {**hello, "tools": [{}]},
        {**hello, "response_format": {"type": "json_object"}},
        {**hello, "temperature": -1},
        {**hello, "model": "another"},
        hello | {"max_tokens": 3},
    )  # fmt: skip
    *refused, good = answers
    assert [one.get("error") for one in refused] == [
        "invalid_parameter", "chat_format", "context_length_exceeded", "input", "not_offered", "not_offered", "input",
        "unknown_adapter",
    ]  # fmt: skip
    assert "no system" in refused[1]["message"]
    assert len(good) == 4


def test_a_model_without_a_form_for_dialogs_goes_on_with_texts(
    engine: Engine, vocabulary: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "plain.gguf"
    tokens = [token.replace("im_start", "begin") for token in vocabulary["tokenizer.ggml.tokens"]]
    write_model(path, ("Q8_0",), {**vocabulary, "tokenizer.ggml.tokens": tokens}, 406)
    questions = [
        {"method": "GET", "path": "/props", "body": None},
        {"method": "POST", "path": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "a"}]}},
        {"method": "POST", "path": "/v1/completions", "body": {"prompt": "Hello", "max_tokens": 2, "temperature": 0}},
    ]
    props, refused, answer = engine.ask(model=str(path), questions=questions)
    assert props["chat_format"] is None
    assert (refused["status"], refused["error"]) == (400, "chat_format")
    assert len(answer) == 3
