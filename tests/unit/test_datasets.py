"""One reader of data sets: the same rows give the same examples in every format, and what is wrong is named."""

import csv
import gzip
import json
import random
import sys
import tracemalloc
import types
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from llamarium.datasets.forms import Record, example_of, pair_of, prompt_of
from llamarium.datasets.rows import Reading, Tally
from llamarium.datasets.sources import named_rows, read_documents, read_rows
from llamarium.errors import TrainingError

pytestmark = pytest.mark.torch

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "day": {"type": "string"}}},
    },
}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the format that a file's name has."""
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    name = path.name
    if name.endswith(".parquet"):
        names = dict.fromkeys(key for row in rows for key in row)
        pq.write_table(pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows]), path)
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows, indent=1))
    elif name.endswith((".csv", ".tsv")):
        with path.open("w", newline="") as file:
            columns = list(dict.fromkeys(key for row in rows for key in row))
            writer = csv.writer(file, delimiter="\t" if name.endswith(".tsv") else ",")
            writer.writerow(columns)
            for row in rows:
                cells = (row.get(key) for key in columns)
                writer.writerow([cell if isinstance(cell, str) or cell is None else json.dumps(cell) for cell in cells])
    else:
        packed = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get(path.suffix, bytes)
        path.write_bytes(packed(lines))
    return path


def examples(source: Any, reading: Reading | None = None) -> list[Record]:
    reading = reading or Reading()
    with named_rows(source) as name:
        tally = Tally("data", reading)
        return [record for row in read_rows(str(name), tally) for record in example_of(row.fields, reading)]


FORMATS = ["a.jsonl", "a.ndjson", "a.json", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz", "a.jsonl.zst"]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome", "day": None}}}
ROWS: list[dict[str, Any]] = [
    {"messages": [USER, ASSISTANT]},
    {
        "messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "sun"}],
        "tools": [TOOL],
    },
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ASSISTANT]},
]


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_rows_are_the_same_examples(name: str, tmp_path: Path) -> None:
    """Contents of one type, as Arrow wants them; parts are in a test of their own."""
    expected = examples(ROWS[:2])
    found = examples(write(tmp_path / name, ROWS[:2]))
    assert found == expected
    call = found[1].messages[1]["tool_calls"][0]
    assert call["function"]["arguments"] == {"city": "Rome", "day": None}, "a null within arguments is a value"
    assert found[1].tools[0].name == "weather" and found[0].tools == ()


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.jsonl.gz"])
def test_parts_and_plain_columns(name: str, tmp_path: Path) -> None:
    plain = [{"prompt": 'a, "b"\r\nc', "completion": " d"}, {"instruction": "i", "input": "", "output": "o"}]
    assert examples(write(tmp_path / name, plain)) == examples(plain)
    assert examples(write(tmp_path / name, ROWS)) == examples(ROWS)


def test_nulls_that_a_schema_adds_are_absent(tmp_path: Path) -> None:
    """Arrow gives every struct the keys of all others; JSONL with nulls in the same places reads alike."""
    other = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    rows = [*ROWS[:2], {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [other]}]}]
    (_, weather, add) = examples(write(tmp_path / "a.parquet", rows))
    assert weather.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome", "day": None}
    assert add.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    nulls = {"role": "user", "content": "q", "tool_calls": None, "name": None}
    assert examples([{"messages": [nulls, {**ASSISTANT, "tool_calls": None}]}]) == examples(ROWS[:1])


def test_python_and_datasets(tmp_path: Path) -> None:
    assert examples(iter(ROWS[:1])) == examples(tuple(ROWS[:1])) == examples(pa.Table.from_pylist(ROWS[:1]))

    class Split(list[Any]):
        column_names = ("messages",)

    assert examples({"train": Split(ROWS[:1]), "test": Split()}) == examples(ROWS[:1])
    for data, word in (([3], r"data\[0\] is 3"), (7, "data is 7"), ({"test": Split()}, "no train")):
        with pytest.raises(TrainingError, match=word):
            examples(data)
    with named_rows(ROWS) as name:
        assert len(list(read_rows(name))) == 3
    with pytest.raises(TrainingError, match="rows of Python, which are not kept"):
        list(read_rows(name))


# --- forms ------------------------------------------------------------------------------------------------------------


