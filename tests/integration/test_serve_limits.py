"""What a client may not do to others: everything is bounded, and who leaves frees what it had."""

import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from llamarium.api import Llama
from llamarium.errors import MemoryBudgetError, OptionError
from llamarium.generation.text_engine import TextEngine
from llamarium.sampling.grammar.compiler import GrammarCompiler
from llamarium.server.fields import validated
from llamarium.server.http.body import Held
from llamarium.server.http.protocol import MAX_REQUESTS_AHEAD
from llamarium.server.lifecycle.service import check_context
from llamarium.server.settings import Settings
from llamarium.tokenizer.tools.request import ToolRequest
from serving import CHAT, HELLO, Running, serving, small_engine

pytestmark = pytest.mark.torch

ENDLESS: dict[str, Any] = HELLO | {"max_tokens": 470, "ignore_eos": True}


@pytest.fixture(scope="module")
def running(llama: Llama) -> Iterator[Running]:
    with serving(llama, max_body_bytes=100_000, max_header_bytes=4096) as found:
        yield found


@pytest.fixture(scope="module")
def hasty(llama: Llama) -> Iterator[Running]:
    """A server that does not wait: of what is sent to it nothing more comes."""
    with serving(llama, header_timeout_s=0.5, body_timeout_s=0.5) as found:
        yield found


class Slowly:
    """Makes each of a model's passes take a while, so that a test can do something meanwhile."""

    def __init__(self, llama: Llama, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.01) -> None:
        self.broken = self.not_finite = False
        run = llama.runner.run

        def slowly(*args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds)
            if self.broken:
                raise RuntimeError("/secret/path: the machine is on fire")
            logits = run(*args, **kwargs)
            return np.full_like(logits, np.nan) if self.not_finite else logits

        monkeypatch.setattr(llama.runner, "run", slowly)


@pytest.fixture
def slowly(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> Slowly:
    return Slowly(llama, monkeypatch)


def connect(running: Running) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", running.port))
    made.settimeout(10)
    return made


def head(body: bytes = b"", *more: str, path: str = CHAT, length: int | None = None) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *more]
    if not any("chunked" in line for line in more):
        lines.append(f"content-length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def all_of(client: socket.socket) -> bytes:
    """What the server sends until it hangs up."""
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts)


def answer_of(client: socket.socket) -> bytes:
    """One answer with a length; it may come in several parts, and the connection stays."""
    parts = b""
    while not (found := re.search(rb"content-length: (\d+)\r\n(?:.+\r\n)*\r\n", parts)):
        parts += client.recv(65536)
    while len(parts) < found.end() + int(found[1]):
        parts += client.recv(65536)
    return parts


