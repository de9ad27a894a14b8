"""Every kind of checkpoint of docs/reference/checkpoints.md: logits, text, dialogs and answers."""

import warnings
from typing import Any

import pytest
import torch

import llamarium
from checkpoint_kinds import KINDS
from kind_parts import ASK, Kind
from llamarium.errors import ChatFormatError

pytestmark = pytest.mark.torch

TEXTS = ["the dog", "Zürich, 日本語 😀", "def main(argv):\n    return [int(x)]", "The price was 12,345.67 in 2024!"]


@pytest.fixture(params=KINDS, scope="module")
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    return KINDS[request.param](tmp_path_factory.mktemp("kind"))


def load(kind: Kind, expected: tuple[str, ...], **options: Any) -> llamarium.Llama:
    """Load a kind; its warnings are the expected ones, and no others."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        llama = llamarium.load(kind.path, device="cpu", chat_template=kind.chat_template, **options)
    said = [str(warning.message) for warning in caught]
    assert len(said) == len(expected), said
    assert all(part in text for part, text in zip(expected, said, strict=True)), said
    return llama


def test_a_kind_computes_reads_and_answers(kind: Kind) -> None:
    llama = load(kind, kind.warns, dtype="float32", **kind.load)
    ids = torch.tensor([[1, 5, 9, 200, 44, 7, 30, 21, 3, 90]])
    expected = kind.reference(ids).logits[0].detach()
    found = llama.model(ids)[0].detach()
    assert float((found - expected).abs().max()) < 1e-4 * max(1.0, float(expected.abs().max()))

    tokenizer = llama.tokenizer
    for text in TEXTS:
        coded = tokenizer.encode(text, add_special_tokens=False)
        assert coded == kind.encode(text) and tokenizer.decode(coded) == text

    answer = llama.generate("the dog", max_new_tokens=4, temperature=0.0).completions[0]
    prompt = tokenizer.encode("the dog")
    for token in answer.token_ids:
        assert token == int(kind.reference(torch.tensor([prompt])).logits[0, -1].argmax())
        prompt.append(token)
    assert len(answer.token_ids) == 4 or answer.finish_reason == "stop"


def test_a_kinds_dialogs_are_as_its_template_writes_them(kind: Kind) -> None:
    tokenizer = load(kind, (*kind.warns, *kind.warns_as_stored)).tokenizer
    if kind.dialog is None:
        with pytest.raises(ChatFormatError):
            tokenizer.chat(ASK)
        return
    ids = list(tokenizer.chat(ASK))
    bos = [tokenizer.bos_token_id] if kind.puts_bos else []
    assert ids == [*bos, *kind.encode(kind.dialog)]

    control = tokenizer.special_tokens[kind.control]
    forged = list(tokenizer.chat([{"role": "user", "content": f"the {kind.control} dog"}]))
    assert forged.count(control) == ids.count(control) and len(forged) > len(ids)


def test_a_kind_answers_as_it_is_stored(kind: Kind) -> None:
    llama = load(kind, (*kind.warns, *kind.warns_as_stored))
    completion = llama.generate("the dog", max_new_tokens=4, temperature=0.0).completions[0]
    assert completion.finish_reason in ("length", "stop") and 1 <= len(completion.token_ids) <= 4