def learned(record: Record) -> list[str]:
    return [message["content"] for message, weight in zip(record.messages, record.weights, strict=True) if weight]


@pytest.mark.parametrize(
    ("row", "form", "answers", "count"),
    [
        ({"messages": [USER, ASSISTANT, USER, {**ASSISTANT, "content": "b"}]}, "messages", ["a", "b"], 4),
        ({"prompt": [USER, ASSISTANT, USER], "completion": [{**ASSISTANT, "content": "b"}]}, "prompt", ["b"], 4),
        ({"prompt": "q", "completion": "a"}, "prompt", ["a"], 2),
        ({"prompt": "q", "completion": ASSISTANT}, "prompt", ["a"], 2),
        ({"instruction": "i", "input": "x", "output": "a", "system": "s"}, "instruction", ["a"], 3),
        ({"instruction": "i", "output": "a", "history": [["p", "o"]]}, "instruction", ["o", "a"], 4),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
         "conversations", ["a"], 3),
        ({"messages": {"role": ["user", "assistant"], "content": ["q", "a"]}}, "messages", ["a"], 2),
        ({"messages": [USER, {**ASSISTANT, "weight": 0}, USER, {**ASSISTANT, "content": "b", "weight": 1}]},
         "messages", ["b"], 4),
        ({"messages": [USER, {**ASSISTANT, "train": False}, {**ASSISTANT, "content": "b", "train": True}]},
         "messages", ["b"], 3),
    ],
)  # fmt: skip
def test_forms(row: dict[str, Any], form: str, answers: list[str], count: int) -> None:
    (record,) = example_of(row, Reading())
    assert (record.form, learned(record), len(record.messages)) == (form, answers, count)
    assert not record.unread


def test_sharegpt_calls_and_results() -> None:
    row = {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Rome"}}'},
            {"from": "observation", "value": "sun"},
            {"from": "gpt", "value": "a"},
        ],
        "tools": json.dumps([TOOL["function"]]),
    }
    (record,) = example_of(row, Reading())
    assert [message["role"] for message in record.messages] == ["user", "assistant", "tool", "assistant"]
    assert record.messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert record.weights == [0, 1, 0, 1] and record.tools[0].parameters["properties"].keys() == {"city", "day"}


@pytest.mark.parametrize(
    ("row", "prompt", "answers"),
    [
        ({"prompt": "q", "chosen": "good", "rejected": "bad"}, "q", ["good", "bad"]),
        ({"prompt": [USER], "chosen": [ASSISTANT], "rejected": [{**ASSISTANT, "content": "b"}]}, "q", ["a", "b"]),
        ({"chosen": [USER, ASSISTANT], "rejected": [USER, {**ASSISTANT, "content": "b"}]}, "q", ["a", "b"]),
        ({"chosen": "The sky is blue.", "rejected": "The sky is black."}, "The sky is", [" blue.", " black."]),
        ({"prompt": "q", "chosen": [USER, ASSISTANT], "rejected": [USER, {**ASSISTANT, "content": "b"}]}, "q",
         ["a", "b"]),
        ({"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "a"},
          "rejected": {"from": "gpt", "value": "b"}}, "q", ["a", "b"]),
        ({"instruction": "q", "chosen": "a", "rejected": "b"}, "q", ["a", "b"]),
    ],
)  # fmt: skip
def test_pairs(row: dict[str, Any], prompt: str, answers: list[str]) -> None:
    pair = pair_of(row, Reading())
    assert [record.messages[0]["content"] for record in pair] == [prompt] * 2
    assert [learned(record) for record in pair] == [[answer] for answer in answers]


SYSTEM, BETTER, WORSE = {"role": "system", "content": "s"}, {**ASSISTANT, "content": "b"}, {**ASSISTANT, "content": "w"}


def contents(record: Record) -> list[str]:
    return [message["content"] for message in record.messages]


def test_earlier_turns_are_not_learned_beside_a_prompt() -> None:
    history = [["one", "two"]]
    for row in (
        {"prompt": "q", "chosen": "b", "rejected": "w", "history": history},
        {"chosen": [USER, BETTER], "rejected": [USER, WORSE], "history": history},
        {"instruction": "q", "chosen": "b", "rejected": "w", "history": history},
    ):
        pair = pair_of(row, Reading())
        assert [contents(record) for record in pair] == [["one", "two", "q", "b"], ["one", "two", "q", "w"]]
        assert [learned(record) for record in pair] == [["b"], ["w"]]
    (record,) = example_of({"prompt": "q", "completion": "a", "history": history}, Reading())
    assert learned(record) == ["a"]


