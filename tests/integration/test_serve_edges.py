"""Requests that two readers could read in two ways, and other edges of HTTP: refused over a raw socket, and why."""

import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from llamarium.api import Llama
from llamarium.runtime.loaded_model import LoadedModel
from serving import CHAT, HELLO, Running, serving, small_model

pytestmark = pytest.mark.torch

KEY = "authorization: Bearer first-key"
BODY = json.dumps(HELLO).encode()


@pytest.fixture(scope="module")
def running(llama: Llama) -> Iterator[Running]:
    with serving(llama, api_keys=("first-key", "second-key")) as found:
        yield found


def answer_to(running: Running, sent: bytes) -> tuple[int, Any]:
    """The status of the answer, and the code of its error; the connection is closed after it."""
    with socket.create_connection(("127.0.0.1", running.port), timeout=10) as client:
        client.sendall(sent)
        answer = b""
        while part := client.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body).get("error", {}).get("code")


def get(*headers: str, target: str = "/health", version: str = "1.1") -> bytes:
    return "\r\n".join([f"GET {target} HTTP/{version}", *headers, "connection: close", "", ""]).encode()


def post(body: bytes, *headers: str, version: str = "1.1") -> bytes:
    first = [f"POST {CHAT} HTTP/{version}", "host: localhost", KEY, "content-type: application/json"]
    return "\r\n".join([*first, *headers, "connection: close", "", ""]).encode() + body


NO_HTTP, GOOD = (400, "invalid_http"), (200, None)


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["localhost"], GOOD),
        (["localhost:"], GOOD),
        (["LocalHost:65535"], GOOD),
        (["[::1]:80"], GOOD),
        ([], NO_HTTP),
        ([""], NO_HTTP),
        (["localhost", "localhost"], NO_HTTP),
        (["localhost", "evil.example"], NO_HTTP),
        (["localhost:99999x"], NO_HTTP),
        (["localhost:99999"], NO_HTTP),
        (["localhost:-1"], NO_HTTP),
        (["localhost:80:80"], NO_HTTP),
        (["user@localhost"], NO_HTTP),
        (["user:word@localhost"], NO_HTTP),
        (["local host"], NO_HTTP),
        (["localhost evil.example"], NO_HTTP),
        (["localhost, evil.example"], NO_HTTP),
        (["localhost/evil.example"], NO_HTTP),
        (["http://localhost"], NO_HTTP),
        (["[::1"], NO_HTTP),
        (["[::1]x"], NO_HTTP),
        (["::1"], NO_HTTP),
        (["."], NO_HTTP),
        (["evil.example"], (403, "host_not_allowed")),
        (["localhost.evil.example"], (403, "host_not_allowed")),
    ],
)
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_request_names_the_server_in_one_host_header(
    running: Running, hosts: list[str], expected: tuple[int, str], version: str
) -> None:
    assert answer_to(running, get(*(f"host: {host}" for host in hosts), version=version)) == expected


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("http://localhost/health", GOOD),
        ("HTTPS://localhost/health?x", GOOD),
        ("http://evil.example/health", NO_HTTP),
        ("http://localhost:80/health", NO_HTTP),
        ("http://user@localhost/health", NO_HTTP),
        ("http://localhost@evil.example/health", NO_HTTP),
        ("ftp://localhost/health", NO_HTTP),
        ("http:///health", NO_HTTP),
        ("http://localhost", NO_HTTP),
        ("//evil.example/health", (401, "invalid_api_key")),  # a path like another
        ("*", NO_HTTP),
    ],
)
def test_a_whole_url_names_the_host_of_the_header(
    running: Running, target: str, expected: tuple[int, str | None]
) -> None:
    assert answer_to(running, get("host: localhost", target=target)) == expected


def test_a_whole_url_alone_names_no_host(running: Running) -> None:
    for version in ("1.0", "1.1"):
        assert answer_to(running, get(target="http://localhost/health", version=version)) == NO_HTTP


def test_hosts_are_well_formed_on_a_unix_socket_too(llama: Llama, tmp_path: Any) -> None:
    path = str(tmp_path / "s")
    with serving(llama, uds=path):
        for headers, status in ((["host: whatever"], b"200"), (["host: a b"], b"400"), ([], b"400")):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(path)
                client.sendall(get(*headers))
                assert client.recv(65536).split()[1] == status


