"""Dialogs as rows: only the assistant's tokens are learned, and nothing is cut, lost or seen across a border."""

import json
import subprocess
import sys
import types
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from closeness import assert_close_to_reference, model_reference
from llamarium.checkpoints.gguf.file import read_gguf
from llamarium.errors import ChatFormatError, TrainingError
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.tokenizer.backends.characters import CharacterBackend
from llamarium.tokenizer.backends.gguf import from_gguf_metadata
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.chat.builtin import ChatMLFormat, Llama3Format
from llamarium.tokenizer.chat.choose import with_format
from llamarium.tokenizer.chat.format import TrainingDialog, value_of
from llamarium.tokenizer.chat.template import TemplateFormat
from llamarium.tokenizer.load import load_tokenizer_file
from llamarium.tokenizer.special import SpecialTokens
from llamarium.train.data.batch import IGNORED, TrainingBatch
from llamarium.train.data.dialog_rows import DialogRows, preview
from llamarium.train.data.dialogs import Example, read_dialogs

pytestmark = pytest.mark.torch

DIALOG = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <|eot_id|> 😀"},
    {"role": "assistant", "content": " Hello!"},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So."},
    {"role": "tool", "content": "ignored"},
]


@pytest.fixture(scope="module")
def llama3(llama3_tokenizer_path: Path) -> Tokenizer:
    return load_tokenizer_file(llama3_tokenizer_path)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return from_gguf_metadata(read_gguf(smollm2_path).metadata, smollm2_path.name)


@pytest.fixture
def base() -> Tokenizer:
    """Characters with BOS and EOS, and no dialog format."""
    characters = [chr(c) for c in range(32, 127)] + ["\n"]
    special = SpecialTokens(ids={"<s>": 96, "</s>": 97}, bos=96, eos=(97,), add_bos=True)
    backend = CharacterBackend([*characters, "\ue000", "\ue001"], "characters")
    return Tokenizer(backend, special, vocab_size=98, source="characters")


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    def write(*records: Any) -> Path:
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        path = tmp_path / "data.jsonl"
        path.write_bytes("\n".join(lines).encode())
        return path

    return write


def learned_text(example: Example, tokenizer: Tokenizer) -> list[str]:
    borders = np.flatnonzero(np.diff(example.learned)) + 1
    runs = zip(np.split(example.ids, borders), np.split(example.learned, borders), strict=True)
    return [tokenizer.decode(ids.tolist(), skip_special_tokens=False) for ids, learned in runs if learned[0]]


# --- formats ----------------------------------------------------------------------------------------------------------


def test_parts_are_the_dialog_and_the_answers(llama3: Tokenizer, smollm2: Tokenizer) -> None:
    for tokenizer, answers in (
        (llama3, ["Hello!<|eot_id|>", "So.<|eot_id|>"]),
        (smollm2, [" Hello!<|im_end|>", "So.<|im_end|>"]),
    ):
        assert tokenizer.chat_format is not None
        parts = value_of(next(tokenizer.chat_format.parts_of([TrainingDialog(DIALOG)])))
        assert [i for ids, _ in parts for i in ids] == tokenizer.chat(DIALOG, add_generation_prompt=False)
        found = [tokenizer.decode(ids, skip_special_tokens=False) for ids, learned in parts if learned]
        assert found == answers


def test_an_answer_is_learned_as_it_is_asked_for(smollm2: Tokenizer) -> None:
    """Where an answer begins with a line end, ChatML's header and answer must not share a token."""
    dialog = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "\n\nYes"}]
    assert smollm2.chat_format is not None
    asked = smollm2.chat(dialog[:1])
    parts = value_of(next(smollm2.chat_format.parts_of([TrainingDialog(dialog)])))
    ids = [i for part, _ in parts for i in part]
    assert ids[: len(asked)] == asked != smollm2.chat(dialog)[: len(asked)]
    assert [smollm2.decode(part) for part, learned in parts if learned] == ["\n\nYes"]


