"""Who may ask: host names, origins and keys, on every route; and what they are told."""

import argparse
import asyncio
import os
import socket
import stat
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarium.cli import serve
from llamarium.cli.main import main
from llamarium.engine.engine import MAX_NUM_SEQS
from llamarium.errors import OptionError
from llamarium.sampling.parameter import Taker
from llamarium.sampling.params import parameters_of
from llamarium.server.app import create_app
from llamarium.server.hosts import listen
from llamarium.server.http.access import OPEN_PATHS, Log, host_name
from llamarium.server.http.access_keys import KEY_VARIABLE, _warn_of_others, access_keys
from llamarium.server.lifecycle.service import Service
from llamarium.server.ray_serve.options import options_of
from llamarium.server.settings import Settings

STILL: Any = SimpleNamespace(progress=(0, 0), result=None, failure=None, is_running=True)  # a `ModelLoader`
KEYS = ("first-key", "second-key")


def ask(
    settings: Settings, method: str, path: str, headers: dict[str, str] | None = None, **how: Any
) -> httpx.Response:
    """Ask a server whose model is still loading, so that whoever gets in is told so."""

    async def send() -> httpx.Response:
        app = create_app(Service(STILL, settings), ("m",), Log("text"))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8000") as client:
            return await client.request(method, path, headers=headers, **how)

    return asyncio.run(send())


def routes() -> list[tuple[str, str]]:
    """Every route of the application, as the application tells them."""
    told = ask(Settings(), "GET", "/openapi.json").json()["paths"]
    found = [(method.upper(), path.replace("{model}", "m")) for path, methods in told.items() for method in methods]
    return [*found, ("GET", "/openapi.json")]


def test_there_are_the_routes_that_are_expected() -> None:
    assert {path for _, path in routes()} >= {
        "/health",
        "/metrics",
        "/props",
        "/v1/models",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
    }


def test_every_field_is_described_and_sampling_parameters_by_their_help() -> None:
    schemas = ask(Settings(), "GET", "/openapi.json").json()["components"]["schemas"]
    fields = {(model, name): field for model, schema in schemas.items() for name, field in schema["properties"].items()}
    assert [place for place, field in fields.items() if not field.get("description")] == []
    takers: dict[str, Taker] = {
        "ChatRequest": "openai",
        "CompletionRequest": "openai",
        "ResponseRequest": "responses",
        "MessagesRequest": "anthropic",
    }
    for model, taker in takers.items():
        for parameter in parameters_of(taker):
            assert fields[model, parameter.name]["description"] == parameter.help


@pytest.mark.parametrize("given", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer "}])
@pytest.mark.parametrize(("method", "path"), routes())
def test_no_route_but_health_is_open_without_a_key(method: str, path: str, given: dict[str, str]) -> None:
    answer = ask(Settings(api_keys=KEYS), method, path, given)
    if path in OPEN_PATHS:
        assert answer.status_code == 503
        assert answer.json() == {"status": "loading", "progress": 0.0}
    else:
        assert answer.status_code == 401
        error = answer.json()["error"]
        assert error.get("details", {"error_code": error.get("code")})["error_code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"


def test_health_is_the_only_open_path() -> None:
    assert {"/health"} == OPEN_PATHS


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer first-key"},
        {"authorization": "bearer second-key"},
        {"x-api-key": "second-key"},
    ],
)
def test_any_of_the_keys_lets_in(headers: dict[str, str]) -> None:
    assert ask(Settings(api_keys=KEYS), "GET", "/metrics", headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "first-key x"},
        {"authorization": "Basic first-key"},
        {"authorization": "Bearer first-key2"},
        {"authorization": "Bearer FIRST-KEY"},
        {"x-api-key": "Bearer"},
        {"x-api-key": ""},
        {"cookie": "first-key"},
    ],
)
def test_nothing_else_lets_in(headers: dict[str, str]) -> None:
    assert ask(Settings(api_keys=KEYS), "GET", "/metrics", headers).status_code == 401
    assert ask(Settings(api_keys=KEYS), "GET", "/metrics?api_key=first-key", headers).status_code == 401


@pytest.mark.parametrize("path", ["/health/", "//health", "/HEALTH", "/health/../metrics", "/%68ealth/x", "/nothing"])
def test_paths_like_an_open_one_are_not_open(path: str) -> None:
    assert ask(Settings(api_keys=KEYS), "GET", path).status_code == 401


