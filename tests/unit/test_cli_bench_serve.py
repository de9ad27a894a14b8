"""`llamarium bench serve`: what it prints, what it refuses, how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import stand_in
from llamarium.cli import bench_serve
from llamarium.cli.main import main
from stand_in import END, Asked, StandIn, full, head, text

Steps = AsyncIterator[bytes | float]


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn() as running:
        yield running


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run `llamarium bench serve` on a stand-in; return its code and what it wrote."""

    def run(server: StandIn, *words: str) -> tuple[int, str, str]:
        code = main(["bench", "serve", "--url", server.url, *words])
        return code, *capsys.readouterr()

    return run


Bench = Callable[..., tuple[int, str, str]]


def posted(server: StandIn) -> list[Asked]:
    return [asked for asked in server.asked if asked.method == "POST"]


# --- what it prints ---------------------------------------------------------------------------------------------------


def test_the_table(bench: Bench, server: StandIn) -> None:
    server.answer = partial(stand_in.good, first_s=0.02, each_s=0.01)
    words = ["--clients", "3", "--requests", "6", "--max-tokens", "4", "--goodput", "ttft:5000", "e2e:1"]
    code, out, err = bench(server, *words)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    lines = out.splitlines()
    assert lines[:2] == ["stand-in", f"{server.url}, 3 clients"]
    assert re.match(r"6 of 6 requests answered in \d+\.\d s$", lines[2])
    rows = {line[:14].strip(): [float(word) for word in line[14:].split()] for line in lines[6:10]}
    assert list(rows) == ["first token", "between pieces", "token", "whole answer"]
    assert all(len(row) == 5 for row in rows.values())
    assert rows["first token"][0] >= 20  # milliseconds
    assert rows["whole answer"][0] >= 50
    assert "prompts      128.0 tokens on average, 128 at most" in lines
    assert "answers      4.0 tokens on average, 4 at most" in lines
    assert "goodput      0.00 requests/s, 0.0 % of all" in lines
    assert re.search(r"^the load generator took [\d,]+ us of processor a token, [\d.]+ % of one processor$", out, re.M)
    assert len(posted(server)) == 7  # one to warm up
    assert posted(server)[0].body["prompt"] not in {asked.body["prompt"] for asked in posted(server)[1:]}


def test_json_has_every_number_and_what_was_asked_for(bench: Bench, server: StandIn) -> None:
    words = ["--rate", "200", "--requests", "5", "--max-tokens", "uniform:2:3", "--shared-prefix", "4", "--seed", "9"]
    code, out, _ = bench(server, *words, "--prompt-tokens", "6", "--ignore-eos", "--api-key", "secret", "--json")
    (line,) = out.splitlines()
    found = json.loads(line)
    assert code == 0
    assert "secret" not in out
    assert posted(server)[1].headers["authorization"] == "Bearer secret"
    assert posted(server)[1].body["ignore_eos"] is True
    asked = {"url": server.url, "model": "stand-in", "clients": None, "rate": 200, "shared_prefix": 4, "seed": 9}
    asked |= {"prompt_tokens_asked": "6", "max_tokens_asked": "uniform:2:3", "ignore_eos": True, "chat": False}
    assert {name: found[name] for name in asked} == asked
    assert found["num_answered"] == 5
    assert found["prompt_tokens"]["mean"] == 10
    assert set(found["ttft_s"]) == {"mean", "p50", "p90", "p99", "max"}
    assert found["errors"] == {}


def test_the_same_seed_asks_the_same_requests(bench: Bench) -> None:
    asked: list[list[dict[str, Any]]] = []
    for seed in ("1", "1", "2"):
        with StandIn() as server:
            bench(server, "--requests", "3", "--prompt-tokens", "uniform:4:9", "--max-tokens", "2", "--seed", seed)
        asked.append([one.body for one in posted(server)])
    assert asked[0] == asked[1] != asked[2]