LLAMA_LIKE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{{ m['content'] | trim }}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def test_a_templates_answers_are_found_or_refused(llama3: Tokenizer) -> None:
    dialog = [message for message in DIALOG if message["role"] != "tool"]
    forms = TemplateFormat(llama3, LLAMA_LIKE), Llama3Format(llama3)
    parts, built_in = (value_of(next(form.parts_of([TrainingDialog(dialog)]))) for form in forms)
    answers = [i for i, learned in parts if learned]
    assert [llama3.decode(i, skip_special_tokens=False) for i in answers] == ["Hello!<|eot_id|>", "So.<|eot_id|>"]
    assert answers == [i for i, learned in built_in if learned]
    assert [i for part, _ in parts for i in part] == [i for part, _ in built_in for i in part]
    forgets = LLAMA_LIKE.replace("m['content'] | trim", "(m['content'] if loop.last else '...')")
    no_end = LLAMA_LIKE.replace("{{ '<|eot_id|>' }}", "")
    for template in (forgets, no_end, LLAMA_LIKE + " ."):
        with pytest.raises(ChatFormatError, match=r"messages\[2\].*be separated from the rest"):
            value_of(next(TemplateFormat(llama3, template).parts_of([TrainingDialog(dialog)])))
    with pytest.raises(ChatFormatError, match=r"messages\[0\]"):
        value_of(next(TemplateFormat(llama3, LLAMA_LIKE).parts_of([TrainingDialog(dialog[2:3])])))


