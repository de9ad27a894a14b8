"""A batch's lines, what is checked before any is asked, and the file of answers."""

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from llamarium.errors import InputError, OutputError
from llamarium.server.batch.check import check_lines, check_model
from llamarium.server.batch.lines import MAX_CUSTOM_ID_CHARACTERS, Line, parse, read_lines
from llamarium.server.batch.output import Kept, OutputFile
from llamarium.server.errors import ApiError
from llamarium.server.http.body import MAX_LEVELS

CHAT = "/v1/chat/completions"


def text(custom_id: object = "a", **changes: Any) -> bytes:
    fields = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"n": 1}} | changes
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode() + b"\n"


def lines_of(*texts: bytes, **how: Any) -> list[Line]:
    return list(read_lines(io.BytesIO(b"".join(texts)), **how))


def answer(line: Line, **changes: Any) -> bytes:
    response = {"status_code": 200, "request_id": "r", "body": {"model": "small"}}
    fields = {"id": line.id, "custom_id": line.custom_id, "response": response, "error": None}
    return json.dumps(fields | changes).encode() + b"\n"


def kept_of(*lines: Line) -> Kept:
    kept = Kept()
    for line in lines:
        if line.custom_id is None:
            kept.nameless.add(line.id)
        else:
            kept.named[line.custom_id] = line.id
    return kept


# --- lines ------------------------------------------------------------------------------------------------------------


def test_what_is_asked_is_read() -> None:
    first, second = lines_of(text("a", body={"x": "é"}), b" \r\n", text("b\u2028").strip() + b"\r\n")
    asked = parse(first)
    assert (first.number, first.custom_id, asked.url, asked.body) == (1, "a", CHAT, {"x": "é"})
    assert (second.number, second.custom_id, parse(second).custom_id) == (3, "b\u2028", "b\u2028")


def test_the_last_line_needs_no_end() -> None:
    (line,) = lines_of(text("a").strip())
    assert parse(line).custom_id == "a"


def test_a_body_may_be_nested_as_deep_as_over_http() -> None:
    def nested(levels: int) -> bytes:
        return text("a").replace(b'{"n": 1}', b'{"x": ' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}")

    (line,) = lines_of(nested(MAX_LEVELS))
    assert parse(line).custom_id == "a"
    (line,) = lines_of(nested(MAX_LEVELS + 1))
    with pytest.raises(ApiError, match="nested deeper"):
        parse(line)


BAD: list[tuple[bytes, str | None, str, str | None]] = [  # the line, its name, the error's code and param
    (b"garbage", None, "invalid_json", None),
    (b"[1]", None, "invalid_json", None),
    (b'"a"', None, "invalid_json", None),
    (b"null", None, "invalid_json", None),
    (b"{}", None, "missing_parameter", "custom_id"),
    (b"\xff{}", None, "invalid_json", None),
    (b"\xef\xbb\xbf" + text(), "a", "invalid_json", None),
    (b"[" * 100_000, None, "invalid_json", None),
    (text("a")[:-10], None, "invalid_json", None),
    (text("a").strip() + text("b"), None, "invalid_json", None),
    (text("a", body={"x": float("nan")}), "a", "invalid_json", None),
    (text("a").replace(b'"n": 1', b'"n": 1, "n": 2'), "a", "invalid_json", None),
    (text("a").replace(b'"n": 1', b'"n": 1' + b"0" * 400), "a", "invalid_json", None),
    (text("a", body={"x": "\ud800"}), "a", "invalid_json", None),
    (text("\ud800"), None, "invalid_json", None),
    (text(None), None, "missing_parameter", "custom_id"),
    (text(3), None, "invalid_parameter", "custom_id"),
    (text(""), None, "invalid_parameter", "custom_id"),
    (text("x" * (MAX_CUSTOM_ID_CHARACTERS + 1)), None, "invalid_parameter", "custom_id"),
    (text("a", method="GET"), "a", "invalid_parameter", "method"),
    (text("a", method=None), "a", "missing_parameter", "method"),
    (text("a", url=3), "a", "invalid_parameter", "url"),
    (text("a", url=None), "a", "missing_parameter", "url"),
    (text("a", body=[1]), "a", "invalid_parameter", "body"),
    (text("a", body="{}"), "a", "invalid_parameter", "body"),
    (text("a", body=None), "a", "missing_parameter", "body"),
    (text("a", priority=1), "a", "unknown_parameter", "priority"),
]