def test_a_system_message_stays_first_beside_history() -> None:
    row = {"messages": [SYSTEM, USER, ASSISTANT], "history": [["one", "two"]]}
    (record,) = example_of(row, Reading())
    assert contents(record) == ["s", "one", "two", "q", "a"] and learned(record) == ["two", "a"]
    (record,) = example_of({**row, "system": "s"}, Reading())
    assert contents(record) == ["s", "one", "two", "q", "a"], "the same system message, twice"
    with pytest.raises(TrainingError, match="system message in the dialog"):
        example_of({**row, "system": "other"}, Reading())


@pytest.mark.parametrize(
    "prompt",
    ['[{"role": "user", "content": "q"}]', '[ {"role": "user", "content": "q"}]',
     '\n[\n {"content": "q", "role": "user"}\n]', '[{"from": "human", "value": "q"}]'],
)  # fmt: skip
def test_messages_as_json_in_a_cell(prompt: str) -> None:
    answer = json.dumps([ASSISTANT]).replace("[{", "[ {")
    (record,) = example_of({"prompt": prompt, "completion": answer}, Reading())
    assert record.messages == [USER, ASSISTANT] and not record.unread
    pair = pair_of({"prompt": prompt, "chosen": answer, "rejected": "w"}, Reading())
    assert pair[0].messages == [USER, ASSISTANT]


def test_texts_that_are_no_messages_stay_texts() -> None:
    for text in ("[1, 2]", '[{"a": 1}]', '[{"a": 1}] is JSON', "[{", '[{"role": "user"}, {"name": "b"}]'):
        (record,) = example_of({"prompt": text, "completion": "a"}, Reading())
        assert contents(record) == [text, "a"] and not record.unread
    with pytest.raises(TrainingError, match=r"prompt is .*no JSON"):
        example_of({"prompt": '[{"role": "user", "content": ', "completion": "a"}, Reading())


def test_messages_in_the_notation_of_python_are_named() -> None:
    row = {"prompt": str([USER]), "completion": "a"}
    (record,) = example_of(row, Reading())
    assert contents(record) == [str([USER]), "a"]
    assert len(record.unread) == 1 and "prompt" in record.unread[0] and "Python" in record.unread[0]
    (record,) = prompt_of({"prompt": str([USER])}, Reading())
    assert len(record.unread) == 1


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        ([USER], [USER, BETTER], ["q", "b"]),
        ("q", [USER, BETTER], ["q", "b"]),
        ([SYSTEM, USER], [SYSTEM, USER, BETTER], ["s", "q", "b"]),
        ([SYSTEM, USER], [USER, BETTER], ["s", "q", "b"]),
        ([USER], [SYSTEM, USER, BETTER], ["s", "q", "b"]),
        ([USER, ASSISTANT, USER], [USER, BETTER], ["q", "a", "q", "b"]),
        ([USER], [BETTER, USER, BETTER], ["q", "b", "q", "b"]),
    ],
)
def test_an_answer_may_repeat_its_prompt(prompt: Any, answer: list[Any], expected: list[str]) -> None:
    (record,) = example_of({"prompt": prompt, "completion": answer}, Reading())
    assert contents(record) == expected and set(learned(record)) == {"b"}
    chosen, rejected = pair_of({"prompt": prompt, "chosen": answer, "rejected": [*answer[:-1], WORSE]}, Reading())
    assert contents(chosen) == expected and contents(rejected) == [*expected[:-1], "w"]


def test_what_has_no_effect_is_named() -> None:
    (record,) = prompt_of({"prompt": "q", "weight": "heavy"}, Reading())
    assert len(record.unread) == 1 and "weight" in record.unread[0]
    for says in ({"train": True}, {"weight": 1}):
        (record,) = example_of({"messages": [{**USER, **says}, ASSISTANT]}, Reading())
        assert record.weights == [0, 1] and len(record.unread) == 1
        (record,) = example_of({"prompt": [{**USER, **says}], "completion": "a"}, Reading())
        assert record.weights == [0, 1] and len(record.unread) == 1
    (record,) = example_of({"messages": [{**USER, "train": False, "weight": 0}, ASSISTANT]}, Reading())
    assert not record.unread


