"""Chat templates that come with a model: Jinja programs from a stranger, applied to what other strangers say.

Two things can go wrong, and each has its own guard.

**The template.** It runs in Jinja's sandbox, in a process with limits on time, memory and output
(`template_worker`), so one that never ends is ended.

**The dialog.** The template writes one string in which control tokens and people's words are mixed, and a user's
`<|im_end|>` would look like the template's own. So before rendering, an invisible mark (a Unicode noncharacter) is set
into each text wherever it spells a control token or could become part of one at its edges. In the output, what
reads as a control token is the template's; then the marks are taken out and the rest is encoded as ordinary text.

A template is a program and may look at the texts or change them, so the marks alone prove nothing. Two more
renderings of the same dialog are the proof: without marks, which must give the same text, and with the texts' first
and last characters of control tokens replaced, which must give the same control tokens. Otherwise the dialog is
refused. A template that is made to build control tokens out of people's words, from both ends, is not
caught; it could as well write any dialog of its own.

Starting a process takes a hundred times as long as rendering, so the dialogs of a data set go through few of them. And
some templates write today's date, by `strftime_now`: a request gets today, but what is learned must not
depend on the day on which it is read, so there the day is always `TRAINING_DAY`.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from llamarium.errors import ChatFormatError, LlamariumError, ToolError, show_value
from llamarium.file_names import TEMPLATE, TOKENIZER, TOKENIZER_CONFIG
from llamarium.tokenizer.chat.content import ContentForms, may_differ, probes, read_forms
from llamarium.tokenizer.chat.format import (
    Part,
    TrainingDialog,
    Vocabulary,
    Written,
    encode_written,
    value_of,
    value_or_error,
)
from llamarium.tokenizer.chat.messages import TemplateMessages, fit_forms, has_parts
from llamarium.tokenizer.chat.rendering import TRAINING_DAY, TemplateRenderer
from llamarium.tokenizer.chat.renderings import Dialog, Marked, Prefix, Rendering
from llamarium.tokenizer.chat.template_worker import read_sought, read_variables
from llamarium.tokenizer.chat.turn_ends import read_turn_ends
from llamarium.tokenizer.chat.turns import read_turns
from llamarium.tokenizer.chat.values import Spellings, plain_value
from llamarium.tokenizer.special import Parts
from llamarium.tokenizer.tools.definition import ToolDefinition
from llamarium.tokenizer.tools.forms import ToolForm, check_form, form_of_template

MAX_TEMPLATE_CHARACTERS = 2**18  # the longest published ones have about 20,000
_DIALOGS_AT_ONCE = 200
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDEE)]
_BORDERS = "\ufdee\ufdef"  # of what a template marks as the assistant's
_MARKS_ANSWERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_NAMES_TOOLS = re.compile(r"\btools\b")
_READ_KEYS = re.compile(r"([\w\]]+)(?:\.get\(|\.|\[)\s*['\"]?(\w+)")
T = TypeVar("T")
_OF_TOOLS = re.compile("call|func|param|tool")


class TemplateFormat:
    """A dialog format that a model's Jinja template defines."""

    name = "template"

    def __init__(self, tokenizer: Vocabulary, template: str) -> None:
        """Take a template; it is compiled when a dialog is rendered."""
        self._source = _file_of_template(tokenizer.source)
        if len(template) > MAX_TEMPLATE_CHARACTERS:
            raise ChatFormatError(
                f"{self._source}: the chat template has {len(template)} characters; at most "
                f"{MAX_TEMPLATE_CHARACTERS} are read"
            )
        self._tokenizer = tokenizer
        self._template = template
        self._messages = TemplateMessages(template)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end an answer: what the files and the spellings say, and what the template writes there."""
        special = self._tokenizer.special
        written = read_turn_ends(self._template, tuple(self._fixed().items()), tuple(special.may_end.items()))
        return tuple(dict.fromkeys((*special.ends, *written)))

    @property
    def tool_form(self) -> ToolForm | None:
        """The form of the calls that the template writes, as far as its text tells."""
        return form_of_template(self._template)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[ToolDefinition] = (),
        tool_form: ToolForm | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a dialog; see `ChatFormat.encode`.

        Messages may have any keys that the template reads, with JSON values. The template is given the tools and
        writes them, unless a form is named: then they, calls and results become parts of the messages' texts.
        """
        if tool_form is not None:
            check_form(tool_form)
            turns = read_turns(messages, tools, tool_form)
            messages, tools = [{"role": turn.role, "content": turn.text} for turn in turns], ()
        elif tools and not _NAMES_TOOLS.search(self._template):
            raise self._unwritten("tools", "tools")
        if unknown := [name for name in variables or {} if name not in self.variables]:
            raise ChatFormatError(
                f"{self._source}: its chat template does not read {show_value(unknown)}; leave it out"
            )
        call = self._marked(messages, tools, variables).call(len(messages), add_generation_prompt)
        outputs = self._renderer.render(call.variants, datetime.now())
        return self._tokenizer.encode_parts(self._checked(call, outputs))

    @property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads, besides those of every dialog; none where it cannot be parsed."""
        return read_variables(self._template)

    @property
    def marks_answers(self) -> bool:
        """Whether the template says what is the assistant's, by `{% generation %}`."""
        return _MARKS_ANSWERS.search(self._template) is not None

    @property
    def message_keys(self) -> frozenset[str]:
        """The keys that the template reads of anything but tools and their calls, which have names of their own."""
        return frozenset(key for holder, key in _READ_KEYS.findall(self._template) if not _OF_TOOLS.search(holder))

    def _unwritten(self, field: str, what: str) -> ToolError:
        return ToolError(
            field,
            f"are not written by {self._source}'s chat template, which has nothing for {what}; name a "
            "tool_form (llama3_json, pythonic, hermes) to have them written into the messages",
        )

    def parts_of(self, dialogs: Sequence[TrainingDialog]) -> Iterator[list[Part] | LlamariumError]:
        """Yield the pieces of each dialog; see `ChatFormat.parts_of`. It is always `TRAINING_DAY`.

        A template that marks what is the assistant's, by `{% generation %}`, is believed. Others do not say what is
        whose, so they are asked: what they write up to an answer, and what with it. An
        answer is known if each begins with the one before, and if a token that ends answers stands in what is new.
        Otherwise it is refused: the template changes earlier turns when there are later ones, say.
        """
        if self.marks_answers:
            return self._render_each(self._whole, self._marked_parts, dialogs, _BORDERS)
        return self._render_each(self._prefixes, self._divide, dialogs)

    def _whole(self, dialog: TrainingDialog) -> list[Rendering]:
        """Return the one rendering of a dialog in which the template itself marks the answers."""
        if any(border in json.dumps(dialog, default=str, ensure_ascii=False) for border in _BORDERS):
            raise ChatFormatError("the dialog holds U+FDEE or U+FDEF, which are noncharacters; take them out")
        return [self._marked(*dialog).call(len(dialog.messages), False)]

    def _marked_parts(self, dialog: TrainingDialog, rendered: Sequence[Parts]) -> list[Part]:
        (parts,) = rendered
        return encode_written(self._tokenizer, self._between_borders(parts))

    def _between_borders(self, parts: Parts) -> list[Written]:
        """Return a dialog's parts cut at the borders; what stands between two is an answer."""
        written: list[Written] = []
        run: list[str | int] = []
        is_answer = False
        for part in parts:
            pieces = re.split(f"([{_BORDERS}])", part) if isinstance(part, str) else [part]
            for piece in pieces:
                if isinstance(piece, int) or piece not in (*_BORDERS, ""):
                    run.append(piece)
                elif piece:
                    written.append((run, is_answer))
                    run, is_answer = [], piece == _BORDERS[0]
        return [(part, learns) for part, learns in [*written, (run, is_answer)] if part]

    def prompts_of(self, dialogs: Sequence[TrainingDialog]) -> Iterator[list[int] | LlamariumError]:
        """Yield the ids of each dialog up to an answer; see `ChatFormat.prompts_of`. It is always `TRAINING_DAY`."""

        def prompt(dialog: TrainingDialog) -> list[Rendering]:
            return [self._marked(*dialog).call(len(dialog.messages), True)]

        def encoded(dialog: TrainingDialog, rendered: Sequence[Parts]) -> list[int]:
            (parts,) = rendered
            return self._tokenizer.encode_parts(parts)

        return self._render_each(prompt, encoded, dialogs)

    def _render_each(
        self,
        make: Callable[[TrainingDialog], Sequence[Rendering]],
        read: Callable[[TrainingDialog, Sequence[Parts]], T],
        dialogs: Sequence[TrainingDialog],
        borders: str = "",
    ) -> Iterator[T | LlamariumError]:
        """Yield what `read` makes of each dialog's renderings, or the error that refuses this dialog.

        `make` says what is rendered of a dialog. The dialogs of one process are refused one by one, so that a bad row
        costs no process of its own.
        """

        def prepared(dialog: TrainingDialog) -> tuple[TrainingDialog, Sequence[Rendering]]:
            dialog = self._in_texts(dialog)
            return dialog, make(dialog)

        for start in range(0, len(dialogs), _DIALOGS_AT_ONCE):
            chunk = [value_or_error(prepared, dialog) for dialog in dialogs[start : start + _DIALOGS_AT_ONCE]]
            variants = [
                variant
                for one in chunk
                if not isinstance(one, LlamariumError)
                for rendering in one[1]
                for variant in rendering.variants
            ]
            outputs = self._renderer.render(variants, TRAINING_DAY, borders)
            for one in chunk:
                if isinstance(one, LlamariumError):
                    yield one
                    continue
                dialog, renderings = one
                written = [[next(outputs) for _ in rendering.variants] for rendering in renderings]
                yield value_or_error(self._read, dialog, renderings, written, read)

    def _read(
        self,
        dialog: TrainingDialog,
        renderings: Sequence[Rendering],
        written: Sequence[Sequence[str | ChatFormatError]],
        read: Callable[[TrainingDialog, Sequence[Parts]], T],
    ) -> T:
        pairs = zip(renderings, written, strict=True)
        return read(dialog, [self._checked(rendering, outputs) for rendering, outputs in pairs])

    def _in_texts(self, dialog: TrainingDialog) -> TrainingDialog:
        """Write tools and calls into the messages of an example if the template has no place for them."""
        calls = any(message.get("tool_calls") for message in dialog.messages)
        lacks_calls = calls and "tool_calls" not in self._template
        if not lacks_calls and not (dialog.tools and not _NAMES_TOOLS.search(self._template)):
            return dialog
        turns = read_turns(dialog.messages, dialog.tools, self.tool_form or "hermes")
        return TrainingDialog([{"role": turn.role, "content": turn.text} for turn in turns], (), dialog.variables)

    def _prefixes(self, dialog: TrainingDialog) -> list[Rendering]:
        """Return what has to be rendered to find the answers; see `_prefixes_of`."""
        marked = self._marked(*dialog)
        return [marked.call(*prefix) for prefix in _prefixes_of(dialog.messages)]

    def _divide(self, dialog: TrainingDialog, rendered: Sequence[Parts]) -> list[Part]:
        """Return the pieces of a dialog by its prefixes."""
        messages = dialog.messages
        encoded = map(self._tokenizer.encode_parts, rendered)
        ids = dict(zip(_prefixes_of(messages), encoded, strict=True))
        whole = ids[len(messages), False]
        parts: list[Part] = []
        stop_ids = self.stop_ids
        done = 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = ids[i, True] if i else whole, ids[i + 1, False]
            ends = [k + 1 for k in range(len(before), len(after)) if after[k] in stop_ids]
            if not ends or after[: len(before)] != before or whole[: len(after)] != after or len(before) < done:
                raise ChatFormatError(
                    f"{self._source}: its chat template does not let the tokens of messages[{i}], the "
                    "assistant's, be told from the rest; name a built-in dialog format (llama3, chatml)"
                )
            parts += [(whole[done : len(before)], False), (whole[len(before) : ends[-1]], True)]
            done = ends[-1]
        return [*parts, (whole[done:], False)]

    def _marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[ToolDefinition] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> "Marked":
        described = [plain_value(self._described(tool), f"tools[{i}]") for i, tool in enumerate(tools)]
        read = self._messages.read(messages)
        has_calls = any("tool_calls" in message for message in read)
        if has_calls and "tool_calls" not in self._template:
            raise self._unwritten("messages", "calls")
        if has_calls or has_parts(read) or may_differ(self._template):
            read = fit_forms(read, self._forms)
        dialog = Dialog(read, described or None, plain_value(variables or {}, "the template's variables"))
        words = json.dumps(dialog, ensure_ascii=False) + self._template
        mark = next((m for m in _MARKS if m not in words), None)
        if mark is None:
            raise ChatFormatError("the dialog holds all 30 noncharacters U+FDD0 to U+FDED, of which one must be free")
        marked = dialog.changed(lambda text: self._spellings.mark(text, mark), self._sought)
        swapped = dialog.changed(lambda text: self._spellings.swap_ends(text, mark), self._sought)
        return Marked(mark, marked, dialog, swapped)

    def _described(self, tool: ToolDefinition) -> dict[str, Any]:
        """Return a tool as it was given, with what it leaves out if the template reads that without asking."""
        given = tool.to_template()
        needed = [key for key in ("description", "parameters") if re.search(rf"\b{key}\b(?! is )", self._template)]
        missing = {key: tool.function()[key] for key in needed if key not in given["function"]}
        return given | {"function": {**given["function"], **missing}}

    def _checked(self, call: Rendering, outputs: Iterable[str | ChatFormatError]) -> Parts:
        """Return texts and control tokens of a rendering that tells them apart; ChatFormatError for others.

        `outputs` is what the template has written for each of its variants.
        """
        texts: list[str] = [value_of(output) for output in outputs]
        output, *proofs = texts
        parts = self._tokenizer.split_special(output)
        written = output.replace(call.mark, "")
        if missing := [name for name in call.tools if name not in written]:
            raise self._unwritten("tools", show_value(missing))
        for kind, proof in zip(call.proofs, proofs, strict=True):
            same_text = kind != "plain" or proof == written
            same_control = kind != "swapped" or self._tokenizer.split_special(proof)[1::2] == parts[1::2]
            if not (same_text and same_control):
                raise ChatFormatError(
                    f"{self._source}: a message spells a control token, and the chat template looks into the "
                    "texts, so the two cannot be told apart; take the control token out of the message"
                )
        control = self._tokenizer.special.ids
        return [control[part] if place % 2 else part.replace(call.mark, "") for place, part in enumerate(parts)]

    @cached_property
    def _spellings(self) -> Spellings:
        return Spellings(self._tokenizer.special.ids)

    @cached_property
    def _sought(self) -> Mapping[str, int]:
        """The control tokens that the template looks for in texts and that end no answer, such as `</think>`."""
        special, sought = self._tokenizer.special.ids, read_sought(self._template)
        return {text: special[text] for text in sought if text in special and special[text] not in self.stop_ids}

    @cached_property
    def _renderer(self) -> TemplateRenderer:
        return TemplateRenderer(self._template, self._source, self._fixed())

    @cached_property
    def _forms(self) -> ContentForms:
        """The forms of content and arguments that the template takes, which it is asked once."""
        return read_forms(self._renderer.attempt(probes(), TRAINING_DAY))

    def _fixed(self) -> dict[str, Any]:
        """Return the variables that every dialog has."""
        tokenizer = self._tokenizer
        special = tokenizer.special
        names = {"bos_token": special.bos, "pad_token": special.pad, "eos_token": (*special.eos, None)[0]}
        spelled = {name: tokenizer.token_bytes(i).decode("utf-8") for name, i in names.items() if i is not None}
        return {"documents": None, **spelled}


def _prefixes_of(messages: Sequence[Mapping[str, Any]]) -> list[Prefix]:
    """Return how far a dialog is rendered to find its answers: to its end, and up to each answer and with it."""
    prefixes: list[Prefix] = [(len(messages), False)]
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prefixes += [(i, True), (i + 1, False)] if i else [(1, False)]
    return [*dict.fromkeys(prefixes)]


def _file_of_template(tokenizer_file: str) -> str:
    """Return the file that a tokenizer's template stands in: beside a tokenizer.json, else in the same one."""
    path = Path(tokenizer_file)
    if path.name != TOKENIZER:
        return tokenizer_file
    beside = path.with_name(TEMPLATE)
    return str(beside if beside.exists() else path.with_name(TOKENIZER_CONFIG))
