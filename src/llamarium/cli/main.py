"""The shell's way in: which commands there are, and how each of them ends.

A command is one module of this folder with two functions: `add_arguments(parser)`, which imports nothing heavy, and
`run(args)`, which returns the exit code. Its docstring is its help text. Only the chosen command's module is imported,
and torch only when it runs, so `llamarium --help` costs what Python's start and argparse cost.

| exit code | meaning                                               |
|-----------|-------------------------------------------------------|
| 0         | done; also when the reader of a pipe had enough       |
| 1         | failed: one line on stderr says why                   |
| 2         | the command line was not understood                   |
| 130       | interrupted by Ctrl-C                                 |
"""

import argparse
import importlib
import os
import re
import shlex
import sys
import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from textwrap import indent as indent_lines
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from llamarium import __version__
from llamarium.cli.errors import UsageError
from llamarium.cli.output import end_line, filled, note, warn
from llamarium.cli.threads import put_threads_back
from llamarium.errors import LlamariumError, escape
from llamarium.extras import need_torch

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

COMMANDS: Mapping[str, str] = {
    "chat": "talk with a model",
    "generate": "continue a text",
    "next": "show the candidates for the next tokens, step by step",
    "score": "show how probable a model finds each token of a text",
    "perplexity": "measure how well a model predicts a text file",
    "tokenize": "show a text's bytes, pieces, merges and ids",
    "tree": "print a model's module tree",
    "info": "show a model's configuration, costs and files",
    "neighbors": "rank embedding rows near a word, or king - man + woman",
    "trace": "list the activations of a forward pass by name",
    "lens": "show what a model would say after each layer",
    "attention": "show how much a head's tokens look at each other",
    "inspect": "look inside a model in the browser",
    "serve": "OpenAI- and Anthropic-compatible HTTP server",
    "batch": "answer a file of requests, in OpenAI's batch format",
    "replay": "compute a server's recorded answers again, and compare them",
    "models": "list the models that are built in or on this machine",
    "download": "fetch a model",
    "doctor": "check this installation",
    "pretrain": "train a model from scratch",
    "experiment": "train with one thing changed, and compare the runs",
    "finetune": "teach a model by examples: all weights, LoRA or QLoRA",
    "dpo": "teach a model by preferences: of two answers, the better one",
    "grpo": "teach a model by rewards: a function rates its answers",
    "data": "show how training data is understood",
    "merge": "merge a LoRA adapter into its base model",
    "quantize": "write a model in 4 or 8 bits, laid out for CPUs",
    "export": "write a model as a Hugging Face folder or a GGUF file",
    "site": "write the page as files for any static host",
    "build": "write a Llama yourself, step by step",
    "train-tokenizer": "learn a vocabulary from texts",
    "bench": "measure how fast a model is on this machine",
    "completion": "print a script that completes commands in a shell",
}

SUBCOMMANDS = frozenset({"bench serve", "build check", "build hint", "build pack"})
"""Commands of two words, which have options of their own; each is a module too (`bench_serve`)."""

TRAINING = frozenset({"pretrain", "experiment", "finetune", "dpo", "grpo"})
"""The commands for which it was measured how PyTorch's threads should wait for each other."""

PEERS_OPTIONS: Mapping[str, str] = {
    "--lora-r": "--rank", "--lora-rank": "--rank", "--lora-alpha": "--alpha", "--lora-dropout": "--dropout",
    "--lr": "--learning-rate", "--too-long": "--truncate", "--batch-size": "--batch-rows", "--max-seq-len": "--context",
    "--max-new-tokens": "--max-tokens", "--n-predict": "--max-tokens", "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty", "--ctx-size": "--max-context", "--max-model-len": "--max-context",
    "--parallel": "--max-num-seqs", "--lora": "--adapter", "--tokens": "--positions", "--n": "--num-answers",
}  # fmt: skip
"""Options of other programs, and the ones here that do the same."""

_MANY_OPTIONS = 12  # their usage has six lines; more lines would push the description off a small terminal
_HUB_BARS = "HF_HUB_DISABLE_PROGRESS_BARS"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose messages cannot drive a terminal."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where help is, and exit with 2."""
        for kind, expected in (("int", "a whole number"), ("float", "a number")):
            message = message.replace(f": invalid {kind} value: ", f": expected {expected}, found ", 1)
        with suppress(OSError):
            note(f"{self.prog}: error: {escape(message, 500)} (`{self.prog} --help` explains)")
        self.exit(2)

    def _print_message(self, message: str, file: "SupportsWrite[str] | None" = None) -> None:
        """Print help or the version; argparse's own way is silent about a full disk."""
        (file or sys.stdout).write(message)


