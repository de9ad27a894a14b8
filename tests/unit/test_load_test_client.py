"""The load generator's client: what it sends, what it notes of an answer, and every way in which one can fail."""

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stand_in
from llamarium.errors import InputError, ServerError
from llamarium.load_test.chunks import Chunk, Events, error_message, parse_chunk
from llamarium.load_test.client import Client, Target, base_url
from llamarium.load_test.exchange import Exchange, ReportedUsage
from llamarium.load_test.workload import LoadRequest
from stand_in import CUT, END, Answer, Asked, StandIn, event, full, head, part, text, usage

HELLO = LoadRequest("say hello", 3)
Steps = AsyncIterator[bytes | float]


def saying(*steps: bytes | float) -> Answer:
    """Answer every request with these steps."""

    async def answer(asked: Asked) -> Steps:
        for step in steps:
            yield step

    return answer


def ask(answer: Answer, *requests: LoadRequest, **target: Any) -> tuple[list[Exchange], StandIn]:
    """Ask a stand-in one request after the other, over one client."""
    with StandIn(answer) as server:

        async def run() -> list[Exchange]:
            with closing(Client(Target(url=server.url, model="m", **target))) as client:
                return [await client.send(request) for request in requests or (HELLO,)]

        return asyncio.run(run()), server


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_a_completion_is_asked_for_as_the_api_says() -> None:
    (exchange,), server = ask(stand_in.good, api_key="secret")
    (asked,) = server.asked
    assert exchange.failure is None
    assert (asked.method, asked.path) == ("POST", "/v1/completions")
    assert asked.headers["authorization"] == "Bearer secret"
    assert asked.headers["content-type"] == "application/json"
    assert asked.headers["host"] == server.url.removeprefix("http://")
    assert asked.body == {
        "model": "m",
        "prompt": "say hello",
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_dialog_and_ids_go_as_they_are_and_extra_fields_win() -> None:
    dialog = LoadRequest(({"role": "user", "content": "hello"},), 2)
    extra = {"ignore_eos": True, "stream_options": None, "max_tokens": 9}
    _, server = ask(saying(head(), text("a", "stop"), END), dialog, LoadRequest((1, 2), 2), extra=extra)
    chat, completion = server.asked
    assert chat.path == "/v1/chat/completions"
    assert chat.body["messages"] == [{"role": "user", "content": "hello"}]
    assert completion.body == {"model": "m", "prompt": [1, 2], "max_tokens": 9, "stream": True, "ignore_eos": True}
    assert "authorization" not in chat.headers


def test_a_path_of_the_address_stays_in_front() -> None:
    with StandIn() as server:

        async def run() -> Exchange:
            with closing(Client(Target(url=base_url(f"{server.url}/api/v1/"), model="m"))) as client:
                return await client.send(HELLO)

        asyncio.run(run())
        assert server.asked[0].path == "/api/v1/completions"


def test_the_key_is_in_no_representation() -> None:
    assert "secret" not in repr(Target(url="http://x", api_key="secret"))


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:80",
        "ftp://x",
        "http://",
        "http://x:port",
        "http://a b",
        "http://x?a=1",
        "http://a..b",
        "http://x:70000",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InputError, match=r"--url is .*expected an address such as http://"):
        base_url(url)


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(InputError) as caught:
        base_url("http://me:secret@host")
    assert "secret" not in str(caught.value)


def test_a_key_that_would_break_the_header_is_refused_and_not_repeated() -> None:
    async def run() -> None:
        with closing(Client(Target(url="http://x", api_key="secret\r\nHost: y"))):
            pass

    with pytest.raises(InputError, match="API key") as caught:
        asyncio.run(run())
    assert "secret" not in str(caught.value)


# --- what is noted ----------------------------------------------------------------------------------------------------


