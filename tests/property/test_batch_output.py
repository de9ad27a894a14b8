"""A file of answers that was torn anywhere: what it holds whole is kept, and the rest is asked again."""

import io
import json
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from llamarium.server.batch.lines import Line, read_lines
from llamarium.server.batch.output import OutputFile

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAMES = st.lists(TEXTS.filter(bool), min_size=1, max_size=6, unique=True)


def asked(names: list[str]) -> list[Line]:
    """A line for each name, and one that is none among them."""
    texts = [json.dumps({"custom_id": name, "method": "POST", "url": "/x", "body": {}}) for name in names]
    return list(read_lines(io.BytesIO("\n".join([*texts, "garbage"]).encode())))


def answer(line: Line, said: str) -> bytes:
    response: Any = {"status_code": 200, "request_id": "r", "body": {"text": said}}
    fields = {"id": line.id, "custom_id": line.custom_id, "response": response, "error": None}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def resume(path: Path, lines: list[Line], said: str) -> list[str | None]:
    """Answer what is not answered; return which those were. What counts is the file, not when it is on the disk."""
    with mock.patch("os.fsync"), OutputFile(path, resumes=True) as output:
        output.begin()
        left = [line for line in lines if not output.kept.has(line)]
        for line in left:
            output.write(answer(line, said))
    return [line.custom_id for line in left]


@settings(deadline=None)
@given(NAMES, TEXTS, st.data())
def test_a_torn_file_is_mended(tmp_path_factory: Any, names: list[str], said: str, data: st.DataObject) -> None:
    path, lines = tmp_path_factory.mktemp("batch") / "out", asked(names)
    answers = [answer(line, said) for line in data.draw(st.permutations(lines))]
    cut = data.draw(st.integers(0, sum(map(len, answers))))
    path.write_bytes(b"".join(answers)[:cut])
    num_whole = path.read_bytes().count(b"\n")

    assert len(resume(path, lines, said)) == len(lines) - num_whole
    assert sorted(path.read_bytes().splitlines(True)) == sorted(answers)
    assert resume(path, lines, said) == []


def test_every_byte_of_the_last_lines(tmp_path: Path) -> None:
    """Also where zeros stand in place of what had not reached the disk."""
    path, lines = tmp_path / "out", asked(["a", "é", "c"])
    answers = [answer(line, "said\u2028") for line in lines]
    whole = b"".join(answers)
    for cut in range(len(answers[0]) + len(answers[1]), len(whole) + 1):
        for zeros in (b"", b"\0" * 7):
            path.write_bytes(whole[:cut] + zeros)
            again = resume(path, lines, "said\u2028")
            assert len(again) == len(lines) - whole[:cut].count(b"\n")
            assert path.read_bytes() == whole
