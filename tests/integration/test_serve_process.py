"""`llamarium serve` as a process: how it starts, what signals do to it, and with which exit code it ends."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving import NEVER_TORCH, wait

pytestmark = pytest.mark.torch

STORY: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 40, "ignore_eos": True}


class Process:
    """A server in a process of its own; `lines` are what it writes."""

    def __init__(self, *words: str, **environment: str) -> None:
        place = () if "--uds" in words else ("--port", "0")
        command = [sys.executable, "-c", NEVER_TORCH, "serve", *place, "--threads", "1", *words]
        self.began = time.monotonic()
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def find(self, pattern: str, limit_s: float = 120) -> str:
        """Wait for a line and return its first group."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            for line in list(self.lines):
                if found := re.search(pattern, line):
                    return found[1]
            time.sleep(0.01)
        raise AssertionError(f"no line {pattern}: {self.lines}")

    @property
    def url(self) -> str:
        return self.find(r"listening at (http://[\w.:]+)")

    def stream(self, told: list[str], **more: Any) -> threading.Thread:
        """Ask for a stream in a thread; wait for its first event."""
        url = self.url

        def read() -> None:
            with httpx.stream(
                "POST", f"{url}/v1/completions", json=STORY | {"stream": True} | more, timeout=60
            ) as answer:
                for line in answer.iter_lines():
                    told.extend([line] if line else [])

        def read_on() -> None:
            try:
                read()
            except httpx.HTTPError as error:
                told.append(type(error).__name__)

        thread = threading.Thread(target=read_on)
        thread.start()
        wait(lambda: told, 120)
        return thread

    def end(self, limit_s: float = 120) -> int:
        code = self.process.wait(limit_s)
        self._reader.join()
        return code


@contextmanager
def started(*words: str, **environment: str) -> Iterator[Process]:
    process = Process(*words, **environment)
    try:
        yield process
    finally:
        process.process.kill()
        process.end()
        assert process.process.stderr is not None
        process.process.stderr.close()


def test_sigterm_lets_what_runs_come_to_its_end_and_never_torch(smollm2_path: Path) -> None:
    with started() as server:
        server.find(r"(ready) after")
        told: list[str] = []
        thread = server.stream(told)
        server.process.send_signal(signal.SIGTERM)
        thread.join()
        assert told[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in told[-2]
        assert server.end() == 0
        assert not any("Traceback" in line or "Error" in line for line in server.lines), server.lines


def test_after_the_time_to_drain_a_stream_ends_with_an_error(smollm2_path: Path) -> None:
    with started("--drain-timeout", "0.1", "--log-format", "json") as server:
        server.find(r"(ready) after")
        told: list[str] = []
        thread = server.stream(told, max_tokens=5000)
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
        thread.join()
        assert json.loads(told[-1][6:])["error"]["code"] == "unavailable"
        assert not any("[DONE]" in line for line in told)
        lines = [json.loads(line) for line in server.lines]
    (line,) = (line for line in lines if line["event"] == "request" and line["path"] == "/v1/completions")
    assert line["status"] == 200
    assert line["error"] == "unavailable"
    assert "stopping; running answers: 1 (waits up to 0.1 s; a second signal stops at once)" in (
        line["event"] for line in lines
    )
    assert line["prompt"] > 0 and line["generated"] > 0


def test_a_second_signal_ends_it_at_once(smollm2_path: Path) -> None:
    with started() as server:
        server.find(r"(ready) after")
        told: list[str] = []
        thread = server.stream(told, max_tokens=5000)
        server.process.send_signal(signal.SIGINT)
        server.find(r"(stopping; running answers: 1 \(waits up to 30 s; a second signal stops at once\))$")
        server.process.send_signal(signal.SIGINT)
        wait(lambda: server.process.poll() is not None, 10)  # the stream would have 30 s
        assert server.end() == 130
        thread.join()
        assert not any("[DONE]" in line or '"finish_reason":"' in line for line in told)


def test_ctrl_c_while_it_does_nothing(smollm2_path: Path) -> None:
    with started() as server:
        server.find(r"(ready) after")
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 130
        assert sum(line.endswith("stopping; running answers: 0\n") for line in server.lines) == 1


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with started("-m", str(tmp_path / "nothing")) as server:
        assert server.end() == 1
        assert sum("llamarium: error:" in line for line in server.lines) == 1
        assert not any("Traceback" in line for line in server.lines)


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with started("--port", str(taken.getsockname()[1])) as server:
            assert server.end() == 1
        (line,) = server.lines
        assert "cannot listen at 127.0.0.1" in line


def test_a_key_of_the_environment_and_a_unix_socket(smollm2_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))  # as a killed server leaves it
    left.close()
    with started("--uds", str(path), LLAMARIUM_API_KEY="secret") as server:
        server.find(r"(ready) after")
        assert path.stat().st_mode & 0o777 == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server", timeout=60) as client:
            assert client.get("/v1/models").status_code == 401
            answer = client.get("/v1/models", headers={"authorization": "Bearer secret"}).json()
        assert answer["data"][0]["id"] == "smollm2-135m"
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
        assert not path.exists()
        assert not any("secret" in line for line in server.lines)