class Help(argparse.RawDescriptionHelpFormatter):
    """Help whose texts and headings fit into the width; a line that fits stays as it was written."""

    def add_usage(self, usage: Any, actions: Iterable[argparse.Action], groups: Any, prefix: str | None = None) -> None:
        """List what has to be given, and options if they are few: many would bury what the command says of itself."""
        listed = list(actions)
        if usage is None and len(listed) > _MANY_OPTIONS:
            others = argparse.Action([], "more", nargs="*", metavar="OPTION")
            listed, groups = (
                [*(action for action in listed if action.required or not action.option_strings), others],
                (),
            )
        super().add_usage(usage, listed, groups, prefix)

    def start_section(self, heading: str | None) -> None:
        """Begin a group of options."""
        super().start_section(heading and filled(heading, self._width))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return indent_lines(filled(text, width + 2, anew=True), indent)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal in Latin-1 shows \u escapes instead of failing
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    code = 0
    try:
        with _one_line_warnings(), _no_bars_in_files():
            code = _exit_code(words)
        sys.stdout.flush()  # here, where a full disk can still be reported
    except BrokenPipeError:
        pass  # the reader had enough: `llamarium generate ... | head -1`
    except KeyboardInterrupt:
        code = 130
        with suppress(OSError):
            end_line()
            if command_name(words) in TRAINING:  # while it begins, or the second time: the first one saves
                note("Ctrl-C: ended at once; nothing more was saved")
    except Exception as error:  # noqa: BLE001 - the last place that can explain it
        code = _explain(error, debug="--debug" in words)
    finally:
        put_threads_back()
    return _leave_streams(code)


def _open_closed_streams() -> None:
    """Put the empty device where a standard stream was closed (`<&-`, `>&-`), for which Python has None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - for as long as the process lives
            setattr(sys, name, stream)


def _exit_code(words: list[str]) -> int:
    try:
        return _dispatch(words)
    except SystemExit as leave:  # argparse's, after --help or a usage error
        return leave.code if isinstance(leave.code, int) else 1


def _dispatch(words: list[str]) -> int:
    words = _joined(words)
    if "help" in words[:1]:
        words = [*words[1:2], "--help"]
    name = command_name(words)
    command = _command(name) if name is not None and (name in COMMANDS or name in SUBCOMMANDS) else None
    parser, chosen = _parsers(name, command)
    if not words:
        parser.print_help()
        return 0
    if name is not None and command is None:
        similar = _close(name, COMMANDS)
        guess = f"did you mean {similar[0]}?" if similar else f"there are: {', '.join(COMMANDS)}"
        parser.error(f"no command {name!r}; {guess}")
    args, unknown = parser.parse_known_args(words)
    if unknown:
        chosen.error(_about_extra(unknown[0], chosen))
    if command is None:  # --debug alone
        parser.error("no command; `llamarium --help` lists them")
    if name in TRAINING:
        need_torch(f"llamarium {name}", "train")
    try:
        return command.run(args)
    except UsageError as error:
        chosen.error(str(error))
    except LlamariumError as error:
        error.args = (_with_flags(str(error), args, chosen),)
        raise


def _with_flags(text: str, args: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """Spell the setting that a message begins with as its flag, where it has a value."""
    about = re.match(r"\w+(?=[ :])", text)
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage]
        if about and action.dest == about[0] and action.option_strings and getattr(args, about[0], None) is not None:
            flag = next(
                (option for option in action.option_strings if option.startswith("--")), action.option_strings[0]
            )
            return flag + text.removeprefix(about[0])
    return text


def _joined(words: list[str]) -> list[str]:
    for idx, pair in enumerate(pairwise(words)):
        if " ".join(pair) in SUBCOMMANDS and command_name(words[:idx]) in (None, "help"):
            return [*words[:idx], " ".join(pair), *words[idx + 2 :]]
    return words


def command_name(words: Sequence[str]) -> str | None:
    """Return the first word of a command line that is no option."""
    return next((word for word in words if not word.startswith("-")), None)


def _about_extra(word: str, parser: argparse.ArgumentParser) -> str:
    """Say what may be meant by a word that no option takes."""
    options = [option for action in parser._actions for option in action.option_strings]  # pyright: ignore[reportPrivateUsage]
    if not word.startswith("-"):
        if "--data" in options:
            usage = f"{parser.prog} --data {shlex.quote(word)}"
            return f"what is {word!r}? What is to be learned is named with --data: {usage}"
        return f"what is {word!r}? A text of several words stands in quotation marks"
    word = word.partition("=")[0]
    bare = {option.lstrip("-"): option for option in options}
    candidates = [PEERS_OPTIONS.get(word, ""), *(option for option in options if option.startswith(word))]
    candidates += [bare[close] for close in _close(word.lstrip("-"), bare)]
    intended = next((option for option in candidates if option in options), None)
    return f"no option {word}" + (f"; did you mean {intended}?" if intended else "")


def _parsers(name: str | None, command: ModuleType | None) -> tuple[Parser, Parser]:
    """Return the parser of the command line, and within it the chosen command's, the only one it needs."""
    listing = "\n".join(f"  {listed_name:<17}{summary}" for listed_name, summary in COMMANDS.items())
    parser = Parser(
        prog="llamarium",
        usage="%(prog)s [-h] [--version] [--debug] COMMAND ...",
        description="Run, train, serve and inspect Llama models.",
        epilog=f"commands:\n{listing}\n\n`llamarium help COMMAND` explains a command. To begin: llamarium chat",
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"llamarium {__version__}")
    _add_debug(parser, default=False)
    chosen = parser
    commands = parser.add_subparsers(prog=parser.prog, metavar="COMMAND", help=argparse.SUPPRESS, parser_class=Parser)
    if name is not None and command is not None:
        chosen = commands.add_parser(name, description=command.__doc__, formatter_class=Help, allow_abbrev=False)
        command.add_arguments(chosen)
        _add_debug(chosen, default=argparse.SUPPRESS)  # not False: `llamarium --debug COMMAND` has set it before
    return parser, chosen