def test_roles_of_one_message() -> None:
    row = {"prompt": "q", "chosen": {"from": "pirate", "value": "a"}, "rejected": {"from": "pirate", "value": "b"}}
    pair = pair_of(row, Reading.parse(roles="pirate=assistant"))
    assert [learned(record) for record in pair] == [["a"], ["b"]]
    parts = {"content": [{"type": "text", "text": "a"}], "role": "assistant"}
    (record,) = example_of({"prompt": "q", "completion": parts}, Reading())
    assert record.messages == [USER, parts]


def test_one_tool_never_refuses_a_row() -> None:
    dialog = {"messages": [USER, ASSISTANT]}
    for tools in ("null", "[]", None, []):
        (record,) = example_of({**dialog, "tools": tools}, Reading())
        assert record.tools == () and not record.unread
    hosted = [{"type": "web_search"}, TOOL, {"type": "computer", "name": "c"}, TOOL, {"name": "no name"}, 3]
    (record,) = example_of({**dialog, "tools": hosted}, Reading())
    assert [tool.name for tool in record.tools] == ["weather"]
    assert len(record.unread) == 5 and "web_search" in record.unread[0] and "weather" in record.unread[2]
    (record,) = example_of({**dialog, "tools": TOOL}, Reading())
    assert [tool.name for tool in record.tools] == ["weather"] and not record.unread
    (record,) = prompt_of({"prompt": "q", "tools": hosted}, Reading())
    assert len(record.unread) == 5


def test_prompts_keep_what_the_reward_reads() -> None:
    for name in ("output", "completion", "chosen", "rejected"):
        (record,) = prompt_of({"prompt": "q", name: "a"}, Reading())
        assert record.messages == [USER] and not record.unread
    for row in ({"prompt": "q", "answer": 1}, {"prompt": [USER]}, {"conversations": [{"from": "human", "value": "q"}]}):
        (record,) = prompt_of(row, Reading())
        assert record.messages == [USER] and not record.unread
    with pytest.raises(TrainingError, match="ends with what is to be answered"):
        prompt_of({"messages": [ASSISTANT]}, Reading())


def test_names_of_columns_and_roles(tmp_path: Path) -> None:
    reading = Reading.parse("prompt=question, completion=answer", "client=user")
    assert examples([{"question": "q", "answer": "a"}], reading) == examples([{"prompt": "q", "completion": "a"}])
    said = [{"from": "client", "value": "q"}, {"from": "gpt", "value": "a"}]
    (record,) = examples([{"conversations": said}], reading)
    assert record.messages == [USER, ASSISTANT]
    with pytest.raises(TrainingError, match=r"data\[0\]: has 'prompt' and 'question', .*take one out"):
        examples([{"question": "q", "answer": "a", "prompt": "p"}], reading)
    swapped = Reading.parse("prompt=completion,completion=prompt")
    assert examples([{"prompt": "a", "completion": "q"}], swapped) == examples([{"prompt": "q", "completion": "a"}])
    tally = Tally("data", Reading.parse("weight=w,prompt=question"))
    with named_rows([{"question": "q"}]) as name:
        list(read_rows(name, tally))
    with pytest.warns(UserWarning, match="data: no row has 'w', which columns names$"):
        tally.warn()
    for text in ("prompt", "prompt=", "a=b,a=c", "a=x,b=x"):
        with pytest.raises(TrainingError, match="columns"):
            Reading.parse(text)


# --- what is wrong ----------------------------------------------------------------------------------------------------


def problems(path: Path) -> Tally:
    tally = Tally("data", Reading(skip_bad=True))
    for _ in read_rows(str(path), tally):
        pass
    return tally


