"""bench/compare_servers.py: which servers are started and how, what they are asked, and what is reported."""

import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
SERVER = """
import json, sys, threading
from functools import partial
sys.path.insert(0, {tests!r})
import stand_in

def note(asked):
    if asked.method == "POST":
        print(json.dumps(asked.body), file=open(sys.argv[2], "a"))
    return stand_in.good(asked, float(sys.argv[3]), float(sys.argv[4]))

with stand_in.StandIn(note, port=int(sys.argv[1])):
    threading.Event().wait()
"""


@pytest.fixture
def compare_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(TESTS.parent / "bench"))
    import compare_servers

    yield compare_servers
    for name in ("compare_servers", "common"):
        sys.modules.pop(name, None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file that nobody reads."""
    path = tmp_path / "some model.gguf"
    path.write_bytes(b"GGUF")
    return path


def stand_in_command(folder: Path, name: str, first_s: float = 0.0, each_s: float = 0.0) -> str:
    """Return the command of a stand-in that notes what it is asked in a file of its name."""
    script = folder / "server.py"
    script.write_text(SERVER.format(tests=str(TESTS)))
    return f"{shlex.join([sys.executable, str(script)])} {{port}} {folder / name} {first_s} {each_s}"


def run(
    compare_servers: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object
) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["compare_servers.py", *map(str, words)])
    compare_servers.main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def asked(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_both_get_the_same_prompts_in_turn_and_medians_and_ratios_are_told(
    compare_servers: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model: Path,
) -> None:
    monkeypatch.setattr(compare_servers, "allowed", lambda num_clients, options: {"tokens/s": 10.0 * num_clients})
    words = ["--model", model, "--rounds", 2, "--clients", 1, 3, "--requests-per-client", 2]
    words += ["--prompt-tokens", 5, "--max-tokens", 2]
    words += ["--ours", stand_in_command(tmp_path, "ours")]
    words += ["--peer", f"slow={stand_in_command(tmp_path, 'slow', 0.2)}"]
    line = run(compare_servers, monkeypatch, capsys, *words)
    ours, slow = asked(tmp_path / "ours"), asked(tmp_path / "slow")
    assert len(ours) == 3 * (4 + 6)  # rounds and one to warm up; at least four requests
    prompts = [body["prompt"] for body in ours]
    assert sorted(prompts) == sorted(body["prompt"] for body in slow)
    assert len(set(prompts)) == len(prompts)  # never one that a server has read before
    assert all(body["ignore_eos"] and body["temperature"] == 0 and body["max_tokens"] == 2 for body in ours)
    assert {len(prompt.split()) for prompt in prompts} == {5}
    found = line["results"]["servers"]
    assert list(found) == ["1", "3"]
    assert list(found["3"]) == ["llamarium", "slow", "allowed", "llamarium / slow", "llamarium / allowed"]
    assert found["3"]["llamarium / allowed"]["tokens/s"] == pytest.approx(found["3"]["llamarium"]["tokens/s"] / 30)
    assert found["3"]["slow"]["ttft p50"] >= 200
    assert found["3"]["llamarium / slow"]["ttft p50"] < 1 < found["3"]["llamarium / slow"]["tokens/s"]
    assert line["benchmark"] == "compare-servers-clients-some model"
    assert str(tmp_path) not in json.dumps(line["options"]["peer"])


def test_a_prefix_is_new_once_a_round(
    compare_servers: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model: Path,
) -> None:
    words = ["--model", model, "--scenario", "prefix", "--rounds", 1, "--prefix-tokens", 30, "--hits", 2]
    words += ["--prompt-tokens", 5, "--ours", stand_in_command(tmp_path, "ours", 0.01)]
    found = run(compare_servers, monkeypatch, capsys, *words)["results"]["servers"]["prefix"]["llamarium"]
    prefixes = [body["prompt"].split()[:30] for body in asked(tmp_path / "ours")]
    assert len(prefixes) == 2 * 3
    assert prefixes[0] == prefixes[1] == prefixes[2] != prefixes[3] == prefixes[4] == prefixes[5]
    assert found["miss"] >= 10
    assert found["hit / miss"] == pytest.approx(found["hit"] / found["miss"])


def test_a_long_prompt_comes_when_all_streams_have_begun(
    compare_servers: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model: Path,
) -> None:
    words = ["--model", model, "--scenario", "long-prompt", "--rounds", 1, "--streams", 3, "--stream-tokens", 60]
    words += ["--prompt-tokens", 5, "--long-tokens", 40, "--ours", stand_in_command(tmp_path, "ours", 0.05, 0.01)]
    found = run(compare_servers, monkeypatch, capsys, *words)["results"]["servers"]["long-prompt"]["llamarium"]
    lengths = [len(body["prompt"].split()) for body in asked(tmp_path / "ours")]
    assert lengths == [5, 5, 5, 40] * 2
    assert found["median before"] >= 9
    assert found["ttft"] >= 50
    assert found["longest"] >= found["p99 while"] >= 9
    words[words.index("--stream-tokens") + 1] = 9
    with pytest.raises(SystemExit, match="an answer ended before the long prompt was read; raise --stream-tokens"):
        run(compare_servers, monkeypatch, capsys, *words)


def test_how_servers_are_started(compare_servers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ["--llama-server", "/x/llama-server -fa off", "--threads", "3", "--clients", "2", "16"]
    monkeypatch.setattr(sys, "argv", ["compare_servers.py", *words])
    options = compare_servers.parse()
    found = compare_servers.commands(options)
    assert list(found) == ["llamarium", "llama-server"]
    slots, tokens = compare_servers.sizes(options)
    assert (slots, tokens) == (16, 128 + 64 + 64)
    values = {"model": "m", "port": 5, "threads": 3, "slots": slots, "tokens": tokens, "context": slots * tokens}
    assert found["llama-server"].format(**values) == (
        "/x/llama-server -fa off -m m --host 127.0.0.1 --port 5 -t 3 -np 16 -c 4096 --no-webui"
    )
    assert (
        found["llamarium"]
        .format(**values)
        .endswith(" -m llamarium serve -m m --host 127.0.0.1 --port 5 --threads 3 --max-num-seqs 16")
    )


def test_a_server_that_does_not_start_is_named_with_what_it_said(compare_servers: ModuleType) -> None:
    command = shlex.join([sys.executable, "-c", "print('no such model'); raise SystemExit(3)"])
    with (
        pytest.raises(SystemExit, match=r"(?s)failed: it ended with 3\nno such model"),
        compare_servers.running("broken", command, {}),
    ):
        pass


def test_servers_are_ended_when_the_work_fails(compare_servers: ModuleType, tmp_path: Path) -> None:
    script = tmp_path / "noted.py"
    noted = f"import os\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
    script.write_text(noted + SERVER.format(tests=str(TESTS)))
    command = f"{shlex.join([sys.executable, str(script)])} {{port}} {tmp_path / 'asked'} 0 0"
    with pytest.raises(ZeroDivisionError), compare_servers.running("stand-in", command, {}):
        raise ZeroDivisionError
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_short_answer_is_no_fast_one(compare_servers: ModuleType) -> None:
    from llamarium.load_test.client import Target
    from llamarium.load_test.exchange import Exchange, ReportedUsage
    from llamarium.load_test.workload import LoadRequest

    server = compare_servers.Server("quick", Target(url="http://x"))
    with pytest.raises(SystemExit, match="quick: an answer has 3 tokens; 64 were asked for"):
        compare_servers._check(server, [Exchange(LoadRequest("a", 64), 0.0, [1.0], 1.0, ReportedUsage(1, 3))])


def test_what_a_server_spends_outside_of_its_passes_is_told_where_it_tells_them(compare_servers: ModuleType) -> None:
    from llamarium.load_test.client import Target
    from stand_in import StandIn, full, head, part

    async def metrics(asked: Any) -> Any:
        yield (
            head(kind="text/plain")
            + part(b'# TYPE\nllamarium:model_pass_seconds_total{model_name="a"} 2.5\n')
            + part(b"")
        )

    async def none(asked: Any) -> Any:
        yield full(404, {})

    for answer, expected in ((metrics, 2.5), (none, None)):
        with StandIn(answer) as server:
            assert compare_servers.pass_s(compare_servers.Server("a", Target(url=server.url))) == expected
