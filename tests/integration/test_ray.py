"""The application on a local Ray cluster of two replicas: affinity, a replica that dies, and Ray Data.

All of it runs in one cluster, in a process of its own (`tests/ray_cluster.py`). The tests go on from each other.
"""

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import psutil
import pytest

from serving import CHAT, free_port, save_small_model

KEY = "the-key"
CLUSTER = Path(__file__).parents[1] / "ray_cluster.py"
LONG = {
    CHAT: {"max_tokens": 16000, "ignore_eos": True},
    "/v1/messages": {"max_tokens": 16000, "temperature": 0},
    "/v1/responses": {"max_output_tokens": 16000, "temperature": 0},
}
"""What asks for an answer that does not come to its end in a test's time."""

pytestmark = [pytest.mark.torch, pytest.mark.alone]


class Cluster:
    """A cluster and the application on it."""

    def __init__(self, **args: Any) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._streams = list[Streaming]()
        self._folder = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")  # its sockets have short paths
        self.process = subprocess.Popen(
            [sys.executable, str(CLUSTER), json.dumps(args), str(port), self._folder.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **_environment()},
        )
        try:
            assert self._read() == "ready"
        except BaseException:
            self.end()
            raise

    def ask(self, command: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def get(self, path: str, **how: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **({"headers": {"x-api-key": KEY}} | how))

    def post(self, path: str = CHAT, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers={"x-api-key": KEY}, timeout=60)

    def stream(self, about: str, path: str = CHAT) -> "Streaming":
        """Ask for a long answer, and wait until it has begun."""
        streaming = self.begin(about, path)
        wait(lambda: len(streaming.lines) > 5, 60)
        return streaming

    def begin(self, about: str, path: str = CHAT) -> "Streaming":
        """Ask for a long answer."""
        self._streams.append(Streaming(self, about, path))
        return self._streams[-1]

    def leave_all(self) -> None:
        """Leave nothing to the next test."""
        for one in self._streams:
            one.leave()
        self._streams.clear()

    def by_replica(self, metric: str) -> dict[str, float]:
        """A metric's value by the replicas' names."""
        found = re.findall(rf'^llamarium:{metric}{{.*replica="(\w+)"}} ([\d.]+)', self.get("/metrics").text, re.M)
        return {name: float(value) for name, value in found}

    def wait_until_idle(self) -> None:
        """Who has left is gone within a second; where the machine is busy, somewhat later."""
        names = ("num_requests_running", "num_requests_waiting")
        wait(lambda: not any(any(self.by_replica(name).values()) for name in names))

    def kill(self, replica: str) -> None:
        (name,) = (one for one in self.ask("replicas") if one.endswith(replica))
        self.ask(f"kill {name}")

    def close(self) -> None:
        started = psutil.Process(self.process.pid).children(recursive=True)
        try:
            self.process.communicate(timeout=60)
            assert self.process.returncode == 0
            _, alive = psutil.wait_procs(started, timeout=20)
            assert alive == []
        finally:
            self.end(*started)

    def end(self, *processes: psutil.Process) -> None:
        """Leave nothing behind, whatever happened."""
        if self.process.poll() is None:
            processes += (*psutil.Process(self.process.pid).children(recursive=True), self.process)
        for one in processes:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                one.kill()
        self.process.communicate()
        self._folder.cleanup()


def _environment() -> dict[str, str]:
    """What keeps Ray from letting others in, from telling them, and from giving a busy machine up."""
    return {
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def dialog(*turns: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]


class Streaming(threading.Thread):
    """Reads an answer that does not come to its end in a test's time; `lines` are its events."""

    def __init__(self, cluster: Cluster, about: str, path: str = CHAT) -> None:
        super().__init__(daemon=True)
        self.lines: list[str] = []
        self.broke = False
        name = "input" if path == "/v1/responses" else "messages"
        self._body = {name: dialog(about), "stream": True, **LONG[path]}
        self._url, self._leaves = cluster.url + path, threading.Event()
        self.start()

    def run(self) -> None:
        headers = {"x-api-key": KEY}
        try:
            with httpx.stream("POST", self._url, json=self._body, headers=headers, timeout=60) as answer:
                for line in answer.iter_lines():
                    if line:
                        self.lines.append(line)
                    if self._leaves.is_set():
                        return
        except httpx.HTTPError:
            self.broke = True

    def leave(self) -> None:
        self._leaves.set()
        self.join(20)
        assert not self.is_alive()

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line.removeprefix("data: ")) for line in self.lines if line.startswith("data: ")]


