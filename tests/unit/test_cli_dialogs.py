"""Dialogs on disk: what `/save` wrote is read, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from llamarium.cli.repl import load_dialog, save_dialog
from llamarium.errors import LlamariumError

DIALOG = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hé\n\x1b"},
    {"role": "assistant", "content": ""},
]


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    save_dialog(tmp_path / "a", "a model", DIALOG, force=False)
    assert load_dialog(tmp_path / "a") == DIALOG


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, '"messages" is None; expected a dialog'),
        ({"messages": {}}, '"messages" is {}; expected a dialog'),
        ({"messages": ["a"]}, r"messages\[0\] is 'a'; expected an object"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content is None; expected text"),
        ({"messages": [{"role": "boss", "content": "a"}]}, r"messages\[0\].role is 'boss'"),
        ({"messages": [DIALOG[1], DIALOG[0]]}, r"messages\[1\].role is 'system'; expected system at the beginning"),
        ({"messages": [{**DIALOG[1], "name": "Ann"}]}, r"messages\[0\] has name besides role and content"),
        ([], "expected a JSON object"),
    ],
)
def test_what_is_no_dialog_is_named(value: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text(json.dumps(value))
    with pytest.raises(LlamariumError, match=message):
        load_dialog(tmp_path / "a")


@pytest.mark.parametrize("name", ["missing", ".", "a\0b", "x" * 300])
def test_what_cannot_be_read(name: str, tmp_path: Path) -> None:
    with pytest.raises(LlamariumError):
        load_dialog(tmp_path / name)