def test_bad_lines_are_named_or_counted(tmp_path: Path) -> None:
    lines = [
        b'\xef\xbb\xbf{"text": "a"}\r',
        b"",
        b"{",
        b"null",
        b'{"text": "a", "text": "b"}',
        b"\xff\xfe",
        b'{"text": "\\u00e9"}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    tally = problems(path)
    assert [problem.place.rpartition(":")[2] for problem in tally.problems] == ["3", "4", "5", "6"]
    assert (tally.num_rows, tally.num_skipped) == (6, 4)
    with pytest.raises(TrainingError, match=r"a\.jsonl:3: no JSON"):
        list(read_rows(str(path)))
    with pytest.warns(UserWarning, match=r"data: 4 of 6 rows skipped: .*:3: no JSON.*; and 1 more"):
        tally.warn()


def test_long_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "x" * 10_000_000}, {"text": "y"}])
    assert [len(text) for text in read_documents(str(path))] == [10_000_000, 1]
    monkeypatch.setattr("llamarium.datasets.files.MAX_LINE_BYTES", 1000)
    with pytest.raises(TrainingError, match=r"a\.jsonl:1: a row of more than"):
        list(read_rows(str(path)))


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("a.json", '[{"text": "a"},\n {"text": "b"},\n {"text": ]', r"a\.json:3: no JSON.*nothing of the file is used"),
        ("a.json", '[{"text": "a"}] x', r"a\.json:1: there is text behind"),
        ("a.json", '[{"text": "a"}', r"a\.json:1: no JSON: the text ends within the list"),
        ("a.json", '[{"text": "a"}\n{"text": "b"}]', r"a\.json:2: no JSON: Expecting ',' delimiter"),
        ("a.json", '[{"text": "a", "text": "b"}]', r"a\.json:1: .*'text' twice"),
        ("a.json", "3", "3 is no row"),
        ("a.csv", "text,text\na,b\n", r"a\.csv:1: the column 'text' stands twice"),
        ("a.csv", "text\na\nb,c\n", r"a\.csv:3: 2 cells; expected 1"),
        ("a.csv", 'text\na\n"b\n', r"a\.csv:3: no CSV"),
        ("a.csv", "", r"a\.csv:1: no names of columns"),
    ],
)
def test_broken_files(name: str, text: str, word: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TrainingError, match=word):
        list(read_rows(str(path)))


def packed_rows(head: bytes, unit: bytes, count: int) -> bytes:
    """Return what gzip makes of a long row, without holding it."""
    packer = zlib.compressobj(9, wbits=31)
    return b"".join([packer.compress(head), *(packer.compress(unit * 2**20) for _ in range(count)), packer.flush()])


