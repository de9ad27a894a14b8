"""The application of Ray Serve without a cluster: what fronts pass on, what replicas make of it, what Ray is told."""

import asyncio
import importlib
import json
import os
import re
import sys
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from starlette.responses import PlainTextResponse

import llamarium.api
from llamarium.errors import EngineStoppedError, ModelNotFoundError
from llamarium.server.http.stream import COMMENT, EventStream, event
from llamarium.server.ray_serve import replica
from llamarium.server.ray_serve.conversation import conversation_of
from llamarium.server.ray_serve.forward import IDS, Forwarded, Head
from llamarium.server.ray_serve.options import ModelOptions
from llamarium.server.ray_serve.ranking import SPARE, ranking
from llamarium.server.ray_serve.replica import RoutedRequest
from llamarium.server.settings import Settings
from serving import CHAT

pytestmark = pytest.mark.torch

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
MESSAGES = "/v1/messages"
OPEN = Settings(host="0.0.0.0")


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    """Import Ray for these tests alone: it takes seconds, warns, and changes what others find."""
    path, hook = sys.path.copy(), sys.excepthook
    with pytest.MonkeyPatch.context() as context, warnings.catch_warnings():
        context.setenv("RAY_CLIENT_MODE", "0")
        warnings.simplefilter("ignore")
        importlib.import_module("llamarium.server.ray_serve.application")
        sys.path[:], sys.excepthook = path, hook
        yield


@dataclass(frozen=True)
class Name:
    unique_id: str


def test_the_router_asks_the_conversations_replica_and_without_one_any_two() -> None:
    replicas: list[Any] = [SimpleNamespace(replica_id=Name(name), max_ongoing_requests=99) for name in "abcd"]
    from llamarium.server.ray_serve.router import ConversationRouter

    router = ConversationRouter.__new__(ConversationRouter)  # its constructor wants a cluster
    under_way: Any = {}
    router._replica_queue_len_cache = under_way
    router.initialize_state(to_run=20, to_wait=0)

    def asked(conversation: str | None, full: Sequence[str] = ()) -> list[list[str]]:
        forwarded = Forwarded({}, b"", conversation, frozenset(full))
        pending: Any = SimpleNamespace(args=[forwarded], routing_context=SimpleNamespace())
        groups = asyncio.run(router.choose_replicas(replicas, pending))
        assert pending.routing_context.should_backoff
        return [[one.replica_id.unique_id for one in group] for group in groups]

    home = ranking("x", "abcd")
    assert asked("x") == [home[:1], home[1:3], home[3:]]
    under_way[Name(home[0])] = 9
    assert asked("x") == [home[1:2], home[2:], home[:1]]
    under_way.update({Name(name): 19 for name in "abcd"} | {Name(home[0]): 20})
    assert asked("x")[0] == home[1:2]
    assert asked("x", full=home[1:3])[0] == home[3:]
    assert asked("x", full=home)[0] == home[1:2]
    pairs = {frozenset(asked(None)[0]) for _ in range(200)}
    assert pairs == {frozenset(pair) for pair in ("ab", "ac", "ad", "bc", "bd", "cd")}
    assert asyncio.run(router.choose_replicas([], None)) == []


# --- a front ----------------------------------------------------------------------------------------------------------


class Replicas:
    """Stands in for a handle: `parts` are what a replica writes; an exception among them is raised, others awaited."""

    app_name, deployment_name = "app", "Replica"

    def __init__(self, *parts: Head | bytes | Exception | Callable[[], Awaitable[Any]], metrics: Any = ()) -> None:
        self.parts, self.asked, self.num_cancelled = parts, list[Forwarded](), 0
        self._metrics = metrics

    def options(self, **how: Any) -> "Replicas":
        assert how == {"method_name": "answer", "stream": True}
        return self

    def remote(self, asked: Forwarded) -> "Replicas":
        self.asked.append(asked)
        return self

    async def __aiter__(self) -> AsyncIterator[Head | bytes]:
        for part in self.parts:
            if isinstance(part, Exception):
                raise part
            if callable(part):
                await part()
            else:
                yield part

    def cancel(self) -> None:
        self.num_cancelled += 1

    def broadcast(self, method: str, asked: Forwarded) -> "Replicas":
        assert (method, asked.scope["path"]) == ("metrics", "/metrics")
        return self

    async def results_async(self, timeout_s: float) -> Any:
        if isinstance(self._metrics, Exception):
            raise self._metrics
        return self._metrics


