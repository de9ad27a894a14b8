"""The files of examples/deploy: what they say is what the server does, and proxies pass on what it answers.

A program that checks or runs a file is asked where it is installed.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from llamarium.cli import serve
from llamarium.server.http.access import OPEN_PATHS
from llamarium.server.http.access_keys import KEY_VARIABLE
from llamarium.server.lifecycle.run import _BREAKING_S, _CLOSING_S
from llamarium.server.ray_serve.options import options_of
from llamarium.server.settings import Settings
from serving import HELLO, free_port, serving, small_llama

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
FILES = ROOT / "examples" / "deploy"
GUIDE = ROOT / "docs" / "guides" / "deploy.md"
NAME = "llama.example"
DEFAULT = Settings()


def text(name: str) -> str:
    return (FILES / name).read_text(encoding="utf-8")


def settings_of(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Settings:
    """What `llamarium serve` makes of a command line."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve.add_arguments(parser)
    monkeypatch.setenv(KEY_VARIABLE, "key")
    return serve._settings(parser.parse_args(words))


def settled(name: str) -> str:
    """A file in one line a statement, without comments."""
    return re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", text(name)))


# --- what the files say -----------------------------------------------------------------------------------------------


def test_the_guide_shows_the_files_as_they_are() -> None:
    shown = re.findall(
        r"^\[`examples/deploy/([\w.-]+)`\]\([^\n]*\n\n```\w+\n(.*?)^```$", GUIDE.read_text(), re.M | re.S
    )
    assert sorted(name for name, _ in shown) == sorted(path.name for path in FILES.iterdir())
    for name, block in shown:
        assert block == text(name), name


