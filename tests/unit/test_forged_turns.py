"""What a user, or an answer that is sent back, spells never becomes a control token: in GGUF vocabularies whose turn
markers are control tokens, user-defined ones, or ordinary text, in every dialog format."""

from typing import Any

import pytest

from llamarium.tokenizer.backends.gguf import from_gguf_metadata
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.bpe import BYTE_TO_CHARACTER
from llamarium.tokenizer.chat.choose import with_template
from llamarium.tokenizer.chat.format import TrainingDialog, value_of
from llamarium.tokenizer.chat.named import NAMED_FORMATS

CONTROL, USER_DEFINED = 3, 4
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n'"
    " + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<\uff5cUser\uff5c>' + m.content }}"
    "{% else %}{{ '<\uff5cAssistant\uff5c>' + m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<\uff5cAssistant\uff5c>' }}{% endif %}"
)
# The template (or a format's name), the markers with their types, and those of them that users may write.
Case = tuple[str, dict[str, int], set[str]]
BEGIN, END = "<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"
CASES: dict[str, Case] = {
    "gemma": (GEMMA, {"<bos>": 3, "<eos>": 3, "<start_of_turn>": 4, "<end_of_turn>": 4, "<table>": 4}, {"<table>"}),
    "gemma control": (GEMMA, {"<bos>": 3, "<eos>": 3, "<start_of_turn>": 3, "<end_of_turn>": 3, "[m]": 4}, {"[m]"}),
    "deepseek": (
        DEEPSEEK,
        {BEGIN: CONTROL, END: CONTROL, "<\uff5cUser\uff5c>": 4, "<\uff5cAssistant\uff5c>": 4, "<think>": 4},
        {"<think>"},
    ),
    "zephyr": ("zephyr", {"<s>": 3, "</s>": 3, "<|user|>": 4, "<|assistant|>": 4, "<|system|>": 4}, set()),
    "mistral": ("mistral", {"<s>": 3, "</s>": 3, "[INST]": 3, "[/INST]": 3, "[TOOL_CALLS]": 3}, set()),
    **{
        name: (name, {"<s>": CONTROL, "</s>": CONTROL}, set())
        for name, form in NAMED_FORMATS.items()
        if not form.tokens and name not in ("zephyr", "mistral")
    },
}
MARKERS = (
    "[INST]",
    "[/INST]",
    "<<SYS>>",
    "USER:",
    "ASSISTANT:",
    "### Response:",
    "<|assistant|>",
    "</s>",
    "<|im_end|>",
)


def tokenizer_of(model: str, case: Case) -> Tokenizer:
    template, added, _ = case
    learned = [*BYTE_TO_CHARACTER.values()] if model == "gpt2" else ["<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": [*learned, *added],
        "tokenizer.ggml.token_type": [*([1] * 256 if model == "gpt2" else [2] + [6] * 256), *added.values()],
        "tokenizer.ggml.bos_token_id": len(learned),
        "tokenizer.ggml.eos_token_id": len(learned) + 1,
        "tokenizer.ggml.scores": [0.0] * (len(learned) + len(added)),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.pre": "llama-bpe",
    }
    own = {} if template in NAMED_FORMATS else {"tokenizer.chat_template": template}
    tokenizer = from_gguf_metadata(metadata | own, "x.gguf")
    return tokenizer if own else with_template(tokenizer, template)


def dialog(place: int, text: str) -> list[dict[str, str]]:
    messages = [("user", "hello"), ("assistant", "hi"), ("user", "again")]
    return [{"role": role, "content": text if i == place else said} for i, (role, said) in enumerate(messages)]


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("name", CASES)
def test_no_text_becomes_a_control_token(name: str, model: str) -> None:
    tokenizer, (_, added, allowed) = tokenizer_of(model, CASES[name]), CASES[name]
    assert set(tokenizer.special.ids) == (set(added) | ({"<unk>"} if model == "llama" else set())) - allowed
    control, form = set(tokenizer.special.ids.values()), tokenizer.chat_format
    assert form is not None
    spelled = dict.fromkeys((*added, *MARKERS))
    texts = [
        text for s in spelled for text in (s, f"a{s}b", f" {s}{s}\n", s[:-1], s[1:], f"{s[:2]}{s}{s[2:]}", f"x\n{s}\ny")
    ]
    dialogs = [dialog(place, text) for text in texts for place in range(3) if place != 1 or "think" not in text]
    given = [*map(TrainingDialog, [dialog(0, "hello"), *dialogs])]
    (plain, *encoded) = [[i for i in ids if i in control] for ids in map(value_of, form.prompts_of(given))]
    assert plain, "the format has control tokens"
    assert [d for d, ids in zip(dialogs, encoded, strict=True) if ids != plain] == []


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("name", CASES)
def test_user_defined_tokens_that_are_no_turn_markers_stay_text(name: str, model: str) -> None:
    tokenizer, (_, _, allowed) = tokenizer_of(model, CASES[name]), CASES[name]
    for text in allowed:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) == 1 and tokenizer.decode(ids) == text
