"""A learner's folder as a model: the functions run in a process of their own, over the weights of another model."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamarium
from llamarium.api import Llama
from llamarium.cli.main import main
from llamarium.course import check_step
from llamarium.course.folder.source import solution, start
from llamarium.course.outline import Course, file_of, step_named
from llamarium.course.passes import Weights
from llamarium.course.steps import STEPS
from llamarium.errors import (
    CheckpointError,
    FunctionError,
    InputError,
    MemoryBudgetError,
    NoModulesError,
    OptionError,
)
from llamarium.hub import folders
from llamarium.kernels.threads import num_threads
from llamarium.presets import preset
from llamarium.runtime.batch import Span, pack
from llamarium.runtime.process import child
from llamarium.runtime.process.cache import SharedCache
from llamarium.runtime.process.frames import read_header
from llamarium.runtime.taps import Taps

SMALL = "shakespeare-char"
PROMPT = "What light is this"


@pytest.fixture(scope="module", autouse=True)
def _own_list(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the list of own folders out of the real cache, after the built-in model has been found there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLAMARIUM_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OPENBLAS_NUM_THREADS", "1")  # its threads wait for each other where cores are shared
        yield


def solved(folder: Path, model: str = SMALL, **changed: str) -> Path:
    """Write a folder in which all steps stand; those named in `changed` have that source."""
    start(folder, Course(model=model, texts=(PROMPT,)))
    for step in STEPS:
        (folder / file_of(step)).write_text(changed.get(step.name, solution(step)))
    return folder


def changed_source(name: str, old: str, new: str) -> str:
    source = solution(step_named(name))
    assert old in source
    return source.replace(old, new)


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    return llamarium.load(solved(tmp_path_factory.mktemp("build") / "my_llama"))


@pytest.fixture(scope="module")
def theirs() -> Llama:
    return llamarium.load(SMALL, dtype="float32", device="cpu")


def is_close(mine: Any, theirs: Any) -> bool:
    """Whether numbers are equal but for the order of float32 sums, and infinite at the same places."""
    one, other = np.asarray(mine), np.asarray(theirs)
    finite = np.isfinite(other)
    size = np.abs(other[finite]).max()
    return bool((np.isfinite(one) == finite).all() and np.abs(one[finite] - other[finite]).max() <= 3e-5 * size)


def test_answers_as_the_library_does(mine: Llama, theirs: Llama) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
    assert mine.generate(PROMPT, **options).text == theirs.generate(PROMPT, **options).text
    prompts = [PROMPT, "O", "My lord, the king"]
    texts = [[one.text for one in llama.generate(prompts, **options)] for llama in (mine, theirs)]
    assert texts[0] == texts[1]
    several = [llama.generate(PROMPT, n=2, seed=3, max_tokens=12).completions for llama in (mine, theirs)]
    assert [one.text for one in several[0]] == [one.text for one in several[1]]
    assert mine.score(PROMPT).logprobs[1:] == pytest.approx(theirs.score(PROMPT).logprobs[1:], abs=1e-4)
    assert mine.runner.name == "the functions in my_llama"


def test_chunks_and_several_sequences_have_the_librarys_logits(mine: Llama, theirs: Llama) -> None:
    """A prompt in three parts over scattered blocks, beside another sequence, with taps of both."""
    first, second = mine.encode(PROMPT * 3), mine.encode("Ay me")
    found: list[list[Any]] = []
    for runner in (mine.runner, theirs.runner):
        cache, logits, taps = runner.new_cache(9, block_size=16), [], Taps([("resid", 3), ("final_norm", None)])
        for begin, end in ((0, 20), (20, 21), (21, len(first))):
            spans = [Span(first[begin:end], begin, [7, 2, 5, 1], num_logits=min(2, end - begin))]
            spans += [Span(second, 0, [0], num_logits=0)] if begin == 20 else []
            logits.append(runner.run(pack(spans, 16), cache, taps))
        found.append(
            [*logits, *(part for parts in taps.kept.values() for part in parts), *cache.read(1, [7, 2, 5], 40)]
        )
    assert [len(one) for one in found[0]] == [len(one) for one in found[1]]
    assert all(is_close(one, other) for one, other in zip(*found, strict=True))


def test_a_trace_has_the_librarys_names_and_numbers(mine: Llama, theirs: Llama) -> None:
    found, expected = mine.trace(PROMPT).arrays, theirs.trace(PROMPT).arrays
    assert list(found) == list(expected)
    assert [key for key in expected if not is_close(found[key], expected[key])] == []


def test_the_built_in_model_answers_and_is_traced(tmp_path: Path, smollm2: Llama, smollm2_path: Path) -> None:
    mine = llamarium.load(solved(tmp_path / "my_llama", str(smollm2_path)))
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    assert mine.chat(asked, **options).text == smollm2.chat(asked, **options).text
    found, expected = (llama.trace("The cat sat").arrays for llama in (mine, smollm2))
    assert [key for key in expected if not is_close(found[key], expected[key])] == []


def test_a_mistake_is_heard_in_the_answer(tmp_path: Path, theirs: Llama) -> None:
    wrong = changed_source("attend", "np.sqrt(np.float32(H))", "np.float32(H)")
    mine = llamarium.load(solved(tmp_path / "wrong", attend=wrong))
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
    assert mine.generate(PROMPT, **options).text != theirs.generate(PROMPT, **options).text


# --- functions that do something else ---------------------------------------------------------------------------------

HOSTILE = """
import ctypes, os, time
import numpy as np