LOCAL = ["localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST", "localhost."]
FOREIGN = ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.7", "[::2]"]


@pytest.mark.parametrize("host", LOCAL)
def test_the_servers_own_names_are_answered(host: str) -> None:
    assert ask(Settings(), "GET", "/metrics", {"host": host}).status_code == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_other_names_are_not(host: str) -> None:
    answer = ask(Settings(), "GET", "/health", {"host": host})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")


def test_names_can_be_allowed_and_a_unix_socket_has_none() -> None:
    assert ask(Settings(allowed_hosts=("Chat.Example",)), "GET", "/metrics", {"host": "chat.example"}).is_success
    assert ask(Settings(host="10.0.0.7"), "GET", "/metrics", {"host": "10.0.0.7:8000"}).is_success
    assert ask(Settings(uds="x"), "GET", "/metrics", {"host": "whatever"}).is_success
    for host in ("0.0.0.0", "::"):
        assert ask(Settings(host=host), "GET", "/metrics", {"host": "10.0.0.7:8000"}).is_success
        assert ask(Settings(host=host), "GET", "/metrics", {"host": "evil.example"}).status_code == 403


@given(st.text(st.characters(max_codepoint=255)))
def test_any_host_header_has_a_name(header: str) -> None:
    assert isinstance(host_name(header), str)


def test_pages_of_other_origins_may_not_ask() -> None:
    for origin in ("http://evil.example", "null", "http://localhost:9999", "https://localhost:8000.evil.example"):
        answer = ask(Settings(), "GET", "/metrics", {"origin": origin})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in answer.headers
    assert ask(Settings(), "GET", "/metrics", {"origin": "http://localhost:8000"}).is_success


def test_an_allowed_origin_may_ask_and_others_still_may_not() -> None:
    settings = Settings(cors_origins=("https://chat.example",), api_keys=KEYS)
    headers = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    preflight = ask(
        settings, "OPTIONS", "/v1/chat/completions", headers | {"access-control-request-headers": "authorization"}
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    refused = ask(settings, "GET", "/metrics", headers)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://chat.example")
    answer = ask(settings, "GET", "/metrics", headers | {"authorization": "Bearer first-key"})
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    assert ask(settings, "GET", "/metrics", {"origin": "https://evil.example"}).status_code == 403


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("GET", "/v1/completions", 405)])
def test_what_the_framework_refuses_has_our_form(method: str, path: str, status: int) -> None:
    answer = ask(Settings(), method, path)
    assert answer.status_code == status
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


def test_a_request_gets_an_id_its_own_if_that_is_sane() -> None:
    assert ask(Settings(), "GET", "/health", {"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for given_id in ("a b", "x" * 200, "é", '"'):
        made = ask(Settings(), "GET", "/health", {"x-request-id": given_id.encode("latin-1")})  # pyright: ignore
        assert made.headers["x-request-id"].startswith("req-")


def test_lines_cannot_be_forged_and_hold_no_key(capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(api_keys=KEYS)
    ask(settings, "GET", "/a%0a2026 forged%1b[31m?secret=1", {"authorization": "Bearer first-key"})
    (line,) = capsys.readouterr().err.splitlines()
    assert "\\n2026 forged\\x1b[31m 404" in line
    assert "first-key" not in line and "secret" not in line


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--api-key", ""], "empty"),
        (["--api-key", "  "], "empty"),
        (["--api-key", "schlüssel"], "ASCII"),
        (["--host", "0.0.0.0"], "--allow-anyone"),
        (["--host", "::"], "--allow-anyone"),
        (["--host", "192.168.1.7"], "--allow-anyone"),
        (["--port", "65536"], "65535"),
        (["--uds", ""], "argument --uds: expected a path"),
        (["--uds", "x", "--host", "127.0.0.1"], "argument --host: not allowed with argument --uds"),
        (["--uds", "x", "--port", "8000"], "argument --port: not allowed with argument --uds"),
        (["--cors-origin", "https://chat.example/"], "origin"),
        (["--cors-origin", "chat.example"], "origin"),
        (["--allowed-host", "chat.example:80"], "without a port"),
        (["--allowed-host", ""], "without a port"),
        (["--kv-memory", "2 apples"], "2GiB"),
        (["--kv-memory", "0"], "2GiB"),
        (["--request-timeout", "nan"], "0 to 1e+09, found 'nan'"),
        (["--max-queue", "-1"], "at least 0"),
        (["--tool-form", "xml"], "hermes"),
        (["--served-model-name", ""], "argument --served-model-name: expected a text that is not empty"),
        (["--cache-dir", ""], "argument --cache-dir: expected a folder"),
        (["--cache-disk", "1GiB"], "argument --cache-disk: bounds --cache-dir"),
        (["--inspect-requests"], "--api-key"),
    ],
)
def test_what_is_unsafe_or_senseless_is_refused_at_the_start(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *words]) == 2
    told = capsys.readouterr().err
    assert why in told and "listening at" not in told