def test_pieces_counts_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    now, num_parsed = 100.0, 0

    def parsed(event: bytes) -> Chunk:
        nonlocal num_parsed
        num_parsed += 1
        return parse_chunk(event)

    async def later(seconds: float, num_events: int) -> None:
        """Let time pass when so many events have been read."""
        nonlocal now
        while num_parsed < num_events:
            await asyncio.sleep(0.001)
        now += seconds

    monkeypatch.setattr("llamarium.load_test.client.parse_chunk", parsed)
    monkeypatch.setattr("time.perf_counter", lambda: now)

    async def answer(asked: Asked) -> Steps:
        yield head()
        yield part(b": a comment\n\n")
        yield part(event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))  # no piece
        await later(0.1, 1)
        yield text("a")
        await later(0.05, 2)
        yield text("b") + text("c")  # in one packet: one time
        yield text("", "length")
        yield usage(12, 3, 8)
        await later(0.05, 6)
        yield END

    (exchange,), _ = ask(answer)
    assert exchange.failure is None
    assert exchange.usage == ReportedUsage(12, 3, 8)
    assert exchange.num_tokens == len(exchange.arrivals) == 3
    assert exchange.ttft_s == pytest.approx(0.1)
    assert exchange.gaps_s == pytest.approx([0.05, 0])
    assert exchange.tpot_s == pytest.approx(0.05 / 2)
    assert exchange.e2e_s == pytest.approx(0.2)


def test_times_count_from_when_a_request_was_due() -> None:
    with StandIn() as server:

        async def run() -> Exchange:
            with closing(Client(Target(url=server.url, model="m"))) as client:
                return await client.send(HELLO, due=time.perf_counter() - 5)

        assert asyncio.run(run()).ttft_s > 5


def test_a_dialogs_pieces_are_content_reasoning_and_calls_of_tools() -> None:
    deltas: list[Any] = [{"content": "a"}, {"reasoning_content": "b"}, {"tool_calls": [{"index": 0}]}, {}, None]
    chunks = [parse_chunk(json.dumps({"choices": [{"delta": delta}]}).encode()) for delta in deltas]
    assert [chunk.has_piece for chunk in chunks] == [True, True, True, False, False]


def test_a_token_without_text_is_a_piece_where_its_id_was_asked_for() -> None:
    choices: list[Any] = [{"text": "", "token_ids": [2]}, {"text": "", "token_ids": []}, {"text": ""}]
    assert [parse_chunk(json.dumps({"choices": [one]}).encode()).has_piece for one in choices] == [True, False, False]


def test_without_counts_pieces_count() -> None:
    (exchange,), _ = ask(saying(head(), text("a"), text("b", "stop"), END))
    assert exchange.usage is None
    assert exchange.num_tokens == 2


@pytest.mark.parametrize("end", [END, part(b"")], ids=["[DONE]", "a finish_reason alone"])
def test_an_answer_may_end_in_either_way(end: bytes) -> None:
    (exchange,), _ = ask(saying(head(), text("a", "stop"), end))
    assert exchange.failure is None


def test_connections_are_kept_and_one_that_the_server_closed_meanwhile_is_no_error() -> None:
    (first, second), server = ask(stand_in.good, HELLO, HELLO)
    assert first.failure is second.failure is None
    assert server.num_connections == 1

    closing = head().replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    (first, second), server = ask(saying(closing, text("a", "stop"), END, CUT), HELLO, HELLO)
    assert first.failure is second.failure is None
    assert server.num_connections == 2

    async def closes_unasked(asked: Asked) -> Steps:
        if asked.number == 1:
            yield CUT  # it had closed when the second request came
            return
        async for step in stand_in.good(asked):
            yield step

    (first, second), server = ask(closes_unasked, HELLO, HELLO)
    assert first.failure is second.failure is None
    assert server.num_connections == 2


def test_a_body_that_ends_with_the_connection_is_whole() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    (exchange,), _ = ask(saying(answer, event({"choices": [{"text": "a"}]}), event(b"[DONE]"), CUT))
    assert exchange.failure is None
    assert len(exchange.arrivals) == 1


