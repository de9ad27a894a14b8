"""The dialog at the terminal: lines that are said, commands that begin with a slash, and the files of `/save`."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from llamarium.adapters.model_names import public_name
from llamarium.cli.answer import sampling_only, say
from llamarium.cli.output import note, note_paragraph
from llamarium.errors import ContextLengthError, InputError, LlamariumError, OutputError, counted, escape, show_value
from llamarium.sampling.params import PARAMETERS, parameters_of

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.engine.tiers.disk_cache import DiskCache

_QUOTES = '"""'
_SHOWN = 200  # characters of a message that is shown again
_MAX_BRANCHES = 64
_LEAVING = ("/quit", "/exit", "/bye")
_SPELLINGS = ((_QUOTES, f"begins a text of several lines, which {_QUOTES} ends"), ("//", "begins a text with a slash"))
_OPTIONS = {option.name: option.help.partition(" (default")[0] for option in parameters_of("cli")}
_OPTIONS["max_tokens"] = "of an answer, at most"


class Repl:
    """The dialog at the terminal; `options` are `Llama.chat`'s."""

    def __init__(
        self,
        llama: "Llama",
        system: str | None,
        options: dict[str, Any],
        stats: bool | None,
        *,
        adapter: Path | None = None,
        may_repeat: bool = False,
        disk_cache: "DiskCache | None" = None,
    ) -> None:
        self.llama = llama
        self.adapter = adapter
        self.options = options
        self.stats = stats
        self.may_repeat = may_repeat
        self.conversation = llama.conversation(system, disk_cache)
        self.branch, self.branches = "main", {"main": self.conversation}
        self.interactive = sys.stdin.isatty()
        self.readline = _readline() if self.interactive else None
        self.commands: dict[str, tuple[str, Callable[[str], object]]] = {  # one that takes words begins with theirs
            "/reset": ("forget the dialog, but not the system prompt", self.reset),
            "/undo": ("take back the last question and its answer", lambda _: self.take_back()),
            "/retry": ("answer the last question again, with another seed", self.retry),
            "/fork": ("NAME: go on in a branch of that name; this one stays as it is", self.fork),
            "/switch": ("NAME: go on in another branch; without NAME, list them", self.switch),
            "/set": ("NAME VALUE: set an option, - takes it back; without NAME, list them", self.set),
            "/system": ("TEXT: set the system prompt; without TEXT, show it", self.system),
            "/load": ("FILE: go on with a dialog that was saved", self.load),
            "/save": ("FILE: save the dialog as JSON; --force FILE replaces a file", self.save),
            "/help": ("show this", self.help),
            "/quit": ("leave; so do /exit, /bye and Ctrl-D", lambda _: None),
        }

    def run(self) -> bool:
        """Read lines until /quit or the end of the input; return whether all of them were understood and answered."""
        is_fine = True
        if self.interactive:
            name = public_name(self.llama.name, None, {}).removesuffix(".gguf")  # its folders would take the line
            name += f" with the adapter {self.adapter}" if self.adapter else ""
            name = escape(name) + (".\n" if self.adapter else ". ")
            note(f"{name}/help lists commands, Ctrl-C stops an answer, Ctrl-D leaves.")
        while (line := self.read_line()) is not None and line.strip() not in _LEAVING:
            try:
                self.take(line.strip())
            except LlamariumError as error:
                is_fine = False
                hint = "; /reset begins a new dialog" if isinstance(error, ContextLengthError) else ""
                note(f"llamarium: error: {' '.join(str(error).split())}{hint}")
        return is_fine

    def read_line(self) -> str | None:
        """Ask for one line, or for several that were pasted together or stand between quotes; None at the end."""
        while True:
            try:
                return self._lines()
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

    def _lines(self) -> str:
        line = self._input("> ")
        if not line.startswith(_QUOTES):
            return line
        lines = [line.removeprefix(_QUOTES)]
        while not lines[-1].rstrip().endswith(_QUOTES):
            try:
                lines.append(self._input(". "))
            except EOFError:
                raise InputError(f"the text that began with {_QUOTES} has no end; write {_QUOTES} after it") from None
        return "\n".join(lines).strip().removesuffix(_QUOTES)

    def _input(self, prompt: str) -> str:
        if self.interactive and not sys.stdout.isatty():  # input() would write the prompt among the answers
            sys.stderr.write(prompt)
            sys.stderr.flush()
            return input()
        return input(prompt if self.interactive else "")

    def take(self, line: str) -> None:
        """Run a command, or send the line as a message; InputError for an unknown command, or words behind one."""
        name, _, rest = line.partition(" ")
        summary, run = self.commands.get("/quit" if name in _LEAVING else name, ("", None))
        if run is not None and rest and not summary.split()[0].isupper():
            raise InputError(f"{name} takes no words behind it; // begins a text with a slash")
        if run is not None:
            run(rest.strip())
        elif line.startswith("/") and not line.startswith("//"):
            raise InputError(f"no command {escape(name, 40)}; /help lists them; // begins a text with a slash")
        elif line:
            self.say(line.removeprefix("/"))

    def say(self, text: str) -> None:
        """Say something; Ctrl-C stops the answer alone."""
        try:
            say(self.conversation, text, self.options, self.stats, may_repeat=self.may_repeat, can_set=True)
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            note("\n[stopped]")

    def reset(self, _: str) -> None:
        """Forget the dialog, but not the system prompt."""
        del self.conversation.messages[int(self._has_system()) :]
        note("[a new dialog]")

    def take_back(self) -> str | None:
        """Remove the last question and what follows it, and return it; None if there is none."""
        messages = self.conversation.messages
        questions = [place for place, message in enumerate(messages) if message["role"] == "user"]
        if not questions:
            note("[nothing to take back]")
            return None
        question = messages[questions[-1]]["content"]
        del messages[questions[-1] :]
        note(f"[taken back: {escape(question, 60)}]")
        return question

    def retry(self, _: str) -> None:
        """Answer the last question again; a seed that was given counts up, so that the answer may be another."""
        if self.options.get("seed") is not None:
            self.options["seed"] += 1
        if (question := self.take_back()) is not None:
            self.say(question)

    def fork(self, name: str) -> None:
        """Go on in a new branch; InputError for a name that is taken, or one branch too many."""
        if not name or name in self.branches:
            raise InputError(f"/fork needs a new name; there are: {escape(', '.join(self.branches))}")
        if len(self.branches) == _MAX_BRANCHES:
            raise InputError(f"there are {_MAX_BRANCHES} branches, which is the most")
        self.branches[name] = self.conversation.fork()
        self.switch(name)

    def switch(self, name: str) -> None:
        """Go on in another branch, or list them; InputError if there is none of that name."""
        if not name:
            for other, branch in self.branches.items():
                mark = " (this one)" if other == self.branch else ""
                note(f"  {escape(other, 40)}: {counted(len(branch.messages), 'message')}{mark}")
            return
        if name not in self.branches:
            raise InputError(f"no branch {escape(name, 40)}; there are: {escape(', '.join(self.branches))}")
        self.branch, self.conversation = name, self.branches[name]
        note(f"[branch {escape(name, 40)}: {counted(len(self.conversation.messages), 'message')}]")

    def set(self, rest: str) -> None:
        """Set an option of `/set`'s list, or take it back (`-`); without a value, show what the next answer has."""
        name, _, text = rest.partition(" ")
        name, text = name.replace("-", "_"), text.strip().lower()
        if name and name not in _OPTIONS:
            raise InputError(f"/set does not take {escape(name, 40)}; it takes {', '.join(_OPTIONS)}")
        changed = {option: value for option, value in self.options.items() if option != name or not text}
        if text and text not in ("-", "none"):
            changed[name] = text  # which is refused if it is no number
            with suppress(ValueError):
                changed[name] = PARAMETERS[name].kind(text)
        params = self.llama.chat_params(**sampling_only(changed))
        self.options = changed
        for option in [name] if name else _OPTIONS:
            value = "random" if option == "seed" and changed.get(option) is None else getattr(params, option)
            note(f"[{option} is {value}]" if text else f"  {option:<18} {value:<4} {_OPTIONS[option]}")

    def system(self, text: str) -> None:
        """Set the system prompt, or show it."""
        messages = self.conversation.messages
        if not text:
            note(messages[0]["content"] if self._has_system() else "[no system prompt]")
            return
        messages[: int(self._has_system())] = [{"role": "system", "content": text}]
        note("[system prompt set]")

    def save(self, rest: str) -> None:
        """Write the dialog as JSON; OutputError without a name, or if the file exists and `--force` is not given."""
        force = rest.startswith("--force ")
        name = rest.removeprefix("--force ").strip()
        if not name:
            raise OutputError("no file; write /save FILE")
        save_dialog(_path(name), self.llama.name, self.conversation.messages, force=force)
        note(f"[saved {name}]")

    def load(self, name: str) -> None:
        """Replace the dialog by one from a file; InputError if it holds none."""
        if not name:
            raise InputError("no file; write /load FILE")
        messages = load_dialog(_path(name))
        self.conversation.messages[:] = messages
        for message in messages:
            note(f"{message['role']}: {escape(message['content'], _SHOWN)}")
        note(f"[loaded {name}: {counted(len(messages), 'message')}]")

    def help(self, _: str) -> None:
        """List commands and spellings."""
        listed = [(name, summary) for name, (summary, _) in self.commands.items()] + [*_SPELLINGS]
        note_paragraph("\n".join(f"  {name:<9}{summary}" for name, summary in listed))

    def _has_system(self) -> bool:
        return self.conversation.messages[:1] != [] and self.conversation.messages[0]["role"] == "system"