def status_and_code(answer: bytes) -> tuple[int, str | None]:
    first, _, rest = answer.partition(b"\r\n")
    return int(first.split()[1]), json.loads(rest.partition(b"\r\n\r\n")[2])["error"]["code"]


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_a_body_that_says_that_it_is_too_large_is_refused(running: Running) -> None:
    answer = httpx.post(running.url + CHAT, content=b" " * 200_000, headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


def test_a_body_without_a_length_is_refused_where_it_gets_too_large(running: Running) -> None:
    with connect(running) as client:
        client.sendall(head(b"", "transfer-encoding: chunked"))
        for _ in range(30):
            client.sendall(b"1000\r\n" + b" " * 4096 + b"\r\n")
        assert status_and_code(all_of(client))[0] == 413


def test_a_body_that_does_not_come_is_not_waited_for(hasty: Running) -> None:
    with connect(hasty) as client:
        client.sendall(head(b'{"messages": ', length=100))
        assert status_and_code(all_of(client)) == (408, "request_timeout")


def test_who_is_answered_before_the_body_has_come_can_go_on(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarium.server.http.protocol._LINGER_S", 10)
    with connect(running) as client:
        for _ in range(3):
            client.sendall(head(path="/nothing", length=60_000))
            assert answer_of(client).startswith(b"HTTP/1.1 404 ")
            for _ in range(10):
                client.sendall(b" " * 6000)
                time.sleep(0.005)
        client.sendall(head(json.dumps(HELLO).encode()))
        assert answer_of(client).startswith(b"HTTP/1.1 200 ")
        monkeypatch.undo()
        client.sendall(head(path="/nothing", length=60_000))
        answer = all_of(client)  # the body never comes
        assert status_and_code(answer) == (404, "not_found")


@pytest.mark.parametrize("start", [b"", b"GET /health HTTP/1.1\r\nhost: loc", b"\r\n"])
def test_headers_that_do_not_come_are_not_waited_for(hasty: Running, start: bytes) -> None:
    with connect(hasty) as client:
        client.sendall(start)
        begin = time.monotonic()
        assert status_and_code(all_of(client)) == (408, "request_timeout")
        assert time.monotonic() - begin < 3


def test_blank_lines_do_not_keep_a_connection(hasty: Running) -> None:
    with connect(hasty) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        begin = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - begin < 5:
                client.sendall(b"\r\n")
                time.sleep(0.05)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("whole", [True, False])
def test_large_headers_are_refused(running: Running, whole: bool) -> None:
    with connect(running) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 5000 + b"\r\n\r\n" * whole)
        assert status_and_code(all_of(client)) == (431, "headers_too_large")


def test_what_is_no_http_is_refused(running: Running) -> None:
    with connect(running) as client:
        client.sendall(b"\x16\x03\x01 no http\r\n\r\n")
        assert status_and_code(all_of(client)) == (400, "invalid_http")


@pytest.mark.parametrize(
    ("how", "body"),
    [
        ("chunked", b"zz\r\nabc\r\n"),
        ("chunked", b"-5\r\nabc\r\n"),
        ("chunked", b"11111111111111111111\r\nabc\r\n"),
        ("chunked", b"3\r\nabcdef0\r\n\r\n"),
        ("gzip", b"abc"),
    ],
)
def test_a_body_that_is_no_http_is_refused(running: Running, how: str, body: bytes) -> None:
    with connect(running) as client:
        client.sendall(head(b"", f"transfer-encoding: {how}", "x: chunked") + body)
        assert status_and_code(all_of(client)) == (400, "invalid_http")


@pytest.mark.parametrize("bad", [b"\x16\x03\x01 no http\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"y" * 5000 + b"\r\n\r\n"])
def test_what_is_refused_does_not_answer_the_request_before_it(llama: Llama, slowly: Slowly, bad: bytes) -> None:
    with serving(llama, max_header_bytes=4096) as running, connect(running) as client:
        client.sendall(head(json.dumps(ENDLESS).encode()) + bad)
        assert all_of(client) == b""


@pytest.mark.parametrize("trailer", [b"x: yyyyyyyyyyyyyyyy\r\n" * 400, b"x: " + b"y" * 8000])
def test_large_trailers_are_refused(running: Running, trailer: bytes) -> None:
    body = json.dumps(HELLO).encode()
    with connect(running) as client:
        client.sendall(head(b"", "transfer-encoding: chunked") + b"%x\r\n%s\r\n0\r\n" % (len(body), body))
        time.sleep(0.05)
        client.sendall(trailer)
        assert status_and_code(all_of(client)) == (431, "headers_too_large")


def test_trailers_are_no_headers(llama: Llama) -> None:
    """Neither of their own request nor of the next on the connection."""
    body = json.dumps(HELLO).encode()
    sent = head(b"", "transfer-encoding: chunked") + b"%x\r\n%s\r\n0\r\n" % (len(body), body)
    with serving(llama) as running, connect(running) as client:
        client.sendall(sent + b"x-request-id: of-a-trailer\r\n\r\n")
        assert b"of-a-trailer" not in answer_of(client)
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = answer_of(client)
        assert answer.startswith(b"HTTP/1.1 200 ") and b"of-a-trailer" not in answer


def test_a_length_that_is_too_large_is_refused_before_the_body(running: Running) -> None:
    with connect(running) as client:
        client.sendall(head(b"", "expect: 100-continue", length=200_000))
        assert status_and_code(all_of(client)) == (413, "request_too_large")


@pytest.mark.parametrize("more", [b"", b"GET /health HT", b"\x16\x03\x01 no http\r\n\r\n"])
def test_requests_that_come_too_far_ahead_are_not_answered_but_those_before_are(running: Running, more: bytes) -> None:
    asked = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with connect(running) as client:
        client.sendall(asked * (MAX_REQUESTS_AHEAD + 1))
        assert client.recv(65536).count(b"HTTP/1.1 200 ") >= 1
        time.sleep(0.1)
        client.sendall(asked * 100 + head(b"x" * 50) + more)
        answers = all_of(client)
        assert answers.count(b"HTTP/1.1 200 ") >= MAX_REQUESTS_AHEAD + 1
        assert answers.count(b"connection: close") == 1
    body = json.dumps(ENDLESS | {"stream": True}).encode()
    with connect(running) as client:
        client.sendall(head(body) + asked * 100)
        assert all_of(client).count(b"HTTP/1.1 200 ") == MAX_REQUESTS_AHEAD + 1
    running.wait(running.is_idle)


def test_who_is_still_sending_reads_the_refusal(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a proxy does that wants the connection closed."""
    monkeypatch.setattr("llamarium.server.http.protocol._LINGER_S", 10)
    large = 4 * 2**20
    with connect(running) as client:
        client.sendall(head(b"", length=large).replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
        time.sleep(0.1)
        for _ in range(large // 2**16):
            client.sendall(b" " * 2**16)
        client.shutdown(socket.SHUT_WR)
        assert status_and_code(all_of(client)) == (413, "request_too_large")


def test_connections_are_counted(llama: Llama) -> None:
    with serving(llama, max_connections=3) as running:
        held = [connect(running) for _ in range(3)]
        running.wait(lambda: len(running.server.server_state.connections) == 3)
        with connect(running) as one_more:
            assert status_and_code(all_of(one_more)) == (503, "too_many_connections")
        for client in held:
            client.close()
        running.wait(lambda: not running.server.server_state.connections)
        assert running.post(**HELLO).status_code == 200


def test_what_is_sent_at_once_is_bounded(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarium.server.http.body.MAX_BYTES_AT_ONCE", 50_000)
    body, add, num_bytes = json.dumps(padded()).encode(), Held.add, list[int]()

    def counted(held: Held, num: int, most: int) -> None:
        num_bytes.append(num)
        add(held, num, most)

    monkeypatch.setattr(Held, "add", counted)
    with connect(running) as one, connect(running) as other:
        one.sendall(head(body[:-1], length=len(body)))
        running.wait(lambda: sum(num_bytes) == len(body) - 1)
        other.sendall(head(b" " * 40_000, length=90_000))
        assert status_and_code(all_of(other)) == (503, "overloaded")
        one.sendall(body[-1:])
        assert one.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert running.post(**HELLO).status_code == 200


def padded(**more: Any) -> dict[str, Any]:
    return HELLO | {"metadata": {"a": "x" * 40_000}} | more


@pytest.mark.parametrize("stream", [False, True])
def test_a_body_counts_until_it_has_become_ids(
    running: Running, slowly: Slowly, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """A whole answer holds its body to the end, a stream until it begins."""
    monkeypatch.setattr("llamarium.server.http.body.MAX_BYTES_AT_ONCE", 50_000)
    with httpx.Client(base_url=running.url, timeout=30) as http, connect(running) as client:
        client.sendall(head(json.dumps(ENDLESS | padded(max_tokens=400, stream=stream)).encode()))
        running.wait(lambda: running.engine.snapshot.running == 1)
        if stream:
            assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        answer = http.post(CHAT, json=padded(max_tokens=1))
        assert running.engine.snapshot.running == 1
        if stream:
            assert answer.status_code == 200
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
            assert answer.headers["retry-after"] == "1"
    running.wait(running.is_idle)
    assert running.post(**padded(max_tokens=1)).status_code == 200


MESSAGE = {"role": "user", "content": ""}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOO_MANY: list[tuple[str, str, Any]] = [
    (CHAT, "messages", [MESSAGE] * 513),
    (CHAT, "messages", [{"role": "user", "content": [{"type": "text", "text": ""}] * 512}]),
    (CHAT, "messages", [{"role": "assistant", "tool_calls": [CALL] * 512}]),
    ("/tokenize", "messages", [MESSAGE] * 513),
    ("/apply-template", "messages", [MESSAGE] * 513),
    ("/v1/responses", "input", [MESSAGE] * 513),
    ("/v1/responses", "input", [{"type": "function_call_output", "call_id": "a", "output": [{}] * 512}]),
    ("/v1/messages", "messages", [MESSAGE] * 513),
    ("/v1/messages/count_tokens", "messages", [{"role": "user", "content": [{"content": [{}] * 511}]}]),
]


@pytest.mark.parametrize(("path", "field", "said"), TOO_MANY)
def test_a_dialog_has_no_more_parts_than_the_context_has_tokens(
    running: Running, monkeypatch: pytest.MonkeyPatch, path: str, field: str, said: Any
) -> None:
    """It is refused before pydantic looks at the messages, each of which costs it as much as a small request."""
    looked: list[object] = []
    monkeypatch.setattr("llamarium.server.http.body.validated", lambda kind, body: looked.append(body))
    answer = running.post(path, **{field: said})
    error = answer.json()["error"]
    assert answer.status_code == 400 and not looked
    told = error.get("details") or {"error_code": error["code"], "param": error["param"]}
    assert told == {"error_code": "context_length_exceeded", "param": field}
    assert "513 messages, parts and calls" in error["message"] and "maximum context length is 512" in error["message"]


def test_what_takes_long_to_read_is_not_read_in_the_event_loop(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[threading.Thread]] = {"body": set(), "tools": set()}
    read = ToolRequest.read

    def checked(kind: Any, body: Any, doubtful: Any) -> Any:
        threads["body"].add(threading.current_thread())
        return validated(kind, body, doubtful)

    def read_tools(*args: Any) -> ToolRequest:
        threads["tools"].add(threading.current_thread())
        return read(*args)

    monkeypatch.setattr("llamarium.server.http.body.validated", checked)
    monkeypatch.setattr(ToolRequest, "read", read_tools)
    schema = {"description": "x" * 20_000, "type": "object", "properties": {}}
    tool: dict[str, Any] = {"name": "f", "strict": True}
    asked: dict[str, dict[str, Any]] = {
        CHAT: {**HELLO, "tools": [{"type": "function", "function": {**tool, "parameters": schema}}]},
        "/v1/responses": {"input": "Hello", "tools": [{"type": "function", **tool, "parameters": schema}]},
        "/v1/messages": {**HELLO, "tools": [{**tool, "input_schema": schema}]},
        "/v1/messages/count_tokens": {"messages": HELLO["messages"], "tools": [{**tool, "input_schema": schema}]},
    }
    for path, body in asked.items():
        for found in threads.values():
            found.clear()
        running.post(path, **body)
        assert threads["body"] and threads["tools"], path
        assert running._thread not in threads["body"] | threads["tools"], path


# --- how much at once -------------------------------------------------------------------------------------------------


def test_who_comes_when_the_queue_is_full_is_told_when_to_come_again(llama: Llama, slowly: Slowly) -> None:
    with serving(llama, max_num_seqs=1, max_queue=1) as running:
        threads = [threading.Thread(target=running.post, kwargs=ENDLESS) for _ in range(2)]
        for thread in threads:
            thread.start()
        running.wait(lambda: running.service.in_flight == 2)
        with pytest.raises(openai.RateLimitError) as error:
            openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0).chat.completions.create(
                model="small", messages=HELLO["messages"]
            )
        assert error.value.code == "rate_limit_exceeded"
        assert int(error.value.response.headers["retry-after"]) >= 1
        running.service.close(0)
        for thread in threads:
            thread.join()


def test_a_request_has_so_much_time(llama: Llama, slowly: Slowly) -> None:
    with serving(llama, request_timeout_s=1.2) as running:
        answer = running.post(**ENDLESS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")
        events = running.post(**ENDLESS, stream=True).text.split("\n\n")
        assert json.loads(events[-2][6:])["error"]["code"] == "request_timeout"
        assert not any('"finish_reason":"' in event or "[DONE]" in event for event in events)
        for stream in (False, True):
            several = running.post("/v1/completions", prompt=["a", "b"], max_tokens=400, stream=stream)
            assert several.status_code == (200 if stream else 408)
            assert several.text.count('"code":"request_timeout"') == 1
        running.wait(running.is_idle)
        running.service.settings = replace(running.service.settings, request_timeout_s=None)
        assert running.post(**HELLO).status_code == 200


def test_a_request_has_so_many_answers(running: Running) -> None:
    for asked in ({"n": 1025}, {"prompt": ["a"] * 600, "n": 2}):
        path = "/v1/completions" if "prompt" in asked else CHAT
        answer = running.post(path, **({} if "prompt" in asked else HELLO) | asked | {"temperature": 1})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "n"


def test_answers_that_never_have_room_are_refused(llama: Llama) -> None:
    with serving(llama, max_num_seqs=2, max_queue=1) as running:
        asked = HELLO | {"n": 3, "temperature": 1, "max_tokens": 2}
        assert running.post(**asked).status_code == 200
        refused = running.post(**asked | {"n": 4})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        assert "4 answers are requested, and the server accepts 3" in refused.json()["error"]["message"]


def test_answers_that_have_no_room_now_are_told_to_come_again(llama: Llama, slowly: Slowly) -> None:
    with serving(llama, max_num_seqs=2, max_queue=1) as running:
        thread = threading.Thread(target=running.post, kwargs=ENDLESS)
        thread.start()
        running.wait(lambda: running.service.in_flight == 1)
        refused = running.post(**HELLO | {"n": 3, "temperature": 1})
        assert (refused.status_code, refused.headers["retry-after"].isdigit()) == (429, True)
        running.service.close()
        thread.join()


def test_a_context_that_the_model_does_not_have_is_refused(llama: Llama) -> None:
    engine = small_engine(llama, Settings())
    with engine, pytest.raises(OptionError, match=r"max_context is 1000000; .* 512 tokens"):
        check_context(engine, 1_000_000)


def test_a_context_can_be_smaller_than_the_models(llama: Llama) -> None:
    with serving(llama, max_context=60) as running:
        assert running.post(messages=HELLO["messages"]).json()["usage"]["total_tokens"] <= 60
        refused = running.post(**HELLO | {"max_tokens": 60}).json()["error"]
        assert refused["code"] == "context_length_exceeded"
        assert "length is 60 tokens" in refused["message"]


def test_slow_grammars_keep_nobody_else_waiting(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than asyncio's pool has threads: who asks without one is answered, and the server can stop."""
    go, compile_grammar, many = threading.Event(), GrammarCompiler.compile, (os.cpu_count() or 1) + 6
    held: list[object] = []

    def slowly(compiler: GrammarCompiler, grammar: Any) -> Any:
        held.append(grammar)
        go.wait(30)
        return compile_grammar(compiler, grammar)

    monkeypatch.setattr(GrammarCompiler, "compile", slowly)
    asked = HELLO | {"response_format": {"type": "json_object"}}
    with serving(llama, max_queue=100, drain_timeout_s=0.2) as running:
        threads = [threading.Thread(target=running.post, kwargs=asked) for _ in range(many)]
        for thread in threads:
            thread.start()
        running.wait(lambda: len(held) == many)
        assert running.post(**HELLO).status_code == 200
        running.service.is_draining = True
        running.wait(lambda: running.server.should_exit, 5)
        go.set()
        for thread in threads:
            thread.join()


# --- who leaves -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_frees_what_it_had(llama: Llama, slowly: Slowly, stream: bool) -> None:
    with serving(llama, max_num_seqs=1) as running:
        clients = [connect(running) for _ in range(2)]  # the second one waits
        for client in clients:
            client.sendall(head(json.dumps(ENDLESS | {"stream": stream}).encode()))
        running.wait(lambda: running.engine.snapshot.running == 1 and running.engine.snapshot.waiting == 1)
        for client in reversed(clients):
            client.close()
            running.wait(lambda: running.service.in_flight < 2, 1)
        running.wait(running.is_idle, 1)
        told = httpx.get(f"{running.url}/metrics").text
    assert 'llamarium:request_aborted_total{model_name="small",reason="disconnected"} 2.0' in told


def test_who_does_not_read_is_ended(llama: Llama) -> None:
    """A reader that never reads: its connection's buffers fill, then it is closed, and others are answered."""
    with serving(llama, read_timeout_s=0.3) as running, connect(running) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps(ENDLESS | {"stream": True, "logprobs": True, "top_logprobs": 20, "n": 1}).encode()
        running.wait(lambda: running.server.server_state.connections)
        client.sendall(head(body) * MAX_REQUESTS_AHEAD)
        running.wait(lambda: not running.server.server_state.connections, 60)
        running.wait(running.is_idle)
        assert running.post(**HELLO).status_code == 200


def test_many_requests_later_everything_is_where_it_was(running: Running) -> None:
    """Whole, streamed, refused and left: no descriptor, no task, no block and no thread is kept but the pool's."""

    def some(count: int) -> None:
        for i in range(count):
            running.post(**HELLO | {"max_tokens": 2}, stream=i % 2 == 0)
            running.post(temperature="hot")
            with connect(running) as client:
                client.sendall(head(json.dumps(ENDLESS | {"stream": i % 2 == 0}).encode())[: None if i % 3 else -5])
        running.wait(running.is_idle)
        running.wait(lambda: not running.server.server_state.connections and not running.server.server_state.tasks)

    def held() -> tuple[int, int, int]:
        pool = ("asyncio_", "uvloop_")  # a loop starts another thread whenever none is free, up to a bound
        threads = [one for one in threading.enumerate() if not one.name.startswith(pool)]
        return len(list(Path("/dev/fd").iterdir())), len(threads), len(running.server.server_state.tasks)

    some(5)
    before = held()
    some(40)
    # What an earlier test has left may end meanwhile: there may be less. One of each request kept would be 40 more.
    running.wait(lambda: all(now <= earlier for now, earlier in zip(held(), before, strict=True)))


# --- what breaks ------------------------------------------------------------------------------------------------------


def test_a_stream_without_events_gets_pings(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, run = threading.Event(), llama.runner.run
    monkeypatch.setattr(llama.runner, "run", lambda *args, **kwargs: gate.wait(10) and run(*args, **kwargs))
    asked = HELLO | {"max_tokens": 3, "stream": True}
    with serving(llama, ping_s=0.05) as running, httpx.stream("POST", running.url + CHAT, json=asked) as answer:
        parts, told = answer.iter_text(), ""
        while told.count(": ping\n\n") < 2:
            told += next(parts)
        gate.set()
        told += "".join(parts)
    assert told.endswith("data: [DONE]\n\n")


def test_logits_that_are_no_numbers_end_the_request_with_an_error(llama: Llama, slowly: Slowly) -> None:
    with serving(llama) as running:
        slowly.not_finite = True
        assert running.post(**HELLO).status_code == 500
        told = running.post(**HELLO, stream=True).text
        assert '"error"' in told and "[DONE]" not in told
        slowly.not_finite = False
        assert running.post(**HELLO).status_code == 200


def test_an_answer_that_gives_way_is_not_blamed_on_its_prompt(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory(rows: object, logits: object) -> None:
        raise MemoryBudgetError("no memory for candidates")

    with serving(llama) as running:
        monkeypatch.setattr(running.engine._thread.engine._sampler, "sample", without_memory)
        answer = running.post(**HELLO)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == ("overloaded", None)
        assert '"code":"overloaded"' in running.post(**HELLO, stream=True).text


def test_a_reader_who_is_too_slow_is_told_so(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarium.generation.text_engine.MAX_BUFFERED", 0)
    with serving(llama) as running:
        answer = running.post(**HELLO)
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "slow_reader")


def test_an_engine_that_breaks_ends_everybody_and_the_server(
    llama: Llama, slowly: Slowly, capfd: pytest.CaptureFixture[str]
) -> None:
    told: dict[bool, httpx.Response] = {}
    with serving(llama) as running:

        def ask(stream: bool) -> None:
            told[stream] = running.post(**ENDLESS, stream=stream)

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        running.wait(lambda: running.engine.snapshot.running == 2)
        slowly.broken = True
        running.wait(lambda: not any(thread.is_alive() for thread in threads), 1)
        assert running.service.state == "broken"
        running.wait(lambda: running.server.should_exit)
        assert running.server.exit_code == 1
    assert told[False].status_code == 503
    assert '"error"' in told[True].text
    assert "[DONE]" not in told[True].text and '"finish_reason":"' not in told[True].text
    for text in (told[False].text, told[True].text, capfd.readouterr().err):
        assert "/secret" not in text and "Traceback" not in text


def test_health_says_what_is_going_on(llama: Llama, slowly: Slowly) -> None:
    go = threading.Event()

    how = Settings(port=0, drain_timeout_s=5)

    def load(report: Any) -> tuple[Llama, TextEngine]:
        report(1, 4)
        go.wait(10)
        return llama, small_engine(llama, how)

    running = Running(load, how)
    running.wait(lambda: running.server.started)
    with httpx.Client(base_url=running.url) as client:

        def health() -> tuple[int, Any]:
            answer = client.get("/health")
            return answer.status_code, answer.json()

        running.wait(lambda: health()[1].get("progress") == 0.25)
        assert health() == (503, {"status": "loading", "progress": 0.25})
        refused = client.post(CHAT, json=HELLO)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
        go.set()
        running.wait(lambda: health() == (200, {"status": "ready"}))
        last: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: last.append(running.post(**HELLO)))
        thread.start()
        running.wait(lambda: running.service.in_flight)
        running.service.is_draining = True
        assert health() == (503, {"status": "draining"})
        refused = client.post(CHAT, json=HELLO)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        thread.join()
    running.stop()
    assert last[0].status_code == 200
    assert last[0].json()["usage"]["completion_tokens"] == 8