def wait(is_so: Callable[[], object], limit_s: float = 20) -> None:
    end = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def cluster(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("ray")
    (folder / "keys").write_text(KEY)
    (folder / "keys").chmod(0o600)
    found = Cluster(
        model=str(save_small_model(folder / "small", smollm2_path, max_position_embeddings=16384)),
        num_cpus=1,
        min_replicas=2,
        max_replicas=2,
        max_num_seqs=4,
        max_queue=2,
        kv_memory=2**26,
        api_key_file=str(folder / "keys"),
        drain_timeout=1,
    )
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(autouse=True)
def nobody_stays(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.leave_all()


def test_both_replicas_are_ready_when_the_application_is(cluster: Cluster) -> None:
    answer = cluster.get("/health", headers={})
    assert (answer.status_code, answer.json()) == (200, {"status": "ready", "replicas": 2})


def test_the_official_client_gets_the_same_whole_and_streamed(cluster: Cluster) -> None:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=KEY, max_retries=0) as client:
        asked: dict[str, Any] = {"model": "small", "messages": dialog("Hello!"), "temperature": 0, "max_tokens": 40}
        whole = client.chat.completions.create(**asked)
        pieces = [
            chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)
        ]
        assert "".join(pieces) == whole.choices[0].message.content
        assert len(pieces) > 10
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**asked, extra_body={"n_predict": 3})
        assert refused.value.param == "n_predict"


def test_keys_hosts_bounds_and_errors_are_the_servers(cluster: Cluster) -> None:
    def told(answer: httpx.Response) -> tuple[int, str]:
        assert len(answer.headers.get_list("x-request-id")) == 1
        return answer.status_code, answer.json()["error"]["code"]

    assert told(cluster.get("/v1/models", headers={})) == (401, "invalid_api_key")
    assert told(cluster.get("/metrics", headers={})) == (401, "invalid_api_key")
    assert told(cluster.get("/health", headers={"host": "evil.example"})) == (403, "host_not_allowed")
    assert told(cluster.get("/nothing")) == (404, "not_found")
    assert told(cluster.get(CHAT)) == (405, "method_not_allowed")
    assert told(cluster.post(messages=dialog("x" * 2**24))) == (413, "request_too_large")
    assert told(cluster.post(messages=[])) == (400, "invalid_parameter")


def test_a_conversation_comes_back_to_the_replica_that_has_its_blocks(cluster: Cluster) -> None:
    for i in range(8):
        begin = f"Question {secrets.token_hex(4)}: " + f"what is {i} times {i}? " * 10
        first = cluster.post(messages=dialog(begin), max_tokens=4, temperature=0).json()
        said = first["choices"][0]["message"]["content"]
        second = cluster.post(messages=dialog(begin, said, "And then?"), max_tokens=4).json()["usage"]
        assert second["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 2
    assert all(cluster.by_replica("prompt_tokens_total").values())  # and both of them answer some


def test_every_protocol_has_its_own_words_and_its_conversations(cluster: Cluster) -> None:
    begin = "Tell me of protocols. " * 10
    with anthropic.Anthropic(base_url=cluster.url, api_key=KEY, max_retries=0) as client:
        turns: Any = dialog(begin)
        first = client.messages.create(model="small", max_tokens=8, messages=turns)
        (block,) = first.content
        assert block.type == "text"
        with client.messages.stream(
            model="small", max_tokens=8, messages=[*turns, *dialog("", block.text, "Go on")[1:]]
        ) as streamed:
            second = streamed.get_final_message()
        assert second.usage.cache_read_input_tokens is not None
        assert second.usage.cache_read_input_tokens >= first.usage.input_tokens - 2
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(model="small", max_tokens=0, messages=turns)
        headers = refused.value.response.headers
        assert refused.value.body["request_id"] == headers["request-id"] == headers["x-request-id"]  # type: ignore
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=KEY, max_retries=0) as client:
        told = client.responses.create(model="small", input=begin, max_output_tokens=8)
        items: Any = [{"role": "user", "content": begin}, *told.output, {"role": "user", "content": "Go on"}]
        *_, last = client.responses.create(model="small", input=items, max_output_tokens=8, stream=True)
        assert last.type == "response.incomplete" and last.response.usage is not None and told.usage is not None
        assert last.response.usage.input_tokens_details.cached_tokens >= told.usage.input_tokens - 2
        vectors = client.embeddings.create(model="small", input=[begin, "x"])
        assert [len(one.embedding) for one in vectors.data] == [64, 64]


def test_who_leaves_frees_what_it_had(cluster: Cluster) -> None:
    cluster.wait_until_idle()
    streaming = cluster.stream("Tell me a long story")
    assert sum(cluster.by_replica("num_requests_running").values()) == 1
    streaming.leave()
    wait(lambda: not any(cluster.by_replica("num_requests_running").values()), 5)


def test_who_finds_no_place_waits_and_who_finds_no_place_to_wait_is_refused(cluster: Cluster) -> None:
    cluster.wait_until_idle()
    running = [cluster.stream(f"Tale {i}") for i in range(8)]
    waiting = []
    for i in range(4):
        waiting.append(cluster.begin(f"Tale of one who waits, {i}"))
        wait(lambda: sum(cluster.by_replica("num_requests_waiting").values()) == len(waiting))
    assert list(cluster.by_replica("num_requests_running").values()) == [4, 4]
    refused = cluster.post(messages=dialog("No place"), max_tokens=1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) >= 1
    assert not any(one.events for one in waiting)
    for one in running:
        one.leave()
    wait(lambda: all(one.events for one in waiting))
    for one in waiting:
        one.leave()