# In the way of Llama 3.1's and 3.2's: a dated system header, tools as JSON in the first user's message.
DATED = (
    "{{- bos_token }}{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
    "{%- endif %}{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}{%- if tools is not none %}"
    "{{- 'Environment: ipython\n' }}{%- endif %}{{- 'Today Date: ' + date_string + '\n\n' + system + '<|eot_id|>' }}"
    "{%- for message in messages %}{%- if message.content == 'never' %}{%- for i in range(99999) %}"
    "{%- for j in range(99999) %}{%- endfor %}{%- endfor %}{%- endif %}"
    "{%- if message.content == 'no' %}{{ raise_exception('not this') }}{%- endif %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)


@pytest.fixture
def dated(llama3: Tokenizer) -> Tokenizer:
    """Llama 3's vocabulary with a template that writes the day."""
    return Tokenizer(llama3.backend, llama3.special, vocab_size=llama3.vocab_size, source="dated", chat_template=DATED)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is started for templates."""
    started: list[str] = []
    start = subprocess.run

    def count(*args: Any, **options: Any) -> Any:
        started.append(args[0])
        return start(*args, **options)

    monkeypatch.setattr("llamarium.tokenizer.chat.rendering.subprocess.run", count)
    return started


def asks(words: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": words}, {"role": "assistant", "content": f"{words}!"}]


def test_many_dialogs_go_through_one_process(
    dated: Tokenizer, processes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    form = dated.chat_format
    assert isinstance(form, TemplateFormat)
    assert form.stop_ids  # what ends a turn is asked once
    processes.clear()
    monkeypatch.setattr("llamarium.tokenizer.chat.rendering.WALL_LIMIT_S", 120)  # a busy machine takes longer
    dialogs = [*map(TrainingDialog, [DIALOG[:5], asks("a <|eot_id|> b"), *(asks(str(i)) for i in range(198))])]
    every = [*map(value_of, form.parts_of(dialogs))]
    assert len(processes) == 1
    texts = [[dated.decode(ids) for ids, learned in parts if learned] for parts in every]
    assert texts == [["Hello!", "So."], ["a <|eot_id|> b!"], *([f"{i}!"] for i in range(198))]
    assert every[0] == value_of(next(form.parts_of([TrainingDialog(DIALOG[:5])])))
    processes.clear()
    monkeypatch.setattr("llamarium.tokenizer.chat.rendering._REQUEST_CHARACTERS", 4_000)
    assert list(form.parts_of(dialogs[:10])) == every[:10]
    assert len(processes) > 2


def test_what_is_learned_does_not_depend_on_the_day(
    dated: Tokenizer, written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written({"messages": asks("Hi")}, {"prompt": "Ho", "completion": "hum"})
    prints, days = set(), []
    for year in (2031, 2032):

        class Clock(datetime):
            @classmethod
            def now(cls, tz: Any = None, year: int = year) -> datetime:
                return datetime(year, 3, 4, 5, 6)

        monkeypatch.setattr("llamarium.tokenizer.chat.template.datetime", Clock)
        rows = DialogRows.from_file(path, dated, 64)
        prints.add(rows.fingerprint)
        assert "Today Date: 26 Jul 2024\n" in dated.decode(rows.examples[0].ids.tolist())
        days.append(dated.decode(dated.chat(asks("Hi")[:1])))
    assert len(prints) == 1
    assert "Today Date: 04 Mar 2031\n" in days[0] and "Today Date: 04 Mar 2032\n" in days[1]


@pytest.mark.parametrize("words", ["never", "no", 3])
def test_a_refused_dialog_among_others_is_named(
    dated: Tokenizer, written: Callable[..., Path], words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamarium.tokenizer.chat.rendering.CPU_LIMIT_S", 0.05)
    expected = {"never": "was stopped", "no": "refuses the dialog: not this", 3: "has nothing to learn"}[words]
    odd = {"messages": asks(words) if words != 3 else asks("x")[:1]}
    path = written(*({"messages": asks(str(i))} for i in range(4)), odd, {"messages": asks("z")}, {"messages": []})
    with pytest.raises(TrainingError, match=f"data.jsonl:5: .*{expected}"):
        read_dialogs(path, dated)


def test_formats_by_name(llama3: Tokenizer, smollm2: Tokenizer) -> None:
    named = with_format(llama3, "llama3")
    assert isinstance(named.chat_format, Llama3Format) and named.chat_template is not None
    assert with_format(llama3, "auto").chat_template == named.chat_template and llama3.chat_template is None
    assert named.chat(DIALOG) == llama3.chat(DIALOG) == TemplateFormat(llama3, named.chat_template).encode(DIALOG)
    chatml = with_format(smollm2, "chatml")
    assert isinstance(chatml.chat_format, ChatMLFormat) and chatml.chat_template != smollm2.chat_template
    assert with_format(smollm2, "auto") is smollm2
    with pytest.raises(ChatFormatError, match=r"has no <\|im_start\|>, <\|im_end\|>"):
        with_format(llama3, "chatml")
    with pytest.raises(ChatFormatError, match="neither a file nor one of llama3, chatml"):
        with_format(llama3, "no-such-format")


# --- reading ----------------------------------------------------------------------------------------------------------


def test_three_forms_in_one_file(llama3: Tokenizer, written: Callable[..., Path]) -> None:
    path = written(
        {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}], "id": 7},
        "",
        {"prompt": "2+2?", "completion": "4"},
        {"instruction": "2+2?", "input": "", "output": "4"},
        {"instruction": "Add.", "input": "2 and 2", "output": "4"},
        {"prompt": "read by nobody", "messages": [{"role": "assistant", "content": "4"}]},
    )
    with pytest.warns(UserWarning, match=r"not read: id \(1 row\), prompt \(1 row\)$"):
        examples = read_dialogs(path, llama3)
    dialog = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    for example in examples[:3]:
        assert example.ids.tolist() == llama3.chat(dialog, add_generation_prompt=False)
    for example in examples:
        assert learned_text(example, llama3) == ["4<|eot_id|>"]
    assert "user<|end_header_id|>\n\nAdd.\n\n2 and 2<|eot_id|>" in llama3.decode(
        examples[3].ids.tolist(), skip_special_tokens=False
    )


def test_a_base_model_continues(base: Tokenizer, llama3: Tokenizer, written: Callable[..., Path]) -> None:
    path = written({"prompt": "2+2=", "completion": "4"}, {"instruction": "Add.", "input": "2 2", "output": "4"})
    first, second = read_dialogs(path, base)
    assert first.ids.tolist() == [96, *base.encode("2+2=4", add_special_tokens=False), 97]
    assert first.learned.tolist() == [False] * 5 + [True] * 2
    told = base.decode(second.ids[:-2].tolist())
    assert told.endswith("\n\n### Instruction:\nAdd.\n\n### Input:\n2 2\n\n### Response:")
    plain, _ = read_dialogs(path, llama3, chat=False)
    assert plain.ids.tolist() == [*llama3.encode("2+2="), *llama3.encode("4", add_special_tokens=False), 128001]


def test_every_source_of_documents_is_one_of_examples(
    llama3: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nulls of columns are fields that a row lacks: tables have every form's columns in every row."""
    rows: list[dict[str, Any]] = [
        {"messages": asks("Hi"), "prompt": None, "completion": None},
        {"messages": None, "prompt": "Hi", "completion": "Hi!"},
    ]
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[1]))  # a table's export has nulls, too
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    fake = types.ModuleType("datasets")
    fake.load_dataset = lambda *_, **__: iter(rows)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    expected = llama3.chat(asks("Hi"), add_generation_prompt=False)
    for source, count in ((tmp_path / "a.jsonl", 1), (tmp_path / "b.parquet", 2), (tmp_path, 3), ("org/name", 2)):
        examples = read_dialogs(source, llama3)
        assert [example.ids.tolist() for example in examples] == [expected] * count
    assert [example.form for example in examples] == ["messages", "prompt"]
    rows[1]["completion"] = 3
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    for source, place in ((tmp_path / "b.parquet", r"b\.parquet: row 2"), ("org/name", "org/name: row 2")):
        with pytest.raises(TrainingError, match=f"{place}: completion is 3; expected text"):
            read_dialogs(source, llama3)
    with pytest.raises(TrainingError, match=r"no data called 'data/missing\.jsonl'"):  # no name on the hub
        read_dialogs("data/missing.jsonl", llama3)


