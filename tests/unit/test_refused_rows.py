"""Rows that a chat template refuses: each has its own error and its own place, and costs no process."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from llamarium.datasets.rows import Reading
from llamarium.errors import TrainingError
from llamarium.tokenizer.backends.characters import CharacterBackend
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.chat.choose import with_format
from llamarium.tokenizer.special import SpecialTokens
from llamarium.train.data.dialogs import Example, read_dialogs
from llamarium.train.data.survey import survey

pytestmark = pytest.mark.quick

CHARACTERS = [chr(c) for c in range(32, 127)] + ["\n"]

# The tools of these rows are written into the messages, as the templates have no place for them.
CALL = {"type": "function", "id": "c", "function": {"name": "f", "arguments": {}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]

MARKS_TWO = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}<{% generation %}{{ m.reasoning_content }}{% endgeneration %}>{% endif %}"
    "{% if m.content %}[{% generation %}{{ m.content }}{% endgeneration %}]{% endif %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
REFUSES = (
    "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('not this') }}{% endif %}"
    "{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Characters with BOS and EOS."""
    special = SpecialTokens(ids={"<s>": 96, "</s>": 97}, bos=96, eos=(97,), add_bos=True)
    backend = CharacterBackend([*CHARACTERS, "\ue000", "\ue001"], "characters")
    return Tokenizer(backend, special, vocab_size=98, source="characters")


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def asks(words: str, answer: str = "yes") -> list[dict[str, Any]]:
    return [{"role": "user", "content": words}, {"role": "assistant", "content": answer}]


def runs(example: Example, tokenizer: Tokenizer) -> list[tuple[str, float]]:
    """The learned texts of an example, with their weights."""
    found: list[tuple[str, float]] = []
    weights = example.learned.astype(float) if example.weights is None else example.weights
    for token, learned, weight in zip(example.ids.tolist(), example.learned, weights, strict=True):
        text = tokenizer.decode([token])
        if learned and found and found[-1][1] == weight:
            found[-1] = (found[-1][0] + text, float(weight))
        elif learned:
            found.append((text, float(weight)))
    return found


def no_result(role_of_last: str) -> dict[str, Any]:
    """A dialog with a result that belongs to no call, which no text can say."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "other", "content": "9"},
        {"role": role_of_last, "content": "a"},
    ]
    return {"messages": messages, "tools": TOOLS}


@pytest.mark.parametrize("template", ["vicuna", MARKS_TWO])
@pytest.mark.parametrize("purpose", ["finetune", "grpo"])
def test_a_bad_dialog_of_tools_is_named_and_no_other(
    tokenizer: Tokenizer, tmp_path: Path, template: str, purpose: Any
) -> None:
    form = with_format(tokenizer, template) if template == "vicuna" else tokenizer.with_chat_template(template)
    last = "assistant" if purpose == "finetune" else "user"
    good = [{"messages": asks(f"q{i}")[: 2 if purpose == "finetune" else 1]} for i in range(3)]
    source = write(tmp_path / "a.jsonl", [*good[:2], no_result(last), good[2]])
    found = survey(source, form, purpose=purpose)
    assert [(bad.place[-2:], "tool_call_id" in bad.problem) for bad in found.tally.problems] == [(":3", True)]
    assert sum(found.forms.values()) == 3
    if purpose == "finetune":
        with pytest.raises(TrainingError, match=r"a\.jsonl:3: messages\[2\].tool_call_id"):
            read_dialogs(source, form)
        with pytest.warns(UserWarning, match=r"1 of 4 rows skipped: .*a\.jsonl:3:"):
            examples = read_dialogs(source, form, reading=Reading(skip_bad=True))
        texts = [tokenizer.decode(example.ids.tolist()) for example in examples]
        assert [f"q{i}" in text for i, text in enumerate(texts)] == [True] * 3


@pytest.mark.parametrize("purpose", ["finetune", "grpo"])
def test_rows_that_the_template_refuses_start_no_processes(
    tokenizer: Tokenizer, tmp_path: Path, purpose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = tokenizer.with_chat_template(REFUSES)
    assert form.chat_format is not None and form.chat_format.stop_ids  # what ends a turn is asked once
    started: list[Any] = []
    start = subprocess.run

    def count(*args: Any, **options: Any) -> Any:
        started.append(args)
        return start(*args, **options)

    monkeypatch.setattr("llamarium.tokenizer.chat.rendering.subprocess.run", count)
    length = 2 if purpose == "finetune" else 1
    rows = [{"messages": asks("no" if i % 2 else str(i))[:length]} for i in range(100)]
    found = survey(write(tmp_path / "a.jsonl", rows), form, purpose=purpose)
    assert (found.tally.num_skipped, sum(found.forms.values()), len(started)) == (50, 50, 1)
    assert all("not this" in bad.problem for bad in found.tally.problems)
    assert [bad.place.rpartition(":")[2] for bad in found.tally.problems] == [str(2 * i) for i in range(1, 21)]


def test_weights_belong_to_messages_and_not_to_what_a_template_marks(tokenizer: Tokenizer, tmp_path: Path) -> None:
    form = tokenizer.with_chat_template(MARKS_TWO)
    first: dict[str, Any] = {"role": "assistant", "reasoning_content": "WHY", "content": "one"}
    empty: dict[str, Any] = {"role": "assistant", "content": ""}
    user = {"role": "user", "content": "q"}
    rows = [
        [user, first | {"weight": 1}, user, empty | {"weight": 0}],  # as many parts as messages
        [user, empty | {"weight": 0}, user, first | {"weight": 0.5}],
        [user, first | {"weight": 0.5}, user, first | {"weight": 0}, user, first | {"weight": 2}],
        [user, first, user, first],
    ]
    examples = read_dialogs(write(tmp_path / "a.jsonl", [{"messages": row} for row in rows]), form)
    assert [runs(example, form) for example in examples] == [
        [("WHYone", 1.0)],
        [("WHYone", 0.5)],
        [("WHYone", 0.5), ("WHYone", 2.0)],
        [("WHYoneWHYone", 1.0)],
    ]


def test_weights_without_a_place_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A template that writes earlier answers differently once another follows has no border between them."""
    template = MARKS_TWO.replace(
        "{% if m.reasoning_content %}", "{% if m.reasoning_content and messages | length < 4 %}"
    )
    form = tokenizer.with_chat_template(template)
    answer = {"role": "assistant", "reasoning_content": "WHY", "content": "one"}
    messages = [{"role": "user", "content": "q"}, answer | {"weight": 1}] * 2
    alike = {"messages": messages}
    different = {"messages": [*messages[:3], answer | {"weight": 0}]}
    source = write(tmp_path / "a.jsonl", [alike, different])
    with pytest.raises(TrainingError, match=r"a\.jsonl:2: .*different weights"):
        read_dialogs(source, form)
    with pytest.warns(UserWarning, match="1 of 2 rows skipped"):
        (example,) = read_dialogs(source, form, reading=Reading(skip_bad=True))
    assert runs(example, form) == [("oneone", 1.0)]


def test_a_prompt_of_no_tokens_is_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    special = SpecialTokens(ids={"</s>": 97}, eos=(97,))
    bare = Tokenizer(tokenizer.backend, special, vocab_size=98, source="characters")
    found = survey(write(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": ""}]), bare, purpose="grpo", chat=False)
    assert (found.tally.num_rows, found.tally.num_skipped, len(found.lengths)) == (2, 1, 1)
    assert found.tally.problems[0].place.endswith(":2") and "no tokens" in found.tally.problems[0].problem
