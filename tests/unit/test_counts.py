"""Grammar of counts: one helper writes a number with its noun, and 0, 1 and 2 read right wherever they are shown."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from llamarium.cli.main import main
from llamarium.course.compare import shape_problem
from llamarium.datasets.rows import BadRow, Reading, Row, Tally
from llamarium.engine.request import too_long
from llamarium.errors import counted
from llamarium.server.prefix.explanation import Explanation

SOURCE = Path(__file__).parents[2] / "src/llamarium"
HOME_MADE = re.compile(
    r"""['"]s['"] \* \(|\{['"]{2} if [^}]* == 1 else ['"]s['"]\}|"1 \w+" if [^\n]* == 1 else"""  # 's' * (n != 1)
    r"""|\} \w+\(s\)"""  # "{n} file(s)"
)


@pytest.mark.parametrize(
    ("number", "noun", "plural", "expected"),
    [
        (0, "token", None, "0 tokens"),
        (1, "token", None, "1 token"),
        (2, "token", None, "2 tokens"),
        (1024, "token", None, "1,024 tokens"),
        (0, "tensor is", "tensors are", "0 tensors are"),
        (1, "tensor is", "tensors are", "1 tensor is"),
        (2, "pass", "passes", "2 passes"),
    ],
)
def test_a_number_with_what_it_counts(number: int, noun: str, plural: str | None, expected: str) -> None:
    assert counted(number, noun, plural) == expected


def test_no_module_has_a_plural_of_its_own() -> None:
    found = {
        f"{path.relative_to(SOURCE)}:{place}"
        for path in SOURCE.rglob("*.py")
        for place, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if HOME_MADE.search(line)
    }
    assert found == set()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "0 tokens, 0 characters, 0 bytes"),
        ("a", "1 token, 1 character, 1 byte"),
        ("é", "1 token, 1 character, 2 bytes"),
        ("a a", "2 tokens, 3 characters, 3 bytes"),
    ],
)
def test_what_tokenize_prints(text: str, expected: str, smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", "-p", text, "-m", str(smollm2_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == expected


@pytest.mark.parametrize(("broken", "expected"), [(1, "1 row"), (2, "2 rows")])
def test_the_summary_of_data(
    broken: int, expected: str, tmp_path: Path, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n" + "{\n" * broken)
    assert main(["data", str(file), "-m", str(smollm2_path)]) == 1
    out = capsys.readouterr().out
    assert re.search(rf"problems\s+{expected}\n", out)
    assert re.search(r"\d+ tokens, 2 learned\n", out)


@pytest.mark.parametrize(
    ("skipped", "others", "expected"),
    [(1, 0, "1 of 1 row skipped"), (1, 1, "1 of 2 rows skipped"), (2, 0, "2 of 2 rows skipped")],
)
def test_the_warning_of_skipped_rows(skipped: int, others: int, expected: str) -> None:
    tally = Tally("data", Reading(skip_bad=True))
    rows = [BadRow(f"data:{i}", "is broken") for i in range(skipped)] + [Row("data:9", {"text": "a"})] * others
    for row in tally.counted(rows):
        if isinstance(row, BadRow):
            tally.skip(row)
    with pytest.warns(UserWarning, match=f"data: {expected}: "):
        tally.warn()


@pytest.mark.parametrize(("number", "expected"), [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens")])
def test_errors_and_explanations(number: int, expected: str) -> None:
    assert f"it has {expected} and asks for" in str(too_long(number, 600, 512))
    assert "maximum context length is 512 tokens" in str(too_long(number, 600, 512)), "as clients look for"
    assert Explanation("extended", 9, number).sentence().endswith(f"shares {expected}")


def test_a_check_of_the_course() -> None:
    one = np.zeros((1,), np.float32)
    assert (shape_problem(["x *"], [one, one], [one]) or "").startswith("returned 2 results; expected 1")
    assert (shape_problem(["x *", "y *"], [one], [one, one]) or "").startswith("returned 1 result; expected 2")
    for wrong, words in ((1, "1 number that is"), (2, "2 numbers that are")):
        mine = np.array([np.nan] * wrong + [0.0] * (3 - wrong), np.float32)
        assert f"has {words} NaN or infinite" in (shape_problem(["x *"], [mine], [np.zeros(3, np.float32)]) or "")