def ask(
    replicas: Replicas,
    path: str = CHAT,
    *,
    settings: Settings = OPEN,
    method: str = "POST",
    root_path: str = "",
    **how: Any,
) -> httpx.Response:
    from llamarium.server.ray_serve.front import Front

    async def send() -> httpx.Response:
        app = Front(replicas, settings).__serve_build_asgi_app__()  # pyright: ignore[reportArgumentType]
        transport = httpx.ASGITransport(app, root_path=root_path)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **how)

    return asyncio.run(send())


WHOLE = Head(200, [(b"content-type", b"application/json"), (b"x-request-id", b"theirs")], b'{"a":1}', "a")
STREAM = Head(200, [(b"content-type", b"text/event-stream; charset=utf-8")], None, "a")
FULL = Head(429, [(b"content-type", b"application/json")], b'{"error":1}', "a")


def test_a_front_passes_on_what_is_asked_and_what_is_answered() -> None:
    replicas = Replicas(WHOLE)
    body = HELLO
    answer = ask(replicas, f"{CHAT}?a=b", json=body, headers={"x-mine": "yes"})
    assert (answer.status_code, answer.json()) == (200, {"a": 1})
    assert "x-request-id" not in answer.headers  # Ray's proxy writes it
    (asked,) = replicas.asked
    assert (asked.scope["method"], asked.scope["path"], asked.scope["query_string"]) == ("POST", CHAT, b"a=b")
    assert (b"x-mine", b"yes") in asked.scope["headers"]
    assert json.loads(asked.body) == body
    assert asked.conversation == conversation_of(CHAT, body)
    assert replicas.num_cancelled == 0


def test_who_is_refused_for_want_of_a_place_is_brought_to_others() -> None:
    class Full(Replicas):
        def remote(self, asked: Forwarded) -> Replicas:
            name = "abcd"[len(self.asked)]
            self.parts = (replace(FULL, replica=name),) if name < free else (replace(WHOLE, replica=name),)
            return super().remote(asked)

    for free, status in (("a", 200), ("b", 200), ("c", 200), ("d", 429)):
        replicas = Full()
        assert ask(replicas, json=HELLO).status_code == status
        assert [sorted(one.full) for one in replicas.asked] == [[], ["a"], ["a", "b"]][: "abcd".index(free) + 1]
        assert {one.body for one in replicas.asked} == {replicas.asked[0].body}


def test_a_stream_is_passed_on_piece_by_piece() -> None:
    assert ask(Replicas(STREAM, b"data: 1\n\n", b"data: [DONE]\n\n")).text == "data: 1\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": NaN}', b"\xff"])
def test_what_a_front_cannot_read_is_a_replicas_to_refuse(body: bytes) -> None:
    replicas = Replicas(WHOLE)
    assert ask(replicas, content=body).status_code == 200
    assert replicas.asked[0].body == body
    assert replicas.asked[0].conversation is None


def failure(kind: str) -> Any:
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

    nobody = DeploymentUnavailableError(None)  # pyright: ignore[reportArgumentType]
    found = {"busy": BackPressureError(256, 256), "died": RayActorError(), "nobody": nobody}
    return found.get(kind, EngineStoppedError("a secret"))


