"""`llamarium tokenize`."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from llamarium.cli.main import main


@pytest.fixture
def llama3(llama3_tokenizer_path: Path) -> str:
    return str(llama3_tokenizer_path)


def test_the_example_of_the_readme(llama3: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", "The cat sat", "-m", llama3]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        '"The"    "The"     791    0-3   54 68 65',
        '" cat"   " cat"   8415    3-7   20 63 61 74',
        '" sat"   " sat"   7731   7-11   20 73 61 74',
        "",
        "3 tokens, 11 characters, 11 bytes",
        "before them goes <|begin_of_text|> (128000)",
    ]


def test_ids_alone_are_what_the_model_gets(llama3: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", "-p", "The cat sat", "-m", llama3, "--ids"]) == 0
    assert capsys.readouterr().out == "128000 791 8415 7731\n"
    assert main(["tokenize", "The cat sat", "-m", llama3, "--ids", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"text": "The cat sat", "ids": [128000, 791, 8415, 7731]}


def test_json_is_the_whole_explanation(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", "tokenization 🙂", "-m", str(smollm2_path), "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    data = json.loads(out)
    assert data["ids"][:2] == [8087, 1237]
    assert data["tokens"][0] == {"id": 8087, "text": "token", "bytes": [116, 111, 107, 101, 110], "start": 0, "end": 5}
    assert data["pieces"][0]["merges"][0]["rank"] == 6
    assert bytes(data["utf8"]).decode() == "tokenization 🙂"


def test_merges_in_their_order(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", "tokenization", "-m", str(smollm2_path), "--merges"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == '"tokenization"   "token"     8087    0-5   74 6f 6b 65 6e'
    assert lines[3].split() == ['"ization"', "1237", "5-12", "69", "7a", "61", "74", "69", "6f", "6e"]
    assert lines[7] == '"tokenization"      6   "o"    "n"       "on"'
    assert lines[16].split() == ["7835", '"to"', '"ken"', '"token"']
    assert lines[-1] == "2 tokens, 12 characters, 12 bytes"


def test_long_input_stays_within_80_columns_and_control_characters_are_escaped(
    llama3: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = "\x1b[2J<|eot_id|> Donaudampfschifffahrtsgesellschaftskapitän 👩‍👩‍👧 " + " " * 60
    assert main(["tokenize", text, "-m", llama3, "--merges"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\\x1b" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "128009" not in out  # the spelling of a control token is text


def test_text_from_standard_input(
    llama3: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"The cat sat\n")))
    assert main(["tokenize", "-", "-m", llama3, "--ids"]) == 0
    assert capsys.readouterr().out == "128000 791 8415 7731\n"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["tokenize"], 2, "no TEXT; give it"),
        (["tokenize", "a", "--ids", "--merges"], 2, "not allowed with argument --ids"),
        (["tokenize", "a", "-m", "./nowhere"], 1, "llamarium: error: no file or folder ./nowhere"),
        (["tokenize", "a\ud800"], 1, "lone surrogate U+D800"),
    ],
)
def test_mistakes(words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == code
    out, err = capsys.readouterr()
    assert not out
    assert message in err.splitlines()[-1]


def test_torch_is_not_imported(llama3: str) -> None:
    program = (
        "import sys; from llamarium.cli.main import main\n"
        f"assert main(['tokenize', 'The cat', '-m', {llama3!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