@pytest.mark.parametrize(("bad", "name", "code", "param"), BAD, ids=lambda value: repr(value)[:40])
def test_a_line_that_is_none_is_refused_by_what_is_wrong(
    bad: bytes, name: str | None, code: str, param: str | None
) -> None:
    first, line, last = lines_of(text("before"), bad.strip() + b"\n", text("after"))
    assert line.custom_id == name
    with pytest.raises(ApiError) as error:
        parse(line)
    assert (error.value.code, error.value.param) == (code, param)
    assert parse(first).custom_id == "before" and parse(last).custom_id == "after"


def test_a_line_that_is_too_long_is_not_kept() -> None:
    long = [text("long", body={"x": "x" * 5000 + end}) for end in "xy"]  # its beginning does not tell
    lines = lines_of(text("a"), long[0], text("b"), long[1], most_bytes=1000)
    assert [line.custom_id for line in lines] == ["a", None, "b", None]
    assert lines[1].text == b"" and lines[1].digest != lines[3].digest
    with pytest.raises(ApiError) as error:
        parse(lines[1])
    assert error.value.code == "request_too_large"
    again = lines_of(text("a"), long[1], text("b"), long[1], most_bytes=1000)
    assert again[1].id != lines[1].id and again[3].id == lines[3].id


def test_an_id_tells_whether_a_line_is_the_same() -> None:
    (one,), (moved,) = lines_of(text("a")), lines_of(b"\n\n", text("a").strip())
    assert one.id == moved.id
    assert one.id != lines_of(text("a", body={"n": 2}))[0].id
    assert len({line.id for line in lines_of(b"garbage\n", b"garbage\n")}) == 2  # known by their places


# --- before anything is asked -----------------------------------------------------------------------------------------


def test_lines_are_counted() -> None:
    assert check_lines(lines_of(text("a"), b"\n", b"garbage\n", b"garbage\n", text("b")), "IN", Kept()) == 4


def test_a_name_stands_once() -> None:
    with pytest.raises(InputError, match="IN, line 4: custom_id b is also used in line 2"):
        check_lines(lines_of(text("a"), text("b"), text("c"), text("b", body={})), "IN", Kept())


def test_a_file_without_requests_is_refused() -> None:
    with pytest.raises(InputError, match="contains no requests"):
        check_lines(lines_of(b"\n", b"  \n"), "IN", Kept())


def test_new_lines_and_another_order_are_no_change() -> None:
    old = lines_of(text("a"), text("b"), b"garbage\n")
    new = lines_of(text("b"), text("a"), b"garbage\n", text("c"))
    assert check_lines(new, "IN", kept_of(*old)) == 4


@pytest.mark.parametrize(
    ("now", "why"),
    [
        ([text("a"), text("b", body={"n": 2}), b"garbage\n"], "line 2, b, has changed since it was answered"),
        ([text("a"), b"garbage\n", text("c")], "b, which was answered, is missing"),
        ([text("a"), text("b"), text("c"), b"garbage\n"], "an answered line without a custom_id"),
        ([text("a"), text("b"), b"garbage, mended\n"], "an answered line without a custom_id"),
    ],
)
def test_what_was_answered_must_still_be_asked(now: list[bytes], why: str) -> None:
    with pytest.raises(OutputError, match=why):
        check_lines(lines_of(*now), "IN", kept_of(*lines_of(text("a"), text("b"), b"garbage\n")))