@pytest.mark.parametrize(
    ("kind", "status", "code", "again"),
    [
        ("busy", 429, "rate_limit_exceeded", "1"),
        ("died", 503, "unavailable", "1"),
        ("nobody", 503, "unavailable", None),
        ("late", 408, "request_timeout", None),
        ("bug", 500, "internal_error", None),
    ],
)
def test_what_goes_wrong_is_told_in_our_form(
    kind: str,
    status: int,
    code: str,
    again: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits, settings = list[asyncio.Timeout](), replace(OPEN, request_timeout_s=61)

    class Limit(asyncio.Timeout):
        def __init__(self, when: float | None) -> None:
            super().__init__(when)
            limits.append(self)

    async def late() -> None:
        """Answer when the request's time is over."""
        loop = asyncio.get_running_loop()
        (limit,) = (one for one in limits if 50 < (one.when() or 0) - loop.time() < 61)
        limit.reschedule(loop.time())
        await asyncio.sleep(60)

    monkeypatch.setattr("asyncio.timeouts.Timeout", Limit)  # what asyncio.timeout makes
    broken_off = late if kind == "late" else failure(kind)
    replicas = Replicas(broken_off)
    refused = ask(replicas, json=HELLO, settings=settings)
    assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
    assert refused.headers.get("retry-after") == again
    assert replicas.num_cancelled == 1
    broken = ask(Replicas(STREAM, b"data: 1\n\n", broken_off, b"data: [DONE]\n\n"), settings=settings)
    events = broken.text.split("\n\n")
    assert broken.status_code == 200
    assert (events[0], events[2:]) == ("data: 1", [""])
    assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == code
    assert "secret" not in broken.text + refused.text + capsys.readouterr().err


def test_a_message_that_breaks_off_says_so_in_its_own_form() -> None:
    refused = ask(Replicas(failure("died")), MESSAGES, json=HELLO)
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "overloaded_error")
    assert refused.json()["request_id"] == refused.headers["request-id"]
    broken = ask(Replicas(STREAM, b"event: ping\ndata: {}\n\n", failure("died")), MESSAGES, json=HELLO)
    name, data = broken.text.split("\n\n")[1].split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["request_id"] == broken.headers["request-id"]


def test_a_response_that_breaks_off_keeps_its_numbers_and_what_is_whole_of_it() -> None:
    created, item = {"id": "resp_1", "status": "in_progress", "error": None, "output": []}, {"id": "msg_1"}
    told = [
        {"type": "response.created", "sequence_number": 0, "response": created},
        {"type": "response.output_text.delta", "sequence_number": 1, "delta": "\n\n: ping\n\n"},
        {"type": "response.output_item.done", "sequence_number": 2, "item": item},
        {"type": "response.output_text.delta", "sequence_number": 3, "delta": "more"},
    ]
    events = [event(one).encode() for one in told]
    pieces = (events[0] + events[1], COMMENT, events[2] + COMMENT + events[3])
    broken = ask(Replicas(STREAM, *pieces, failure("died")), "/v1/responses", json={"input": "Hello"})
    written = broken.text.removeprefix(b"".join(pieces).decode()).split("\n\n")
    error, failed = (json.loads(one.partition("\ndata: ")[2]) for one in written[:2])
    assert written[2:] == [""]
    assert (error["type"], error["sequence_number"], error["code"]) == ("error", 4, "unavailable")
    assert (failed["type"], failed["sequence_number"]) == ("response.failed", 5)
    assert failed["response"] == created | {
        "status": "failed",
        "error": {"code": "server_error", "message": error["message"]},
        "output": [item],
    }


@pytest.mark.parametrize(("has_begun", "status"), [(True, 200), (False, 503)])
def test_a_front_counts_a_body_until_its_replica_begins_to_answer(
    monkeypatch: pytest.MonkeyPatch, has_begun: bool, status: int
) -> None:
    from llamarium.server.ray_serve.front import Front

    monkeypatch.setattr("llamarium.server.http.body.MAX_BYTES_AT_ONCE", 50_000)
    begun, other_asked = asyncio.Event(), asyncio.Event()

    async def waits() -> None:
        begun.set()
        await other_asked.wait()

    replicas = Replicas(STREAM, waits, b"data: x\n\n") if has_begun else Replicas(waits, WHOLE)
    app = Front(replicas, OPEN).__serve_build_asgi_app__()  # pyright: ignore[reportArgumentType]

    async def both() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            body = HELLO | {"user": "x" * 40_000}
            first = asyncio.create_task(client.post(CHAT, json=body))
            await begun.wait()
            replicas.parts = (STREAM, b"data: x\n\n")
            second = await client.post(CHAT, json=body)
            other_asked.set()
            return [(await first).status_code, second.status_code, (await client.post(CHAT, json=body)).status_code]

    assert asyncio.run(both()) == [200, status, 200]


