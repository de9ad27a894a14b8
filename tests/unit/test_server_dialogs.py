"""A dialog that is far too long is refused without encoding all of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import llamarium
from llamarium.errors import ContextLengthError
from llamarium.server.dialogs import encode_dialog
from llamarium.server.errors import ApiError
from llamarium.server.settings import Settings
from llamarium.tokenizer.base import Tokenizer

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "hello there " * 20}}
DOCUMENTS = [{"title": "One", "text": "<|im_start|>first"}]
READS_DOCUMENTS = "{% for d in documents %}{{ d.title }}: {{ d['text'] }}{% endfor %}{{ messages[0].content }}"
DIALOGS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello there " * 20}] * 60,
    [{"role": "assistant", "content": None, "tool_calls": [CALL] * 60}],
]


@pytest.mark.parametrize("dialog", DIALOGS)
def test_texts_that_fit_one_by_one_and_not_together_are_refused_before_they_are_encoded(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, dialog: list[dict[str, Any]]
) -> None:
    tokenizer = llamarium.load_tokenizer(smollm2_path)
    whole: list[object] = []

    def service(max_tokens: int) -> Any:
        return SimpleNamespace(tokenizer=tokenizer, max_tokens=max_tokens, settings=Settings())

    monkeypatch.setattr(Tokenizer, "chat", lambda *_, **__: whole.append(None) or [])
    with pytest.raises(ContextLengthError, match="too long: its 14,400 characters are"):
        encode_dialog(service(512), dialog)
    assert not whole
    assert encode_dialog(service(4096), dialog[:1]) == [] and whole


def test_documents_reach_a_template_that_reads_them_and_are_refused_elsewhere(smollm2_path: Path) -> None:
    plain = llamarium.load_tokenizer(smollm2_path)
    tokenizer = plain.with_chat_template(READS_DOCUMENTS)
    served: Any = SimpleNamespace(tokenizer=tokenizer, max_tokens=50, settings=Settings())
    ask = [{"role": "user", "content": "hi"}]
    assert tokenizer.decode(encode_dialog(served, ask, documents=DOCUMENTS)) == "One: <|im_start|>firsthi"

    def param(**how: Any) -> str | None:
        with pytest.raises(ApiError) as refusal:
            encode_dialog(served, ask, **how)
        return refusal.value.param

    assert param(documents=DOCUMENTS, variables={"documents": []}) == "documents"
    assert param(documents=[{"a\n": "x"}]) == "documents"
    with pytest.raises(ContextLengthError, match="too long"):
        encode_dialog(served, ask, documents=[{"title": "x", "text": "long " * 1000}])
    served.tokenizer = plain
    assert param(documents=DOCUMENTS) == "documents"
    assert encode_dialog(served, ask, documents=[]) == plain.chat(ask)
