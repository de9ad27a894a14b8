"""What a person at a terminal does: Ctrl-C, Ctrl-D, a pipe that closes. Real processes, on a pseudo-terminal."""

import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pty = pytest.importorskip("pty")

CTRL_C, CTRL_D = b"\x03", b"\x04"
PATIENCE_S = 120  # a busy machine imports torch for the first time


class Session:
    """A process whose terminal we hold."""

    def __init__(self, *words: str, program: str | None = None) -> None:
        self.terminal, theirs = pty.openpty()
        env = {**os.environ, "COLUMNS": "80", "TERM": "xterm", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *(["-m", "llamarium"] if program is None else ["-c", program]), *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
            preexec_fn=_take_terminal,  # so that Ctrl-C reaches it as a signal
        )
        os.close(theirs)
        self.seen = ""

    def wait_for(self, text: str) -> str:
        """Read until `text` appears; returns what came up to its end and forgets it."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.seen:
            ready, _, _ = select.select([self.terminal], [], [], deadline - time.monotonic())
            assert ready, f"no {text!r} in {self.seen!r}"
            try:
                self.seen += os.read(self.terminal, 65536).decode(errors="replace")
            except OSError:  # Linux's way to say that the other side has closed
                raise AssertionError(f"it ended without {text!r}: {self.seen!r}") from None
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def send(self, keys: bytes) -> None:
        os.write(self.terminal, keys)

    def interrupt(self) -> None:
        """Press Ctrl-C where a line is being typed."""
        time.sleep(0.3)  # Python's readline loses a signal that comes between what it shows and its wait for keys
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.exists() and stat.read_text().rpartition(") ")[2][0] != "S":  # it has had no processor yet
            time.sleep(0.05)
        self.send(CTRL_C)

    def end(self) -> tuple[int, str]:
        """Wait for the end; returns exit code and the rest of the output."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            ready, _, _ = select.select([self.terminal], [], [], 1)
            try:
                data = os.read(self.terminal, 65536) if ready else b"-"
            except OSError:
                break
            if not data:
                break
            self.seen += data.decode(errors="replace") if ready else ""
        return self.process.wait(PATIENCE_S), self.seen


def one_line(text: str) -> str:
    """Undo the breaks between words: where a sentence breaks is the terminal's affair."""
    return " ".join(text.split())


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def session() -> Iterator[type[Session]]:
    made: list[Session] = []

    class Tracked(Session):
        def __init__(self, *words: str, program: str | None = None) -> None:
            super().__init__(*words, program=program)
            made.append(self)

    yield Tracked
    for one in made:
        one.process.kill()
        one.process.wait()
        os.close(one.terminal)


