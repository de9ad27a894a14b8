"""Recorded answers are computed again, token by token: after a restart, and on other numbers of threads."""

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llamarium.api import Llama
from llamarium.cli.main import main
from llamarium.errors import InputError, OptionError
from llamarium.generation.record import RecordedPrompt, RecordedStart, read_record
from llamarium.server.openai.responses.store import ResponseStore
from llamarium.server.recorder import Recorder
from serving import CHAT, NEVER_TORCH, Running, save_small_model, serving

pytestmark = pytest.mark.torch

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}},
                                                   "required": ["city"]}},
}  # fmt: skip
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 12}),
    ("/v1/chat/completions", {
        "messages": [{"role": "user", "content": "Which weather?"}], "tools": [WEATHER], "tool_choice": "required",
        "max_tokens": 60,
    }),
    ("/v1/completions", {
        "prompt": ["Once upon", "The sea"], "n": 2, "temperature": 1.3, "top_p": 0.9, "max_tokens": 9, "seed": 7,
        "frequency_penalty": 0.5, "logit_bias": {"260": 3.0}, "min_tokens": 4,
    }),
    ("/v1/completions", {"prompt": "A number: ", "structured_outputs": {"regex": "[0-9]{6}"}, "max_tokens": 20}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "stop_sequences": ["e"]}),
    ("/v1/responses", {"input": "Say something.", "max_output_tokens": 8}),
]  # fmt: skip
NUM_ANSWERS = 9
INT4 = {"kv_cache_dtype": "int4"}


