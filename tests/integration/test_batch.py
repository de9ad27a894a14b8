"""`llamarium batch`: a file of requests, answered as over HTTP, and gone on with after any end."""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llamarium.api import Llama
from llamarium.cli.main import main
from llamarium.cli.serve import load_engine
from llamarium.errors import DownloadError, EngineStoppedError, MemoryBudgetError, OutputError
from llamarium.server.app import post_paths
from llamarium.server.batch.answer import BatchProgress, BatchRun
from llamarium.server.batch.dispatch import RouteReply, Routes
from llamarium.server.batch.lines import Line, read_lines
from llamarium.server.lifecycle.loading import ModelLoader
from llamarium.server.lifecycle.service import Service
from llamarium.server.settings import Settings
from serving import CHAT, HELLO, NEVER_TORCH, Running, small_engine

pytestmark = pytest.mark.torch

COMPLETIONS = "/v1/completions"
ROUTES: dict[str, dict[str, Any]] = {
    CHAT: HELLO,
    COMPLETIONS: {"prompt": ["Once", "upon a"], "max_tokens": 5, "temperature": 0.7, "seed": 3, "n": 2, "logprobs": 2},
    "/v1/messages": {"messages": HELLO["messages"], "max_tokens": 5, "temperature": 0},
    "/v1/messages/count_tokens": {"messages": HELLO["messages"]},
    "/v1/embeddings": {"input": ["Once", "upon a"]},
    "/tokenize": {"prompt": "häuser\u2028"},
    "/detokenize": {"tokens": [88, 9023, 34878]},
    "/apply-template": {"messages": HELLO["messages"]},
}