def test_an_empty_variable_or_file_is_no_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "")
    assert main(["serve"]) == 2
    monkeypatch.delenv(KEY_VARIABLE)
    (tmp_path / "keys").write_text("")
    assert main(["serve", "--api-key-file", str(tmp_path / "keys")]) == 2
    assert capsys.readouterr().err.count("API key") == 2


@pytest.mark.parametrize(("content", "why"), [(None, "No such file or directory"), (b"caf\xe9\n", "it is not UTF-8")])
def test_a_file_with_keys_that_cannot_be_read_is_refused(
    content: bytes | None, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    assert main(["serve", "--api-key-file", str(path)]) == 2
    assert f"{path}: cannot be read: {why}; expected one API key per line" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(OptionError, match=why):
        options_of({"num_cpus": 1, "api_key_file": path}).settings()


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (0o600, None),
        (0o400, None),
        (0o711, None),
        (0o644, "other users can read the keys (mode 644): chmod 600 "),
        (0o620, "other users can change the keys (mode 620): chmod 600 "),
        (0o666, "other users can read and change the keys (mode 666): chmod 600 "),
    ],
)
def test_a_file_of_keys_that_others_can_read_is_warned_of(mode: int, said: str | None, tmp_path: Path) -> None:
    path, link = tmp_path / "keys", tmp_path / "link"
    path.write_text("first-key\nsecond-key\n")
    path.chmod(mode)
    link.symlink_to(path)
    for named in (path, link):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert access_keys(named) == KEYS
        assert [str(one.message) for one in caught] == ([] if said is None else [f"{named}: {said}{named}"])


def test_a_file_of_keys_may_have_comments_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the web page\n\nfirst-key\r\n  \n  # of the tests\n second-key \n\n")
    path.chmod(0o600)
    assert access_keys(path) == KEYS


@pytest.mark.parametrize(("text", "said"), [("\n# none\n", "contains no API key"), ("a\n\nschlüssel\n", "line 3: ")])
def test_a_file_of_keys_is_refused_by_its_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(OptionError, match=said):
        access_keys(path)


def test_a_file_of_keys_of_another_user_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text("first-key")
    path.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.warns(UserWarning, match=f"it belongs to user {owner}, who can read and change the keys; chown it"):
        access_keys(path)


@pytest.mark.parametrize(("user", "mode", "num_warnings"), [(7, 0o440, 0), (7, 0o444, 1), (7, 0o460, 1), (0, 0o440, 1)])
def test_a_group_may_read_what_root_hands_to_a_services_user(
    user: int, mode: int, num_warnings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    roots = os.stat_result((stat.S_IFREG | mode, 0, 0, 1, 0, 0, 0, 0, 0, 0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _warn_of_others(Path("keys"), roots)
    assert len(caught) == num_warnings


def test_keys_from_a_pipe_have_no_mode() -> None:
    read, write = os.pipe()
    os.write(write, b"first-key\n")
    os.close(write)
    assert access_keys(Path(f"/dev/fd/{read}")) == ("first-key",)
    os.close(read)


def test_the_command_and_ray_have_the_defaults_of_a_server() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    of_command, of_ray = parser.parse_args([]), options_of({"num_cpus": 1, "allow_anyone": True}).settings()
    assert serve._settings(of_command) == Settings()
    assert of_ray == Settings(host="0.0.0.0")
    assert Settings().max_num_seqs == MAX_NUM_SEQS


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("2GiB", 2**31), ("512MiB", 2**29), ("1.5g", 3 * 2**29), ("4096", 4096), ("1 KB", 1024)]
)
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    assert serve.size(text) == num_bytes


def test_a_client_that_comes_before_the_server_runs_waits(tmp_path: Path) -> None:
    """The address is printed first, so a request may follow at once."""
    path = str(tmp_path / "socket")
    with listen(Settings(port=0)) as listener, socket.create_connection(listener.getsockname()):
        pass
    with listen(Settings(uds=path)), socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
