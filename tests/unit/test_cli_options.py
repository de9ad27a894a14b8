"""Shared options: each one that can be given reaches what it is for."""

import argparse
import contextlib
import gc
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llamarium.api import CHAT_MAX_TOKENS
from llamarium.cli import options, sampling, threads
from llamarium.cli import text as text_option
from llamarium.cli.main import main
from llamarium.errors import DownloadError, InputError
from llamarium.hub.resolve import packaged_path, resolve
from llamarium.kernels.threads import num_threads
from llamarium.sampling.params import SamplingParams, parameters_of

pytestmark = pytest.mark.torch("options that reach modules")


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    text_option.add_text(parser, "PROMPT", "the text")
    sampling.add_sampling(parser)
    options.add_model(parser)
    return parser.parse_args(words)


def test_nothing_given_leaves_everything_to_the_model() -> None:
    assert sampling.sampling(parse()) == {}


def test_every_sampling_option_reaches_the_api_by_its_name() -> None:
    words = (
        "-n 7 --temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 --presence-penalty 0.2 "
        "--frequency-penalty -0.3 --logit-bias 5=-100 --logit-bias 6=2.5 --seed 0 --stop a --stop b --stop-id 2 "
        "--stop-id 3"
    )
    given = sampling.sampling(parse(*words.split()))
    assert given == {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "logit_bias": {5: -100.0, 6: 2.5},
        "seed": 0,
        "stop": ("a", "b"),
        "stop_token_ids": (2, 3),
    }


def test_zero_is_given_too() -> None:
    assert sampling.sampling(parse("--temperature", "0", "--seed", "0")) == {"temperature": 0.0, "seed": 0}


def test_one_token_with_two_biases() -> None:
    with pytest.raises(options.UsageError, match="twice"):
        sampling.sampling(parse("--logit-bias", "5=1", "--logit-bias", "5=2"))


@pytest.mark.parametrize("text", ["5", "5=", "=1", "a=1", "5=b", "5:1"])
def test_a_bias_that_is_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentError, match="expected ID=BIAS"):
        parse("--logit-bias", text)


def test_every_loading_option_reaches_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Loaded:
        name = ""

    def load(path: Path, **given: Any) -> Loaded:
        seen.update(given, path=path)
        return Loaded()

    monkeypatch.setattr("llamarium.api.load", load)
    monkeypatch.setattr(options, "set_threads", lambda threads: seen.update(threads=threads))
    words = "--dtype float32 --device cuda:1 --quantize q8_0 --dequantize use --deterministic --input-bits 8"
    words += " --strict --threads 3 -m"
    llama = options.load_llama(parse(*words.split(), str(tmp_path)))
    assert llama.name == str(tmp_path)
    assert callable(seen.pop("progress"))
    assert seen == {
        "path": tmp_path,
        "dtype": "float32",
        "device": "cuda:1",
        "quantize": "Q8_0",
        "dequantize": "use",
        "deterministic": True,
        "input_bits": 8,
        "strict": True,
        "threads": 3,
    }


def test_where_nothing_can_be_fetched_the_packaged_model_answers_unless_one_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resolve(name: str) -> Path:
        if name == options.DEFAULT_MODEL:
            raise DownloadError("smollm2-135m cannot be fetched: no network")
        return packaged_path(name)

    monkeypatch.setattr("llamarium.hub.resolve.resolve", resolve)
    llama = options.load_llama(parse())
    assert llama.name == "shakespeare-char" and llama.generate("ROMEO", max_tokens=3).text
    err = capsys.readouterr().err
    assert "no network" in err and "shakespeare-char is used" in err
    with pytest.raises(DownloadError):
        options.load_llama(parse("-m", options.DEFAULT_MODEL))
    with pytest.raises(DownloadError):
        options.load_llama(parse(), falls_back=False)


def test_threads_are_the_command_s_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr("torch.get_num_threads", lambda: (5, *seen)[-1])
    monkeypatch.setattr("torch.set_num_threads", seen.append)
    threads.set_threads(None)
    threads.put_threads_back()
    assert seen == []
    threads.set_threads(2)
    threads.set_threads(3)
    threads.put_threads_back()
    assert seen == [2, 3, 2, 5]
    threads.put_threads_back()
    assert seen == [2, 3, 2, 5]


