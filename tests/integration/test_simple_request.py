"""How much of the library a chat request without tools, forms, hints and edits walks through; a report, no bound.

Counted are the functions of `src/llamarium` that run from a request's first byte to the last byte of its answer, over
a connection that stays open, in all threads: HTTP, parsing, rendering, tokenizing, the engine, sampling, the answer,
the log. Lambdas and properties count, comprehensions do not. What the server does on its own twenty times a second,
with or without requests (`Server._watch`), is not part of a request.
"""

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import httpx
import pytest

import llamarium
from llamarium.api import Llama
from llamarium.server.lifecycle.run import Server
from serving import CHAT, HELLO, serving

pytestmark = pytest.mark.torch

PACKAGE = str(Path(llamarium.__file__).parent)


class Walked:
    """The functions that threads call while it `is_on`, but for those that the server's watcher calls."""

    def __init__(self) -> None:
        self.is_on = False
        self._codes = set[CodeType]()

    def note(self, frame: FrameType, event: str, _: object) -> None:
        if self.is_on and event == "call" and frame.f_code not in self._codes and not is_watching(frame):
            self._codes.add(frame.f_code)

    def start(self) -> None:
        """Begin to count, from nothing."""
        self._codes.clear()
        self.is_on = True

    @property
    def functions(self) -> list[str]:
        """As `server/answering.py:submit`, sorted."""
        inside = (code for code in self._codes if code.co_filename.startswith(PACKAGE))
        named = {f"{code.co_filename[len(PACKAGE) + 1 :]}:{code.co_qualname}" for code in inside}
        return sorted(name for name in named if not name.endswith(("comp>", "<genexpr>")))

    @property
    def files(self) -> list[str]:
        return sorted({name.partition(":")[0] for name in self.functions})


def is_watching(frame: FrameType | None) -> bool:
    """Whether a frame is the server's watcher, or called by it."""
    while frame is not None:
        if frame.f_code is Server._watch.__code__:
            return True
        frame = frame.f_back
    return False


@contextmanager
def profiled() -> Generator[Walked]:
    """Note the calls of this thread and of those that begin meanwhile."""
    found, before = Walked(), (sys.getprofile(), threading.getprofile())
    threading.setprofile(found.note)
    sys.setprofile(found.note)
    try:
        yield found
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])


def test_a_simple_request_is_reported(llama: Llama) -> None:
    """Shown with `-s`; its third time, when caches are filled, and then a dialog with another text."""
    other = {**HELLO, "messages": [{"role": "user", "content": "Is this another text? It is read from the beginning."}]}
    with profiled() as walked, serving(llama) as running, httpx.Client(base_url=running.url, timeout=30) as client:
        for _ in range(2):
            assert client.post(CHAT, json=HELLO).status_code == 200
        for title, body in (("a chat request", HELLO), ("with another text", other)):
            running.wait(running.is_idle)
            walked.start()
            answer = client.post(CHAT, json=body)
            walked.is_on = False
            assert answer.status_code == 200
            assert "server/openai/chat.py:chat_completions" in walked.functions
            print(f"\n{title}: {len(walked.files)} files and {len(walked.functions)} functions")
            for name in walked.functions:
                print(f"    {name}")
