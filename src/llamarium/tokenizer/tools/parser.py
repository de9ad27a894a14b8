"""Calls in an answer's text, read while it comes.

A call is known by its content, not by the model's name. It may stand

- at the beginning of an answer, after white space: `{"name": ..., "parameters": {...}}` (or `arguments`), and
  `[name(argument='value'), ...]`;
- after `<|python_tag|>` or `<tool_call>`, anywhere: either of these; after the first also `name.call(query="...")`, and
  bare Python where there is a tool `code_interpreter`;
- after another call, with white space, `;` or `,` between them.

Everything else is content: calls of tools that there are not, arguments that are not named, JSON that is no call. What
looked like a call is then given back as it was. White space beside calls, their tags and separators belong to them.

A call is emitted when its first value begins. If it goes wrong after that, it ends as incomplete, and what follows is
content. If the text ends in it, it ends where the last value that could be read ended. One that is so far the same as a
call before is emitted once it differs; if it never does, it ends the answer.

An answer whose calls a grammar holds, beside another form, has calls only where it begins as the grammar writes them.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from llamarium.tokenizer.tools.definition import ToolCall, ToolDefinition, new_call_id
from llamarium.tokenizer.tools.deltas import CallArguments, CallBegin, CallEnd, ContentDelta, Delta, calls_of, text_of
from llamarium.tokenizer.tools.forms import PYTHON_TAG, TOOL_CALL, TOOL_CALL_END
from llamarium.tokenizer.tools.source import Reading, Source
from llamarium.tokenizer.tools.values import JSON, PYTHON, NotACall, ValueReader, in_json

CODE_INTERPRETER = "code_interpreter"
"""A tool of this name is called by Python after `<|python_tag|>`; it has one argument, `code`."""

MAX_CALLS = 8
"""Calls of one answer: small models would make some forever."""

_WORD = re.compile(r"[\w-]*")
_ALL = re.compile(r".*", re.DOTALL)


class _OpenCall:
    """A call that is being read.

    Attributes:
        waiting: Arguments that are not emitted.
        is_read: Its arguments are there to the end.
    """

    def __init__(self, name: str | None = None, before: Sequence[ToolCall] = ()) -> None:
        self.name = name
        self.waiting: list[str] = []
        self.is_read = False
        self._length = 0
        self._alike = before

    def add(self, fragment: str) -> None:
        self.waiting.append(fragment)
        self._alike = [one for one in self._alike if one.arguments.startswith(fragment, self._length)]
        self._length += len(fragment)

    @property
    def repeats(self) -> bool:
        """Whether it is so far the same as a call before."""
        return self._length > 0 and any(one.name == self.name for one in self._alike)


class ToolCallParser:
    """Reads one answer. The pieces in which its text comes change nothing: the joined result is the same.

    Attributes:
        is_done: There are as many calls as may be, or one came again: the rest of the answer is passed over.
    """

    def __init__(
        self,
        tools: Iterable[ToolDefinition],
        *,
        most: int = MAX_CALLS,
        only_calls: bool = False,
        openings: Sequence[str] = (),
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """Begin an answer.

        `only_calls`: it is held to calls, and what else there is, is the beginning of one. With `openings` it is so
        where it begins with one of them, and has no calls otherwise.
        """
        self.is_done = False
        self._only_calls = only_calls
        self._openings = openings
        self._names = {tool.name for tool in tools}
        self._most = most
        self._new_id = new_id
        self._source = Source()
        self._reading = self._answer()
        self._call = _OpenCall()
        self._begun: list[CallBegin] = []
        self._ended: list[CallEnd] = []
        self._made: Sequence[ToolCall] = ()
        self._deltas: list[Delta] = []
        self._emitted: list[Delta] = []

    def push(self, text: str) -> list[Delta]:
        """Take a piece of the answer's text, in which the `TAGS` are spelled; return what is known now."""
        self._source.push(text)
        next(self._reading, None)
        emitted, self._deltas = _joined(self._deltas), []
        self._emitted += emitted
        return emitted

    def finish(self) -> list[Delta]:
        """Return what was kept back, now that no more text comes."""
        self._source.has_ended = True
        return self.push("")

    @property
    def content(self) -> str:
        """The emitted text outside of calls."""
        return text_of(self._emitted)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The emitted calls; the last may be incomplete."""
        return calls_of(self._emitted)

    # --- the answer ---------------------------------------------------------------------------------------------------

    def _answer(self) -> Reading[None]:
        tag: str | None = ""
        if self._openings:
            self._only_calls = yield from self._opens()
            tag = "" if self._only_calls else None
        while tag is not None:
            yield from self._calls(tag)
            tag = yield from self._prose()

    def _opens(self) -> Reading[bool]:
        """Return whether the answer begins with calls; otherwise all of it is content, unless it ends before that."""
        source = self._source
        found = yield from source.accept(*self._openings)
        source.put_back(len(found))
        if not found:
            text = source.take_run(_ALL)
            self._say("" if any(opening.startswith(text) for opening in self._openings) else text)
            while (yield from source.peek()):
                self._say(source.take_run(_ALL))
        return bool(found)

    def _prose(self) -> Reading[str | None]:
        """Read content up to the next tag and return that, which is not emitted; None at the end."""
        source = self._source
        while (yield from source.peek()):
            self._say(source.take_until("<"))
            if tag := (yield from source.accept(PYTHON_TAG, TOOL_CALL)):
                return tag
            if (yield from source.peek()):
                self._say(source.take())
        return None

    def _calls(self, tag: str) -> Reading[None]:
        gap, has_called = tag, False
        while not self.is_done:
            gap, tag = yield from self._gap(gap, tag, has_called)
            count = len(self._begun)
            try:
                yield from self._one(tag)
            except NotACall:
                yield from self._no_call(gap, tag, has_called, is_new=len(self._begun) > count)
                return
            self._source.settle()
            is_closed = tag == TOOL_CALL and (yield from self._close())
            self._source.settle()
            gap, tag, has_called = "", TOOL_CALL if tag == TOOL_CALL and not is_closed else "", True

    def _gap(self, gap: str, tag: str, has_called: bool) -> Reading[tuple[str, str]]:
        """Read what may stand before a call; return all of it, and the tag."""
        source = self._source
        gap += yield from source.blanks()
        gap += (yield from source.accept(";", ",")) if has_called else ""
        gap += yield from source.blanks()
        found = yield from source.accept(PYTHON_TAG, TOOL_CALL)
        return gap + found + (yield from source.blanks()), found or tag

    def _close(self) -> Reading[bool]:
        blanks = yield from self._source.blanks()
        found = yield from self._source.accept(TOOL_CALL_END)
        if not found:
            self._source.put_back(len(blanks))
        return bool(found)

    def _no_call(self, gap: str, tag: str, has_called: bool, *, is_new: bool) -> Reading[None]:
        """Go on after what was no call, or not to its end."""
        source, call = self._source, self._call
        is_at_end = not (yield from source.peek())
        if self.is_done:
            return
        if is_at_end and call.repeats:
            self._emit()
            is_new = True
        self._call = _OpenCall()
        held = source.held()
        if is_new:  # the call has been emitted, and what was read since then has not
            if not call.is_read:
                self._end(is_complete=False)
            if call.is_read or not is_at_end:
                source.put_back(len(held))
            source.settle()
        elif tag == PYTHON_TAG and CODE_INTERPRETER in self._names and not (is_at_end and held == gap):
            source.put_back(len(held) - len(gap))
            source.settle()
            yield from self._code()
        else:
            source.put_back(len(held) - len(gap))
            is_over = has_called and not gap.strip() and not (yield from source.peek())
            self._say("" if is_over else gap)

    # --- one call -----------------------------------------------------------------------------------------------------

    def _one(self, tag: str) -> Reading[None]:
        character = yield from self._source.peek()
        if character == "{":
            yield from self._json_call()
        elif character == "[":
            yield from self._list_of_calls()
        elif tag == PYTHON_TAG:
            yield from self._python_call(ValueReader(self._source, PYTHON, self._write), may_be_method=True)
        else:
            raise NotACall

    def _json_call(self) -> Reading[None]:
        """Read `{"name": ..., "parameters": {...}}`, in any order."""
        reader = ValueReader(self._source, JSON, self._write)
        self._call = _OpenCall(None, self._made)
        seen: set[str] = set()
        yield from reader.expect("{")
        while True:
            key: str = json.loads((yield from reader.text()))
            key = "parameters" if key == "arguments" else key
            if key in seen:
                raise NotACall
            seen.add(key)
            yield from reader.expect(":")
            yield from self._member(key, reader)
            if (yield from reader.expect(",", "}")) == "}":
                break
        if "parameters" not in seen:
            self._write("{}")
            self._complete()
        if "name" not in seen:
            raise NotACall

    def _member(self, key: str, reader: ValueReader) -> Reading[None]:
        """Read what stands after a key of a call; there are no others than these."""
        if key == "parameters":
            yield from reader.object()
            self._complete()
        elif key == "name":
            name: str = json.loads((yield from reader.text()))
            if name not in self._names:
                raise NotACall
            self._call.name = name
            if self._call.is_read:
                self._complete()
        elif key not in ("type", "id") or ((yield from reader.text()) != '"function"' and key == "type"):
            raise NotACall

    def _list_of_calls(self) -> Reading[None]:
        """Read `[name(argument='value'), ...]`."""
        reader = ValueReader(self._source, PYTHON, self._write)
        yield from reader.expect("[")
        while not self.is_done:
            yield from self._source.blanks()
            yield from self._python_call(reader)
            if (yield from reader.expect(",", "]")) == "]":
                return

    def _python_call(self, reader: ValueReader, *, may_be_method: bool = False) -> Reading[None]:
        """Read `name(argument='value')`, or `name.call(...)`; each argument has a name."""
        source = self._source
        name = yield from source.run(_WORD)
        if name not in self._names:
            raise NotACall
        self._call = _OpenCall(name, self._made)
        if may_be_method:
            yield from source.accept(".call")
        yield from reader.expect("(")
        reader.later("{")
        keys: set[str] = set()
        while not (yield from reader.is_at_end(")", bool(keys))):
            reader.later(", " if keys else "")
            yield from source.blanks()
            key = yield from source.run(_WORD)
            if not key or key in keys:
                raise NotACall
            keys.add(key)
            yield from reader.expect("=")
            reader.later(f"{json.dumps(key, ensure_ascii=False)}: ")
            yield from reader.value(1)
        reader.now("}")
        self._complete()

    def _code(self) -> Reading[None]:
        """Read Python to the answer's end."""
        self._call = _OpenCall(CODE_INTERPRETER, self._made)
        self._write('{"code": "')
        while (yield from self._source.peek()):
            self._write(in_json(self._source.take_run(_ALL)))
        self._write('"}')
        self._complete()

    # --- telling ------------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        if text and not self.is_done and not self._only_calls:
            self._deltas.append(ContentDelta(text))
        self._source.settle()

    def _write(self, fragment: str) -> None:
        self._call.add(fragment)
        if self._call.name is not None and not self._call.repeats:
            self._emit()

    def _emit(self) -> None:
        call = self._call
        assert call.name is not None
        if not self._begun or len(self._ended) == len(self._begun):
            self._begun.append(CallBegin(len(self._begun), self._new_id(), call.name))
            self._deltas.append(self._begun[-1])
        self._deltas.append(CallArguments(self._begun[-1].index, "".join(call.waiting)))
        call.waiting = []
        self._source.settle()

    def _complete(self) -> None:
        """Note that the call's arguments are all there, and tell it if its name is known."""
        self._call.is_read = True
        if self._call.repeats:
            self.is_done = True
        elif self._call.name is not None:
            self._write("")
            self._end()

    def _end(self, *, is_complete: bool = True) -> None:
        self._ended.append(CallEnd(self._begun[-1].index, is_complete))
        self._deltas.append(self._ended[-1])
        self._made = calls_of([*self._emitted, *self._deltas])
        self.is_done = len(self._ended) >= self._most


def _joined(deltas: Sequence[Delta]) -> list[Delta]:
    joined: list[Delta] = []
    for is_kind, group in groupby(deltas, key=lambda delta: (type(delta), getattr(delta, "index", 0))):
        found = list(group)
        if is_kind[0] is ContentDelta:
            found = [ContentDelta(text_of(found))]
        elif is_kind[0] is CallArguments:
            text = "".join(delta.fragment for delta in found if isinstance(delta, CallArguments))
            found = [CallArguments(is_kind[1], text)] if text else []
        joined += found
    return joined