def test_sharegpt_and_raw_texts(llama3: Tokenizer, base: Tokenizer, written: Callable[..., Path]) -> None:
    said = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    tool = {"from": "tool", "value": "42", "weight": None}
    path = written(
        {"conversations": [*said, tool, {"from": "gpt", "value": "b"}]},
        {"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        {"text": "all of it"},
        {"prompt": "q", "completion": "a", "text": "q a"},  # as Alpaca's rows have their whole prompt besides
    )
    with pytest.warns(UserWarning, match=r"not read: text \(1 row\)$"):
        sharegpt, messages, text, prompt = examples = read_dialogs(path, llama3)
    names = ("system", "user", "assistant", "tool", "assistant")
    dialog = [
        {"role": role, "content": content} for role, content in zip(names, ["s", "q", "a", "42", "b"], strict=True)
    ]
    assert sharegpt.ids.tolist() == llama3.chat(dialog, add_generation_prompt=False)
    assert learned_text(sharegpt, llama3) == ["a<|eot_id|>", "b<|eot_id|>"]
    assert messages.ids.tolist() == prompt.ids.tolist()
    assert text.ids.tolist() == [*llama3.encode("all of it"), llama3.eos_token_ids[0]]
    assert text.learned.tolist() == [False] + [True] * (len(text.ids) - 1)
    counts = {"examples of conversations": 2, "examples of text": 1, "examples of prompt": 1}
    assert DialogRows(examples, 64).about.items() >= counts.items()
    (alone,) = read_dialogs(written({"text": "abc"}), base)
    assert alone.ids.tolist() == [96, *base.encode("abc", add_special_tokens=False), 97]


def test_without_packing_a_row_has_one_example() -> None:
    examples = make_examples(20)
    rows, packed = DialogRows(examples, 32, packing=False, seed=3), DialogRows(examples, 32, seed=3)
    batch = rows.batch(1, range(rows.num_rows(1)))
    assert len(batch.ids_BT) == 20 > packed.num_rows(1) and rows.fingerprint != packed.fingerprint
    assert sorted(unpacked(batch)) == sorted(unpacked(packed.batch(1, range(packed.num_rows(1)))))
    train, held_out = rows.split(0.1)
    assert (train.num_rows(0), held_out.num_rows(0)) == (18, 2)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "no JSON"),
        ("[1]", "no JSON object"),
        ("3", "3 is no JSON object"),
        ('{"body": "x"}', r"keys \['body'\]; expected messages, or conversations"),
        ('{"messages": [], "prompt": "a", "completion": "b"}', "only one of them"),
        ('{"messages": []}', "at least one"),
        ('{"messages": [{"role": "king", "content": "x"}]}', "role is 'king'"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "nothing to learn"),
        ('{"messages": [{"role": "assistant", "content": "\\ud800"}]}', "lone surrogate"),
        ('{"prompt": "x", "completion": "a\\udfffb"}', "lone surrogate"),
        ('{"conversations": [{"from": "king", "value": "x"}]}', r"conversations\[0\].from is 'king'; expected .*human"),
        ('{"conversations": [{"from": "gpt", "value": "x", "weight": 0}]}', "nothing to learn"),
        ('{"conversations": [{"from": "gpt", "value": "x", "weight": -1}]}', r"\[0\].weight is -1.*number from 0"),
        ('{"conversations": [], "prompt": "a", "completion": "b"}', "only one of them"),
        ('{"conversations": "x"}', "conversations is 'x'; expected a list"),
        ('{"text": ["x"]}', r"text is \['x'\]; expected text"),
        ('{"prompt": ["x"], "completion": "b"}', r"prompt\[0\] is 'x'; expected an object"),
        ('{"instruction": "x", "input": 3, "output": "b"}', "input is 3"),
        ('{"messages": [{"role": "assistant", "content": "x"}], "tools": 3}', "tools is 3; expected a list"),
        ('{"prompt": "p", "chosen": "x", "rejected": "y"}', "which dpo learns from"),
        ("[" * 100_000, "no JSON"),
        ('{"prompt": "a", "completion": "b", "prompt": "c"}', "the key 'prompt' twice"),
        ('{"prompt": ' + "1" * 5000 + ', "completion": "x"}', "no JSON"),
    ],
)
def test_lines_that_are_no_examples(llama3: Tokenizer, written: Callable[..., Path], line: str, word: str) -> None:
    path = written({"prompt": "a", "completion": "b"}, "", line)
    with pytest.raises(TrainingError, match=rf"data\.jsonl:3: .*{word}"):
        read_dialogs(path, llama3)