def test_a_dialog_at_the_terminal(session: type[Session], smollm2_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "dialog.json"
    chat = session("chat", "-m", str(smollm2_path), "--temperature", "0", "-n", "500")
    greeting = one_line(chat.wait_for("> "))
    assert f"{smollm2_path.stem}. /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves." in greeting
    assert str(smollm2_path.parent) not in greeting.rpartition("\x1b[K")[2]

    chat.send(b"Tell me a very long story about a lighthouse.\r")
    chat.wait_for("story about a lighthouse.\r\n")
    for _ in range(6):  # words of the answer
        chat.wait_for(" ")
    chat.send(CTRL_C)
    chat.wait_for("[stopped]")
    chat.wait_for("> ")

    chat.interrupt()
    chat.wait_for("To leave: Ctrl-D or /quit")
    chat.wait_for("> ")
    chat.send(b"half a li")
    chat.wait_for("half a li")
    chat.interrupt()
    assert "To leave" not in chat.wait_for("> ")

    chat.send(b"/nonsense\r")
    chat.wait_for("llamarium: error: no command /nonsense")
    chat.wait_for("> ")
    chat.send(b"\x1b[A\r")  # arrow up: the last line again
    chat.wait_for("llamarium: error: no command /nonsense")
    chat.wait_for("> ")
    chat.send(f"/save {file}\r".encode())
    chat.wait_for("[saved")
    chat.wait_for("> ")
    chat.send(CTRL_D)
    assert chat.end()[0] == 0

    question, answer = json.loads(file.read_text())["messages"]
    assert question["content"] == "Tell me a very long story about a lighthouse."
    assert answer["role"] == "assistant" and 20 < len(answer["content"]) < 5000


def test_lines_that_are_pasted_are_one_question(session: type[Session], smollm2_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "dialog.json"
    chat = session("chat", "-m", str(smollm2_path), "--temperature", "0", "-n", "5")
    chat.wait_for("> ")
    chat.send(b"\x1b[200~Which is larger,\nthe sun\n  or the moon?\x1b[201~\r")
    chat.wait_for("5 tokens in")
    chat.wait_for("> ")
    chat.send(f"/save {file}\r".encode())
    chat.wait_for("[saved")
    chat.wait_for("> ")
    chat.send(CTRL_D)
    assert chat.end()[0] == 0
    question, _ = json.loads(file.read_text())["messages"]
    assert question["content"] == "Which is larger,\nthe sun\n  or the moon?"


@pytest.mark.parametrize("words", [("chat", "Tell me a story."), ("generate", "Once upon a time")])
def test_words_of_an_answer_do_not_cross_the_edge(
    session: type[Session], smollm2_path: Path, words: tuple[str, str]
) -> None:
    chat = session(*words, "-m", str(smollm2_path), "--temperature", "0", "-n", "120")
    code, seen = chat.end()
    text = seen.rpartition("\x1b[K")[2].split("\r\n[")[0]
    assert (words[0] == "generate") == ("\x1b[2mOnce upon a time\x1b[0m" in text), "a prompt is dimmed"
    lines = re.sub(r"\x1b\[\d*m", "", text).split("\r\n")
    assert code == 0 and len(lines) > 5
    assert max(map(len, lines)) <= 79
    pairs = [(line, after) for line, after in itertools.pairwise(lines) if line and after]
    assert sum(len(line) + len(after.split()[0]) >= 79 for line, after in pairs) > 3  # others end where the text does


def test_interrupting_keeps_what_there_is_and_exits_with_130(session: type[Session], smollm2_path: Path) -> None:
    story = session("generate", "Once upon a time", "-m", str(smollm2_path), "--temperature", "0", "-n", "500")
    story.wait_for("city of")
    story.send(CTRL_C)
    code, rest = story.end()
    assert code == 130
    assert rest.endswith("\r\n")
    assert "Traceback" not in rest and "error" not in rest


def test_interrupting_before_the_model_is_there(session: type[Session]) -> None:
    endless = (  # what loads comes to no end
        "import sys, time; from llamarium import api; from llamarium.cli import start; load = api.load\n"
        "api.load = lambda *args, **options: (load(*args, **options), time.sleep(600))\n"
        "sys.exit(start())"
    )
    info = session("info", program=endless)
    info.wait_for("loading smollm2-135m")
    info.send(CTRL_C)
    code, rest = info.end()
    assert code == 130
    assert "Traceback" not in rest
    assert "\r\x1b[K" in rest  # the progress line is gone


def test_a_reader_that_has_enough(smollm2_path: Path) -> None:
    line = (
        f'"{sys.executable}" -m llamarium generate "Once upon a time" -m "{smollm2_path}" -n 500 --seed 1 | head -c 5'
    )
    start = time.monotonic()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"], capture_output=True, text=True, check=False, env=env
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout) == 5
    assert time.monotonic() - start < PATIENCE_S


def test_interrupted_in_a_pipe_what_was_written_arrives(smollm2_path: Path, tmp_path: Path) -> None:
    words = ["generate", "Once upon a time", "-m", str(smollm2_path), "--temperature", "0", "-n", "500"]
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "llamarium", *words], stdout=out, stderr=subprocess.PIPE, text=True
        )
        while (tmp_path / "out").stat().st_size < 20 and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (130, "")
    assert (tmp_path / "out").read_text().startswith(", the city of")


def test_a_batch_shows_how_it_goes_and_keeps_what_there_is(session: type[Session], tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    body = {"prompt": "KING:", "max_tokens": 100, "ignore_eos": True}
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body | ({"n": 0} if i == 0 else {})}
        for i in range(400)
    ]
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    batch = session("batch", str(source), str(out), "-m", "shakespeare-char", "--max-num-seqs", "2")
    batch.wait_for(" of 400 lines answered, 1 failed, ")
    shown = batch.wait_for(" of 400 lines answered, 1 failed, ") + batch.wait_for("tokens/s")
    assert f"answering {source} … " in shown
    batch.send(CTRL_C)
    code, rest = batch.end()
    assert code == 130
    number = out.read_bytes().count(b"\n")
    assert 1 < number < 400
    assert f"{number} of 400 lines answered, 1 failed; " in one_line(rest)
    assert "; --resume runs the rest" in one_line(rest)
    assert "Traceback" not in rest