def test_a_request_has_one_id_in_all_places() -> None:
    replicas = Replicas(replace(WHOLE, headers=[*WHOLE.headers, (b"request-id", b"theirs")]))
    answer = ask(replicas, MESSAGES, json=HELLO, headers={"request-id": "of the client"})
    told = [value.decode() for name, value in replicas.asked[0].scope["headers"] if name in IDS]
    assert answer.headers.get_list("request-id") == told and len(told) == 1
    ask(replicas, json=HELLO, headers={"x-request-id": "mine"})
    assert (b"x-request-id", b"mine") in replicas.asked[1].scope["headers"]


def test_behind_a_prefix_paths_are_the_servers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = Replicas(WHOLE)
    ask(replicas, f"/llama{CHAT}", root_path="/llama", json=HELLO)
    assert replicas.asked[0].scope["path"] == CHAT
    refused = ask(Replicas(failure("died")), f"/llama{MESSAGES}", root_path="/llama", json=HELLO)
    assert refused.json()["type"] == "error"
    monkeypatch.setattr("llamarium.server.ray_serve.cluster.Cluster._look", lambda _: {"status": "ready"})
    closed = replace(OPEN, api_keys=("key",))
    assert ask(replicas, "/llama/health", root_path="/llama", method="GET", settings=closed).status_code == 200


def test_nothing_follows_an_answer_that_is_whole() -> None:
    assert ask(Replicas(WHOLE, EngineStoppedError("late"))).json() == {"a": 1}


def test_who_may_ask_and_how_much_is_a_fronts_to_say() -> None:
    replicas = Replicas(WHOLE)
    closed = replace(OPEN, api_keys=("key",), max_body_bytes=100, cors_origins=("https://a.example",))
    assert ask(replicas, settings=closed).json()["error"]["code"] == "invalid_api_key"
    told = ask(replicas, settings=closed, headers={"host": "evil.example", "x-api-key": "key"})
    assert told.json()["error"]["code"] == "host_not_allowed"
    told = ask(replicas, settings=closed, content=b"x" * 101, headers={"x-api-key": "key"})
    assert (told.status_code, told.json()["error"]["code"]) == (413, "request_too_large")
    assert replicas.asked == []
    origin = {"x-api-key": "key", "origin": "https://a.example"}
    told = ask(Replicas(failure("busy")), settings=closed, headers=origin)
    assert (told.status_code, told.headers["access-control-allow-origin"]) == (429, "https://a.example")


def test_a_client_that_leaves_ends_the_replicas_work() -> None:
    replicas = Replicas(STREAM, b"data: 1\n\n", lambda: asyncio.sleep(60))

    from llamarium.server.ray_serve.front import Front

    async def leave() -> None:
        app = Front(replicas, OPEN).__serve_build_asgi_app__()  # pyright: ignore[reportArgumentType]
        came = asyncio.Event()

        async def send(message: Any) -> None:
            if message.get("body"):
                came.set()

        async def receive() -> Any:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        headers = [(b"host", b"localhost")]
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": CHAT, "headers": headers}
        task = asyncio.create_task(app(scope, receive, send))  # pyright: ignore[reportArgumentType]
        await came.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert replicas.num_cancelled == 1