def test_files_that_are_none(llama3: Tokenizer, base: Tokenizer, written: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="holds no example"):
        read_dialogs(written("", "  "), llama3)
    with pytest.raises(TrainingError, match="no file or folder of that name"):
        read_dialogs(tmp_path / "nothing", llama3)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text("no row")
    with pytest.raises(TrainingError, match=r"nothing to read in this folder; expected .jsonl, .*.parquet, .*.csv"):
        read_dialogs(tmp_path / "empty", llama3)
    (tmp_path / "junk").write_bytes(b"\x80\x81\x00")
    with pytest.raises(TrainingError, match=r"junk:1: a NUL byte"):
        read_dialogs(tmp_path / "junk", llama3)
    dialog = written({"messages": [{"role": "assistant", "content": "x"}]})
    with pytest.raises(TrainingError, match=r":1: is a dialog, and characters has no dialog format"):
        read_dialogs(dialog, base)
    endless = Tokenizer(base.backend, SpecialTokens(), vocab_size=96, source="endless")
    with pytest.raises(TrainingError, match="endless has no end-of-text token"):
        read_dialogs(written({"prompt": "a", "completion": "b"}), endless)


# --- rows -------------------------------------------------------------------------------------------------------------


def make_examples(count: int, longest: int = 12, seed: int = 0) -> list[Example]:
    random = np.random.default_rng(seed)
    made: list[Example] = []
    for _ in range(count):
        ids = random.integers(1, 200, random.integers(2, longest + 1)).astype(np.int32)
        learned = random.random(len(ids)) < 0.5
        learned[0], learned[-1] = False, True
        made.append(Example(ids, learned))
    return made