def _path(name: str) -> Path:
    return Path(os.path.expanduser(name))  # noqa: PTH111 - pathlib's raises RuntimeError for ~nobody


def _readline() -> ModuleType | None:
    """Import line editing and history, where Python has them: `input()` uses them from then on."""
    with suppress(ImportError):
        import readline

        if "libedit" not in (readline.__doc__ or ""):  # GNU's: a paste is one text; for its own prompt Python says off
            readline.parse_and_bind("set enable-bracketed-paste on")
        return readline
    return None


_ROLES = ("system", "user", "assistant")
_MAX_BYTES = 2**26


def save_dialog(path: Path, model: str, messages: list[dict[str, Any]], *, force: bool) -> None:
    """Write a dialog as JSON, complete or not at all."""
    from llamarium.io import atomic_file

    try:
        if path.exists() and not force:
            raise OutputError(f"{escape(path)} exists; /save --force {escape(path)} replaces it")
        with atomic_file(path) as file:
            file.write(json.dumps({"model": model, "messages": messages}, indent=2).encode())
    except (OSError, ValueError) as error:  # ValueError: a NUL or half a surrogate pair in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise OutputError(f"{escape(path)}: cannot be written: {reason}") from None


def load_dialog(path: Path) -> list[dict[str, Any]]:
    """Read the messages of a dialog."""
    from llamarium.config import read_json_object

    messages = read_json_object(path, _MAX_BYTES).get("messages")
    if not isinstance(messages, list):
        raise InputError(f'{escape(path)}: "messages" is {show_value(messages)}; expected a dialog, as /save writes it')
    return [_message(item, i, path) for i, item in enumerate(cast(list[Any], messages))]


def _message(item: Any, i: int, path: Path) -> dict[str, Any]:
    where = f"{escape(path)}: messages[{i}]"
    if not isinstance(item, dict):
        raise InputError(f"{where} is {show_value(item)}; expected an object with role and content")
    message = cast(dict[str, Any], item)
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES or (role == "system" and i > 0):
        expected = "system at the beginning alone, user and assistant"
        raise InputError(f"{where}.role is {show_value(role)}; expected {expected}")
    if not isinstance(content, str):
        raise InputError(f"{where}.content is {show_value(content)}; expected text")
    if others := sorted(set(message) - {"role", "content"}):
        raise InputError(f"{where} has {escape(', '.join(others))} besides role and content, which would be lost")
    return {"role": role, "content": content}