def command_parser(name: str) -> Parser:
    """Return a command's parser."""
    return _parsers(name, _command(name))[1]


def _add_debug(parser: Parser, default: object) -> None:
    parser.add_argument("--debug", action="store_true", default=default, help="show a traceback when something fails")


def _close(word: str, names: Iterable[str]) -> list[str]:
    """Return the name that a word looks like, if there is one."""
    import difflib

    return difflib.get_close_matches(word, [*names], n=1)


def _command(name: str) -> ModuleType:
    return importlib.import_module(f"llamarium.cli.{name.replace('-', '_').replace(' ', '_')}")


def _explain(error: Exception, *, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exception(error)
    if isinstance(error, LlamariumError):
        text = str(error)
    elif isinstance(error, OSError) and error.strerror:
        text = ": ".join(str(part) for part in (error.filename, error.strerror) if part)
    elif isinstance(error, MemoryError):
        text = f"out of memory {error}"
    elif isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("llamarium"):
        module = error.name.partition(".")[0]
        needed, package = ("PyTorch", "'llamarium[torch]'") if module == "torch" else (module, module)
        text = f"this needs {needed}, which is not installed: pip install {package}"
    else:
        hint = "report it with the traceback above" if debug else "run again with --debug for the traceback"
        text = f"{type(error).__name__}: {error}: this is a bug in llamarium; {hint}"
    with suppress(OSError):  # stderr may be what is full
        note(f"llamarium: error: {escape(' '.join(text.split()), 2000)}")
    return 1


def _leave_streams(code: int) -> int:
    """Flush the streams; what has no reader is dropped, or Python would complain at its exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):  # a stand-in for a stream has no descriptor
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)
    return code


@contextmanager
def _one_line_warnings() -> Generator[None]:
    """Show what concerns the user as one line; what concerns developers only if Python was started with -W."""
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
            warnings.simplefilter("default", UserWarning)
        warnings.showwarning = lambda message, category, filename, lineno, file=None, line=None: warn(str(message))
        yield


@contextmanager
def _no_bars_in_files() -> Generator[None]:
    """Keep huggingface_hub's progress bars to terminals, unless the user says something else; it reads this once."""
    if sys.stderr.isatty() or _HUB_BARS in os.environ:
        yield
        return
    os.environ[_HUB_BARS] = "1"
    try:
        yield
    finally:
        os.environ.pop(_HUB_BARS, None)


if __name__ == "__main__":
    sys.exit(main())