@pytest.mark.alone
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux for the processor's time")
def test_it_answers_soon_after_its_libraries_are_imported(smollm2_path: Path, tmp_path: Path) -> None:
    """Of the processor's time: what wall time is where nothing else runs. bench/startup.py has the seconds.

    Both sides run from bytecode that the first round writes, as an installed package has it.
    """
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    command = [sys.executable, "-c", "import fastapi, numpy, tokenizers, uvicorn"]
    libraries: list[float] = []
    served: list[float] = []
    for _ in range(5):
        before = os.times()
        subprocess.run(command, check=True, env=os.environ | bytecode)
        after = os.times()
        libraries.append(after.children_user + after.children_system - before.children_user - before.children_system)
        with started(**bytecode) as server:
            assert httpx.get(f"{server.url}/health", timeout=60).status_code in (200, 503)
            numbers = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
            served.append((int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK"))
    assert min(served) < 2.9 * min(libraries), (served, libraries)


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llamarium", "serve", "--uds", str(tmp_path / "socket"), "--drain-timeout", "0"]
    with Path("/dev/full").open("w") as full, subprocess.Popen([*command, "--threads", "1"], stderr=full) as process:
        try:
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(tmp_path / "socket")), timeout=60) as asks:
                end = time.monotonic() + 120
                while not listens(tmp_path / "socket") or asks.get("http://localhost/health").status_code != 200:
                    assert time.monotonic() < end
                    time.sleep(0.05)
                assert asks.post("http://localhost/v1/completions", json=STORY).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0
        finally:
            process.kill()


# --- conversations survive --------------------------------------------------------------------------------------------

PLAY: dict[str, Any] = STORY | {"prompt": "ROMEO: " * 18, "max_tokens": 9, "logprobs": 3}  # three blocks and a half


def _told(url: str) -> dict[str, float]:
    """The numbers of /metrics by name."""
    lines = (
        line.split()
        for line in httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
        if line.startswith("llamarium:")
    )
    return {name.partition("{")[0].removeprefix("llamarium:"): float(value) for name, value in lines}


def test_what_was_read_is_there_after_kill_9(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    words = ("-m", "shakespeare-char", "--cache-dir", str(folder), "--cache-disk", "1MB")
    with started(*words) as server:
        server.find(r"(ready) after")
        cold = httpx.post(f"{server.url}/v1/completions", json=PLAY, timeout=60).json()
        assert "disk_tokens" not in cold["usage"]["prompt_tokens_details"]
        until = time.monotonic() + 60
        while _told(server.url)["prefix_cache_disk_written_blocks_total"] < 4:  # soon after the answer
            assert time.monotonic() < until
            time.sleep(0.01)
        with started(*words) as second:
            assert second.end() == 1
            (line,) = (line for line in second.lines if "error" in line)
            assert line.startswith(f"llamarium: error: {folder}: is used by another process; choose another")
        server.process.kill()
        server.end()
    with started(*words) as server:
        server.find(r"(ready) after")
        warm = httpx.post(f"{server.url}/v1/completions", json=PLAY, timeout=60).json()
        assert warm["choices"] == cold["choices"], "the same text and the same log-probabilities"
        assert warm["usage"]["prompt_tokens_details"] == {"cached_tokens": 96, "disk_tokens": 96}
        told, props = _told(server.url), httpx.get(f"{server.url}/props", timeout=60).text
        assert told["prefix_cache_hits_total"] == told["prefix_cache_disk_hits_total"] == 96
        assert json.loads(props)["disk_cache"] == {"bytes": told["prefix_cache_disk_bytes"], "max_bytes": 2**20}
        assert str(tmp_path) not in props + httpx.get(f"{server.url}/metrics", timeout=60).text
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
        assert not any(str(tmp_path) in line for line in server.lines)


def test_a_folder_that_is_gone_is_made_again_and_what_takes_its_place_is_one_line(tmp_path: Path) -> None:
    folder, texts = tmp_path / "cache", (f"{letter}: " * 40 for letter in "abcdefghij")
    with started("-m", "shakespeare-char", "--cache-dir", str(folder)) as server:
        server.find(r"(ready) after")

        def count(name: str) -> None:
            """Ask for more until all four blocks of it are counted: nothing is being written any more."""
            name = f"prefix_cache_disk_{name}_blocks_total"
            until, before = time.monotonic() + 60, _told(server.url)[name]
            assert (
                httpx.post(f"{server.url}/v1/completions", json=PLAY | {"prompt": next(texts)}, timeout=60).status_code
                == 200
            )
            while _told(server.url)[name] < before + 4:
                assert time.monotonic() < until
                time.sleep(0.01)
            time.sleep(0.1)
            _told(server.url)  # the server has looked since: it does so every 50 ms, in the loop that answers this

        def warned() -> list[str]:
            return [line for line in server.lines if "prefix cache on disk cannot be written" in line]

        for times in (1, 2):
            shutil.rmtree(folder)
            count("written")
            shutil.rmtree(folder)
            folder.write_text("no folder")
            count("dropped")
            count("dropped")
            wait(lambda times=times: len(warned()) >= times)
            assert (
                len(warned()) == times
                and "no blocks are kept: File exists" in warned()[-1]
                and str(folder) not in warned()[-1]
            )
            folder.unlink()
            count("written")


def test_a_cache_that_cannot_be_is_one_line_before_the_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("Dear")
    with started("-m", "shakespeare-char", "--cache-dir", str(tmp_path)) as server:
        assert server.end() == 1
        says = f"llamarium: error: {tmp_path}: contains letter.txt and is not a prefix cache"
        assert [line.startswith(says) for line in server.lines if "error" in line] == [True], server.lines
        assert not any("Traceback" in line or "model cannot" in line for line in server.lines)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]