def test_systemd_waits_for_as_long_as_answers_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unit = dict(re.findall(r"^(\w+)=(.*)$", settled("llamarium.service"), re.M))
    program, command, *words = shlex.split(unit["ExecStart"].replace("${CREDENTIALS_DIRECTORY}", str(tmp_path)))
    keys = tmp_path / unit["LoadCredential"].partition(":")[0]
    keys.write_text("a-key\n")
    keys.chmod(0o400)
    settings = settings_of(words, monkeypatch)
    assert (Path(program).name, command) == ("llamarium", "serve")
    assert "a-key" in settings.api_keys and NAME in settings.allowed_hosts
    assert int(unit["TimeoutStopSec"]) > settings.drain_timeout_s + _CLOSING_S
    assert int(unit["LimitNOFILE"]) > 2 * settings.max_connections
    assert unit["Restart"] == "on-failure"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "llamarium.service"
    unit.write_text(text(unit.name).replace("/opt/llamarium/bin/llamarium", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_kubernetes_asks_what_health_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment, service = yaml.safe_load_all(text("kubernetes.yaml"))
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    settings = settings_of(["--host", "0.0.0.0", *container["args"]], monkeypatch)
    assert {NAME, service["metadata"]["name"]} <= set(settings.allowed_hosts)
    (port,) = container["ports"]
    assert port["containerPort"] == settings.port
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    for probe in probes.values():
        assert probe["httpGet"] == {"path": "/health", "port": port["name"]}
        assert probe["httpGet"]["path"] in OPEN_PATHS
    (sleep,) = (int(word) for word in container["lifecycle"]["preStop"]["exec"]["command"] if word.isdigit())
    ends = sleep + settings.drain_timeout_s + _CLOSING_S + _BREAKING_S
    assert pod["terminationGracePeriodSeconds"] > ends
    patience = {name: probe["periodSeconds"] * probe["failureThreshold"] for name, probe in probes.items()}
    assert patience["liveness"] > settings.drain_timeout_s  # a server that drains answers 503, and is not killed for it
    assert patience["readiness"] < sleep
    assert patience["startup"] >= 600
    assert container["env"][0]["name"] == KEY_VARIABLE


def test_the_container_has_what_the_build_needs_and_listens_where_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = re.sub(r"\\\n\s*", "", text("Containerfile")).splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY") and "--from" not in line]
    for source in (ROOT / name for names in copied for name in names):
        assert source.exists()
    (entry,) = (json.loads(line.removeprefix("ENTRYPOINT ")) for line in lines if line.startswith("ENTRYPOINT"))
    assert entry[:2] == ["llamarium", "serve"]
    settings = settings_of(entry[2:], monkeypatch)
    assert f"EXPOSE {settings.port}" in lines
    assert f"http://127.0.0.1:{settings.port}/health" in text("Containerfile")
    user = re.search(r"useradd --uid (\d+)", text("Containerfile"))
    assert user is not None and f"USER {user[1]}" in lines


def test_proxies_wait_longer_and_take_more_than_the_server() -> None:
    assert DEFAULT.request_timeout_s is not None
    for name, pattern in (
        ("nginx.conf", r"proxy_read_timeout (\d+)s"),
        ("Caddyfile", r"response_header_timeout (\d+)s"),
    ):
        found = re.search(pattern, text(name))
        assert found is not None and int(found[1]) > DEFAULT.request_timeout_s
        assert f"127.0.0.1:{DEFAULT.port}" in text(name)
    sizes = [("nginx.conf", r"client_max_body_size (\d+)m"), ("Caddyfile", r"request_buffers (\d+)MiB")]
    for name, pattern in sizes:
        size = re.search(pattern, text(name))
        assert size is not None and int(size[1]) * 2**20 > DEFAULT.max_body_bytes


def test_prometheus_brings_a_key_where_the_metrics_are() -> None:
    (job,) = yaml.safe_load(text("prometheus.yml"))["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["authorization"].get("type", "Bearer") == "Bearer" and job["authorization"]["credentials_file"]
    assert job["static_configs"] == [{"targets": [f"127.0.0.1:{DEFAULT.port}"]}]


def test_ray_is_given_options_that_it_takes(tmp_path: Path) -> None:
    (app,) = yaml.safe_load(text("ray-serve.yaml"))["applications"]
    assert app["import_path"] == "llamarium.server.ray_serve:build"
    (tmp_path / "keys").write_text("a-key")
    (tmp_path / "keys").chmod(0o600)
    options = options_of(app["args"] | {"api_key_file": str(tmp_path / "keys")})
    assert options.settings().allowed_hosts == (NAME,)
    assert options.min_replicas < options.max_replicas


# --- proxies ----------------------------------------------------------------------------------------------------------


class Slow(BaseHTTPRequestHandler):
    """Writes an event, and goes on when it has been read."""

    was_read, has_come = threading.Event(), threading.Event()

    def do_POST(self) -> None:
        self.has_come.set()
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b"data: 1\n\n")
        self.wfile.flush()
        self.wfile.write(b"data: 2\n\n" if self.was_read.wait(20) else b"data: nobody has read\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        return


@contextmanager
def nginx(backend: int, folder: Path) -> Iterator[str]:
    port, key, certificate = free_port(), folder / "key.pem", folder / "certificate.pem"
    subject = ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}"]
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", *subject]
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    site = text("nginx.conf").replace("127.0.0.1:8000", f"127.0.0.1:{backend}")
    site = re.sub(r"(?m)^ *listen \[::\].*\n", "", site).replace("443 ssl", f"127.0.0.1:{port} ssl")
    site = site.replace("listen 80", f"listen 127.0.0.1:{free_port()}")
    site = re.sub(r"/etc/letsencrypt\S*fullchain.pem", str(certificate), site)
    site = re.sub(r"/etc/letsencrypt\S*privkey.pem", str(key), site)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    user = "user root;" if os.geteuid() == 0 else ""
    config = folder / "nginx.conf"
    config.write_text(f"{user} daemon off; pid {folder}/pid; events {{}} http {{ access_log off; {paths} {site} }}")
    command = ["nginx", "-e", str(folder / "errors"), "-c", str(config)]
    subprocess.run([*command, "-t"], check=True, capture_output=True)
    with proxy(command, f"https://127.0.0.1:{port}") as url:
        yield url


@contextmanager
def caddy(backend: int, folder: Path) -> Iterator[str]:
    port, config = free_port(), folder / "Caddyfile"
    site = text("Caddyfile").replace("127.0.0.1:8000", f"127.0.0.1:{backend}").replace(NAME, f"http://{NAME}:{port}")
    version = subprocess.run(["caddy", "version"], capture_output=True, text=True, check=True).stdout
    if [int(part) for part in re.findall(r"\d+", version)[:3]] < [2, 6, 3]:  # as the comment in the file says
        site = site.replace("request_buffers 17MiB", "buffer_requests")
    config.write_text(f"{{\n\tadmin off\n\tauto_https off\n}}\n{site}")
    command = ["caddy", "run", "--adapter", "caddyfile", "--config", str(config)]
    with proxy(command, f"http://127.0.0.1:{port}", HOME=str(folder)) as url:
        yield url


@contextmanager
def proxy(command: list[str], url: str, **environment: str) -> Iterator[str]:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env={**os.environ, **environment}, **quiet)
    try:
        while not answers(url):
            assert process.poll() is None
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def answers(url: str) -> bool:
    try:
        with client() as asks:
            asks.get(url)
    except httpx.ConnectError:
        return False
    return True


def client() -> httpx.Client:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return httpx.Client(verify=context, headers={"host": NAME}, timeout=30)


PROXIES = [
    pytest.param(
        made, id=made.__name__, marks=pytest.mark.skipif(shutil.which(made.__name__) is None, reason="not here")
    )
    for made in (nginx, caddy)
]


@pytest.mark.parametrize("made", PROXIES)
def test_a_proxy_passes_on_answers_refusals_and_the_name_that_was_asked(
    made: Any, smollm2_path: Path, tmp_path: Path
) -> None:
    with (
        serving(small_llama(smollm2_path), allowed_hosts=(NAME,), api_keys=("key",)) as running,
        made(running.port, tmp_path) as url,
        client() as asks,
    ):
        asks.headers["authorization"] = "Bearer key"
        chat = f"{url}/v1/chat/completions"
        whole = asks.post(chat, json=HELLO).json()["choices"][0]["message"]["content"]
        streamed = asks.post(chat, json=HELLO | {"stream": True})
        assert streamed.status_code == 200, streamed.text
        events = streamed.text.split("\n\n")
        chunks = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events[:-2]]
        assert "".join(chunk.get("content", "") for chunk in chunks) == whole
        assert events[-2] == "data: [DONE]"
        too_much = asks.post(
            chat, content=b" " * (DEFAULT.max_body_bytes + 1), headers={"content-type": "application/json"}
        )
        assert (too_much.status_code, too_much.json()["error"]["code"]) == (413, "request_too_large")
        own = f"https://{NAME}"
        assert asks.post(chat, json=HELLO, headers={"origin": own}).status_code == 200  # a page of the same name
        assert asks.post(chat, json=HELLO, headers={"origin": "https://evil.example"}).status_code == 403
        assert asks.get(f"{url}/health", headers={"authorization": ""}).json() == {"status": "ready"}


