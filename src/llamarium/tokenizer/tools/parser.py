"""A streaming parser for tool calls in an answer.

A call is recognized by its content, not by the model's name. It may appear

- at the beginning of an answer, after white space: `{"name": ..., "parameters": {...}}` (or `arguments`), or
  `[name(argument='value'), ...]`;
- after `<|python_tag|>` or `<tool_call>`, anywhere: either of these; after the first tag also
  `name.call(query="...")`, and bare Python if there is a tool `code_interpreter`;
- after another call, separated by white space, `;` or `,`.

Everything else is content: calls of unknown tools, positional arguments, JSON that is not a call. Text that only looked
like a call becomes content unchanged. White space around calls, their tags and separators are not content.

A call is emitted when its first value begins. If it turns out to be malformed later, it ends as incomplete, and the
rest is content. If the text ends within it, it ends after the last complete value. A call that so far equals an earlier
one is emitted once it differs; if it does not, it ends the answer.

If a grammar constrains the answer to calls or to another format, there are calls only if the answer begins with one of
the grammar's openings.
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
"""The tool that is called by bare Python after `<|python_tag|>`; it has one argument, `code`."""

MAX_CALLS = 8
"""Maximum number of calls in an answer; small models may repeat calls without end."""

_WORD = re.compile(r"[\w-]*")
_ALL = re.compile(r".*", re.DOTALL)


class _OpenCall:
    """A call that is being parsed.

    Attributes:
        name: The tool, once known.
        waiting: Fragments of the arguments that have not been emitted.
        is_read: Whether its arguments are complete.
    """

    def __init__(self, name: str | None = None, before: Sequence[ToolCall] = ()) -> None:
        self.name = name
        self.waiting: list[str] = []
        self.is_read = False
        self._length = 0
        self._alike = before

    def add(self, fragment: str) -> None:
        self.waiting.append(fragment)
        self._alike = [call for call in self._alike if call.arguments.startswith(fragment, self._length)]
        self._length += len(fragment)

    @property
    def repeats(self) -> bool:
        """Whether it so far equals an earlier call."""
        return self._length > 0 and any(call.name == self.name for call in self._alike)


class ToolCallParser:
    """Parses one answer; the joined result does not depend on how the text is split into pieces.

    Attributes:
        is_done: Whether the maximum number of calls was reached or a call was repeated; the rest is ignored then.
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
        """Start an answer.

        Args:
            tools: The tools that may be called.
            most: Maximum number of calls.
            only_calls: Whether a grammar constrains the answer to calls, so that other text can only be the beginning
                of one and is not content.
            openings: If not empty, `only_calls` applies if the answer begins with one of these; else it has no calls.
            new_id: Returns the id of a new call.
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
        """Add a piece of the answer's text, which includes the `TAGS`; return the new deltas."""
        self._source.push(text)
        next(self._reading, None)
        emitted, self._deltas = _joined(self._deltas), []
        self._emitted += emitted
        return emitted

    def finish(self) -> list[Delta]:
        """Return the remaining deltas, at the end of the text."""
        self._source.has_ended = True
        return self.push("")

    @property
    def content(self) -> str:
        """The emitted text outside calls."""
        return text_of(self._emitted)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The emitted calls; the last one may be incomplete."""
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
        """Return whether the answer begins with an opening; if not, emit all of it as content."""
        source = self._source
        found_opening = yield from source.accept(*self._openings)
        source.put_back(len(found_opening))
        if not found_opening:
            text = source.take_run(_ALL)
            self._say("" if any(opening.startswith(text) for opening in self._openings) else text)
            while (yield from source.peek()):
                self._say(source.take_run(_ALL))
        return bool(found_opening)

    def _prose(self) -> Reading[str | None]:
        """Emit content up to the next tag and return the tag; None at the end."""
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
        """Read white space, separator and tag before a call; return all of it, and the tag."""
        source = self._source
        gap += yield from source.blanks()
        gap += (yield from source.accept(";", ",")) if has_called else ""
        gap += yield from source.blanks()
        new_tag = yield from source.accept(PYTHON_TAG, TOOL_CALL)
        return gap + new_tag + (yield from source.blanks()), new_tag or tag

    def _close(self) -> Reading[bool]:
        blanks = yield from self._source.blanks()
        closing_tag = yield from self._source.accept(TOOL_CALL_END)
        if not closing_tag:
            self._source.put_back(len(blanks))
        return bool(closing_tag)

    def _no_call(self, gap: str, tag: str, has_called: bool, *, is_new: bool) -> Reading[None]:
        """Continue after text that is not a call, or not a complete one."""
        source, call = self._source, self._call
        is_at_end = not (yield from source.peek())
        if self.is_done:
            return
        if is_at_end and call.repeats:
            self._emit()
            is_new = True
        self._call = _OpenCall()
        held = source.held()
        if is_new:  # the call has been emitted, but not the text read since then
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
        """Read `{"name": ..., "parameters": {...}}`, with the keys in any order."""
        reader = ValueReader(self._source, JSON, self._write)
        self._call = _OpenCall(None, self._made)
        names: set[str] = set()
        yield from reader.expect("{")
        while True:
            key: str = json.loads((yield from reader.text()))
            key = "parameters" if key == "arguments" else key
            if key in names:
                raise NotACall
            names.add(key)
            yield from reader.expect(":")
            yield from self._member(key, reader)
            if (yield from reader.expect(",", "}")) == "}":
                break
        if "parameters" not in names:
            self._write("{}")
            self._complete()
        if "name" not in names:
            raise NotACall

    def _member(self, key: str, reader: ValueReader) -> Reading[None]:
        """Read the value of a key of a call; unknown keys make it something else."""
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
        """Read `name(argument='value')`, or `name.call(...)`, with keyword arguments only."""
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
        """Read the rest of the answer as Python code."""
        self._call = _OpenCall(CODE_INTERPRETER, self._made)
        self._write('{"code": "')
        while (yield from self._source.peek()):
            self._write(in_json(self._source.take_run(_ALL)))
        self._write('"}')
        self._complete()

    # --- deltas -------------------------------------------------------------------------------------------------------

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
        """Mark the call's arguments as complete, and end the call if its name is known."""
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
    for kind, group in groupby(deltas, key=lambda delta: (type(delta), getattr(delta, "index", 0))):
        members = list(group)
        if kind[0] is ContentDelta:
            members = [ContentDelta(text_of(members))]
        elif kind[0] is CallArguments:
            text = "".join(delta.fragment for delta in members if isinstance(delta, CallArguments))
            members = [CallArguments(kind[1], text)] if text else []
        joined += members
    return joined