def test_a_file_is_asked_line_by_line_once(bench: Bench, server: StandIn, tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    lines = [{"prompt": "one", "max_tokens": 2}, {"messages": [{"role": "user", "content": "two"}]}]
    path.write_text("\n".join(map(json.dumps, lines)))
    code, _, _ = bench(server, "--dataset", str(path), "--max-tokens", "3", "--warmup", "0")
    one, two = posted(server)
    assert code == 0
    assert (one.path, one.body["prompt"], one.body["max_tokens"]) == ("/v1/completions", "one", 2)
    assert (two.path, two.body["messages"], two.body["max_tokens"]) == ("/v1/chat/completions", lines[1]["messages"], 3)


def test_chat_and_extra_fields(bench: Bench, server: StandIn) -> None:
    code, _, _ = bench(
        server, "--chat", "--requests", "1", "--extra-body", '{"temperature": 0, "stream_options": null}'
    )
    assert code == 0
    assert {asked.path for asked in posted(server)} == {"/v1/chat/completions"}
    assert posted(server)[1].body["messages"][0]["role"] == "user"
    assert posted(server)[1].body["temperature"] == 0
    assert "stream_options" not in posted(server)[1].body


def test_the_key_of_the_environment(bench: Bench, server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    _, out, err = bench(server, "--requests", "1")
    assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer secret"}
    assert "secret" not in out + err


async def _fails_often(asked: Asked) -> Steps:
    if asked.method == "GET" or asked.number % 3 == 0:
        async for step in stand_in.good(asked):
            yield step
    elif asked.number % 3 == 1:
        yield full(429, {"error": {"message": "slow down \x1b[2J"}})
    else:
        yield head() + text("a")
        yield b"0\r\n\r\n"


def test_errors_are_counted_by_kind_with_an_example(bench: Bench, server: StandIn) -> None:
    server.answer = _fails_often
    code, out, _ = bench(server, "--requests", "9", "--max-tokens", "2")
    assert code == 0  # some were answered
    assert "3 of 9 requests answered" in out
    assert "6 failed" in out
    failed = out[out.index("failed   why") :]
    assert re.search(r"^ +3   http 429        slow down \\x1b\[2J$", failed, re.M)
    assert re.search(r"^ +3   broken stream   it ended after 1 piece", failed, re.M)
    assert max(map(len, out.splitlines())) <= 80


def test_when_nothing_is_answered_the_code_is_1(bench: Bench, server: StandIn) -> None:
    server.answer = _fails_often  # the first is to warm up
    code, out, _ = bench(server, "--requests", "2")
    assert code == 1
    assert "0 of 2 requests answered" in out
    assert "throughput" not in out


def test_pieces_are_counted_where_the_server_does_not(bench: Bench, server: StandIn) -> None:
    async def answer(asked: Asked) -> Steps:
        for step in (head(), text("a"), text("b", "stop"), END):
            yield step

    server.answer = answer
    code, out, _ = bench(server, "--requests", "2", "--model", "m")
    assert code == 0
    assert "answers      2.0 tokens on average, 2 at most: pieces, as the server does not count" in out
    assert "with prompts" not in out
    assert [asked.method for asked in server.asked] == ["POST"] * 3  # a named model is not asked for


@pytest.mark.parametrize("until", [["--requests", "4"], ["--duration", "0.3"]])
def test_progress_goes_up_to_the_whole(
    until: list[str], bench: Bench, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[float] = []

    @contextmanager
    def percent(text: str) -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: shown.append(done / total)

    monkeypatch.setattr(bench_serve, "share_done", percent)
    server.answer = partial(stand_in.good, first_s=0.05)
    assert bench(server, *until, "--max-tokens", "1")[0] == 0
    assert shown == sorted(shown)
    assert 0 < shown[0] < shown[-1] <= 1
    if until[0] == "--requests":
        assert shown == [0.25, 0.5, 0.75, 1]


# --- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: --url"),
        (["--clients", "0"], "--clients: expected a whole number, at least 1, found '0'"),
        (["--clients", "2", "--rate", "1"], "not allowed with argument"),
        (["--rate", "0"], "--rate: expected a number, above 0, found '0'"),
        (["--rate", "nan"], "above 0, found 'nan'"),
        (["--rate", "x"], "above 0, found 'x'"),
        (["--rate", "1", "--think-time", "1"], "--think-time is for --clients"),
        (["--think-time", "-1"], "expected a number, at least 0, below 1e+09, found '-1'"),
        (["--warmup", "-1"], "at least 0, found '-1'"),
        (["--prompt-tokens", "many"], "expected N, uniform:LOW:HIGH or lognormal:MEAN:SIGMA"),
        (["--dataset", "x", "--shared-prefix", "3"], "--dataset has its own"),
        (["--dataset", "x", "--prompt-tokens", "3"], "--dataset has its own"),
        (["--goodput", "speed:3"], "--goodput: expected ttft, itl, tpot, e2e"),
        (["--extra-body", "[1]"], "expected a JSON object"),
        (["--extra-body", "{"], "expected a JSON object"),
        (["--client", "3"], "no option --client; did you mean --clients?"),
        (["faster"], "what is 'faster'?"),
    ],
)
def test_a_wrong_command_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = [] if not words else ["--url", "http://127.0.0.1:1"]
    assert main(["bench", "serve", *url, *words]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert message in err
    assert err.splitlines()[-1].endswith("(`llamarium bench serve --help` explains)")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "localhost"], "--url is localhost; expected an address such as http://127.0.0.1:8080"),
        (["--url", "http://127.0.0.1:1"], "http://127.0.0.1:1/v1/models: "),
        (["--url", "http://127.0.0.1:1", "-m", "x"], "http://127.0.0.1:1 fails at the first request: connection: "),
        (["--url", "http://127.0.0.1:1", "--wait", "0"], "http://127.0.0.1:1 is not ready after 0 s: "),
        (["--url", "http://127.0.0.1:1", "--dataset", "/no/such.jsonl"], "/no/such.jsonl: No such file or directory"),
    ],
)
def test_what_cannot_be_done_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *words]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"llamarium: error: {message}")
    assert err.count("\n") == 1