@pytest.fixture(scope="module")
def folder(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model"), smollm2_path)


@pytest.fixture(scope="module")
def recorded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The record of two runs of a server, the second of which answers a request that is not to be kept."""
    import llamarium

    file = tmp_path_factory.mktemp("record") / "answers.jsonl"
    llama = llamarium.load(folder, device="cpu")
    for requests in (REQUESTS[:3], REQUESTS[3:]):
        with serving(llama, recorder=Recorder(file), responses=ResponseStore(2**20)) as running:
            for path, body in requests:
                response = running.post(path, **body)
                assert response.status_code == 200, response.text
            hidden = {"input": "Do not keep this.", "store": False, "max_output_tokens": 3}
            assert running.post("/v1/responses", **hidden).status_code == 200
    yield file


def replay(
    capsys: pytest.CaptureFixture[str], file: Path, folder: Path, *more: str
) -> tuple[int, list[dict[str, Any]]]:
    code = main(["replay", str(file), "-m", str(folder), "--kv-memory", "16MiB", "--json", *more])
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def entries(file: Path) -> list[RecordedPrompt]:
    with file.open("rb") as opened:
        return [entry for entry in read_record(opened, "record") if isinstance(entry, RecordedPrompt)]


def test_the_file_is_its_owners_alone_and_has_what_may_be_kept(recorded: Path) -> None:
    assert stat.S_IMODE(recorded.stat().st_mode) == 0o600
    assert sum(len(entry.answers) for entry in entries(recorded)) == NUM_ANSWERS
    assert recorded.read_bytes().count(b'{"llamarium_record":1') == 2


def test_a_number_beyond_float64_is_a_fault_of_its_line(recorded: Path, tmp_path: Path) -> None:
    start, line, *_ = recorded.read_bytes().splitlines(keepends=True)
    file = tmp_path / "faulty.jsonl"
    file.write_bytes(start + line.replace(b'"params":{', b'"params":{"min_tokens":1e999,'))
    with file.open("rb") as opened:
        assert [type(entry) for entry in read_record(opened, "record")] == [RecordedStart, InputError]


def test_what_keeps_an_answer_out_of_the_record_has_an_effect(folder: Path, tmp_path: Path) -> None:
    import llamarium

    llama = llamarium.load(folder, device="cpu")
    path, body = REQUESTS[0]
    with serving(llama, recorder=Recorder(tmp_path / "answers.jsonl"), strict_fields=True) as running:
        assert running.post(path, **body, store=False).status_code == 200
        assert running.post(path, **body, store=True).status_code == 400
    assert not (tmp_path / "answers.jsonl").read_bytes()


def in_a_process(file: Path, folder: Path, **variables: str) -> tuple[int, list[dict[str, Any]], str]:
    """Replay in a process of its own, since a process chooses kernels and threads once."""
    command = [sys.executable, "-c", NEVER_TORCH, "replay", str(file), "-m", str(folder), "--json"]
    done = subprocess.run(
        [*command, "--kv-memory", "16MiB"], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.parametrize("threads", ["1", "2"])
def test_each_answer_is_equal_on_any_number_of_threads(recorded: Path, folder: Path, threads: str) -> None:
    code, results, told = in_a_process(recorded, folder, OMP_NUM_THREADS=threads)
    assert [result["result"] for result in results] == ["equal"] * NUM_ANSWERS
    assert code == 0 and "9 equal" in told


def test_the_cache_has_the_dtype_of_the_record(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import llamarium

    file = tmp_path / "answers.jsonl"
    path, body = REQUESTS[0]
    with serving(llamarium.load(folder, device="cpu"), recorder=Recorder(file), engine=INT4) as running:
        assert running.post(path, **body).status_code == 200
    code, results = replay(capsys, file, folder)
    assert (code, [result["result"] for result in results]) == (0, ["equal"])
    main(["replay", str(file), "-m", str(folder), "--kv-memory", "16MiB", "--kv-cache-dtype", "auto"])
    assert "int4" in capsys.readouterr().err


def test_a_model_of_another_shape_is_refused(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recorded), "-m", "shakespeare-char", "--device", "cpu"]) == 1
    assert "shape" in capsys.readouterr().err


def test_on_another_set_of_kernels_the_first_different_token_is_reported(recorded: Path, folder: Path) -> None:
    code, results, told = in_a_process(recorded, folder, LLAMARIUM_KERNELS="portable")
    assert "replayed with C (portable)" in told
    different = [result for result in results if result["result"] == "different"]
    assert len(results) == NUM_ANSWERS and code == bool(different)
    for result in different:
        assert result["recorded"] != result["now"] and 0 <= result["token"] < result["num_tokens"]


def test_the_first_different_token_is_shown(
    recorded: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = recorded.read_bytes().splitlines(keepends=True)
    changed = json.loads(lines[1])
    was = changed["answers"][0]["token_ids"][3]
    changed["answers"][0]["token_ids"][3] = 17
    file = tmp_path / "changed.jsonl"
    file.write_bytes(lines[0] + json.dumps(changed).encode() + b"\n" + lines[2])
    code, results = replay(capsys, file, folder)
    assert code == 1 and [result["result"] for result in results] == ["different", "equal"]
    assert {"token": 3, "recorded": 17, "now": was}.items() <= results[0].items()


def test_lines_that_were_cut_or_forged_are_named_and_the_others_replayed(
    recorded: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = recorded.read_bytes().splitlines(keepends=True)
    bad = [
        lines[1][: len(lines[1]) // 2] + b"\n", b"[]\n", b'{"id": "a"}\n', b"\xff\n",
        lines[1].replace(b'"prompt_ids":[', b'"prompt_ids":[-5,'),
        lines[1].replace(b'"prompt_ids":[', b'"prompt_ids":[1e9,'),
        lines[1].replace(b'"params":{', b'"params":{"top_p":7,'),
        lines[1].replace(b'"params":{', b'"params":{"x\\u001b":7,'),
    ]  # fmt: skip
    file = tmp_path / "bad.jsonl"
    file.write_bytes(lines[0] + b"".join(bad) + lines[1])
    code, results = replay(capsys, file, folder)
    assert code == 1 and [result["result"] for result in results] == ["unreadable"] * len(bad) + ["equal"]
    assert all(f"line {i + 2}" in result["reason"] for i, result in enumerate(results[:-1]))
    assert not any("\x1b" in str(result) for result in results)


@pytest.mark.parametrize("content", [b"", b"{}\n", b"\x00" * 100, b'{"llamarium_recor'])
def test_what_is_no_record_is_refused_before_the_model_is_loaded(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "other"
    file.write_bytes(content)
    assert main(["replay", str(file), "-m", str(tmp_path / "nothing")]) == 1
    if content:
        with pytest.raises(OptionError):
            Recorder(file)
        assert file.read_bytes() == content


def test_a_record_that_was_cut_off_goes_on_with_a_new_line(recorded: Path, tmp_path: Path, llama: Llama) -> None:
    file = tmp_path / "cut.jsonl"
    file.write_bytes(recorded.read_bytes()[:-9])
    with serving(llama, recorder=Recorder(file)) as running:
        running.post(messages=[{"role": "user", "content": "Hello!"}], max_tokens=2)
    assert sum(len(entry.answers) for entry in entries(file)) == NUM_ANSWERS


def test_a_full_disk_costs_lines_and_no_answer(
    llama: Llama, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(tmp_path / "full.jsonl")
    with open("/dev/full", "wb") as full, serving(llama, recorder=recorder) as running:  # noqa: PTH123
        recorder._descriptor = full.fileno()
        response = running.post(messages=[{"role": "user", "content": "Hello!"}], max_tokens=2)
        assert response.status_code == 200
    assert "not_recorded=No space left on device" in capsys.readouterr().err


def test_a_record_of_full_size_ends_with_one_warning_and_no_answer_waits(
    llama: Llama, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small.jsonl"
    most = 1000
    for _ in range(2):  # a second start, after which there is no room either
        with serving(llama, recorder=Recorder(file, most)) as running:
            for _ in range(8):
                assert running.post(messages=[{"role": "user", "content": "Hello!"}], max_tokens=2).status_code == 200
            running.wait(lambda: "nothing more is recorded" in capsys.readouterr().err)
            for _ in range(8):
                assert running.post(messages=[{"role": "user", "content": "Hello!"}], max_tokens=2).status_code == 200
        told = capsys.readouterr().err
        assert "nothing more is recorded" not in told and "not_recorded" not in told, "it is said once"
        assert most / 2 < file.stat().st_size <= most
    assert 1 <= len(entries(file)) < 8


def test_a_size_without_a_record_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--record-size", "1MiB"]) == 2
    assert "--record" in capsys.readouterr().err


def test_a_record_is_written_beside_the_event_loop(
    llama: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, goes_on, threads = Recorder.write, threading.Event(), list[threading.Thread]()

    def slow(self: Recorder, *how: Any) -> str:
        threads.append(threading.current_thread())
        assert goes_on.wait(20)
        return write(self, *how)

    monkeypatch.setattr(Recorder, "write", slow)
    file = tmp_path / "answers.jsonl"
    with serving(llama, recorder=Recorder(file)) as running:
        asked = running.begin(CHAT, messages=[{"role": "user", "content": "Hello!"}], max_tokens=2)
        running.wait(lambda: threads)
        assert httpx.get(f"{running.url}/health", timeout=10).status_code == 200, "the event loop goes on"
        asked.close()
        goes_on.set()
        running.wait(lambda: file.stat().st_size)
        running.wait(lambda: len(entries(file)) == 1)
    assert running._thread not in threads


def test_branches_of_a_response_share_their_prefix_and_are_replayed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dialog goes on from any of its responses; what two branches share is computed once."""
    import llamarium

    file = tmp_path / "branches.jsonl"
    llama = llamarium.load(folder, device="cpu")

    def ask(running: Running, text: str, previous: str | None = None) -> dict[str, Any]:
        body = {"input": text, "max_output_tokens": 12, "temperature": 0.8}
        return running.post("/v1/responses", **body | {"previous_response_id": previous} if previous else body).json()

    with serving(llama, recorder=Recorder(file), responses=ResponseStore(2**20)) as running:
        first = ask(running, "Tell me of a garden with many beds and a pond, please. " * 3)
        second = ask(running, "And of its trees?", first["id"])
        branches = [ask(running, text, first["id"]) for text in ("And of its birds?", "And of its gate?")]
        branches += [ask(running, text, second["id"]) for text in ("Which ones?", "How old?")]
    for branch, parent in zip(branches, (first, first, second, second), strict=True):
        shared = parent["usage"]["input_tokens"]  # and all of the parent's answer whose tokens came back as they were
        assert branch["usage"]["input_tokens_details"]["cached_tokens"] >= shared
    code, results = replay(capsys, file, folder)
    assert code == 0 and [result["result"] for result in results] == ["equal"] * 6