def test_streams_of_a_killed_replica_end_with_an_error_and_the_others_go_on(cluster: Cluster) -> None:
    cluster.wait_until_idle()
    streams = [cluster.stream(f"Story number {i}") for i in range(3)]
    while not all((running := cluster.by_replica("num_requests_running")).values()):
        streams.append(cluster.stream(f"Story number {len(streams)}"))
    assert sum(running.values()) == len(streams) <= 5, running
    victim = max(running, key=running.__getitem__)
    cluster.kill(victim)

    wait(lambda: sum(not one.is_alive() for one in streams) == running[victim], 10)
    for one in streams:
        if not one.is_alive():
            assert one.events[-1]["error"]["code"] == "unavailable"
        assert not any("[DONE]" in line or '"finish_reason":"' in line for line in one.lines)
        assert not one.broke
    alive = [one for one in streams if one.is_alive()]
    seen = [len(one.lines) for one in alive]
    for i in range(6):
        assert cluster.post(messages=dialog(f"Story number {i}"), max_tokens=4).status_code == 200
    assert cluster.get("/health", headers={}).json()["status"] == "ready"
    wait(lambda: all(len(one.lines) > before for one, before in zip(alive, seen, strict=True)))
    for one in alive:
        one.leave()


def test_another_replica_is_started_and_an_answer_that_is_whole_ends_with_503(cluster: Cluster) -> None:
    wait(lambda: len(cluster.by_replica("num_requests_running")) == 2, 40)
    cluster.wait_until_idle()
    told: list[httpx.Response] = []
    asked = {"messages": dialog("One more"), "max_tokens": 16000, "ignore_eos": True}
    thread = threading.Thread(target=lambda: told.append(cluster.post(**asked)))
    thread.start()
    wait(lambda: sum(cluster.by_replica("num_requests_running").values()) == 1)
    cluster.kill(max(running := cluster.by_replica("num_requests_running"), key=running.__getitem__))
    thread.join(20)
    assert told[0].status_code == 503
    assert told[0].json()["error"]["code"] == "unavailable"
    assert told[0].headers["retry-after"] == "1"


def test_ray_data_answers_rows(cluster: Cluster, tmp_path: Path) -> None:
    asked = [{"id": i, "messages": dialog(f"Say {i}")} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    answered = sorted(cluster.ask(f"data {tmp_path / 'rows.jsonl'}"), key=lambda row: row["id"])
    assert [row["id"] for row in answered] == list(range(20))
    for row, found in zip(asked, answered, strict=True):
        whole = cluster.post(messages=row["messages"], temperature=0, max_tokens=6).json()
        assert found["generated_text"] == whole["choices"][0]["message"]["content"]
        assert found["num_input_tokens"] == whole["usage"]["prompt_tokens"]
        assert (found["num_generated_tokens"], found["finish_reason"], found["error"]) == (6, "length", None)


def test_ray_data_answers_lines_as_llamarium_batch_does(cluster: Cluster, tmp_path: Path) -> None:
    bodies = [{"messages": dialog(f"Say {i}"), "max_tokens": 6, "temperature": 0} for i in range(20)]
    lines = [
        {"custom_id": str(i), "method": "POST", "url": CHAT, "body": body | ({"n": 0} if i == 7 else {})}
        for i, body in enumerate(bodies)
    ]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    answers = [json.loads(answer) for answer in cluster.ask(f"lines {tmp_path / 'lines.jsonl'}")]
    told = {answer["custom_id"]: answer["response"] for answer in answers}
    assert sorted(told, key=int) == [str(i) for i in range(20)]
    assert told.pop("7")["status_code"] == 400
    for name, response in told.items():
        assert response["body"]["choices"] == cluster.post(**bodies[int(name)]).json()["choices"]


def test_when_the_application_ends_a_stream_has_its_time_and_then_an_error(cluster: Cluster) -> None:
    cluster.wait_until_idle()
    chat, message, response = streams = [cluster.stream("The last story", path) for path in LONG]
    before = [len(one.lines) for one in streams]
    cluster.ask("delete")
    for one, seen in zip(streams, before, strict=True):
        one.join(20)
        assert len(one.lines) > seen + 10
        assert not one.broke
        assert not any("[DONE]" in line for line in one.lines)
    assert chat.events[-1]["error"]["code"] == "unavailable"
    assert (message.events[-1]["type"], message.events[-1]["error"]["type"]) == ("error", "overloaded_error")
    error, failed = response.events[-2:]
    assert (error["type"], error["code"]) == ("error", "unavailable")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert [one["sequence_number"] for one in response.events] == list(range(len(response.events)))
