"""Rows of a corpus: each is answered as the engine answers it alone, or says why not."""

import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest

import llamarium
from llamarium.errors import EngineStoppedError, InputError, LlamariumError
from llamarium.ray_data import Answered, AnswerLines, AnswerRows
from llamarium.server.batch.lines import read_lines
from serving import CHAT, save_small_model

pytestmark = pytest.mark.torch

HELLO = [{"role": "user", "content": "Hello!"}]
NO_ANSWER = {"generated_text": None, "finish_reason": None, "num_input_tokens": None, "num_generated_tokens": None}


@pytest.fixture(scope="module")
def folder(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model") / "small", smollm2_path)


@pytest.fixture(scope="module")
def answer(folder: Path) -> Iterator[AnswerRows]:
    rows = AnswerRows(str(folder), engine={"kv_memory": 2**24}, temperature=0.0, max_tokens=5)
    yield rows
    rows.close()


def answered(answer: AnswerRows, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = dict.fromkeys(name for row in rows for name in row)  # a table has all of them in each row
    table = answer(pyarrow.Table.from_pylist([{name: row.get(name) for name in names} for row in rows]))
    assert isinstance(table, pyarrow.Table)
    return table.to_pylist()


def test_rows_are_answered_as_the_library_answers(answer: AnswerRows, folder: Path) -> None:
    rows = [{"id": 0, "messages": HELLO}, {"id": 1, "prompt": "Once upon"}, {"id": 2, "messages": HELLO[:1]}]
    found = answered(answer, rows)
    llama = llamarium.load(folder)
    chat = llama.chat(HELLO, temperature=0.0, max_tokens=5)
    text = llama.generate("Once upon", temperature=0.0, max_tokens=5)
    assert [row["generated_text"] for row in found] == [chat.text, text.text, chat.text]
    assert [row["num_input_tokens"] for row in found] == [len(one.prompt_ids) for one in (chat, text, chat)]
    assert [row["id"] for row in found] == [0, 1, 2]
    for row in found:
        assert (row["finish_reason"], row["num_generated_tokens"], row["error"]) == ("length", 5, None)


def test_a_rows_own_options_go_before_the_others(answer: AnswerRows) -> None:
    rows = [
        {"messages": HELLO, "sampling_params": {"max_tokens": 2, "stop": None}},
        {"messages": HELLO, "sampling_params": {"max_tokens": None, "stop": ["x"]}},
        {"messages": HELLO, "sampling_params": None},
    ]
    assert [row["num_generated_tokens"] for row in answered(answer, rows)] == [2, 5, 5]


def test_ids_are_a_prompt(answer: AnswerRows) -> None:
    (found,) = answered(answer, [{"prompt": [1, 2, 3]}])
    assert found["num_input_tokens"] == 3 and found["error"] is None


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"id": 1}, "expected messages or prompt, one of them"),
        ({"messages": HELLO, "prompt": "Hello"}, "expected messages or prompt, one of them"),
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, "wizard"),
        ({"prompt": "word " * 1000}, "512"),
        ({"prompt": 5}, "int"),
        ({"messages": 5}, "a dialog is 5"),
        ({"prompt": "a", "sampling_params": {"temprature": 1.0}}, "temprature"),
        ({"prompt": "a", "sampling_params": {"temperature": -1.0}}, "temperature"),
        ({"prompt": "a", "sampling_params": 3}, "sampling_params"),
        ({"prompt": "a", "sampling_params": {"n": 2}}, "n is 2; a row has one answer"),
        ({"messages": HELLO, "sampling_params": {"tool_choice": "none"}}, "tool_choice: a row is a text"),
    ],
)
def test_a_row_that_cannot_be_answered_says_why_and_the_others_are_answered(
    answer: AnswerRows, row: dict[str, Any], error: str
) -> None:
    bad = answered(answer, [row])[0]
    assert {name: bad[name] for name in NO_ANSWER} == NO_ANSWER
    assert error in bad["error"]
    if not any(isinstance(value, int) for value in row.values()):  # a column has one type
        both = answered(answer, [{"messages": HELLO}, row])
        assert (both[0]["num_generated_tokens"], both[1]["error"]) == (5, bad["error"])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"n": 2}, "n is 2; a row has one answer"),
        ({"temprature": 1.0}, "temprature"),
        ({"tools": []}, "tools: a row is a text"),
        ({"regex": "("}, "expression"),
        ({"adapter": "law"}, "adapter: all rows have the model's"),
        ({"timeout_s": -1}, "timeout_s is -1"),
        ({"timeout_s": "5"}, "timeout_s is '5'"),
    ],
)
def test_options_that_no_row_could_have_are_refused_at_once(folder: Path, options: Any, error: str) -> None:
    before = threading.active_count()
    with pytest.raises(LlamariumError, match=error):
        AnswerRows(str(folder), engine={"kv_memory": 2**24}, **options)
    assert threading.active_count() == before


