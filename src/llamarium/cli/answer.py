"""Send a message in a dialog, write the answer as it is generated, and explain why it ended.

On a terminal, lines are wrapped between words.
"""

import os
import shutil
import sys
import unicodedata
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llamarium.cli.output import Stopwatch, draws, note, printable, write_text
from llamarium.cli.speculation import SPECULATION, speculation_details
from llamarium.cli.text import check_fits
from llamarium.errors import counted

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.generation.conversation import Conversation


_PROMPT_SHOWN = 2000  # characters
_MIN_REPEATED, _MIN_TIMES, _MAX_PERIOD = 64, 4, 128


def say(
    conversation: "Conversation[Llama]",
    text: str,
    options: dict[str, Any],
    stats: bool | None,
    *,
    may_repeat: bool = False,
    can_set: bool = False,
) -> None:
    """Send a message and write the answer; an interrupted answer stays in the dialog.

    Hints refer to slash commands if `can_set`, else to flags.
    """
    check_fits(conversation.llama, text)
    watch, out = Stopwatch(stats), writer()
    pieces = conversation.say(text, **options)
    ids: list[int] = []
    reason, period = None, None
    try:
        for piece in pieces:
            watch.count(len(piece.token_ids))
            out.write(piece.text)
            ids += piece.token_ids
            reason = piece.finish_reason
            period = None if may_repeat or reason else repeated(ids)
            if period is not None:
                break
    finally:
        pieces.close()  # adds an interrupted answer to the dialog
        out.finish()
    out.write("\n")
    out.finish()
    if period is not None:
        rarer = "/set repetition_penalty 1.1" if can_set else "--repetition-penalty 1.1"
        hint = f"{rarer} makes that rarer{'' if can_set else ', --allow-repetition lets it go on'}"
        note(f"[stopped: the last {_needed(period)} tokens are the same {period} again and again. {hint}]")
    elif reason == "length":
        _explain_length(conversation, len(ids), options, can_set)
    watch.report(*speculation_details(options))


def repeated(ids: Sequence[int]) -> int | None:
    """Return the period of the repetition at an answer's end: at least 4 times and 64 tokens; None if there is none."""
    for period in range(1, _MAX_PERIOD + 1):
        min_tokens = _needed(period)
        if len(ids) >= min_tokens and all(ids[-i] == ids[-i - period] for i in range(1, min_tokens - period + 1)):
            return period
    return None


def _needed(period: int) -> int:
    """Return the number of tokens that must be repeated."""
    times = max(_MIN_TIMES, -(-_MIN_REPEATED // period))
    return times * period


def _explain_length(conversation: "Conversation[Llama]", count: int, options: dict[str, Any], can_set: bool) -> None:
    """Explain why an answer was cut off, unless it reached a `max_tokens` that was given."""
    llama = conversation.llama
    if count < llama.chat_params(**sampling_only(options)).max_tokens:
        context = llama.config.max_position_embeddings
        note(f"[cut: the context of {context:,} tokens is full{'; /reset begins a new dialog' if can_set else ''}]")
    elif "max_tokens" not in options:
        note(f"[cut at {counted(count, 'token')}; {'/set max_tokens' if can_set else '-n'} allows more]")


def sampling_only(options: dict[str, Any]) -> dict[str, Any]:
    """Return only the sampling options."""
    return {name: value for name, value in options.items() if name not in (*SPECULATION, "kv_cache_dtype")}


_FENCE = "```"
_TAB = 8  # columns


class Plain:
    """Writes every piece immediately and unchanged, to a pipe or a file."""

    def write(self, text: str) -> None:
        """Write a piece."""
        write_text(text)

    def write_prompt(self, text: str) -> None:
        """Write nothing, as a pipe or a file gets only the answer."""

    def finish(self) -> None:
        """Do nothing, as nothing is buffered."""


class Wrapped:
    """Wraps lines between words at the terminal's width.

    Lines of code (between lines that begin with ```) are not wrapped, as a break would be copied with the code. Lines
    may be broken between any wide characters (Chinese, Japanese), as these have no spaces between words.
    """

    def __init__(self, columns: int, write: Callable[[str], None] = write_text) -> None:
        self._columns = columns - 1  # a character in the last column makes some terminals start a new line
        self._write = write
        self._column = 0
        self._blanks, self._word = "", ""
        self._line = ""  # the beginning of the line that the text has, for fences
        self._is_code = False

    def write(self, text: str) -> None:
        """Write a piece; its last word is buffered until it is complete."""
        ready = [part for character in printable(text) for part in self._take(character)]
        if ready:
            self._write("".join(ready))

    def write_prompt(self, text: str) -> None:
        """Write the end of the prompt, dimmed unless `NO_COLOR` is set."""
        ending = text if len(text) <= _PROMPT_SHOWN else f"…{text[-_PROMPT_SHOWN:]}"
        ready = [part for character in printable(ending) for part in self._take(character)]
        dim, plain = ("", "") if os.environ.get("NO_COLOR") else ("\x1b[2m", "\x1b[0m")
        sys.stdout.write(dim)
        self._write("".join([*ready, *self._end_word()]))
        sys.stdout.write(plain)
        sys.stdout.flush()

    def finish(self) -> None:
        """Write the buffered word."""
        self._write("".join(self._end_word()))

    def _take(self, character: str) -> list[str]:
        if character == "\n":
            return self._end_line()
        self._line = (self._line + character)[: len(_FENCE)]
        if character in " \t":
            ready = self._end_word()
            self._blanks += character
            return ready
        self._word += character
        return self._end_word() if _width(character) == 2 else []

    def _end_line(self) -> list[str]:
        ready = [*self._end_word(), "\n"]
        if self._line == _FENCE:
            self._is_code = not self._is_code
        self._column, self._line = 0, ""
        return ready

    def _end_word(self) -> list[str]:
        blanks, word, self._blanks, self._word = self._blanks, self._word, "", ""
        for blank in blanks:
            self._column = self._column + 1 if blank == " " else (self._column // _TAB + 1) * _TAB
        width = sum(map(_width, word))
        crosses = word and self._column + width > self._columns and not self._is_code and self._line != _FENCE
        if crosses and self._column > len(blanks):  # something stands before it
            blanks, self._column = "\n", 0
        self._column += width
        return [blanks, word]


def writer() -> Plain | Wrapped:
    """Return the writer of answers to stdout."""
    return Wrapped(shutil.get_terminal_size().columns) if draws(sys.stdout) else Plain()


def _width(character: str) -> int:
    """Return the number of columns of a character: 0 for combining characters."""
    if unicodedata.combining(character) or character == "\u200d":
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