def test_another_model_does_not_go_on() -> None:
    check_model(Kept(models={"small", "alias"}), ("small", "alias"), "OUT")
    with pytest.raises(OutputError, match="OUT: the earlier run used other, this one uses small"):
        check_model(Kept(models={"small", "other"}), ("small",), "OUT")


# --- the file of answers ----------------------------------------------------------------------------------------------


def test_a_file_is_made_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with OutputFile(path) as output:
        output.begin()
        output.write(b"one\n")
        assert path.read_bytes() == b"one\n"  # at once
        output.write(b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_file_is_not_replaced_unless_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"precious\n")
    with pytest.raises(OutputError, match=r"--resume .* --force"):
        OutputFile(path)
    with OutputFile(path, replaces=True) as output:
        assert path.read_bytes() == b"precious\n"  # something may still be refused
        output.begin()
        output.write(b"new\n")
    assert path.read_bytes() == b"new\n"


def test_nothing_is_left_where_nothing_was_written(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with OutputFile(path):
        assert path.exists()
    assert not path.exists()
    path.touch()
    with OutputFile(path):  # holds nothing that could be lost
        pass
    assert path.exists()


def test_a_file_belongs_to_one_process(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with OutputFile(path), pytest.raises(OutputError, match="is being written by another process"):
        OutputFile(path)
    with OutputFile(path):
        pass


def test_what_was_answered_is_read(tmp_path: Path) -> None:
    path = tmp_path / "out"
    lines = lines_of(text("a"), text("b"), b"garbage\n", text("c"), text("d"))
    failed = {"status_code": 400, "request_id": "r", "body": {}}
    nothing = {"response": None, "error": {"code": "x"}}
    path.write_bytes(answer(lines[0]) + answer(lines[1], response=failed) + answer(lines[2], **nothing) + b'{"id": "b')
    with OutputFile(path, resumes=True) as output:
        kept = output.kept
        assert [kept.has(line) for line in lines] == [True, True, True, False, False]
        assert (kept.num_answers, kept.num_failed, kept.models) == (3, 2, {"small"})
        assert path.read_bytes().endswith(b'{"id": "b')  # something may still be refused
        output.begin()
        output.write(answer(lines[3]))
    assert [json.loads(one)["custom_id"] for one in path.read_bytes().splitlines()] == ["a", "b", None, "c"]


@pytest.mark.parametrize(
    "there",
    [b"a text\n", b"\n", b"[]\n", b"{}\n", b'{"id": 3, "custom_id": "a", "response": null}\n', b"\xff\xff\n", b"3\n"],
    ids=repr,
)
def test_what_is_no_answer_is_not_gone_on_with(tmp_path: Path, there: bytes) -> None:
    path = tmp_path / "out"
    (line,) = lines_of(text("a"))
    path.write_bytes(answer(line) + there)
    with pytest.raises(OutputError, match=r"out, line 2: is not a batch result"):
        OutputFile(path, resumes=True)
    assert path.read_bytes() == answer(line) + there


def test_a_request_that_was_answered_twice_is_said(tmp_path: Path) -> None:
    path = tmp_path / "out"
    (line,) = lines_of(text("a"))
    path.write_bytes(answer(line) * 2)
    with pytest.raises(OutputError, match="line 2: custom_id a appears twice"):
        OutputFile(path, resumes=True)


def test_what_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "out"):
        with pytest.raises(OutputError, match="cannot be written"):
            OutputFile(path)
    if not Path("/dev/full").exists():
        pytest.skip("this system has no full device")
    with OutputFile(Path("/dev/full")) as output:
        output.begin()
        with pytest.raises(OutputError, match="No space left"):
            output.write(b"x\n")


def test_a_pipe_has_nothing_to_resume(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OutputError, match="is not a regular file"):
        OutputFile(path, resumes=True)