def test_threads_are_set_without_torch_and_for_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("llamarium.kernels.threads.allowed_cpus", lambda: 9)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    threads.set_threads(2)
    assert (num_threads(), os.environ["OMP_NUM_THREADS"]) == (2, "2")  # which PyTorch reads when it is imported
    threads.set_threads(3)
    assert num_threads() == 3
    threads.put_threads_back()
    assert (num_threads(), os.environ["OMP_NUM_THREADS"]) == (4, "4")
    monkeypatch.delenv("OMP_NUM_THREADS")
    threads.set_threads(2)
    threads.put_threads_back()
    assert "OMP_NUM_THREADS" not in os.environ


LATER = """
from llamarium.cli.threads import put_threads_back, set_threads
from llamarium.kernels.threads import num_threads
set_threads(1)
import torch
assert (torch.get_num_threads(), num_threads()) == (1, 1)
put_threads_back()
assert torch.get_num_threads() == 3
"""

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from llamarium.cli.main import main
assert main(["generate", "x", "--threads", "1", "-n", "1", "-m", "shakespeare-char"]) == 0
from llamarium.kernels.native import library
assert library().lm_threads() == 1
"""


@pytest.mark.parametrize("script", [LATER, WITHOUT_TORCH])
def test_threads_in_a_process_of_its_own(script: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "3"}
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("text", ["0", "-1", "1025", "3000000000"])
def test_threads_out_of_range(text: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=f"expected a whole number, 1 to 1024, found '{text}'"):
        parse(f"--threads={text}")


def test_ctrl_c_during_an_import_comes_after_it() -> None:
    done: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), options.importing_torch():
        with contextlib.suppress(BaseException):  # as some imports do
            signal.raise_signal(signal.SIGINT)
        done.append("the rest")
    assert done == ["the rest"]
    assert signal.getsignal(signal.SIGINT) is before


def test_the_collector_rests_during_the_first_import_only(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    with options.importing_torch():
        assert gc.isenabled(), "torch is here already"
    assert not frozen
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(ImportError), options.importing_torch():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() and frozen == [True]


def test_the_collector_rests_while_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    resting: list[bool] = []

    def load(path: Path, **_: object) -> argparse.Namespace:
        resting.append(not gc.isenabled())
        return argparse.Namespace()

    monkeypatch.setattr("llamarium.api.load", load)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.delitem(sys.modules, "torch")
    options.load_llama(parse("-m", str(tmp_path)))
    assert resting == [True] and gc.isenabled()


def test_text_by_itself_or_as_an_option() -> None:
    assert text_option.read_text(parse("hello")) == "hello"
    assert text_option.read_text(parse("-p", "hello")) == "hello"
    assert text_option.read_text(parse()) is None
    with pytest.raises(options.UsageError, match="given twice"):
        text_option.read_text(parse("hello", "-p", ""))
    with pytest.raises(options.UsageError, match="no PROMPT"):
        text_option.require_text(parse(), "PROMPT")
    assert text_option.require_text(parse(""), "PROMPT") == ""


@pytest.mark.parametrize(
    ("given", "text"), [(b"a b\n", "a b"), (b"a\r\n", "a"), (b"a\n\n", "a\n"), (b"", ""), ("é".encode(), "é")]
)
def test_text_from_standard_input(given: bytes, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="ascii"))
    assert text_option.read_text(parse("-")) == text


def test_standard_input_that_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    with pytest.raises(InputError, match="byte 2 is 0xff"):
        text_option.read_text(parse("-p", "-"))


def test_lists() -> None:
    assert options.whole_numbers("0,-1, 3") == (0, -1, 3)
    assert options.names("q, k") == ("q", "k")
    with pytest.raises(argparse.ArgumentTypeError, match="expected whole numbers with commas, as in 0,1,-1, found"):
        options.whole_numbers("1,")


def test_numbers_that_are_none_are_named_without_a_functions_name() -> None:
    for parse_one, expected in ((options.positive, "at least 1"), (options.whole_number(1, 1024), "1 to 1024")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"^expected a whole number, {expected}, found 'two'$"):
            parse_one("two")


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("-n -3", "argument -n/--max-tokens"),
        ("-n 0", "argument -n/--max-tokens"),
        ("--top-p 2", "argument --top-p"),
        ("--top-p 0", "argument --top-p"),
        ("--top-k -1", "argument --top-k"),
        ("--min-p 1.5", "argument --min-p"),
        ("--temperature 1e-7", "argument --temperature"),
        ("--repetition-penalty 0", "argument --repetition-penalty"),
        ("--frequency-penalty nan", "argument --frequency-penalty"),
        ("--seed -1", "argument --seed"),
        ("--min-tokens -1", "argument --min-tokens"),
        ("--min-tokens 9 -n 3", "argument --min-tokens"),
        ("--stop-id -1", "argument --stop-id"),
        ("--stop=", "argument --stop"),
        ("--logit-bias 3=900", "argument --logit-bias"),
        ("--regex a --stop b", "argument --stop"),
        ("--regex a --min-tokens 1", "argument --min-tokens"),
        ("--choice=", "argument --choice"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_setting_out_of_range_names_its_flag_before_anything_is_loaded(
    command: str, words: str, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("llamarium.api.load", lambda *_, **__: pytest.fail("was loaded"))
    assert main([command, "hello", *words.split()]) == 2
    assert capsys.readouterr().err.startswith(f"llamarium {command}: error: {flag}: ")


def test_every_parameter_of_sampling_is_parsed_within_its_own_bounds() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    sampling.add_choosing(parser)
    for one in parameters_of("cli"):
        assert one.low is not None and one.high is not None
        value = one.kind(one.high) if one.high < 1e300 else 7
        assert getattr(parser.parse_args([f"--{one.flag}", str(value)]), one.name) == value
        with pytest.raises(argparse.ArgumentError, match=re.escape(one.expected)):
            parser.parse_args([f"--{one.flag}", str(one.low - 1)])


def test_a_draft_that_is_not_there_is_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("llamarium.api.load", lambda *_, **__: pytest.fail("was loaded"))
    assert main(["generate", "hello", "-m", "shakespeare-char", "--draft-model", "nothere"]) == 1
    assert "no built-in model, file or folder nothere" in capsys.readouterr().err


def test_a_draft_is_looked_up_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[object] = []

    def counted(name: str | Path) -> Path:
        asked.append(name)
        return resolve(name)

    monkeypatch.setattr("llamarium.hub.resolve.resolve", counted)
    assert main(["generate", "ROMEO:", "-n", "2", "-m", "shakespeare-char", "--draft-model", "letters"]) == 0
    assert asked.count("letters") == 1, capsys.readouterr().err


@pytest.mark.parametrize(("words", "limit"), [(["generate"], SamplingParams().max_tokens), (["chat"], CHAT_MAX_TOKENS)])
def test_help_says_the_default_length_of_an_answer(
    words: list[str], limit: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--help"]) == 0
    assert f"maximum number of tokens of the answer (default: {limit:,})" in " ".join(capsys.readouterr().out.split())


def test_endless_standard_input_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_option, "_MAX_BYTES", 10)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x" * 11)))
    with pytest.raises(InputError, match="more than 10 bytes"):
        text_option.read_text(parse("-"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x" * 10)))
    assert text_option.read_text(parse("-")) == "x" * 10


def test_threads_that_the_system_does_not_start_are_refused() -> None:
    program = (
        "import resource, sys\n"
        "from llamarium.cli.threads import _check_startable\n"
        "from llamarium.errors import OptionError\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))\n"  # a thread's stack takes 8 MB of it
        "try: _check_startable(1024)\n"
        "except OptionError as error: print(error)\n"
        "_check_startable(1)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"1,024 threads cannot be started here, only \d+; give fewer .*\n", done.stdout)
