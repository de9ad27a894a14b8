"""The log: a line for each thing, that nobody can forge; and on a terminal a line that changes beneath them."""

import io
import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from llamarium.engine.counts import Counts
from llamarium.engine.thread import EngineSnapshot
from llamarium.server.http.log import Log
from llamarium.server.lifecycle.run import StatusLine

FIELDS = {"client": "127.0.0.1", "method": "GET", "path": "/a\n\x1b[2J\u202e", "status": 404, "id": "r", "error": None}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def test_a_line_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    Log("text").request(FIELDS)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("Z 127.0.0.1 GET /a\\n\\x1b[2J\\u202e 404 id=r")
    Log("json").request(FIELDS)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isascii()
    assert json.loads(line).items() >= {**FIELDS, "event": "request"}.items()


def test_a_name_that_the_operator_gave_forges_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    Log("text").event("listening at unix:\x1b[31m", model="a\n2026 forged")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("Z listening at unix:\\x1b[31m model=a\\n2026 forged")


def test_nothing_moves_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal_of(monkeypatch)
    assert Log("text").shows_status
    assert not Log("json").shows_status
    monkeypatch.setenv("TERM", "dumb")
    assert not Log("text").shows_status


def test_the_line_beneath_stays_beneath(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    log = Log("text")
    log.status("2 running")
    log.status("2 running")
    log.event("ready")
    log.status("")
    lines = terminal.getvalue().split("\r\x1b[K")
    assert lines[:2] == ["", "2 running"]
    assert re.fullmatch(r"\d\d:\d\d:\d\d ready\n2 running", lines[2])
    assert lines[3:] == [""]


def test_a_line_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")
    Log("text").request({**FIELDS, "path": "/v1/chat/completions", "id": f"req-{'a' * 24}", "prompt_tokens": 300})
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d 127.0.0.1 GET /v1/chat/completions 404 id=req-a{24}\n {9}prompt_tokens=300\n",
        terminal.getvalue(),
    )


def test_a_narrow_terminal_cuts_no_address_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    monkeypatch.setenv("COLUMNS", "30")
    address = "http://127.0.0.1:8000/" + "v1/chat-completions/" * 3
    Log("text").event(f"listening at {address}")
    assert address in terminal.getvalue()


def test_the_line_says_who_is_answered_and_how_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    counts, service = Counts(), SimpleNamespace(loaded=None, loading=SimpleNamespace(progress=(1, 4)))
    unbounded: Any = service
    live = StatusLine(unbounded, Log("text"))
    live.show()
    assert terminal.getvalue().endswith("loading 25 %")
    engine = SimpleNamespace(snapshot=EngineSnapshot(3, 1, 30, 120, counts))
    service.loaded = (None, engine)
    live.show()
    assert terminal.getvalue().endswith("loading 25 %")  # it is not time yet
    live._next_s = 0.0
    live.show()
    assert "3 running, 1 waiting" in terminal.getvalue()
    assert terminal.getvalue().endswith("cache 25 %")
