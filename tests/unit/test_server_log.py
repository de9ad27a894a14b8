"""The log: a line for each thing, that nobody can forge; and on a terminal a line that changes beneath them."""

import asyncio
import io
import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import Message

from llamarium.engine.counts import Counts, EngineSnapshot
from llamarium.engine.tiers.disk_tier import DiskUse
from llamarium.server.http.access import Access, Log, http_scope
from llamarium.server.lifecycle.run import DroppedBlocks, StatusLine

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


def test_dropped_blocks_are_a_line_at_most_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    dropped = DroppedBlocks(Log("json"))
    for second, num_dropped, failure in (
        (0, 0, ""),
        (1, 3, "No space left on device"),
        (2, 9, ""),
        (62, 9, ""),
        (200, 9, ""),
    ):
        now[0] = second
        dropped.look(DiskUse(0, 1, 0, num_dropped, failure))
    dropped.look(None)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["blocks"], line["reason"]) for line in lines] == [
        (3, "No space left on device"), (6, "the disk is too slow, or memory ran out"),
    ]  # fmt: skip
    assert all("dropped blocks" in line["event"] for line in lines)


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ([TRACE], True),
        ([TRACE, TRACE], False),
        ([TRACE.replace("00-", "ff-", 1)], False),
        ([TRACE.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32)], False),
        ([TRACE.replace("00f067aa0ba902b7", "0" * 16)], False),
        ([TRACE.upper()], False),
        ([TRACE + "\n"], False),
        (["x"], False),
    ],
)
def test_a_trace_is_logged_and_returned(given: list[str], is_kept: bool, capsys: pytest.CaptureFixture[str]) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = http_scope("/x", method="GET", headers=[(b"traceparent", one.encode()) for one in given], client=None)
    asyncio.run(Access(Response("ok"), Log("json"))(scope, receive, send))
    line = json.loads(capsys.readouterr().err)
    assert line.get("traceparent") == (TRACE if is_kept else None)
    assert dict(sent[0]["headers"]).get(b"traceparent") == (TRACE.encode() if is_kept else None)


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