def text(custom_id: str, url: str = CHAT, **body: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode() + b"\n"


def lines_of(texts: list[bytes], path: Path) -> Iterator[Line]:
    path.write_bytes(b"".join(texts))
    with path.open("rb") as file:
        yield from read_lines(file)


class Answered:
    """What became of some lines: `answers` as they were written, `by_id`, `tally` and `warnings`."""

    def __init__(self, llama: Llama, lines: Iterator[Line], num_lines: int = 0, max_num_seqs: int = 4) -> None:
        self.answers: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self.tally = BatchProgress(num_lines)
        self.error: BaseException | None = None
        settings = Settings(max_num_seqs=max_num_seqs, max_queue=10**9, request_timeout_s=None)
        with small_engine(llama, settings) as engine:
            loading = ModelLoader(lambda _: (llama, engine))
            loading.wait()
            service = Service(loading, settings)
            batch = BatchRun(service, ("small", "alias"), self._take, self.warnings.append, self.tally)
            try:
                asyncio.run(batch.run(lines))
            except EngineStoppedError as error:
                self.error = error
            self.left = service.in_flight

    def _take(self, line: bytes) -> None:
        assert line.isascii() and line.count(b"\n") == 1
        self.answers.append(json.loads(line))

    @property
    def by_id(self) -> dict[str | None, dict[str, Any]]:
        return {one["custom_id"]: one for one in self.answers}


def plain(body: dict[str, Any]) -> dict[str, Any]:
    """A body without what is another each time, or depends on who came before."""
    kept = {name: value for name, value in body.items() if name not in ("id", "created", "request_id")}
    changing = ("prompt_tokens_details", "input_tokens", "cache_read_input_tokens")
    if isinstance(kept.get("usage"), dict):
        kept["usage"] = {name: value for name, value in kept["usage"].items() if name not in changing}
    return kept


# --- the same as over HTTP --------------------------------------------------------------------------------------------


def test_every_route_answers_as_over_http(llama: Llama, running: Running, tmp_path: Path) -> None:
    assert set(ROUTES) <= set(post_paths())
    asked = [*ROUTES.items(), *((path, {}) for path in post_paths())]
    texts = [text(str(i), path, **body) for i, (path, body) in enumerate(asked)]
    found = Answered(llama, lines_of(texts, tmp_path / "in")).by_id
    for i, (path, body) in enumerate(asked):
        told = running.post(path, **body)
        response = found[str(i)]["response"]
        assert found[str(i)]["error"] is None
        assert response["status_code"] == told.status_code == (200 if body else 400), told.text
        assert plain(response["body"]) == plain(told.json())
        assert response["request_id"].startswith("req-")


def test_a_bad_line_harms_nobody(llama: Llama, tmp_path: Path) -> None:
    good = [text(f"good {i}", **HELLO | {"max_tokens": 3 + i}) for i in range(6)]
    bad = [
        b"garbage\n",
        b'{"custom_id": "cut", "method": "POST"\n',
        b'{"custom_id": 3, "method": "POST", "url": "/v1/chat/completions", "body": {}}\n',
        b'{"custom_id": "array", "method": "POST", "url": "/v1/chat/completions", "body": []}\n',
        b'{"custom_id": "get", "method": "GET", "url": "/v1/models", "body": {}}\n',
        text("nowhere", "/v1/nothing"),
        text("elsewhere", "https://api.example/v1/chat/completions", **HELLO),
        text("page", "/health"),
        text("slash", f"{CHAT}/", **HELLO),
        text("stream", **HELLO | {"stream": True}),
        text("typed", **HELLO | {"temperature": "hot"}),
        text("unknown", **HELLO | {"temprature": 1}),
        text("model", **HELLO | {"model": "gpt-4"}),
        text("long", **HELLO | {"max_tokens": 5000}),
        text("empty", COMPLETIONS, prompt=[]),
        text("control", "/detokenize", tokens=[10**9]),
    ]
    alone = Answered(llama, lines_of(good, tmp_path / "good")).by_id
    mixed = [line for pair in zip([*good, *[b"\n"] * 10], bad, strict=True) for line in pair]
    found = Answered(llama, lines_of(mixed, tmp_path / "in"), num_lines=22)
    assert (found.tally.num_answered, found.tally.num_failed, found.tally.share) == (22, 16, 1)
    assert found.tally.first_failure.startswith("line 2: the line is not valid JSON")
    assert found.warnings == []
    for name, answer in alone.items():
        assert plain(found.by_id[name]["response"]["body"]) == plain(answer["response"]["body"])
    faults = [one for one in found.answers if one["response"] is None]
    refused = {one["custom_id"]: one["response"] for one in found.answers if one["response"]}
    assert sorted((one["error"]["line"], one["error"]["code"]) for one in faults) == [
        (2, "invalid_json"),
        (4, "invalid_json"),
        (6, "invalid_parameter"),
        (8, "invalid_parameter"),
        (10, "invalid_parameter"),
        (12, "not_found"),
        (14, "not_found"),
        (16, "not_found"),
        (18, "not_found"),
        (20, "unsupported_parameter"),
    ]
    for name, status, param in [
        ("typed", 400, "temperature"),
        ("unknown", 400, "temprature"),
        ("model", 404, "model"),
        ("long", 400, "messages"),
        ("empty", 400, "prompt"),
        ("control", 400, "tokens"),
    ]:
        assert (refused[name]["status_code"], refused[name]["body"]["error"]["param"]) == (status, param)


def test_a_bug_of_ours_fails_its_own_line(llama: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("/secret/path and a prompt")

    monkeypatch.setattr("llamarium.server.plain.texts.chosen_model", broken)
    texts = [text("bug", "/tokenize", prompt="x"), text("good", **HELLO)]
    found = Answered(llama, lines_of(texts, tmp_path / "in"))
    response = found.by_id["bug"]["response"]
    assert (response["status_code"], response["body"]["error"]["code"]) == (500, "internal_error")
    assert found.by_id["good"]["response"]["status_code"] == 200
    (warning,) = found.warnings
    assert warning.startswith("line 1: internal error in llamarium: ZeroDivisionError in broken")
    assert "secret" not in warning + json.dumps(found.answers)


def test_an_engine_that_breaks_ends_the_run_and_fails_no_line(
    llama: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = llama.runner.run, iter(range(10**9))

    def breaking(*args: Any, **kwargs: Any) -> Any:
        if next(calls) > 30:
            raise RuntimeError("the machine is on fire")
        return run(*args, **kwargs)

    monkeypatch.setattr(llama.runner, "run", breaking)
    texts = [text(str(i), **HELLO | {"max_tokens": 10, "ignore_eos": True}) for i in range(40)]
    found = Answered(llama, lines_of(texts, tmp_path / "in"), num_lines=40)
    assert "the machine is on fire" in str(found.error)
    assert 0 < len(found.answers) < 40
    assert found.tally.num_failed == 0 and found.left == 0


def test_a_body_is_measured_as_over_http(llama: Llama, running: Running, tmp_path: Path) -> None:
    """In ASCII each of these letters would take six bytes instead of two, and the body be too large."""
    long = "ы" * 3_000_000
    line = text("a", "/detokenize", tokens=[], user="LONG").replace(b"LONG", long.encode())
    (answer,) = Answered(llama, lines_of([line], tmp_path / "in")).answers
    told = running.post("/detokenize", tokens=[], user=long)
    assert (told.status_code, told.json()) == (200, {"prompt": ""})
    assert answer["response"]["body"] == told.json()


def test_an_answer_that_gives_way_fails_its_line_alone(
    llama: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = llama.runner.run, iter(range(10**9))

    def without_memory(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 5:
            raise MemoryBudgetError("no memory for the step")
        return run(*args, **kwargs)

    monkeypatch.setattr(llama.runner, "run", without_memory)
    texts = [text(str(i), **HELLO | {"max_tokens": 10, "ignore_eos": True}) for i in range(6)]
    found = Answered(llama, lines_of(texts, tmp_path / "in"), num_lines=6)
    assert found.error is None
    statuses = [answer["response"]["status_code"] for answer in found.answers]
    assert sorted(statuses) == [200] * 5 + [503]


# --- how much at once -------------------------------------------------------------------------------------------------


class Slow(Routes):
    """Answers when it is told to, and counts."""

    most = under_way = 0

    async def post(self, asked: Any) -> RouteReply:
        type(self).under_way += 1
        type(self).most = max(self.most, self.under_way)
        await asyncio.sleep(0.001)
        type(self).under_way -= 1
        return RouteReply(200, "{}")


@pytest.mark.parametrize(("size", "most"), [(10, 8), (300_000, 2)])
def test_lines_are_read_as_they_are_needed(llama: Llama, monkeypatch: pytest.MonkeyPatch, size: int, most: int) -> None:
    """Twice what runs side by side, and of large lines so many bytes: never all of a file."""
    monkeypatch.setattr("llamarium.server.batch.answer.MAX_PENDING_BYTES", 700_000)
    monkeypatch.setattr("llamarium.server.batch.answer.Routes", Slow)
    Slow.most, read, ahead = 0, 0, 0

    def lines() -> Iterator[Line]:
        nonlocal read, ahead
        for i in range(60):
            read += 1
            ahead = max(ahead, read - len(found.answers))
            yield Line(i + 1, text(str(i), prompt="x" * size), str(i), str(i))

    found = Answered.__new__(Answered)
    found.answers = []
    found.__init__(llama, lines(), 60)  # type: ignore[misc]
    assert len(found.answers) == 60
    assert Slow.most == most
    assert ahead <= most + 1


def test_many_answers_to_a_line_count_as_many(llama: Llama, tmp_path: Path) -> None:
    """A line with n=200 is not asked beside 7 others of its kind: their rows would all be in memory."""
    peak = 0
    texts = [text(str(i), COMPLETIONS, prompt="a", n=200, temperature=1, seed=1, max_tokens=1) for i in range(8)]

    admit = Service.admit

    def counted(service: Service, num_answers: int, *more: Any) -> Any:
        nonlocal peak
        peak = max(peak, service.in_flight + num_answers)
        return admit(service, num_answers, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Service, "admit", counted)
        found = Answered(llama, lines_of(texts, tmp_path / "in"))
    assert [len(one["response"]["body"]["choices"]) for one in found.answers] == [200] * 8
    assert peak <= 400


# --- the command ------------------------------------------------------------------------------------------------------

STORY: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
TINY = ("-m", "shakespeare-char", "--threads", "1")


def stories(number: int) -> bytes:
    prompts = (f"KING {chr(65 + i % 26)}{chr(97 + i // 26)}:" for i in range(number))  # its tokens are letters
    return b"".join(text(str(i), COMPLETIONS, prompt=prompt, **STORY) for i, prompt in enumerate(prompts))


def answers_of(path: Path) -> dict[str | None, Any]:
    """The texts that were answered; each was once."""
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    found = {row["custom_id"]: row["response"] and row["response"]["body"]["choices"][0] for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Any]:
    """The answers to sixty stories, from a run that nothing ends."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "in").write_bytes(stories(60))
    assert main(["batch", str(folder / "in"), str(folder / "out"), *TINY]) == 0
    return answers_of(folder / "out")


SLOW = """
import os, time
from llamarium.engine.engine import Engine
step, path, most = Engine.step, sys.argv.pop(1), int(sys.argv.pop(1))
def slower(engine):
    if os.path.exists(path) and os.path.getsize(path) > most: time.sleep(0.1)
    return step(engine)
Engine.step = slower
"""
"""Make steps so slow, once a file is as large, that the answers to sixty stories would take minutes."""


def start(*words: str, slow: tuple[Path, int] | None = None, **how: Any) -> "subprocess.Popen[bytes]":
    """`slow`: From which size of which file on the program takes its time, so that it is still there."""
    program = NEVER_TORCH if slow is None else NEVER_TORCH.replace("import sys; ", f"import sys{SLOW}")
    command = [sys.executable, "-c", program, *map(str, slow or ()), "batch", *words, *TINY]
    return subprocess.Popen(command, stderr=subprocess.PIPE, **how)


def wait_for(is_so: Callable[[], object], process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert process.poll() is None, "it ended before"
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, whole: dict[str | None, Any]) -> None:
    """Killed three times, each time somewhere else; what was answered is not asked again, and torch is not imported."""
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_bytes(stories(60))
    for _ in range(3):
        before = out.read_bytes() if out.exists() else b""
        slow = out, len(before) + 2000
        process = start(str(source), str(out), "--resume", "--max-num-seqs", "2", slow=slow)
        wait_for(lambda before=before: out.exists() and out.stat().st_size > len(before) + 2000, process)
        process.kill()
        process.communicate()
        assert out.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    with out.open("ab") as file:
        file.write(b'{"id":"batch_req_')  # as if it had been killed within a line
    kept = out.read_bytes()
    process = start(str(source), str(out), "--resume")
    told = process.communicate()[1].decode()
    assert process.returncode == 0, told
    num_kept = kept.count(b"\n")
    assert f"60 of 60 lines answered, 0 failed ({num_kept} before)" in told
    assert out.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert answers_of(out) == whole


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_was_answered_before_a_signal_is_kept(
    tmp_path: Path, whole: dict[str | None, Any], number: signal.Signals
) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_bytes(stories(60))
    process = start(str(source), str(out), "--max-num-seqs", "2", slow=(out, 1000))
    wait_for(lambda: out.exists() and out.stat().st_size > 1000, process)
    process.send_signal(number)
    told = process.communicate()[1].decode()
    found = answers_of(out)
    assert 0 < len(found) < 60 and found == {name: whole[name] for name in found}
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert f"{len(found)} of 60 lines answered, 0 failed" in told and "--resume runs the rest" in told
        assert "Traceback" not in told


def test_lines_that_failed_are_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    words = ["batch", str(source), str(out), *TINY]
    source.write_bytes(stories(2) + b"garbage\n")
    assert main(words) == 1
    told = capsys.readouterr()
    assert "3 of 3 lines answered, 1 failed; 80 tokens" in told.err and "line 3: the line is not valid" in told.err
    assert told.out == ""
    before = out.read_bytes()
    assert main(words) == 1
    assert "use --resume to run the remaining requests, or --force to replace it" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 1  # nothing is asked, and the error is still there
    assert "3 of 3 lines answered, 1 failed, all of them before" in capsys.readouterr().err
    assert out.read_bytes() == before
    source.write_bytes(stories(3))
    assert main([*words, "--resume"]) == 1
    assert "an answered line without a custom_id has moved" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert main([*words, "--force"]) == 0
    assert len(answers_of(out)) == 3
    source.write_bytes(stories(4))
    assert main([*words, "--resume", "--served-model-name", "other"]) == 1
    assert "the earlier run used shakespeare-char, this one uses other" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 0
    assert "4 of 4 lines answered, 0 failed (3 before); 40 tokens" in capsys.readouterr().err


def test_nothing_is_asked_or_written_where_a_name_stands_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_bytes(stories(2) + stories(1))
    assert main(["batch", str(source), str(out), *TINY]) == 1
    assert "line 3: custom_id 0 is also used in line 1" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(("change", "code"), [("cut", 1), ("rewritten", 1), ("longer", 0)])
def test_a_file_that_is_changed_meanwhile_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: str, code: int
) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_bytes(stories(3))
    others = {"cut": stories(2), "rewritten": stories(3).replace(b"KING C", b"KING D"), "longer": stories(4)}

    def load(args: argparse.Namespace) -> Any:  # all lines have been checked, and none is asked
        source.write_bytes(others[change])
        return load_engine(args)

    monkeypatch.setattr("llamarium.cli.batch.load_engine", load)
    assert main(["batch", str(source), str(out), *TINY]) == code
    assert ("in: was changed while it was being answered" in capsys.readouterr().err) == bool(code)
    assert len(answers_of(out)) == (2 if change == "cut" else 3)


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["missing", "out"], 1, "missing: cannot be read"),
        (["folder", "out"], 1, "folder: cannot be read"),
        (["in", "in"], 1, "in: is the input, too"),
        (["in", "in", "--force"], 1, "in: is the input, too"),
        (["in", "link", "--force"], 1, "link: is the input, too"),
        (["in", "missing/out"], 1, "cannot be written"),
        (["empty", "out"], 1, "contains no requests"),
        (["in", "out", "--force", "--resume"], 2, "give one of them"),
        (["in", "-", "--resume"], 2, "standard output keeps no answers"),
        (["in"], 2, "OUT"),
        (["in", "out", "-m", "nothing/like/this"], 1, "nothing/like/this"),
    ],
)
def test_what_cannot_be_begun_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").write_bytes(stories(1))
    Path("link").symlink_to("in")
    Path("empty").touch()
    Path("folder").mkdir()
    assert main(["batch", *words]) == code
    told = capsys.readouterr().err
    assert why in told and told.count("\n") == 1
    assert not Path("out").exists()
    assert Path("in").read_bytes() == stories(1)


def test_through_pipes(tmp_path: Path, whole: dict[str | None, Any]) -> None:
    process = start("-", "-", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    out, told = process.communicate(stories(3))
    assert process.returncode == 0
    (tmp_path / "out").write_bytes(out)
    found = answers_of(tmp_path / "out")
    assert len(found) == 3 and found == {name: whole[name] for name in found}
    assert b"3 of 3 lines answered" in told and b"--resume" not in told


def test_a_named_pipe_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = start(str(pipe), str(tmp_path / "out"))
    pipe.write_bytes(stories(2))
    assert process.wait(60) == 0
    process.communicate()
    assert len(answers_of(tmp_path / "out")) == 2


def test_a_reader_that_has_enough_ends_it_quietly(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(stories(60))
    process = start(str(tmp_path / "in"), "-", "--max-num-seqs", "1", stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith(b'{"id":"batch_req_')
    process.stdout.close()
    told = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 0
    assert b"Traceback" not in told and b"error" not in told


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
def test_a_full_disk_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_bytes(stories(3))
    assert main(["batch", str(tmp_path / "in"), "/dev/full", *TINY]) == 1
    told = capsys.readouterr().err
    assert "llamarium: error: /dev/full: cannot be written: No space left on device" in told
    assert "Traceback" not in told


def test_two_runs_do_not_write_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_bytes(stories(60))
    process = start(str(source), str(out), "--max-num-seqs", "2")
    wait_for(lambda: out.exists() and out.stat().st_size, process)
    assert main(["batch", str(source), str(out), "--resume", *TINY]) == 1
    assert "is being written by another process" in capsys.readouterr().err
    process.kill()
    process.communicate()


def test_an_output_that_cannot_be_written_is_an_error_of_the_run(llama: Llama, tmp_path: Path) -> None:
    def full(_: bytes) -> None:
        raise OutputError("no room")

    settings = Settings(max_num_seqs=4, max_queue=10**9)
    with small_engine(llama, settings) as engine:
        loading = ModelLoader(lambda _: (llama, engine))
        loading.wait()
        batch = BatchRun(Service(loading, settings), ("small",), full, print, BatchProgress(2))
        texts = [text("a", **HELLO), text("b", **HELLO)]
        with pytest.raises(OutputError, match="no room"):
            asyncio.run(batch.run(lines_of(texts, tmp_path / "in")))


def test_no_other_model_answers_under_the_models_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`generate` takes the packaged model where the built-in one cannot be fetched; here its answers would be kept."""

    def resolve(name: str) -> Path:
        raise DownloadError(f"{name} cannot be fetched: no network")

    monkeypatch.setattr("llamarium.hub.resolve.resolve", resolve)
    (tmp_path / "in").write_bytes(stories(1))
    assert main(["batch", str(tmp_path / "in"), str(tmp_path / "out")]) == 1
    assert "smollm2-135m cannot be fetched: no network" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