# --- all replicas together --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "states", "told"),
    [
        ("RUNNING", {"RUNNING": 2}, (200, {"status": "ready", "replicas": 2})),
        ("DEPLOYING", {"STARTING": 2, "RUNNING": 1}, (200, {"status": "ready", "replicas": 1})),
        ("DEPLOYING", {"STARTING": 2}, (503, {"status": "loading", "replicas": 0})),
        ("RUNNING", {}, (503, {"status": "loading", "replicas": 0})),
        ("UNHEALTHY", {"STARTING": 1}, (503, {"status": "broken", "replicas": 0})),
        ("DEPLOY_FAILED", {}, (503, {"status": "broken", "replicas": 0})),
    ],
)
def test_health_is_what_ray_says_of_the_replicas(
    state: str, states: dict[str, int], told: tuple[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.serve.schema import ApplicationStatus

    from llamarium.server.ray_serve import cluster

    app = SimpleNamespace(
        status=ApplicationStatus(state), deployments={"Replica": SimpleNamespace(replica_states=states)}
    )
    monkeypatch.setattr(cluster.serve, "status", lambda: SimpleNamespace(applications={"app": app}))
    closed = replace(OPEN, api_keys=("key",))
    answer = ask(Replicas(), "/health", method="GET", settings=closed)
    assert (answer.status_code, answer.json()) == told


def test_health_asks_ray_once_a_second_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    from llamarium.server.ray_serve import cluster

    calls: list[int] = []

    def status() -> Any:
        calls.append(1)
        deployment = SimpleNamespace(replica_states={"RUNNING": 1})
        app = SimpleNamespace(status="RUNNING", deployments={"Replica": deployment})
        return SimpleNamespace(applications={"app": app})

    monkeypatch.setattr(cluster.serve, "status", status)

    async def many() -> None:
        found = cluster.Cluster(Replicas())  # pyright: ignore[reportArgumentType]
        await asyncio.gather(*(found.health() for _ in range(50)))
        assert calls == [1]
        monkeypatch.setattr(cluster, "_HEALTH_S", 0.0)
        await found.health()
        assert calls == [1, 1]

    asyncio.run(many())


def test_metrics_are_those_of_all_replicas_by_their_names() -> None:
    registry = CollectorRegistry()
    count = Counter("llamarium:requests", "Of all kinds.", ["kind"], registry=registry)
    count.labels("a").inc(3)
    Histogram("llamarium:seconds", "How long.", registry=registry, buckets=(1, 2)).observe(1.5)
    text = generate_latest(registry).decode()
    told = ask(Replicas(metrics=[("one", text), ("two", text)]), "/metrics", method="GET")
    assert told.status_code == 200
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for name in ("one", "two"):
        mine = re.sub(rf',?replica="{name}"', "", told.text).replace("{}", "").splitlines()
        assert set(lines) <= set(mine)
    assert told.text.count("# TYPE llamarium:requests_total counter") == 1
    failed = ask(Replicas(metrics=failure("nobody")), "/metrics", method="GET")
    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "unavailable")


# --- a replica --------------------------------------------------------------------------------------------------------


def parts_of(app: Callable[..., Any], found: list[Head | bytes] | None = None) -> list[Head | bytes]:
    found = [] if found is None else found

    async def collect() -> list[Head | bytes]:
        run = RoutedRequest(
            Forwarded({"method": "POST", "path": CHAT, "headers": [], "query_string": b""}, b"asked"), "a"
        )
        task = asyncio.create_task(run.through(app))
        try:
            async for part in run.parts():
                found.append(part)
            return found
        finally:
            await task

    return asyncio.run(collect())


class Made(replica.Replica):
    async def whole_of(self, path: str) -> Head:
        asked = Forwarded({"method": "GET", "path": path, "headers": [], "query_string": b""})
        (head,) = [part async for part in self.answer(asked)]
        assert isinstance(head, Head)
        return head


async def anew(options: ModelOptions, settings: Settings) -> Made:
    made = Made.__new__(Made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "_name", lambda: "a")
        await made.__init__(options, ("small",), settings)  # as Ray does it
    return made


def test_an_answer_is_told_at_once() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"] + scope["path"].encode()
        await PlainTextResponse(body, 201)(scope, receive, send)

    (head,) = parts_of(app)
    assert isinstance(head, Head)
    assert (head.status, head.body) == (201, f"asked{CHAT}".encode())
    assert (b"content-length", b"25") in head.headers


def test_of_a_stream_is_told_what_there_is() -> None:
    told = list[Head | bytes]()

    async def produce(write: Any) -> None:
        await write("1")
        await write("2")
        while told[-1:] not in ([b"2"], [b"12"]):
            await asyncio.sleep(0.001)
        await write("3")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["notes"] = {}
        await receive()
        await EventStream(produce, str, 60, ExitStack())(scope, receive, send)

    head, *pieces = parts_of(app, told)
    assert isinstance(head, Head)
    assert (head.status, head.body) == (200, None)
    assert pieces[-1] == b"3" and b"".join(one for one in pieces if isinstance(one, bytes)) == b"123"


@pytest.mark.parametrize("messages", [[], [{"type": "http.response.start", "status": 200, "headers": []}]])
def test_an_answer_that_breaks_off_is_an_error(messages: list[Any]) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    with pytest.raises(EngineStoppedError, match="was interrupted"):
        parts_of(app)


def test_a_replica_is_there_when_its_model_is_and_ends_its_process_when_the_engine_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, ends = SimpleNamespace(state="ready"), list[int]()
    model, options, asked = SimpleNamespace(), ModelOptions(), list[Any]()

    def load(*args: Any) -> Any:
        asked.append(args)
        time.sleep(0.1)
        return model, engine

    monkeypatch.setattr(replica, "_load", load)
    monkeypatch.setattr(replica, "_BREAKING_S", 0.01)
    monkeypatch.setattr(os, "_exit", ends.append)

    async def live() -> None:
        made = await anew(options, OPEN)
        assert asked[0][0] == options
        health = await made.whole_of("/health")
        assert (health.status, health.body) == (200, b'{"status":"ready"}')
        await asyncio.sleep(0.1)
        assert ends == []
        engine.state = "broken"
        async with asyncio.timeout(10):
            while not ends:
                await asyncio.sleep(0.01)

    asyncio.run(live())
    assert ends == [1]
    assert "the engine failed" in capsys.readouterr().err


def test_a_replicas_draft_model_is_loaded_as_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, engines = list[dict[str, Any]](), list[dict[str, Any]]()

    def load(**how: Any) -> Any:
        loaded.append(how)
        runner = SimpleNamespace(is_row_exact=True)
        return SimpleNamespace(name=how["model"], runner=runner, engine=lambda **how: engines.append(how))

    monkeypatch.setattr(llamarium.api, "load", load)
    options = ModelOptions(model="large", draft_model="small", dtype="float32", quantize="NF4")
    replica._load(options, Settings(), lambda *_: None)
    replica._load(ModelOptions(), Settings(), lambda *_: None)
    assert [how["model"] for how in loaded] == ["large", "small", None]
    assert (loaded[1]["dtype"], "quantize" in loaded[1]) == ("float32", False)
    assert [how["draft_model"] and how["draft_model"].name for how in engines] == ["small", None]
    assert [bool(how["prompt_lookup"]) for how in engines] == [False, False]


def test_a_replica_whose_model_cannot_be_loaded_says_why() -> None:
    options = ModelOptions(model="/nowhere")
    with pytest.raises(ModelNotFoundError, match="/nowhere"):
        asyncio.run(anew(options, OPEN))


# --- what Ray is told -------------------------------------------------------------------------------------------------


def test_replicas_scale_with_what_is_under_way_and_drain_for_as_long_as_they_may() -> None:
    args = {"max_num_seqs": 8, "max_queue": 5, "min_replicas": 0, "max_replicas": 7, "drain_timeout": 90}
    from llamarium.server.ray_serve import build

    front: Any = build({"num_cpus": 2, "allow_anyone": True, "num_gpus": 1, "num_fronts": 3, **args})._bound_deployment
    of_replicas: Any = front.init_args[0]._bound_deployment
    scaling = of_replicas._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (0, 7, 4)
    assert (of_replicas.max_ongoing_requests, of_replicas.max_queued_requests) == (8 + 5 + SPARE, 5)
    assert of_replicas.ray_actor_options["num_cpus"] == 2 and of_replicas.ray_actor_options["num_gpus"] == 1
    assert of_replicas._deployment_config.graceful_shutdown_timeout_s == 90
    assert front._deployment_config.graceful_shutdown_timeout_s > 90
    assert (front.num_replicas, front.max_ongoing_requests) == (3, 1000)
