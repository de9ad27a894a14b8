"""A server of a few lines on a real socket, which answers as a test wants: for what speaks to servers."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Asked:
    """A request, and which it is of its path: 0, 1, ..."""

    number: int
    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


Answer = Callable[[Asked], AsyncIterator[bytes | float]]
"""Yields what is written, and numbers of seconds to wait; the connection closes if what was written last is CUT."""

CUT = b"cut"


def head(status: int = 200, kind: str = "text/event-stream") -> bytes:
    """The beginning of an answer whose body comes in chunks."""
    return f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()


def part(data: bytes) -> bytes:
    """A chunk of a body; the empty one ends it."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def full(status: int, body: Any) -> bytes:
    """A whole answer in JSON."""
    return head(status, "application/json") + part(json.dumps(body).encode()) + part(b"")


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def text(piece: str, finish_reason: str | None = None) -> bytes:
    """An event of a completion, as a chunk of the body."""
    return part(event({"choices": [{"index": 0, "text": piece, "finish_reason": finish_reason}]}))


def usage(num_prompt: int, num_new: int, num_cached: int | None = None) -> bytes:
    """The event with the counts, as a chunk of the body."""
    counts: dict[str, Any] = {"prompt_tokens": num_prompt, "completion_tokens": num_new}
    if num_cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": num_cached}
    return part(event({"choices": [], "usage": counts}))


END = part(event(b"[DONE]")) + part(b"")


async def good(asked: Asked, first_s: float = 0.0, each_s: float = 0.0) -> AsyncIterator[bytes | float]:
    """Answer with as many words as were asked for, and counts."""
    if asked.method == "GET":
        yield full(200, {"data": [{"id": "stand-in"}]}) if asked.path == "/v1/models" else full(404, {})
        return
    yield head()
    yield first_s
    for number in range(asked.body["max_tokens"]):
        yield each_s if number else 0.0
        yield text(" word")
    yield text("", "length")
    yield usage(len(asked.body.get("prompt", "").split()), asked.body["max_tokens"])
    yield END


@dataclass
class StandIn:
    """Runs in a thread while the `with` block does; `asked` is what came."""

    answer: Answer = good
    asked: list[Asked] = field(default_factory=list)
    num_connections: int = 0
    num_open: int = 0
    most_open: int = 0  # requests at once
    port: int = 0  # 0 is any

    def __enter__(self) -> "StandIn":
        self._loop, ready = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve(ready)))
        self._thread.start()
        assert ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self, ready: threading.Event) -> None:
        self._end = asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await self._end.wait()
        server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = first.split(" ")
        number = sum(asked.path == path for asked in self.asked)
        self.asked.append(Asked(number, method, path, headers, json.loads(body or b"{}")))
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            async for step in self.answer(self.asked[-1]):
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif step == CUT:
                    return False
                else:
                    writer.write(step)
                    await writer.drain()
        finally:
            self.num_open -= 1
        return True
