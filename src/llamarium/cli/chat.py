"""Talk with a model.

Without a question it asks for one, again and again, and remembers the dialog;
/help lists what else can be typed. Ctrl-C stops an answer, Ctrl-D leaves.

  llamarium chat
  llamarium chat "Why is the sky blue?" --temperature 0
  llamarium chat --system "Answer in rhymes." -m org/name
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from llamarium.cli.options import UsageError, add_json, add_kv_cache, add_model, add_stats, load_llama
from llamarium.cli.output import Stopwatch, emit, note, write_text
from llamarium.cli.sampling import add_prompt_lookup, add_sampling, lookup_details, prompt_lookup, sampling
from llamarium.cli.text import add_text, read_text
from llamarium.errors import ContextLengthError, InputError, LlamariumError, OutputError, escape

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.generation.conversation import Conversation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_text(parser, "QUESTION", "ask this one question and leave")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the dialog")
    add_prompt_lookup(parser)
    add_json(parser)
    add_stats(parser)
    add_sampling(parser, max_tokens=1024)
    add_model(parser)
    add_kv_cache(parser)


def run(args: argparse.Namespace) -> int:
    """Answer one question, or talk."""
    question, options = read_text(args), sampling(args)
    if args.json and question is None:
        raise UsageError("argument --json: needs a QUESTION")
    llama = load_llama(args, falls_back=False)  # the packaged model knows no dialogs
    llama.sampling_params(**options)  # raises for a value out of range, before anyone types a question
    options |= prompt_lookup(args)
    if llama.tokenizer.chat_format is None:
        llama.tokenizer.chat([])  # raises what there is to say about it
    if question is None:
        Repl(llama, args.system, options, args.stats).run()
    elif args.json:
        _answer_as_json(llama, args.system, question, options)
    else:
        _say(llama.conversation(args.system), question, options, args.stats)
    return 0


def _answer_as_json(llama: "Llama", system: str | None, question: str, options: dict[str, Any]) -> None:
    from dataclasses import asdict

    messages = [{"role": "user", "content": question}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    generation = llama.chat(messages, **options)
    lookup = {"prompt_lookup": options["prompt_lookup"].counts()} if "prompt_lookup" in options else {}
    emit({"num_prompt_tokens": len(generation.prompt_ids)} | asdict(generation.completions[0]) | lookup)


def _say(conversation: "Conversation", text: str, options: dict[str, Any], stats: bool | None) -> None:
    """Say something and write the answer as it grows; interrupted, what there is of it stays in the dialog."""
    watch = Stopwatch(stats)
    pieces = cast(Generator[Any], conversation.say(text, **options))
    try:
        for piece in pieces:
            watch.count(len(piece.token_ids))
            write_text(piece.text)
    finally:
        pieces.close()  # puts the answer into the dialog, if it was interrupted while it was being written
    write_text("\n")
    watch.report(*lookup_details(options))


class Repl:
    """The dialog at the terminal."""

    def __init__(self, llama: "Llama", system: str | None, options: dict[str, Any], stats: bool | None) -> None:
        self.llama = llama
        self.options = options
        self.stats = stats
        self.conversation = llama.conversation(system)
        self.interactive = sys.stdin.isatty()
        self.readline = _readline() if self.interactive else None
        self.commands: dict[str, tuple[str, Callable[[str], None]]] = {
            "/reset": ("forget the dialog, but not the system prompt", self.reset),
            "/system": ("TEXT: set the system prompt; without TEXT, show it", self.system),
            "/save": ("FILE: save the dialog as JSON; --force FILE replaces a file", self.save),
            "/help": ("show this", self.help),
            "/quit": ("leave; so does Ctrl-D", lambda _: None),
        }

    def run(self) -> None:
        """Take turns until the person leaves."""
        if self.interactive:
            note(f"{self.llama.name}. /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves.")
        while (line := self.read_line()) is not None and line.strip() != "/quit":
            try:
                self.take(line.strip())
            except LlamariumError as error:
                if not self.interactive:
                    raise
                hint = "; /reset begins a new dialog" if isinstance(error, ContextLengthError) else ""
                note(f"llamarium: error: {' '.join(str(error).split())}{hint}")

    def read_line(self) -> str | None:
        """Ask for one line; None at its end."""
        while True:
            try:
                return self._input()
            except EOFError:
                if self.interactive:
                    note("")
                return None
            except UnicodeDecodeError as error:
                raise InputError(f"standard input is no UTF-8 text: {error.reason}") from None
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                typed = self.readline.get_line_buffer() if self.readline else ""
                note("" if typed else "\nTo leave: Ctrl-D or /quit")

    def _input(self) -> str:
        if self.interactive and not sys.stdout.isatty():  # input() would write the prompt among the answers
            sys.stderr.write("> ")
            sys.stderr.flush()
            return input()
        return input("> " if self.interactive else "")

    def take(self, line: str) -> None:
        """Do what one line says."""
        name, _, rest = line.partition(" ")
        if name in self.commands:
            self.commands[name][1](rest.strip())
        elif line.startswith("/") and not line.startswith("//"):
            raise InputError(f"no command {escape(name, 40)}; /help lists them; // begins a text with a slash")
        elif line:
            self.say(line.removeprefix("/"))

    def say(self, text: str) -> None:
        """Say something; Ctrl-C stops the answer alone."""
        try:
            _say(self.conversation, text, self.options, self.stats)
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            note("\n[stopped]")

    def reset(self, _: str) -> None:
        """Begin a new dialog."""
        del self.conversation.messages[int(self._has_system()) :]
        note("[a new dialog]")

    def system(self, text: str) -> None:
        """Set the system prompt, or show it."""
        messages = self.conversation.messages
        if not text:
            note(messages[0]["content"] if self._has_system() else "[no system prompt]")
            return
        messages[: int(self._has_system())] = [{"role": "system", "content": text}]
        note("[system prompt set]")

    def save(self, rest: str) -> None:
        """Write the dialog to a file.

        Raises:
            OutputError: If there is no name, the file exists, or it cannot be written.
        """
        force = rest.startswith("--force ")
        name = rest.removeprefix("--force ").strip()
        if not name:
            raise OutputError("no file; write /save FILE")
        path = Path(os.path.expanduser(name))  # noqa: PTH111 - pathlib's raises RuntimeError for ~nobody
        save_dialog(path, self.llama.name, self.conversation.messages, force=force)
        note(f"[saved {name}]")

    def help(self, _: str) -> None:
        """List the commands."""
        note("\n".join(f"  {name:<9}{what}" for name, (what, _) in self.commands.items()))

    def _has_system(self) -> bool:
        return self.conversation.messages[:1] != [] and self.conversation.messages[0]["role"] == "system"


def save_dialog(path: Path, model: str, messages: list[dict[str, str]], *, force: bool) -> None:
    """Write a dialog as JSON, complete or not at all.

    Raises:
        OutputError: If the file exists and `force` is false, or it cannot be written.
    """
    from llamarium.io import atomic_file

    try:
        if path.exists() and not force:
            raise OutputError(f"{escape(path)} exists; /save --force {escape(path)} replaces it")
        with atomic_file(path) as file:
            file.write(json.dumps({"model": model, "messages": messages}, indent=2).encode())
    except (OSError, ValueError) as error:  # ValueError: a NUL or half a surrogate pair in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise OutputError(f"{escape(path)}: cannot be written: {reason}") from None


def _readline() -> ModuleType | None:
    """Import line editing and history, where Python has them: `input()` uses them from then on."""
    with suppress(ImportError):
        import readline

        return readline
    return None
