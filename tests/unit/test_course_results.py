"""`llamarium build`: whatever a learner's function does is a result in words, in this process or in one of its own."""

import json
import os
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from learner_styles_2 import LOOPS
from learners import check_source, random_weights
from llamarium.course import check_step, check_steps, process, start
from llamarium.course.arguments import Source
from llamarium.course.check import Result
from llamarium.course.folder.progress import Reached, keep, progress
from llamarium.course.folder.source import solution
from llamarium.course.limits import Limits
from llamarium.course.outline import Course, file_of, step_named
from llamarium.errors import InputError, OptionError, TokenizerError, UnknownNameError
from llamarium.hub.builtin import cache_folder
from llamarium.hub.folders import is_trusted
from llamarium.runtime.process.child import Process

pytestmark = pytest.mark.usefixtures("own_folders_list")

RIGHT = "x / np.sqrt((x ** 2).mean(-1, keepdims=True) + eps) * gamma"
HEAD = "def rms_norm(x, gamma, eps):\n    "

CASES: dict[str, tuple[str, str, str]] = {
    "raises": ("raise KeyError('no')", "raised", "raises KeyError: 'no' (line 3: raise KeyError('no'))"),
    "none": ("x + 1", "shape", "y is None: is `return` missing?; expected an array of shape (5, 8)"),
    "a list": ("return x.tolist()", "shape", "y is a list; expected an array"),
    "a generator": ("yield x", "shape", "y is a generator: did you mean `return` instead of `yield`?; expected"),
    "two results": ("return x, x", "shape", "returned 2 results; expected 1: y"),
    "a transposed result": (f"return ({RIGHT}).T", "shape", "expected (5, 8) (T, D): the axes are in the order (D, T)"),
    "a batch": (f"return ({RIGHT})[None]", "shape", "remove the extra axis of size 1; there is no batch axis"),
    "another shape": (f"return ({RIGHT})[1:]", "shape", "y has shape (4, 8); expected (5, 8) (T, D)"),
    "a flat result": (f"return ({RIGHT}).ravel()", "shape", "the number of elements is right, the axes are not"),
    "whole numbers": (f"return ({RIGHT}).astype(int)", "shape", "y has dtype int64; expected float32"),
    "half": (f"return ({RIGHT}).astype('float16')", "shape", "y has dtype float16; expected float32"),
    "complex": (f"return ({RIGHT}) + 0j", "shape", "y has dtype complex"),
    "objects": (f"return ({RIGHT}).astype(object)", "shape", "y has dtype object; expected float32"),
    "NaN": (f"y = {RIGHT}; y[2, 1] = np.nan; return y", "shape", "1 number that is NaN or infinite, first at [2, 1]"),
    "changed input": ("x += 1; return x", "changed", "changes its input; work on a new array"),
    "another file": ("open('/etc/hostname').read()", "files", "reads the file /etc/hostname"),
    "a written file": ("open('kept.txt', 'w')", "files", "writes the file kept.txt"),
    "a file by its descriptor": ("import os; os.open('kept.txt', os.O_CREAT)", "files", "writes the file kept.txt"),
    "a socket": ("import socket; socket.create_connection(('localhost', 1))", "files", "does more than compute"),
    "a process": ("import subprocess; subprocess.run(['true'])", "files", "does more than compute (subprocess.Popen)"),
    "a fork": ("import os; os.fork()", "files", "does more than compute (os.fork)"),
    "exit": ("raise SystemExit(3)", "raised", "raises SystemExit: 3"),
    "an interrupt": ("raise KeyboardInterrupt", "raised", "raises KeyboardInterrupt"),
    "recursion": ("return rms_norm(x, gamma, eps)", "raised", "recurses without end (line"),
    "a missing package": ("import einops_of_nobody", "raised", "imports einops_of_nobody, which is not installed"),
    "memory": ("raise MemoryError", "memory", "needs more memory than a check allows"),
    "still empty": ("raise NotImplementedError('is still empty')", "empty", "is still empty (step03_rms_norm.py"),
    "bytes": ("return b'1'", "shape", "y is bytes; expected an array"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_result_is_said(case: str, tmp_path: Path) -> None:
    body, status, words = CASES[case]
    result = check_source(tmp_path, "rms_norm", HEAD + body + "\n")
    assert result.status == status
    assert words in result.message, result.message
    assert result.cause == ("The results are rounded to float16; compute in float32." if case == "half" else "")
    assert result.section
    assert not (tmp_path / "kept.txt").exists()


FILES = {
    "a syntax error": ("def rms_norm(x:\n    return x\n", "raised", "step03_rms_norm.py, line 2: '(' was never closed"),
    "no function": ("def norm(x, gamma, eps): return x\n", "missing", "step03_rms_norm.py does not define rms_norm"),
    "no function of that name": ("rms_norm = 3\n", "missing", "does not define rms_norm"),
    "other arguments": ("def rms_norm(x, gamma): return x\n", "missing",
                        "rms_norm(x, gamma) has the wrong arguments; expected rms_norm(x_TD, gamma_D, eps)"),
    "an error at import": ("1 / 0\n", "raised", "raises ZeroDivisionError: division by zero (line 2: 1 / 0)"),
    "not UTF-8": ("# coding: latin-2\nraise ValueError('\\x1b[2J')\n", "raised", "\\x1b[2J"),
    "null bytes": ("\0\n", "raised", "null bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_what_is_wrong_with_a_file_is_said(case: str, tmp_path: Path) -> None:
    source, status, words = FILES[case]
    result = check_source(tmp_path, "rms_norm", source)
    assert (result.status, words in result.message) == (status, True), result.message
    assert "\x1b" not in result.message


def test_what_a_function_prints_is_kept_and_no_failure(tmp_path: Path) -> None:
    result = check_source(tmp_path, "rms_norm", f"{HEAD}print('x' * 10 ** 5); return {RIGHT}\n")
    assert result.passed
    assert result.printed == "x" * 2000


def test_modules_that_a_function_deletes_are_there_again(tmp_path: Path) -> None:
    result = check_source(tmp_path, "rms_norm", f"import sys\n{HEAD}sys.modules.clear(); return {RIGHT}\n")
    assert result.passed
    assert socket.create_connection


def test_two_mistakes_at_once_are_a_place_without_a_cause(tmp_path: Path) -> None:
    result = check_source(tmp_path, "rms_norm", f"{HEAD}return ({RIGHT}) / gamma - x.mean()\n")
    assert (result.status, result.cause) == ("differs", "")
    assert result.message.startswith("differs in y at layer 0, position 0, number 0 (inside the model): yours ")
    assert result.place["inside"] and result.place["layer"] == 0 and result.place["T"] == 0


def test_an_error_alone_is_no_known_mistake(tmp_path: Path) -> None:
    """Where no call returned there is nothing that a mistake could be recognised by."""
    result = check_source(tmp_path, "rotate", "def rotate(q, k, v, positions, theta):\n    return q @ k @ v\n")
    assert (result.status, result.cause) == ("raised", "")


def test_what_is_slow_inside_the_model_is_right_as_far_as_it_was_compared(tmp_path: Path) -> None:
    slow = f"{HEAD}\n    if x.shape[1] == 32:\n        for _ in range(3 * 10 ** 6): pass\n    return {RIGHT}\n"
    result = check_source(tmp_path, "rms_norm", slow, limits=Limits(inside_s=0.2))
    assert result.passed
    assert result.checked.endswith(": it is slow")


@pytest.mark.parametrize("name", ["project", "join", "swiglu", "head"])
def test_loops_over_single_numbers_are_right_by_a_part_of_each_call(name: str, tmp_path: Path) -> None:
    """The whole calls would take the function longer than all calls may."""
    result = check_source(tmp_path, name, LOOPS[name], limits=Limits(inside_s=0.005))
    assert result.passed, result
    assert result.checked.endswith(": it is slow")


@pytest.mark.parametrize("when", ["True", "len(x) == 1"])
def test_a_loop_without_an_end_inside_the_model_is_no_slow_function(when: str, tmp_path: Path) -> None:
    """Neither at the first call there nor later, at a token that reads the cache."""
    endless = f"{HEAD}\n    while x.shape[1] == 32 and {when}: pass\n    return {RIGHT}\n"
    result = check_source(tmp_path, "rms_norm", endless, limits=Limits(call_s=0.5))
    assert result.status == "time"
    assert result.message.startswith("takes longer than 0.5 s of CPU time (line 4: while")


# --- in a process of its own ------------------------------------------------------------------------------------------

ENDS = {
    "rms_norm": ("import os\ndef rms_norm(x, gamma, eps): os._exit(7)\n", "ended", "ends the process (exit code 7)"),
    "project": ("import ctypes\ndef project(x, w_q, w_k, w_v, n, k): ctypes.string_at(0)\n", "ended",
                "crashes the process (SIGSEGV)"),
    "rotate": ("while True: pass\n", "time", "takes longer than 2 s of CPU time"),
    "attend": ("import numpy as np\ndef attend(q, k, v, positions):\n    return np.ones(1 << 33, 'u1')\n", "memory",
               "needs more memory than a check allows (line 3"),
    "join": ("import json\njson.dumps = None\ndef join(heads, w_o): return None\n", "shape", "out is None"),
    "head": ("import numpy as np\nnp.argwhere = None\ndef head(x, table): return x @ table.T\n", "ended",
             "interferes with the check: TypeError: 'NoneType' object is not callable"),
    "adamw_step": ("import os\ndef adamw_step(w, g, m, v, step, lr, b1, b2, eps, decay):\n"
                   "    while True: os.write(2, b'x' * 65536)\n", "raised",
               "raises OSError: [Errno 27] File too large"),
}  # fmt: skip


def test_a_process_that_ends_is_a_result_of_its_step(tmp_path: Path) -> None:
    """One folder with one that ends, crashes, never returns ...; the step after each is checked all the same."""
    folder = tmp_path / "my_llama"
    start(folder, Course.of([*ENDS, "embed", "lora"], ["one two three four"]))
    for name, (source, _, _) in ENDS.items():
        (folder / file_of(step_named(name))).write_text(source)
    (folder / file_of(step_named("lora"))).write_text(solution(step_named("lora")))
    results = check_steps(folder, limit_s=2.0)
    found = {result.step: result for result in results}
    for name, (_, status, words) in ENDS.items():
        assert (found[name].status, words in found[name].message) == (status, True), found[name]
        assert found[name].section
    assert found["embed"].status == "empty" and found["lora"].passed
    assert [name for name, entry in progress(folder).items() if entry.is_right] == ["lora"]
    json.dumps([result.message for result in results])


def test_a_process_that_ends_between_two_steps_is_no_failure_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Process] = []

    class Unnoticed(Process):
        """A process whose end is noticed by the next request, and not before it."""

        is_running = property(lambda self: self.end.alive)  # pyright: ignore

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(process, "Process", Unnoticed)
    start(tmp_path, Course.of(["head", "lora"], ["one two three four"]))
    for name in ("head", "lora"):
        (tmp_path / file_of(step_named(name))).write_text(solution(step_named(name)))
    found = check_steps(tmp_path)
    assert next(found).passed
    made[0].popen.kill()
    made[0].popen.wait()
    assert next(found).passed
    assert len(made) == 2


def test_a_function_that_waits_is_ended_too(tmp_path: Path) -> None:
    start(tmp_path, Course.of(["layer"], ["one two three four"]))
    source = "import time\ndef layer(x, norm_1, attention, norm_2, mlp): time.sleep(600)\n"
    (tmp_path / file_of(step_named("layer"))).write_text(source)
    result = check_step(tmp_path, limit_s=0.4)
    assert result.status == "time"
    assert result.message.startswith("waits for time, a lock or input")


def test_a_process_that_gets_no_processor_time_is_not_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on for ten times as long as a call may compute, as on a busy machine."""

    class Stopped(Process):
        def ask(self, *args: Any, **options: Any) -> dict[str, Any]:
            self.popen.send_signal(signal.SIGSTOP)
            threading.Timer(4.0, self.popen.send_signal, (signal.SIGCONT,)).start()
            return super().ask(*args, **options)

    monkeypatch.setattr(process, "Process", Stopped)
    start(tmp_path, Course.of(["lora"], ["one two three four"]))
    (tmp_path / file_of(step_named("lora"))).write_text(solution(step_named("lora")))
    assert check_step(tmp_path, limit_s=0.4).passed


def test_a_model_that_cannot_read_the_courses_texts_is_no_failure_of_a_step(tmp_path: Path) -> None:
    start(tmp_path / "texts", Course(model="shakespeare-char"))
    (tmp_path / "texts" / file_of(step_named("rotate"))).write_text(solution(step_named("rotate")))
    with pytest.raises(InputError, match=r"the text 'Zwölf .*': the course's model cannot encode it"):
        check_step(tmp_path / "texts", "rotate")
    assert progress(tmp_path / "texts")["rotate"] == Reached()


def test_a_model_without_merges_is_refused_before_a_step_is_checked() -> None:
    def no_merges() -> None:
        raise TokenizerError("not byte-level")

    backend = SimpleNamespace(byte_level_bpe=no_merges)
    tokenizer: Any = SimpleNamespace(encode=list, backend=backend)
    with pytest.raises(InputError, match=r"the course's model has no merges for the step merge \(not byte-level\)"):
        Source(random_weights(), tokenizer).vocabulary()


def test_what_was_found_is_kept_before_it_is_handed_out(tmp_path: Path) -> None:
    """As many tries as findings, also where the rest is never asked for, and where checks run beside each other."""
    start(tmp_path, Course.of(["head", "lora"], ["one two three four"]))
    found = check_steps(tmp_path)
    assert next(found).status == "empty"
    assert [name for name, entry in progress(tmp_path).items() if entry.tries] == ["head"]
    del found

    def more(_: int) -> None:
        keep(tmp_path, Result("lora", "differs", "differs"))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(more, range(40)))
    assert progress(tmp_path)["lora"].tries == 40


def test_a_folder_whose_check_is_refused_is_not_trusted(tmp_path: Path) -> None:
    start(tmp_path, Course.of(["lora"], ["one two three four"]))
    (cache_folder() / "own_folders.jsonl").unlink()
    for name, error in (("walk", UnknownNameError), ("embed", InputError)):
        with pytest.raises(error):
            check_step(tmp_path, name)
        assert not is_trusted(tmp_path)
    assert check_step(tmp_path).status == "empty"
    assert is_trusted(tmp_path)


def test_windows_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(tmp_path, Course.of(["lora"], ["one two three four"]))
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(OptionError, match="use Linux or macOS"):
        check_step(tmp_path)


def test_a_wrong_row_is_placed_in_the_text(tmp_path: Path) -> None:
    """Also where only tokens that come one by one are wrong."""
    source = "def embed(ids, table):\n    return table[ids] * (1 + (len(ids) == 1 and table.shape[1] == 32))\n"
    result = check_source(tmp_path, "embed", source)
    assert result.place["inside"]
    assert result.place["T"] == len(result.place["ids"]) - 2


def test_what_a_function_writes_or_leaves_behind_is_a_result_or_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line on the check's own pipe, a thread that goes on, a module of the working folder, files by another way."""
    folder, elsewhere = tmp_path / "my_llama", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "resource.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(elsewhere)
    write = "import os\nfor fd in range(3, 30):\n    try: os.write(fd, {})\n    except OSError: pass\n"
    begun = {
        "join": write.format("b'[1]\\n'"),
        "head": write.format('b\'{"result": {"step": "head", "status": "passed", "message": 3}}\\n\''),
        "swiglu": "open(__file__ + '/../../../../etc/passwd')\n",
        "layer": "open('/proc/self/root/etc/passwd')\n",
        "lora": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n",
    }
    start(folder, Course.of(list(begun), ["one two three four"]))
    for name, source in begun.items():
        (folder / file_of(step_named(name))).write_text(source + solution(step_named(name)))
    found = {result.step: result for result in check_steps(folder, limit_s=5.0)}
    assert found["lora"].passed, found["lora"]
    for name in ("join", "head"):
        assert (found[name].status, "file descriptor that it did not open" in found[name].message) == ("ended", True), (
            found[name]
        )
    for name in ("swiglu", "layer"):
        assert (found[name].status, "reads the file" in found[name].message) == ("files", True), found[name]


def test_progress_that_is_no_file_counts_as_nothing_reached(tmp_path: Path) -> None:
    start(tmp_path / "my_llama", Course.of(["embed"], ["one two three four"]))
    os.mkfifo(tmp_path / "my_llama" / "progress.json")
    assert not progress(tmp_path / "my_llama")["embed"].is_right
