"""How much of the library a chat request without tools, forms, hints and edits walks through; a report, no bound."""

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import llamarium
from llamarium.api import Llama
from serving import CHAT, HELLO, serving

PACKAGE = str(Path(llamarium.__file__).parent)


class Walked:
    """The functions that threads call while it `is_on`; those of comprehensions do not count."""

    def __init__(self) -> None:
        self.is_on = False
        self._codes = set[CodeType]()

    def note(self, frame: FrameType, event: str, _: object) -> None:
        if self.is_on and event == "call":
            self._codes.add(frame.f_code)

    @property
    def functions(self) -> list[str]:
        """As `server/answering.py:submit`, sorted."""
        inside = (code for code in self._codes if code.co_filename.startswith(PACKAGE))
        named = {f"{code.co_filename[len(PACKAGE) + 1 :]}:{code.co_qualname}" for code in inside}
        return sorted(name for name in named if not name.endswith(("comp>", "<genexpr>")))

    @property
    def files(self) -> list[str]:
        return sorted({name.partition(":")[0] for name in self.functions})


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
    """Shown with `-s`; its third time, when caches are filled."""
    with profiled() as walked, serving(llama) as running:
        for _ in range(2):
            assert running.post(CHAT, **HELLO).status_code == 200
        running.wait(running.is_idle)
        walked.is_on = True
        answer = running.post(CHAT, **HELLO)
        walked.is_on = False
    assert answer.status_code == 200
    assert "server/openai/chat.py:chat_completions" in walked.functions
    print(f"\na chat request walks through {len(walked.files)} files and {len(walked.functions)} functions")
    for name in walked.functions:
        print(f"    {name}")