def test_options_that_are_null_count_as_not_given(answer: AnswerRows, folder: Path) -> None:
    rows = AnswerRows(str(folder), engine={"kv_memory": 2**24}, n=None, temperature=0.0, max_tokens=5)
    try:
        assert answered(rows, [{"messages": HELLO}]) == answered(answer, [{"messages": HELLO}])
    finally:
        rows.close()


def test_columns_that_were_there_stay_and_ours_are_always_of_the_same_kinds(answer: AnswerRows) -> None:
    table = answer(pyarrow.table({"prompt": ["a"], "error": ["of an earlier run"], "x": [1.5]}))
    failed = answer(pyarrow.table({"x": [1.5]}))
    assert table.column_names == [
        "prompt",
        "error",
        "x",
        *(name for name in Answered.__annotations__ if name != "error"),
    ]
    assert table["error"].to_pylist() == [None]
    for name in Answered.__annotations__:
        assert table.schema.field(name).type == failed.schema.field(name).type
    assert answer(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})).num_rows == 0


def test_another_kind_of_batch_is_refused_with_what_to_do(answer: AnswerRows) -> None:
    with pytest.raises(InputError, match=r'dict; .*batch_format="pyarrow"'):
        answer({"prompt": ["a"]})


# --- lines in OpenAI's batch format -----------------------------------------------------------------------------------


def line(name: str | None, body: dict[str, Any], url: str = CHAT) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def test_lines_are_answered_as_llamarium_batch_answers_them(folder: Path) -> None:
    asked = {"messages": HELLO, "max_tokens": 5, "temperature": 0}
    lines = [
        line("a", asked),
        line("b", {"input": "Hello"}, "/v1/embeddings"),
        line("c", asked | {"max_tokens": 0}),
        line("d", asked | {"stream": True}),
        "no line",
    ]
    rows = AnswerLines(str(folder), engine={"kv_memory": 2**24})
    try:
        table = rows(pyarrow.table({"text": lines, "other": [0] * 5}))
        empty = rows(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}))
    finally:
        rows.close()
    assert (table.schema, empty.num_rows) == (empty.schema, 0)
    told = {answer["custom_id"]: answer for answer in map(json.loads, table["answer"].to_pylist())}
    assert len(told) == 5
    chat = llamarium.load(folder).chat(HELLO, temperature=0.0, max_tokens=5)
    assert told["a"]["response"]["body"]["choices"][0]["message"]["content"] == chat.text
    assert told["a"]["response"]["body"]["model"] == folder.name
    assert len(told["b"]["response"]["body"]["data"][0]["embedding"]) == 64
    assert told["c"]["response"]["status_code"] == 400
    assert told["d"]["error"]["param"] == "body.stream"
    assert told[None]["error"]["line"] == 5
    named = {one.custom_id: one.id for one in read_lines(io.BytesIO("\n".join(lines).encode()))}
    assert {name: answer["id"] for name, answer in told.items()} == named  # and so `--resume` knows them


@pytest.mark.parametrize("table", [{"lines": ["a"]}, {"text": [1]}, {"text": ["a", None]}])
def test_a_batch_without_lines_is_refused(folder: Path, table: dict[str, Any]) -> None:
    rows = AnswerLines(str(folder), engine={"kv_memory": 2**24})
    try:
        with pytest.raises(InputError, match="expected a column text"):
            rows(pyarrow.table(table))
    finally:
        rows.close()


def test_a_broken_engine_ends_the_actor_not_the_row(folder: Path) -> None:
    rows = AnswerRows(str(folder), engine={"kv_memory": 2**24})
    rows.close()
    with pytest.raises(EngineStoppedError):
        rows(pyarrow.table({"prompt": ["a"]}))
    lines = AnswerLines(str(folder), engine={"kv_memory": 2**24})
    lines.close()
    with pytest.raises(EngineStoppedError):
        lines(pyarrow.table({"text": [line("a", {"messages": HELLO})]}))