@pytest.fixture
def slow_port() -> Iterator[int]:
    backend = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    thread = threading.Thread(target=backend.serve_forever, daemon=True)
    thread.start()
    Slow.was_read.set()
    yield backend.server_port
    backend.shutdown()
    backend.server_close()
    thread.join()


@pytest.mark.parametrize("made", PROXIES)
def test_a_proxy_passes_on_an_event_when_it_comes(made: Any, slow_port: int, tmp_path: Path) -> None:
    with made(slow_port, tmp_path) as url, client() as asks:
        Slow.was_read.clear()
        with asks.stream("GET", url) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "data: 1"
            Slow.was_read.set()
            assert [line for line in lines if line] == ["data: 2"]


@pytest.mark.parametrize("made", PROXIES)
def test_a_proxy_passes_a_request_on_when_its_body_is_whole(made: Any, slow_port: int, tmp_path: Path) -> None:
    """Caddy ends a stream that begins while the request's body is still being read."""
    was_early: list[bool] = []

    def body() -> Iterator[bytes]:
        yield b"first, "
        was_early.append(Slow.has_come.wait(0.5))
        yield b"second"

    with made(slow_port, tmp_path) as url, client() as asks:
        Slow.has_come.clear()
        assert asks.post(url, content=body(), headers={"content-length": "13"}).text == "first, second"
    assert was_early == [False]
