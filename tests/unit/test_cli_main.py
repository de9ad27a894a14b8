"""The shell's way in: help, versions, mistakes, and how each command may end."""

import argparse
import io
import os
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from llamarium.cli import main as cli
from llamarium.cli.main import PEERS_OPTIONS
from llamarium.cli.options import UsageError
from llamarium.errors import CheckpointError, OptionError


class FakeCommand:
    """What its options are.

    And how it is used.
    """

    def __init__(self, body: Callable[[argparse.Namespace], int]) -> None:
        self.run = body

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--size", type=int, default=0)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run `llamarium info ...` with another body."""

    def run(body: Callable[[argparse.Namespace], int], *words: str) -> int:
        monkeypatch.setattr(cli, "_command", lambda name: FakeCommand(body))
        return cli.main(["info", *words])

    return run


def raising(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def body(args: argparse.Namespace) -> int:
        raise error

    return body


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    for name, summary in cli.COMMANDS.items():
        assert f"  {name:<17}{summary}" in out
    assert max(map(len, out.splitlines())) <= 80
    assert not err


@pytest.mark.parametrize("name", [*cli.COMMANDS, *sorted(cli.SUBCOMMANDS)])
def test_help_fits_into_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([*name.split(), "--help"]) == 0
    assert not [line for line in capsys.readouterr().out.splitlines() if len(line) > 80]


@pytest.mark.parametrize(
    ("name", "usage"),
    [
        ("generate", "generate [PROMPT] [OPTION ...]"),
        ("trace", "trace [TEXT ...] [OPTION ...]"),
        ("batch", "batch IN OUT [OPTION ...]"),
        ("quantize", "quantize -m NAME --out FOLDER [OPTION ...]"),
    ],
)
def test_usage_is_a_line_what_has_to_be_given_and_options_if_they_are_few(
    name: str, usage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: llamarium {usage}\n\n")


def test_help_breaks_a_paragraph_anew_and_an_example_so_that_it_can_be_pasted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    assert cli.main(["next", "--help"]) == 0
    out = capsys.readouterr().out
    assert "candidates for\nthe next token with their probabilities, one of\nthem appended, and again.\n\n" in out
    assert '\n  llamarium next "I love to drink" --steps 3 \\\n      --temperature 1 --top-p 0.9 --seed 1\n' in out
    assert cli.main(["download", "--help"]) == 0
    assert (
        " \\\n      bartowski/Llama-3.2-1B-Instruct-GGUF:Llama-3.2-1B-Instruct-Q4_K_M.gguf\n" in capsys.readouterr().out
    )


def test_a_usage_error_ends_lines_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", stream)
    assert cli.main(["export", "-m", "letters"]) == 2
    assert stream.getvalue() == (
        "llamarium export: error: the following\narguments are required: --format, --out\n"
        "(`llamarium export --help` explains)\n"
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "llamarium 0.1.0\n"


def test_help_of_every_command_imports_neither_torch_nor_rich_and_is_fast(tmp_path: Path) -> None:
    program = (
        "import sys; from llamarium.cli.main import COMMANDS, main\n"
        "for words in ([], ['--help'], *([name, '--help'] for name in COMMANDS)): assert main(words) == 0, words\n"
        "heavy = {'torch', 'rich', 'numpy', 'huggingface_hub', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    # From bytecode, as an installed package has it: the first run writes it.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: llamarium") == 2 + len(cli.COMMANDS)
    # Processor time, of all of them: other work on the machine does not count. One alone takes 0.07 s.
    assert after.ru_utime - before.ru_utime < 0.6


def test_the_list_of_commands_imports_no_more_than_it_prints() -> None:
    """The first thing that is typed: 0.1 s, a half of which Python and argparse take."""
    program = (
        "import sys; before = {*sys.modules}; from llamarium.cli.main import main; assert main(['--help']) == 0\n"
        "late = {'dataclasses', 'difflib', 'inspect', 'traceback', 'llamarium.presets', 'llamarium.quant.formats'}\n"
        "assert not late & (sys.modules.keys() - before), late & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("typed", "hint"), [("genrate", "did you mean generate?"), ("zzz", "there are: chat, "), ("a\x1b[2J", "\\x1b[2J")]
)
def test_unknown_command(typed: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([typed]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert hint in err.splitlines()[-1]
    assert "\x1b" not in err


def test_an_unknown_or_shortened_option_is_a_usage_error(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(lambda args: 0, "--siz", "3") == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "llamarium info: error: no option --siz; did you mean --size? (`llamarium info --help` explains)"
    )
    assert command(lambda args: 0, "--size", "x\x1b") == 2
    assert "llamarium info: error: argument --size: expected a whole number, found 'x\\x1b'" in capsys.readouterr().err


def test_no_command_but_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--debug"]) == 2
    assert "no command" in capsys.readouterr().err


def test_exit_code_is_the_commands(command: Callable[..., int]) -> None:
    assert command(lambda args: args.size, "--size", "1") == 1


def test_a_callers_error_is_one_line(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(raising(CheckpointError("model.gguf: bad\n  magic \x1b[2J"))) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err == "llamarium: error: model.gguf: bad magic \\x1b[2J\n"


@pytest.mark.parametrize("words", [["--debug", "info"], ["info", "--debug"]])
def test_debug_shows_the_traceback_first(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_command", lambda name: FakeCommand(raising(CheckpointError("bad magic"))))
    assert cli.main(words) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "llamarium: error: bad magic"


def test_an_unexpected_exception_says_that_it_is_a_bug(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(raising(KeyError("rope"))) == 1
    assert capsys.readouterr().err == (
        "llamarium: error: KeyError: 'rope': this is a bug in llamarium; run again with --debug for the traceback\n"
    )


def test_without_pytorch_the_extra_is_named(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(raising(ModuleNotFoundError("No module named 'torch'", name="torch"))) == 1
    assert "PyTorch, which is not installed: pip install 'llamarium[torch]'" in capsys.readouterr().err


def test_a_missing_package_is_named(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(raising(ModuleNotFoundError("No module named 'tokenizers.x'", name="tokenizers.x"))) == 1
    assert "needs tokenizers, which is not installed: pip install tokenizers" in capsys.readouterr().err
    assert command(raising(ModuleNotFoundError("No module named 'llamarium.x'", name="llamarium.x"))) == 1
    assert "this is a bug in llamarium" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("max_context is 9; kv_memory holds 8", "--max-context is 9; kv_memory holds 8"),
        ("max_context: of no effect", "--max-context: of no effect"),
        ("max_context needs more", "--max-context needs more"),
        ("max_context is /a/max_context b", "--max-context is /a/max_context b"),
        ("generation_config.json: max_context is 9", "generation_config.json: max_context is 9"),
        ("kv_memory is 1 bytes", "kv_memory is 1 bytes"),
    ],
)
def test_a_setting_that_the_model_refuses_is_named_as_its_flag_where_it_was_given(
    message: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("llamarium.cli.serve.run", raising(OptionError(message)))
    assert cli.main(["serve", "--max-context", "9"]) == 1
    assert capsys.readouterr().err == f"llamarium: error: {said}\n"


def test_a_switch_that_is_refused_is_named_as_it_was_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("llamarium.cli.generate.run", raising(OptionError("stats is for one text")))
    assert cli.main(["generate", "Once", "--stats"]) == 1
    assert capsys.readouterr().err == "llamarium: error: --stats is for one text\n"


def test_what_the_system_refuses_is_no_bug(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(raising(PermissionError(13, "Permission denied", "/root/x"))) == 1
    assert capsys.readouterr().err == "llamarium: error: /root/x: Permission denied\n"
    assert command(raising(MemoryError())) == 1
    assert capsys.readouterr().err == "llamarium: error: out of memory\n"


def test_a_contradiction_is_a_usage_error(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(raising(UsageError("given twice"))) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "llamarium info: error: given twice (`llamarium info --help` explains)"
    )


def test_interrupted(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    def body(args: argparse.Namespace) -> int:
        print("half an ans", end="")
        raise KeyboardInterrupt

    assert command(body) == 130
    assert capsys.readouterr() == ("half an ans", "")


def test_a_training_command_that_is_interrupted_says_that_it_saved_nothing_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "need_torch", lambda *_: None)
    monkeypatch.setattr(cli, "_command", lambda name: FakeCommand(raising(KeyboardInterrupt())))
    assert cli.main(["finetune"]) == 130
    assert capsys.readouterr() == ("", "Ctrl-C: ended at once; nothing more was saved\n")


def test_until_main_is_there_ctrl_c_ends_the_process_without_a_word() -> None:
    program = (
        "import os, signal, sys, types, llamarium.cli\n"
        "class Main(types.ModuleType):\n"
        "    def __getattr__(self, name): os.kill(os.getpid(), signal.SIGINT)\n"  # while main is being imported
        "sys.modules['llamarium.cli.main'] = Main('main')\n"
        "llamarium.cli.start()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")  # a shell calls this 130


def test_warnings_for_the_user_are_one_line_and_others_are_not_shown(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def body(args: argparse.Namespace) -> int:
        warnings.warn("config.json: fields\n not known: \x1b", stacklevel=1)
        warnings.warn("an old name", DeprecationWarning, stacklevel=1)
        return 0

    assert command(body) == 0
    assert capsys.readouterr().err == "llamarium: warning: config.json: fields not known: \\x1b\n"


def test_output_that_a_terminal_cannot_encode_is_escaped(
    command: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))

    def body(args: argparse.Namespace) -> int:
        print("é and 🙂")
        return 0

    assert command(body) == 0
    assert raw.getvalue() == b"\xe9 and \\U0001f642\n"


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash, in which `llamarium` is this one."""
    text = f'set -o pipefail; llamarium() {{ "{sys.executable}" -m llamarium "$@"; }}; {line}'
    env = {**os.environ, "COLUMNS": "80"}
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False, env=env)


SIGNALLED = """
import sys, time
from llamarium.cli.main import main
sys.modules["llamarium.cli.main"]._dispatch = lambda words: (time.sleep(0.5), print("much"), 143)[-1]
sys.exit(main([]))
"""


def test_a_closed_pipe_ends_quietly() -> None:
    done = shell("llamarium --help | head -1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: llamarium")
    done = shell(f"env -u PYTHONUNBUFFERED '{sys.executable}' -c '{SIGNALLED}' | true")
    assert (done.returncode, done.stderr) == (143, ""), "the exit code is the command's"
    done = shell("llamarium models --json | true")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_is_one_line() -> None:
    for words in ("models --json", "--version"):  # one flushes itself, the other leaves that to the end
        done = shell(f"llamarium {words} > /dev/full")
        assert done.returncode == 1
        assert done.stderr == "llamarium: error: No space left on device\n"

    full = "import sys; from llamarium.cli.main import main; sys.exit(main(['--help']))"
    done = shell(f'"{sys.executable}" -u -c "{full}" > /dev/full')  # unbuffered: argparse itself would meet the error
    assert (done.returncode, done.stderr) == (1, "llamarium: error: No space left on device\n")


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("models --json >&-", 0, ""),
        ("models 2>&-", 0, ""),
        ("tokenize - <&-", 0, ""),
        ("nonsense 2>&-", 2, ""),
        ("nonsense <&- >&-", 2, "llamarium: error: no command 'nonsense'"),
    ],
)
def test_closed_standard_streams_are_empty_ones(line: str, code: int, message: str) -> None:
    done = shell(f"llamarium {line}")
    assert done.returncode == code
    assert message in done.stderr
    assert "this is a bug" not in done.stderr and "Traceback" not in done.stderr
    assert bool(done.stderr) == bool(message)


def test_a_text_without_quotation_marks_is_explained(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(lambda args: 0, "Once", "upon", "a", "time") == 2
    assert "A text of several words stands in quotation marks" in capsys.readouterr().err


def test_help_of_a_command_can_be_asked_for_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    for words, same in ((["help"], ["--help"]), (["help", "generate"], ["generate", "--help"])):
        assert (cli.main(words), cli.main(same)) == (0, 0)
        out = capsys.readouterr().out
        assert out[: len(out) // 2] == out[len(out) // 2 :]
    assert cli.main(["help", "genrate"]) == 2
    assert "did you mean generate?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["finetune", "--lora-r", "8"], "--rank"),
        (["generate", "--max-new-tokens=4", "Hello"], "--max-tokens"),
        (["generate", "--n", "3", "Hello"], "--num-answers"),
        (["chat", "--temprature", "1"], "--temperature"),
    ],
)
def test_an_option_of_another_program_is_answered_with_ours(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_an_option_that_is_like_none_here_gets_no_guess(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lens", "--word", "Paris"]) == 2
    assert capsys.readouterr().err.startswith("llamarium lens: error: no option --word (`llamarium lens --help`")


def test_every_new_name_is_an_option_of_some_command(capsys: pytest.CaptureFixture[str]) -> None:
    for name in cli.COMMANDS:
        assert cli.main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    for new in PEERS_OPTIONS.values():
        assert f"{new} " in shown


@pytest.mark.parametrize("name", ["train-tokenizer", "pretrain", "finetune"])
def test_data_that_stands_by_itself_is_shown_its_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "a b.txt"]) == 2
    assert f"named with --data: llamarium {name} --data 'a b.txt' (" in capsys.readouterr().err


def test_a_tokenizer_needs_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train-tokenizer"]) == 2
    assert "argument --out: has to be given" in capsys.readouterr().err


COMPLETE = """
source /dev/stdin <<< "$({python} -m llamarium completion bash)"
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _llamarium; echo "${{COMPREPLY[*]}}"
"""


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (("ge",), "generate"),
        (("chat", "--dt"), "--dtype"),
        (("chat", "--dtype", ""), "auto bfloat16 float32 float16"),
        (("bench", "serve", "--cl"), "--clients"),
        (("bench", "all", "--cl"), ""),
        (("bench", "ca"), "cache"),
    ],
)
def test_a_shell_completes(typed: tuple[str, ...], offered: str) -> None:
    script = COMPLETE.format(python=f'"{sys.executable}"')
    done = subprocess.run(
        ["bash", "-c", script, "bash", "llamarium", *typed], capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == (offered, "")


def test_fish_and_zsh_have_their_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "fish"]) == 0
    fish = capsys.readouterr().out
    assert all(f" -n __fish_use_subcommand -f -a {name} -d " in fish for name in cli.COMMANDS)
    assert "seen_subcommand_from chat' -l dtype -x -a 'auto bfloat16 float32 float16'" in fish
    assert cli.main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("autoload -U +X bashcompinit && bashcompinit\n_llamarium()")


def test_errors_of_the_command_line_say_what_was_expected(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, code, said in (
        (["bench"], 2, "required: {prefill,decode,batch,all,cache,learn-and-write,serve}"),
        (["pretrain", "--steps", "abc"], 2, "argument --steps: expected a whole number, found 'abc'"),
        (["generate", "hi", "-m", "."], 1, ".: no model; expected config.json with safetensors"),
    ):
        assert cli.main(words) == code
        assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("command", [["lens", "-k", "20"], ["trace", "--layers", "0", "--names", "q"]])
def test_what_is_long_is_broken_to_the_width(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([*command, "-m", "letters", "-p", "the cat sat on the mat, and so did I"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    if command[0] == "lens":
        assert [name for name in out.split() if name[0] == "#"] == [f"#{rank}" for rank in range(1, 21)]
    else:
        named = " ".join(out.split("\n\n")[0].splitlines())
        assert [one.split()[0] for one in named.split(" | ")] == [str(i) for i in range(named.count("|") + 1)]