def unpacked(batch: TrainingBatch) -> list[tuple[list[int], list[int]]]:
    """Every segment with something to learn, as (ids, labels)."""
    found: list[tuple[list[int], list[int]]] = []
    assert batch.segments_BT is not None
    for ids, labels, positions, segments in zip(
        batch.ids_BT, batch.labels_BT, batch.positions_BT, batch.segments_BT, strict=True
    ):
        assert (segments.diff() >= 0).all() and (segments.diff() <= 1).all() and segments[0] == 0
        for segment in segments.unique():
            inside = segments == segment
            assert positions[inside].tolist() == list(range(int(inside.sum())))
            if (labels[inside] != IGNORED).any():
                found.append((ids[inside].tolist(), labels[inside].tolist()))
    return found


@pytest.mark.parametrize("epoch", [0, 1])
def test_every_example_is_there_once_with_its_labels(epoch: int) -> None:
    examples = make_examples(100)
    rows = DialogRows(examples, 32, seed=5)
    batch = rows.batch(epoch, range(rows.num_rows(epoch)))
    assert batch.ids_BT.dtype == batch.labels_BT.dtype == batch.positions_BT.dtype == torch.int64
    expected = [
        (ids[:-1].tolist(), [int(i) if learns else IGNORED for i, learns in zip(ids[1:], learned[1:], strict=True)])
        for ids, learned, *_ in examples
    ]
    assert sorted(unpacked(batch)) == sorted(expected)
    assert batch.num_learned == sum(int(learned.sum()) for _, learned, *_ in examples)
    full = sum(len(ids) - 1 for ids, *_ in examples) / batch.ids_BT.numel()
    assert full > 0.9, "first fit leaves little room"


def test_the_order_is_the_seeds_and_the_epochs() -> None:
    examples = make_examples(50)
    rows, again = DialogRows(examples, 24, seed=1), DialogRows(examples, 24, seed=1)
    later = again.batch(1, [0])
    assert torch.equal(rows.batch(0, [2, 0]).ids_BT, again.batch(0, [2, 0]).ids_BT)
    assert torch.equal(rows.batch(0, [2, 0]).ids_BT[1:], rows.batch(0, [0]).ids_BT)
    assert not torch.equal(rows.batch(0, [0]).ids_BT, later.ids_BT)
    assert not torch.equal(rows.batch(0, [0]).ids_BT, DialogRows(examples, 24, seed=2).batch(0, [0]).ids_BT)
    fixed = DialogRows(examples, 24, seed=None)
    assert torch.equal(fixed.batch(0, [0]).ids_BT, fixed.batch(3, [0]).ids_BT)
    assert fixed.batch(0, [0]).ids_BT[0, 0] == int(examples[0].ids[0])


def test_fingerprint_is_of_everything_that_shapes_rows() -> None:
    examples = make_examples(5)
    other_id, other_mask = make_examples(5), make_examples(5)
    other_id[2].ids[0] += 1
    other_mask[2].learned[-1] = False
    swapped = [examples[1], examples[0], *examples[2:]]
    same = DialogRows(examples, 24).fingerprint
    assert same == DialogRows(make_examples(5), 24).fingerprint and len(same) == 64
    others = [
        DialogRows(examples, 25), DialogRows(examples, 24, seed=1), DialogRows(examples, 24, pad_id=1),
        DialogRows(other_id, 24), DialogRows(other_mask, 24), DialogRows(swapped, 24), DialogRows(examples[:4], 24),
    ]  # fmt: skip
    assert len({same, *(rows.fingerprint for rows in others)}) == 8


def test_fingerprint_stays_from_version_to_version() -> None:
    example = Example(np.arange(6, dtype=np.int32), np.arange(6) > 3)
    assert DialogRows([example, example], 8, seed=1).fingerprint.startswith("37e517627bbfa1485acc")  # runs resume by it


def test_a_row_of_one_segment_needs_no_mask() -> None:
    example = Example(np.arange(9, dtype=np.int32), np.arange(9) > 3)
    assert DialogRows([example], 8).batch(0, [0]).segments_BT is None
    assert DialogRows([example], 9).batch(0, [0]).segments_BT is not None