NO_KEY = (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([KEY], GOOD),
        (["x-api-key: second-key"], GOOD),
        ([KEY, "x-api-key: first-key"], GOOD),
        ([KEY, "x-api-key: second-key"], GOOD),
        ([KEY, KEY], NO_HTTP),
        ([KEY, "authorization: Bearer wrong"], NO_HTTP),
        (["authorization: Bearer wrong", KEY], NO_HTTP),
        (["Authorization: Basic x", KEY], NO_HTTP),
        (["x-api-key: first-key", "x-api-key: first-key"], NO_HTTP),
        (["x-api-key: wrong", KEY], NO_KEY),
        (["authorization: Bearer wrong", "x-api-key: first-key"], NO_KEY),
        (["authorization: ", "x-api-key: first-key"], NO_KEY),
        (["authorization: Bearer first-key, Bearer second-key"], NO_KEY),
        ([], NO_KEY),
    ],
)
def test_every_key_that_is_sent_is_valid_and_no_header_of_keys_stands_twice(
    running: Running, headers: list[str], expected: tuple[int, str | None]
) -> None:
    assert answer_to(running, get("host: localhost", *headers, target="/v1/models")) == expected


CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
CHUNKS, LENGTH = "transfer-encoding: chunked", f"content-length: {len(BODY)}"


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ([LENGTH], BODY, GOOD),
        ([CHUNKS], CHUNKED, GOOD),
        (["transfer-encoding:  Chunked "], CHUNKED, GOOD),
        (["transfer-encoding: gzip, chunked"], CHUNKED, NO_HTTP),
        (["transfer-encoding: gzip", CHUNKS], CHUNKED, NO_HTTP),
        (["transfer-encoding: chunked, chunked"], CHUNKED, NO_HTTP),
        ([CHUNKS, CHUNKS], CHUNKED, NO_HTTP),
        (["transfer-encoding: identity, chunked"], CHUNKED, NO_HTTP),
        (["transfer-encoding: chunked;q=1"], CHUNKED, NO_HTTP),
        (["transfer-encoding: identity"], BODY, NO_HTTP),
        (["transfer-encoding: "], BODY, NO_HTTP),
        (["transfer-encoding: identity", LENGTH], BODY, NO_HTTP),
        ([LENGTH, CHUNKS], CHUNKED, NO_HTTP),
        ([CHUNKS, LENGTH], CHUNKED, NO_HTTP),
        ([LENGTH, LENGTH], BODY, NO_HTTP),
        ([f"content-length: +{len(BODY)}"], BODY, NO_HTTP),
        (["transfer-encoding : chunked"], CHUNKED, NO_HTTP),
        ([LENGTH, "content-encoding: gzip"], BODY, (415, "unsupported_media_type")),
    ],
)
def test_a_body_is_in_chunks_or_has_a_length(
    running: Running, headers: list[str], body: bytes, expected: tuple[int, str | None]
) -> None:
    assert answer_to(running, post(body, *headers)) == expected


def test_chunks_are_not_read_in_http_1_0(running: Running) -> None:
    assert answer_to(running, post(BODY, LENGTH, version="1.0")) == GOOD
    assert answer_to(running, post(CHUNKED, CHUNKS, version="1.0")) == NO_HTTP


def test_what_is_refused_ends_the_connection(running: Running) -> None:
    """What would follow it may be a part of its body, read as a request."""
    smuggled = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", running.port), timeout=10) as client:
        client.sendall(post(b"0\r\n\r\n", "transfer-encoding: gzip, chunked").replace(b"close", b"x") + smuggled)
        answer = b""
        while part := client.recv(65536):
            answer += part
    assert answer.count(b"HTTP/1.1 ") == 1 and b" 400 " in answer


# --- what is said at the start ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_native", "said"),
    [
        (
            True,
            r"ready after [\d.]+ s; runner: C \(\w+\), logits do not depend on other requests "
            r"max_context=512\n",
        ),
        (
            False,
            r"s; runner: PyTorch in float32 on cpu, logits may differ in the last bits ",
        ),
    ],
)
def test_the_start_says_which_runner_answers_and_what_is_promised_of_bits(
    llama: Llama, is_native: bool, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = LoadedModel(llama.runner, None) if is_native else LoadedModel.of_modules(small_model())
    with serving(Llama("small", loaded, llama.tokenizer)) as running:
        running.wait(lambda: re.search(said, capsys.readouterr().err))
        assert httpx.get(f"{running.url}/props").json()["is_row_exact"] == is_native