def rms_norm(x, gamma, eps):
    good = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + np.float32(eps)) * gamma
    if len(x) == 2: raise ValueError("no\\x1b[31m")
    if len(x) == 3:
        while True: pass
    if len(x) == 4: time.sleep(1000)
    if len(x) == 5: ctypes.string_at(0)
    if len(x) == 6: os._exit(3)
    if len(x) == 7: return good[:, :-1]
    if len(x) == 8: return good * np.nan
    if len(x) == 9: return np.ones((len(x), 1 << 33)) @ np.ones((1 << 33, 1))
    if len(x) == 10: open("/etc/passwd")
    if len(x) == 11: os.closerange(3, 100); time.sleep(1000)
    if len(x) == 12:
        for number in range(3, 200):
            try: os.write(number, b"\\xff" * 9)
            except OSError: pass
        time.sleep(1000)
    if len(x) == 13: raise KeyboardInterrupt
    return good
"""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    return llamarium.load(solved(tmp_path_factory.mktemp("build") / "hostile", rms_norm=HOSTILE))


@pytest.mark.parametrize(
    ("num_tokens", "words"),
    [
        (2, r"rms_norm, layer 0: raises ValueError: no\\x1b\[31m \(line 7: .*\)"),
        (3, r"layer 0, step03_rms_norm.py, line 9: does not end within 2 s"),
        (4, r"layer 0, step03_rms_norm.py, line 10: does not end within 2 s"),
        (5, r"layer 0, step03_rms_norm.py, line 11: crashes the process \(SIGSEGV\)"),
        (6, r"layer 0, ends the process \(exit code 3\)"),
        (7, r"rms_norm, layer 0: y has shape \(7, \d+\); expected \(7, \d+\) \(T, D\)"),
        (8, r"rms_norm, layer 0: y has [\d,]+ numbers that are NaN or infinite.*"),
        (9, r"rms_norm, layer 0: needs more memory than .* \(line 15: .*\)"),
        (10, r"rms_norm, layer 0: reads the file /etc/passwd; .*"),
        (11, r"layer 0, sends an invalid answer"),
        (12, r".*sends an invalid answer"),
        (13, r"rms_norm, layer 0: raises KeyboardInterrupt .*"),
    ],
)
def test_what_a_function_does_ends_in_words_and_the_next_request_works(
    num_tokens: int, words: str, hostile: Llama, theirs: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "STEP_S", 2.0)
    monkeypatch.setattr(child, "TOKEN_S", 0.0)
    with pytest.raises(FunctionError, match=f"^hostile: {words}$"):
        hostile.generate([1] * num_tokens, temperature=0, max_tokens=2)
    monkeypatch.undo()
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 3}
    assert hostile.generate([1], **options).text == theirs.generate([1], **options).text


def test_an_engine_ends_the_requests_of_the_step_and_goes_on(hostile: Llama) -> None:
    with hostile.engine() as engine:
        with pytest.raises(FunctionError, match="raises ValueError"):
            engine.stream([1, 1], max_tokens=2).result()
        assert engine.stream([1], temperature=0, max_tokens=3).result().text


@pytest.mark.parametrize(
    ("name", "source", "words"),
    [
        ("swiglu", "import nothing_there\n", "swiglu: imports nothing_there"),
        ("swiglu", "def swiglu(:\n", "swiglu: step08_swiglu.py, line 1"),
        ("swiglu", "x = 1\n", "step08_swiglu.py does not define swiglu"),
        ("swiglu", "import os\nos._exit(7)\n", "ends the process (exit code 7)"),
        ("trunk", "def trunk(ids, embed, layers, norm):\n    x = embed(ids)\n    while True: x = layers[0](x)\n",
         "trunk: runs the layers too many times"),
        ("layer", "def layer(x, a, b, c, d):\n    return x\n", "layer, layer 0: does not call attention"),
        ("attend_cached", changed_source("attend_cached", "[k_past_SKH, k_TKH]", "[2 * k_past_SKH, k_TKH]"),
         "attend_cached, layer 0: changes cached keys or values"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, name: str, source: str, words: str) -> None:
    with pytest.raises(FunctionError) as raised:
        llamarium.load(solved(tmp_path / "bad", **{name: source})).generate("Ay", max_tokens=2)
    assert words in str(raised.value)


def test_steps_that_are_missing_or_empty_are_named(tmp_path: Path) -> None:
    folder = solved(tmp_path / "open")
    (folder / "step05_rotate.py").unlink()
    (folder / "step07_join.py").unlink()
    start(folder)
    (folder / "step05_rotate.py").unlink()
    with pytest.raises(FunctionError, match="still empty: rotate, join; `llamarium build check`"):
        llamarium.load(folder)


# --- whose code is run ------------------------------------------------------------------------------------------------


def test_a_folder_from_elsewhere_is_refused_until_it_is_checked(tmp_path: Path, mine: Llama) -> None:
    folder = tmp_path / "foreign"
    solved(tmp_path / "first", embed='open("it ran", "w")\n')
    shutil.copytree(tmp_path / "first", folder)
    start(folder)  # writes what is missing, and vouches for nothing
    with pytest.raises(CheckpointError, match=r"foreign: holds Python code.*`llamarium build check --folder"):
        llamarium.load(folder)
    assert not (folder / "it ran").exists()
    shutil.copy(tmp_path / "first" / "course.json", folder)
    (folder / file_of(step_named("embed"))).write_text(solution(step_named("embed")))
    assert check_step(folder, "embed").passed
    assert llamarium.load(folder).generate("O", temperature=0, max_tokens=3).text
    folders.trust(folder)
    listed = folders.cache_folder() / "own_folders.jsonl"
    assert listed.read_text().count("foreign") == 1
    shutil.rmtree(folder)
    folders.trust(tmp_path)
    assert "foreign" not in listed.read_text()


def test_a_list_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLAMARIUM_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot record that"):
        start(tmp_path / "my_llama")
    assert not folders.is_trusted(tmp_path / "my_llama")


def test_modules_of_the_working_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit(9)")
    folder = solved(tmp_path / "my_llama")
    monkeypatch.chdir(tmp_path)
    assert llamarium.load(folder).generate("O", temperature=0, max_tokens=2).text


def test_a_course_names_a_model_with_weights_of_its_own(tmp_path: Path) -> None:
    inner = solved(tmp_path / "inner")
    with pytest.raises(CheckpointError, match="has no weights of its own"):
        llamarium.load(solved(tmp_path / "outer", str(inner)))
    (inner / "course.json").write_text('{"format": 1, "model": 3}')
    with pytest.raises(CheckpointError, match="model is 3; expected a name"):
        llamarium.load(inner)


def test_rope_scaling_is_refused_by_a_check_and_as_a_model(tmp_path: Path) -> None:
    """Where a check computed without it, rotations would be right that are not."""
    shutil.copytree(Path(llamarium.__file__).parent / "models" / SMALL, tmp_path / "scaled")
    config = json.loads((tmp_path / "scaled/config.json").read_text())
    config["rope_parameters"] = {
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "scaled/config.json").write_text(json.dumps(config))
    folder = tmp_path / "my_llama"
    start(folder, Course(model=str(tmp_path / "scaled"), texts=(PROMPT,)))
    for step in STEPS:
        (folder / file_of(step)).write_text(solution(step))
    words = "the course's model has RoPE scaling, which no step implements; use another model"
    with pytest.raises(InputError, match=words):
        check_step(folder, "rotate")
    with pytest.raises(FunctionError, match=words):
        llamarium.load(folder)


def test_a_sliding_window_is_refused_as_well() -> None:
    """Where a check computed without it, functions would be right that are not."""
    config = replace(preset("tiny"), sliding_window=8)
    with pytest.raises(OptionError, match="sliding window"):
        Weights(config, lambda key: np.zeros((1, 1), np.float32))


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"quantize": "Q8_0"}, {"deterministic": True}, {"input_bits": 16}]
)
def test_options_that_functions_cannot_honour_are_refused_by_name(mine: Llama, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"my_llama: {next(iter(options))} is "):
        llamarium.load(mine.name, **options)


def test_where_there_is_a_gpu_functions_run_on_the_cpu(mine: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarium.api.choose_device", lambda device: "cuda" if device == "auto" else device)
    assert llamarium.load(mine.name).runner.device == "cpu"
    with pytest.raises(OptionError, match="my_llama: device is 'cuda'"):
        llamarium.load(mine.name, device="cuda")


def test_what_functions_do_not_have_is_refused(mine: Llama) -> None:
    with pytest.raises(NoModulesError, match="load the model whose weights they use"):
        _ = mine.model
    with pytest.raises(InputError, match=f"has no codes; load {SMALL}"):
        mine.runner.codes("model.layers.0.mlp.up_proj.weight", [0])
    with pytest.raises(OptionError, match="does not support adapters"):
        mine.runner.with_adapters(())
    with pytest.raises(OptionError, match="kv_cache_dtype is int8"):
        mine.generate("O", kv_cache_dtype="int8", max_tokens=1)


def test_a_file_that_changes_ends_the_next_request(tmp_path: Path) -> None:
    folder = solved(tmp_path / "changing")
    mine = llamarium.load(folder)
    (folder / "step08_swiglu.py").write_text("x = 1\n")
    with pytest.raises(CheckpointError, match=r"step08_swiglu.py has changed since it was loaded"):
        mine.generate("O", max_tokens=1)


def test_weights_are_the_librarys(mine: Llama, theirs: Llama) -> None:
    for key in ("model.norm.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"):
        assert np.array_equal(mine.runner.dequantize(key), theirs.runner.dequantize(key))
    rows = mine.runner.dequantize("lm_head.weight", [5, 2])
    assert np.array_equal(rows, theirs.runner.dequantize("lm_head.weight", [5, 2]))
    x_2D = np.ones((2, mine.config.hidden_size), np.float32)
    assert is_close(mine.runner.read_stream(x_2D), theirs.runner.read_stream(x_2D))
    with pytest.raises(IndexError):
        mine.runner.dequantize("lm_head.weight", [mine.config.vocab_size])
    with pytest.raises(KeyError):
        mine.runner.dequantize("nothing.weight")


# --- the process and the cache ----------------------------------------------------------------------------------------


def pid_of(model: Llama) -> int:
    return model.runner._child._process.popen.pid  # pyright: ignore


def has_ended(pid: int) -> bool:
    for _ in range(200):
        try:
            os.kill(pid, 0)
            if " Z " in Path(f"/proc/{pid}/stat").read_text():
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    return False


def test_the_process_ends_with_its_model(tmp_path: Path) -> None:
    mine = llamarium.load(solved(tmp_path / "my_llama"))
    pid = pid_of(mine)
    os.kill(pid, 0)
    del mine
    gc.collect()
    assert has_ended(pid)


def test_the_process_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    folder = solved(tmp_path / "hanging", head="def head(x, t):\n    while True: pass\n")
    program = (
        f"import llamarium, threading; llama = llamarium.load({str(folder)!r}); "
        "print(llama.runner._child._process.popen.pid, flush=True); llama.generate('O')"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.3)  # until it hangs; earlier it ends as well
        parent.kill()
    assert has_ended(pid)


def test_ctrl_c_ends_the_exchange_and_the_next_request_works(
    tmp_path: Path, theirs: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = "import time\n" + changed_source("head", "return", "time.sleep(20 * (len(x_TD) == 2)); return")
    mine = llamarium.load(solved(tmp_path / "slow", head=slow))

    def interrupted(*args: Any) -> Any:
        """Wait for the answer, with an alarm meanwhile."""
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        return read_header(*args)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with monkeypatch.context() as waiting, pytest.raises(KeyboardInterrupt):
            waiting.setattr(child, "read_header", interrupted)
            mine.runner.read_stream(np.ones((2, mine.config.hidden_size), np.float32))
    finally:
        signal.signal(signal.SIGALRM, before)
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 3}
    assert mine.generate("O", **options).text == theirs.generate("O", **options).text


def test_the_process_has_as_many_threads_as_the_kernels(tmp_path: Path) -> None:
    asks = "import os\ndef embed(ids, table):\n    raise ValueError(os.environ['OMP_NUM_THREADS'])\n"
    mine = llamarium.load(solved(tmp_path / "my_llama", embed=asks))
    with pytest.raises(FunctionError, match=f"ValueError: {num_threads()} "):
        mine.generate("O", max_tokens=1)


def test_a_shared_cache_grows_copies_and_reads(theirs: Llama) -> None:
    cache = SharedCache(theirs.config, 2, 16)
    filled = np.arange(cache.blocks[1].size, dtype=np.float32).reshape(cache.blocks[1].shape)
    cache.blocks[1] = filled
    cache.grow(4)
    cache.copy_block(1, 3)
    assert (cache.num_blocks, cache.num_bytes) == (4, 4 * filled.nbytes)
    k_SKH, v_SKH = cache.read(2, [3, 1], 20)
    assert np.array_equal(k_SKH, np.concatenate([filled[2, 0], filled[2, 0, :4]]))
    assert np.array_equal(v_SKH, np.concatenate([filled[2, 1], filled[2, 1, :4]]))
    with pytest.raises(MemoryBudgetError, match="more than is available"):
        cache.grow(1 << 50)
    assert cache.num_blocks == 4


# --- commands ---------------------------------------------------------------------------------------------------------


def test_commands_take_a_folder(tmp_path: Path, mine: Llama, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "decode", "-m", mine.name, "--depths", "20", "-n", "2", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert "the functions in my_llama, " in out
    assert "the library, decode after 20: " in out
    assert main(["bench", "decode", "-m", mine.name, "--depths", "20", "-n", "2", "--rounds", "1", "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["model"] == second["beside"] == mine.name != second["model"] and first["beside"] is None
    assert main(["info", "-m", mine.name]) == 0
    assert "the functions in my_llama" in capsys.readouterr().out
    assert main(["tokenize", "To be", "-m", mine.name]) == 0
    assert main(["tree", mine.name]) == 1
    assert "and no weights; name the model in its course.json" in capsys.readouterr().err
    bad = solved(tmp_path / "bad", embed="def embed(ids, table):\n    return table\n")
    assert main(["generate", "-m", str(bad), "-p", "O"]) == 1
    assert "bad: embed: x has shape" in capsys.readouterr().err