@pytest.mark.parametrize(
    ("name", "head", "unit"),
    [
        ("a.csv.gz", b"text\n", b"x"),
        ("a.csv.gz", b'text\n"', b"\n"),
        ("a.csv.gz", b"text\n", b","),
        ("a.jsonl.gz", b'{"text": "', b"x"),
        ("a.json.gz", b"[", b'{"text": "x"},' * 2),
    ],
)
def test_small_compressed_files_hold_no_large_rows(name: str, head: bytes, unit: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(packed_rows(head, unit, 80 // len(unit) + 1))
    assert path.stat().st_size < 500_000
    tracemalloc.start()
    try:
        with pytest.raises(TrainingError, match=rf"{name}.* more than (16|64) MiB.*decompress it"):
            list(read_rows(str(path)))
        assert tracemalloc.get_traced_memory()[1] < 3 * 64 * 2**20
    finally:
        tracemalloc.stop()


def test_compressed_rows_may_be_long_where_the_file_is(tmp_path: Path) -> None:
    """More than a small file may hold, of data that is not compressed well."""
    text = random.Random(0).randbytes(9_000_000).hex()
    for name in ("a.csv.gz", "a.jsonl.gz"):
        path = tmp_path / name
        lines = f"text\n{text}\n" if ".csv" in name else json.dumps({"text": text})
        path.write_bytes(gzip.compress(lines.encode(), 1))
        assert list(read_documents(str(path))) == [text]


def test_the_limit_of_csv_stays_the_caller_s(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", [{"text": "x" * 200_000}, {"text": "y" * 200_000}])
    before = csv.field_size_limit()
    rows = read_rows(str(path))
    assert len(next(rows).fields["text"]) == 200_000 and csv.field_size_limit() == before
    assert len(list(rows)) == 1 and csv.field_size_limit() == before


def test_columns_without_a_name(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(",prompt,completion,,\n0,q,a,,\n1,q,a,,note\n")
    assert [dict(row.fields) for row in read_rows(str(path))] == [
        {"(a column without a name)": "0", "prompt": "q", "completion": "a"},
        {"(a column without a name)": "note", "prompt": "q", "completion": "a"},
    ]


def test_an_object_of_several_lists(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"train": [{"text": "a"}], "data": [{"text": "b"}], "rows": [1], "version": 1}))
    with pytest.warns(UserWarning, match=r"a\.json: has several lists.*'data'.*'train', 'rows'"):
        assert list(read_documents(str(path))) == ["b"]
    for row in ({"prompt": "q", "completion": "a", "examples": ["x"]}, {"messages": [USER, ASSISTANT], "data": []}):
        path.write_text(json.dumps(row))
        assert [found.fields for found in read_rows(str(path))] == [row]


def test_rows_of_weight_0_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"text": str(weight), "weight": weight} for weight in (1, 0, 0.5, 0.0)]
    for name in ("a.jsonl", "a.csv"):
        tally = problems(write(tmp_path / name, rows))
        assert (tally.num_rows, tally.num_skipped, tally.num_without_weight) == (2, 0, 2)
        with pytest.warns(UserWarning, match="data: 2 rows left out, of weight 0"):
            tally.warn()
    assert [record.text for record in examples(rows)] == ["1", "0.5"]
    with pytest.raises(TrainingError, match="weight is 'heavy'"):
        examples([{"text": "a", "weight": "heavy"}])


def test_rows_of_python_with_any_keys_and_several_users() -> None:
    rows: list[dict[Any, Any]] = [{"text": "a", 3: "b", ("c", None): {1: 2, "1": 2}}]
    with named_rows(rows) as name:
        with named_rows(rows) as again:
            assert again == name
        assert list(read_documents(name)) == ["a"], "the other use has ended"
        with named_rows([{"text": "a", "3": "b", ("c", None): {1: 2, "1": 2}}]) as other:
            assert other != name
    with pytest.raises(TrainingError, match="not kept"):
        list(read_documents(name))
    arrays = [np.zeros(2000), np.zeros(2000)]
    arrays[1][1000] = 1
    with named_rows([{"text": "a", "x": arrays[0]}]) as first, named_rows([{"text": "a", "x": arrays[1]}]) as second:
        assert first != second, "their middle is not in what numpy prints"


def test_json_in_other_shapes(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in (
        '{"data": [{"text": "a"}]}',
        '{"text": "a"}',
        '{"text": "a"}\n{"text": "a"}',
        '\ufeff[{"text": "a"}]',
        "[]",
    ):
        path.write_text(text)
        assert all(text == "a" for text in read_documents(str(path)))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_files_that_are_cut_off_or_damaged(suffix: str, tmp_path: Path) -> None:
    rows = [{"text": f"{i} {i * i}"} for i in range(20_000)]
    path = write(tmp_path / f"a.jsonl{suffix}", rows)
    whole = path.read_bytes()
    assert len(list(read_rows(str(path)))) == len(rows)
    path.write_bytes(whole + whole)
    assert len(list(read_rows(str(path)))) == 2 * len(rows), "frames and members follow each other"
    for data in (whole[:-20], whole[: len(whole) // 2], whole[:9], b"no such data"):
        path.write_bytes(data)
        with pytest.raises(TrainingError, match="damaged or cut off"):
            problems(path)


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamarium.errors import MissingPackageError

    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "compression", types.ModuleType("compression"))
    with pytest.raises(MissingPackageError, match=r"zstandard: pip install 'llamarium\[data\]'"):
        list(read_rows(str(write(tmp_path / "a.jsonl.zst", [{"text": "a"}]))))


def test_a_row_that_is_two_forms_is_refused_unless_columns_choose() -> None:
    row = {"messages": [USER, ASSISTANT], "prompt": "p", "completion": "c"}
    with pytest.raises(TrainingError, match="only one of them"):
        example_of(row, Reading())
    (record,) = example_of(row, Reading.parse("messages=messages"))
    assert record.form == "messages" and set(record.unread) == {"prompt", "completion"}


def test_extra_keys_are_counted() -> None:
    (record,) = example_of({"messages": [USER, ASSISTANT], "id": 1, "chosen": [], "prompt": "p"}, Reading())
    assert set(record.unread) == {"id", "chosen", "prompt"}