def test_longer_than_the_context() -> None:
    examples = [*make_examples(10, longest=12), *make_examples(2, longest=40, seed=3)]
    lengths = sorted(len(ids) - 1 for ids, *_ in examples)
    assert lengths[-2] > 12
    num_rows = DialogRows(examples, lengths[-1]).num_rows(0)
    assert num_rows > 0
    with pytest.raises(TrainingError, match=rf"2 of 12 examples are longer .* 12 tokens; .* has {lengths[-1]}"):
        DialogRows(examples, 12)
    with pytest.warns(UserWarning, match=r"2 of 12 examples .*left out"):
        rows = DialogRows(examples, 12, truncate="drop")
    assert len(rows.examples) == 10
    with pytest.raises(TrainingError, match="longer"):
        DialogRows(examples[-2:], 12, truncate="drop")
    with pytest.raises(TrainingError, match="truncate is 'cut'"):
        DialogRows(examples, 12, truncate="cut")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TrainingError, match="no example"):
        DialogRows([], 12)
    with pytest.raises(TrainingError, match="at least 1"):
        DialogRows(examples, 0)


def test_split() -> None:
    rows = DialogRows(make_examples(10), 24, seed=4)
    train, held_out = rows.split(0.2)
    assert [len(train.examples), len(held_out.examples)] == [8, 2]
    assert held_out.examples == rows.examples[8:]
    assert torch.equal(held_out.batch(0, [0]).ids_BT, held_out.batch(1, [0]).ids_BT)
    others = DialogRows([*rows.examples[:9], *make_examples(1, seed=5)], 24, seed=4).split(0.2)[0]
    assert len({train.fingerprint, others.fingerprint, rows.split(0.1)[0].fingerprint}) == 3  # what is held out counts
    assert [len(part.examples) for part in rows.split(0.04)] == [9, 1]
    for share in (0.0, 1.0):
        with pytest.raises(TrainingError, match="expected at least one to validate"):
            rows.split(share)


@torch.no_grad()
def test_packed_examples_do_not_see_each_other() -> None:
    from llamarium.attention.base import CausalAttend

    model = init_weights(LlamaForCausalLM(preset("tiny")), seed=0)
    examples = make_examples(6)
    rows = DialogRows(examples, 40, seed=None)
    batch = rows.batch(0, [0])
    packed = model(batch.ids_BT, batch.positions_BT, CausalAttend(segments_BT=batch.segments_BT))[0]
    start = 0
    for ids, *_ in examples[:3]:
        alone_ids = torch.from_numpy(ids[:-1].astype(np.int64))[None]
        alone, reference = model(alone_ids)[0], model_reference(model, alone_ids)[0]
        assert_close_to_reference(packed[start : start + len(alone)], alone, reference)
        start += len(alone)


# --- showing ----------------------------------------------------------------------------------------------------------


def test_preview(llama3: Tokenizer, written: Callable[..., Path]) -> None:
    path = written({"messages": DIALOG[:5]}, {"prompt": "a\x1b[31m", "completion": "日本"})
    rows = DialogRows.from_file(path, llama3, 100, seed=None)
    text = preview(rows.batch(0, [0]), llama3)
    plain = text.plain
    assert "assistant<|end_header_id|>\n\n⟦Hello!<|eot_id|>⟧<|start_header_id|>user" in plain
    assert "⟦日本<|eot_id|>⟧" in plain and "a\\x1b[31m" in plain and "\x1b" not in plain
    assert "example 1: " in plain and "example 2: " in plain and "(padding)" in plain
    green = "".join(plain[span.start : span.end] for span in text.spans if "green" in str(span.style))
    assert green == "⟦Hello!<|eot_id|>⟧⟦So.<|eot_id|>⟧⟦日本<|eot_id|>⟧"
    dim = "".join(plain[span.start : span.end] for span in text.spans if str(span.style) == "dim")
    assert "Be brief." in dim and "So." not in dim