def test_a_word_before_the_answer_is_none() -> None:
    (exchange,), _ = ask(saying(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n", head(), text("a", "stop"), END))
    assert exchange.failure is None
    assert len(exchange.arrivals) == 1


@given(st.data())
def test_events_are_the_same_however_the_network_cuts_them(data: st.DataObject) -> None:
    stream = b": ping\n\nevent: x\ndata: {\xc3\xa9}\r\n\r\ndata:a\ndata: b\n\n\nid: 3\n\ndata: cut off"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
    events, found = Events(), list[bytes]()
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += events.feed(stream[start:end])
    assert found == [b"{\xc3\xa9}", b"a\nb"]


# --- what goes wrong --------------------------------------------------------------------------------------------------

FAILURES = {
    "an OpenAI error": (
        saying(full(400, {"error": {"message": "too long", "code": "context_length_exceeded"}})),
        "http 400: too long",
    ),
    "a FastAPI error": (saying(full(422, {"detail": "no such field"})), "http 422: no such field"),
    "429": (saying(full(429, {"error": {"message": "slow down"}})), "http 429: slow down"),
    "503 without JSON": (
        saying(head(503, "text/html"), part(b"<b>\x1b[2J</b>\n"), part(b"")),
        r"http 503: <b>\x1b[2J</b>",
    ),
    "500 without a body": (saying(head(500), part(b"")), "http 500: (nothing)"),
    "a stream of another status": (saying(head(500), text("a", "stop"), END), 'http 500: data: {"choices"'),
    "an error in the stream": (
        saying(head(), text("a"), part(event({"error": {"message": "the engine died"}})), END),
        "stream error: the engine died",
    ),
    "an end too early": (saying(head(), text("a"), part(b"")), "broken stream: it ended after 1 piece, without"),
    "a cut connection": (saying(head(), text("a"), CUT), "broken stream: the server closed the connection"),
    "a cut after the headers": (saying(head(), 0.05, CUT), "broken stream: the server closed the connection"),
    "no answer at all": (saying(CUT), "connection: the server closed the connection"),
    "another protocol": (saying(b"SSH-2.0-OpenSSH\r\n", 0.2), "connection: not HTTP: "),
    "an event that is no JSON": (saying(head(), part(event(b"{oops")), END), "not JSON: an event is {oops"),
    "an event that is no object": (saying(head(), part(event([1])), END), "not JSON: an event is [1]"),
    "an answer in one piece": (
        saying(full(200, {"choices": [{"text": "a"}]})),
        'no stream: application/json: {"choices"',
    ),
    "no text": (saying(head(), text("", "stop"), END), "empty answer: the answer is empty"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_has_a_kind_and_says_what_the_server_said(case: str) -> None:
    answer, said = FAILURES[case]
    (exchange, other), _ = ask(answer, HELLO, HELLO)  # the next request meets the same, not what is left of this one
    assert str(exchange.failure).startswith(said)
    assert str(other.failure).startswith(said)
    assert exchange.end > exchange.start


def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen

        async def run() -> Exchange:
            with closing(Client(Target(url=f"http://127.0.0.1:{unused.getsockname()[1]}", model="m"))) as client:
                return await client.send(HELLO)

        failure = asyncio.run(run()).failure
    assert failure is not None
    assert failure.kind == "connection"
    assert "Connect call failed" in failure.message


def ask_socket(scheme: str, react: Callable[[socket.socket], object]) -> str:
    """Ask a listening socket that does `react` with the one connection it takes; return the kind of failure."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def accept() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(10_000)
                react(connection)

        async def run() -> Exchange:
            url = f"{scheme}://127.0.0.1:{listening.getsockname()[1]}"
            with closing(Client(Target(url=url, model="m"))) as client:
                _, exchange = await asyncio.gather(asyncio.to_thread(accept), client.send(HELLO))
                return exchange

        failure = asyncio.run(run()).failure
    assert failure is not None
    return failure.kind


def test_a_reset_connection() -> None:
    at_once = struct.pack("ii", 1, 0)  # no goodbye
    assert ask_socket("http", lambda c: c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)) == "connection"


def test_a_server_that_knows_no_tls() -> None:
    assert ask_socket("https", lambda c: c.sendall(b"HTTP/1.1 400 Bad LoadRequest\r\n\r\n")) == "connection"


def test_a_timeout_ends_the_request_alone_and_its_connection() -> None:
    async def answer(asked: Asked) -> Steps:
        yield head()
        yield text("a")
        yield 0.0 if asked.number else 30.0
        yield text("b", "stop")
        yield END

    async def run(url: str) -> tuple[Exchange, Exchange]:
        with closing(Client(Target(url=url, model="m", timeout_s=0.3))) as client:
            late = await client.send(HELLO)
            client.target = replace(client.target, timeout_s=30)
            return late, await client.send(HELLO)

    with StandIn(answer) as server:
        late, good = asyncio.run(run(server.url))
    assert str(late.failure) == "timeout: not complete within 0.3 s"
    assert 0.3 <= late.e2e_s < 5
    assert good.failure is None
    assert server.num_connections == 2  # nothing of the first answer reaches the second


def test_a_server_that_repeats_the_key_is_not_quoted_with_it() -> None:
    answer = saying(full(401, {"error": {"message": "Incorrect API key provided: secret."}}))
    (exchange,), _ = ask(answer, api_key="secret")
    assert str(exchange.failure) == "http 401: Incorrect API key provided: ***."


def test_a_huge_error_is_shown_in_part() -> None:
    assert len(error_message(json.dumps({"error": {"message": "x" * 10**6}}).encode())) <= 300
    (exchange,), _ = ask(saying(head(500), *[part(b"y" * 65536)] * 20, part(b"")))
    assert len(str(exchange.failure)) < 400


# --- which model, and whether it is ready -----------------------------------------------------------------------------


def model_of(answer: Answer, **target: Any) -> str:
    with StandIn(answer) as server:

        async def run() -> str:
            with closing(Client(Target(url=server.url, **target))) as client:
                return await client.model()

        return asyncio.run(run())


def test_the_only_model() -> None:
    assert model_of(stand_in.good) == "stand-in"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (saying(full(200, {"data": [{"id": "a"}, {"id": "b"}]})), r"lists 2 models \(a, b\); choose one with --model"),
        (saying(full(200, {"data": []})), "lists 0 models; choose"),
        (saying(full(200, ["a"])), "lists 0 models"),
        (saying(full(404, {"detail": "Not Found"})), "http 404: Not Found; set --model"),
        (saying(CUT), "the server closed the connection; set --model"),
    ],
)
def test_no_model_can_be_named(answer: Answer, message: str) -> None:
    with pytest.raises(ServerError, match=message):
        model_of(answer)


def wait(answer: Answer, wait_s: float) -> StandIn:
    with StandIn(answer) as server:

        async def run() -> None:
            with closing(Client(replace(Target(url=server.url), api_key="secret"))) as client:
                await client.ready(wait_s)

        asyncio.run(run())
        return server


def test_waiting_until_health_says_so() -> None:
    async def loads(asked: Asked) -> Steps:
        yield full(503, {"error": {"message": "Loading model"}}) if asked.number < 2 else full(200, {"status": "ok"})

    assert [asked.path for asked in wait(loads, 10).asked] == ["/health"] * 3


def test_where_there_is_no_health_models_will_do() -> None:
    assert [asked.path for asked in wait(stand_in.good, 10).asked] == ["/health", "/v1/models"]


def test_waiting_in_vain_says_what_the_server_said_last() -> None:
    with pytest.raises(ServerError, match=r"not ready after 0.3 s: http 503: Loading model$"):
        wait(saying(full(503, {"error": {"message": "Loading model"}})), 0.3)