def test_a_first_request_that_fails_ends_it(bench: Bench, server: StandIn) -> None:
    async def answer(asked: Asked) -> Steps:
        yield full(401, {"error": {"message": "Incorrect API key provided: secret"}})

    server.answer = answer
    code, out, err = bench(server, "-m", "m", "--api-key", "secret")
    assert (code, out) == (1, "")
    assert err.endswith("fails at the first request: http 401: Incorrect API key provided: ***\n")
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    "words", [["help", "bench", "serve"], ["bench", "serve", "--help"], ["--debug", "bench", "serve", "-h"]]
)
def test_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: llamarium bench serve ")
    assert max(map(len, out.splitlines())) <= 80
    assert main(["bench", "--help"]) == 0
    assert "llamarium bench serve --help" in capsys.readouterr().out


def test_two_words_are_a_command_in_its_place_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", "a", "bench", "serve"]) == 2
    assert "what is 'bench'?" in capsys.readouterr().err


def test_it_imports_neither_torch_nor_numpy(server: StandIn) -> None:
    program = (
        "import sys; from llamarium.cli.main import main\n"
        f"assert main(['bench', 'serve', '--url', '{server.url}', '--requests', '2', '--json']) == 0\n"
        "heavy = {'torch', 'numpy', 'httpx'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("load", "most"), [(["--clients", "2"], 7), (["--rate", "50"], 20)])
def test_ctrl_c_prints_what_there_is(load: list[str], most: int, server: StandIn) -> None:
    """Once so many were posted, which is some time after the first ones were answered."""

    async def answer(asked: Asked) -> Steps:
        async for step in stand_in.good(
            asked, first_s=60.0 if asked.path == "/v1/completions" and asked.number > 4 else 0.0
        ):
            yield step

    server.answer = answer
    words = ["bench", "serve", "--url", server.url, *load, "--requests", "50", "--max-tokens", "2"]
    environment = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    with subprocess.Popen(
        [sys.executable, "-m", "llamarium", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment,
    ) as running:  # fmt: skip
        deadline = time.monotonic() + 60
        while len(posted(server)) < most and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=120)
    assert running.returncode == 130
    assert not err
    assert re.search(r"^4 of 4 requests answered in .* s, \d+ more cut short$", out, re.M)
    assert "throughput" in out
