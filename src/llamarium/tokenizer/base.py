"""The tokenizer that callers hold: text to ids, ids to text.

Three rules hold for every vocabulary:

- Text is only text. The spelling of a control token inside a text (`<|eot_id|>`) is encoded as ordinary characters,
  unless the caller says `parse_special=True`.
- The begin-of-sequence token is there once, or not at all where the vocabulary's own files say so.
- `decode(encode(text)) == text`. Tokens are bytes, and a character may span several of them, so decoding joins bytes
  first and reads UTF-8 second. A `tokenizer.json` whose own rules change texts says so in a warning when it is read.
"""

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from llamarium.errors import ChatFormatError, ContextLengthError, TokenizerError, escape, show_value
from llamarium.tokenizer.chat.templates import ChatTemplates
from llamarium.tokenizer.special import Parts, SpecialTokens, check_text, split_control, split_spellings
from llamarium.tokenizer.streaming import StreamDecoder

if TYPE_CHECKING:
    from llamarium.tokenizer.bpe import ByteLevelBPE, Explanation
    from llamarium.tokenizer.chat.format import ChatFormat
    from llamarium.tokenizer.tools.definition import ToolDefinition
    from llamarium.tokenizer.tools.forms import ToolForm

_PLAIN_CHARACTERS = 16  # for each token that fits: a text of up to so many is encoded at once
_PART_CHARACTERS = 2**16


class Backend(Protocol):
    """A vocabulary and its rules. BOS, decoding and the rules of dialogs are `Tokenizer`'s matter.

    Implementations derive from it: `encode_parts` and `encode_parsed` suit every vocabulary in which what surrounds a
    text does not change its ids. Others override them.
    """

    def encode(self, text: str) -> list[int]:
        """Encode valid Unicode text, every control token's spelling as ordinary characters."""
        ...

    def encode_parts(self, parts: Parts) -> list[int]:
        """Encode texts and control tokens as one string, with the rules that hold around control tokens.

        A text here is not a new beginning unless it is the first part: a space that the vocabulary puts before a text,
        and white space that a control token takes away, are as in the encoding of the whole string. The spelling of a
        control token inside a text stays ordinary characters.

        Args:
            parts: Texts, none of them empty or next to another, and ids of control tokens.
        """
        return [i for part in parts for i in (self.encode(part) if isinstance(part, str) else (part,))]

    def encode_parsed(self, text: str, control: Mapping[str, int]) -> list[int]:
        """Encode a text in which the spellings of control tokens (spelling to id) are these tokens."""
        return self.encode_parts(split_control(text, control))

    def with_control(self, control: Mapping[str, int]) -> "Backend":
        """Return a backend of the same vocabulary for which these are the control tokens, spelling to id."""
        return self

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes that an id stands for, or None where there is no such token."""
        ...

    def byte_level_bpe(self) -> "ByteLevelBPE":
        """Return the readable twin that shows its merges, or raise `TokenizerError` where there is none."""
        ...

    def save(self, folder: Path, tokenizer: "Tokenizer") -> None:
        """Write the files from which `load_tokenizer_file` reads an equal tokenizer."""


class Tokenizer:
    """A tokenizer: encodes text to ids and decodes ids to text.

    >>> smollm2.tokenizer.encode("Hello, world!")
    [19556, 28, 905, 17]

    Attributes:
        vocab_size: The highest id plus one.
        source: File it was read from, for error messages.
        chat_templates: Jinja templates of the model.
    """

    def __init__(
        self,
        backend: Backend,
        special: SpecialTokens,
        *,
        vocab_size: int,
        source: str,
        chat_template: str | ChatTemplates | None = None,
        strip_first_space: bool = False,
    ) -> None:
        """Wrap a backend; the readers (`load_tokenizer_file`, `from_gguf_metadata`) call this.

        With `strip_first_space`, encoding puts a space before the text, which decoding takes away (Llama 2).
        """
        self.backend = backend
        self.special = special
        self.vocab_size = vocab_size
        self.source = source
        self.chat_templates = ChatTemplates.of(chat_template)
        self.strip_first_space = strip_first_space
        self._num_rows = vocab_size
        self._control_ids = frozenset(special.ids.values())
        self._hidden_ids = special.hidden
        self._bytes: dict[int, bytes] = {}

    @property
    def bos_token_id(self) -> int | None:
        """The id put before a text, or None."""
        return self.special.bos

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text; the chat format's `stop_ids` end an answer."""
        return self.special.eos

    @property
    def pad_token_id(self) -> int | None:
        """The id that fills short rows, or None."""
        return self.special.pad

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Spelling and id of every control token."""
        return self.special.ids

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of dialogs without tools, or None."""
        return self.chat_templates.default

    @cached_property
    def chat_format(self) -> "ChatFormat | None":
        """How a dialog becomes ids: built in for Llama 3 and ChatML, else the file's template, else None."""
        from llamarium.tokenizer.chat.choose import choose_format

        return choose_format(self)

    def with_chat_template(self, template: str) -> Self:
        """Return a tokenizer of the same vocabulary whose dialogs, and saved files, are of another template."""
        special = self.special.with_template(template)
        other = type(self)(
            self.backend.with_control(special.ids),
            special,
            vocab_size=self.vocab_size,
            source=self.source,
            chat_template=template,
            strip_first_space=self.strip_first_space,
        )
        other.allow_unused_ids(self._num_rows)
        return other

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Return the ids of `text`; TokenizerError for a lone surrogate, or a character that the vocabulary lacks.

        Args:
            text: Any valid Unicode text.
            add_special_tokens: Put BOS first where the vocabulary has it so, unless it is there already.
            parse_special: Read the spellings of control tokens as control tokens. Only for text that the caller
                wrote: a user's text could otherwise end its own turn.
        """
        check_text(text)
        ids = self.backend.encode_parsed(text, self.special.ids) if parse_special else self.backend.encode(text)
        bos = self.special.bos
        if add_special_tokens and self.special.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def check_length(self, text: str, num_tokens: int) -> None:
        """Refuse a text that is far too long, without encoding all of it: that takes hundreds of bytes for each byte.

        A long text is encoded a part at a time until there are twice as many tokens as fit, `num_tokens`. What is not
        refused may still be too long; the runner counts the tokens. ContextLengthError with both numbers.
        """
        if len(text) <= _PLAIN_CHARACTERS * num_tokens:
            return
        count = 0
        for start in range(0, len(text), _PART_CHARACTERS):
            count += len(self.backend.encode(text[start : start + _PART_CHARACTERS]))
            if count > 2 * num_tokens:
                read, found = start + _PART_CHARACTERS, f"its {len(text):,} characters are"
                found = found if read >= len(text) else f"of its {len(text):,} characters the first {read:,} alone are"
                raise ContextLengthError(
                    f"the prompt is too long: {found} {count:,} tokens; this model's maximum context length is "
                    f"{num_tokens} tokens: use a shorter text"
                )

    def encode_parts(self, parts: Parts) -> list[int]:
        """Return the ids of texts and control tokens that are one string, without BOS before it.

        What a user wrote is a text here, and cannot become a control token. TokenizerError as `encode`, and for an id
        that is no control token.

        Args:
            parts: Texts and ids of control tokens. Texts next to each other are one text.
        """
        joined: list[str | int] = []
        for part in parts:
            if not isinstance(part, str):
                index = _index(part)
                if index not in self._control_ids:
                    problem = f"the id {index} is not that of a control token; expected text instead"
                    raise TokenizerError(f"{self.source}: {problem}")
                joined.append(index)
                continue
            if not part.isascii():
                check_text(part)
            if part and joined and isinstance(joined[-1], str):
                joined[-1] += part
            elif part:
                joined.append(part)
        return self.backend.encode_parts(joined)

    def encode_after(self, ids: Sequence[int], text: str) -> list[int]:
        """Return the ids of a text that goes on where `ids` end, such as an answer whose beginning is given.

        A vocabulary that puts a space before a text puts none in the middle of one. TokenizerError as `encode`.
        """
        check_text(text)
        last = next((i for i in reversed(range(len(ids))) if ids[i] in self._control_ids), None)
        tail = list(ids if last is None else ids[last:])  # as far back as any rule looks
        control = tail[: last is not None]
        before = b"".join(map(self.token_bytes, tail[len(control) :])).decode("utf-8", "replace")
        for begun in (before, before.removeprefix(" ")):  # the space that a vocabulary puts before each text
            if self.encode_parts([*control, begun]) == tail:
                whole = self.encode_parts([*control, begun, text])
                if whole[: len(tail)] == tail:
                    return whole[len(tail) :]
        return self.backend.encode(text)

    def split_special(self, text: str) -> list[str]:
        """Split into text, control token, text, ...: control tokens stand at the odd places."""
        return split_spellings(text, self.special.ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. Bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: Token ids.
            skip_special_tokens: Leave out control tokens (except those that an answer shows) rather than spell them.

        Raises:
            TokenizerError: For an id that the vocabulary lacks, or what is no sequence of ids.
        """
        if not isinstance(ids, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TokenizerError(f"expected token ids, found {type(ids).__name__}")
        visible = self.visible_bytes
        text = b"".join([visible(i, skip_special_tokens) for i in ids]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strip_first_space else text

    def stream(
        self, *, skip_special_tokens: bool = True, continuation: bool = False, spelled: Collection[int] = ()
    ) -> StreamDecoder:
        """Return a decoder that takes one id at a time and shows complete characters only.

        Args:
            skip_special_tokens: Leave out control tokens (except those that an answer shows) rather than spell them.
            spelled: Control tokens that are spelled all the same: those that announce calls, say.
            continuation: The ids go on where other text ended, such as a prompt: a space at their beginning is part
                of the text. Otherwise they are a text of their own, and Llama 2's space before it is taken away, as
                `decode` does.
        """
        hidden = self._hidden_ids.difference(spelled) if skip_special_tokens else frozenset[int]()
        strip_first_space = self.strip_first_space and not continuation
        return StreamDecoder(self.token_bytes, hidden, strip_first_space=strip_first_space)

    def visible_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """Return what `decode` shows of one id: nothing for a control token that is to be skipped."""
        index = _index(token_id)
        return b"" if skip_special_tokens and index in self._hidden_ids else self.token_bytes(index)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one id stands for, a control token's spelling; TokenizerError for an unknown id."""
        index = _index(token_id)
        known = self._bytes.get(index)
        return self._look_up(index) if known is None else known

    def has_token(self, token_id: int) -> bool:
        """Tell whether the vocabulary has a token of this id; there may be holes."""
        return 0 <= token_id < self.vocab_size and self.backend.token_bytes(token_id) is not None

    def allow_unused_ids(self, num_rows: int) -> None:
        """Let the ids from `vocab_size` to `num_rows` - 1 stand for nothing: a model's table may have spare rows.

        A model can give such an id a probability, so it needs a text (none) and a name in tables (`<49200>`).
        """
        self._num_rows = max(num_rows, self.vocab_size)

    def _look_up(self, index: int) -> bytes:
        if self.vocab_size <= index < self._num_rows:
            return b""
        found = self.backend.token_bytes(index) if 0 <= index < self.vocab_size else None
        if found is None:
            raise TokenizerError(
                f"{self.source}: no token has the id {index}; ids are 0 to {self.vocab_size - 1} "
                "(does the model belong to another tokenizer?)"
            )
        return self._bytes.setdefault(index, found)

    def token_text(self, token_id: int) -> str:
        r"""Return a printable piece: control characters and stray bytes as `\n` or `\xe4`; errors as `token_bytes`."""
        if self.vocab_size <= _index(token_id) < self._num_rows:
            return f"<{token_id}>"
        return escape(self.token_bytes(token_id).decode("utf-8", "backslashreplace"))

    def explain(self, text: str) -> "Explanation":
        """Follow `text` from bytes over pieces and merges to ids, without BOS.

        TokenizerError as for `encode`, for SentencePiece-style BPE, and where the readable encoding disagrees with the
        backend on this text, since an explanation of other ids would be untrue.
        """
        check_text(text)
        ids = self.backend.encode(text)
        explanation = self.backend.byte_level_bpe().explain(text)
        if explanation.ids != ids:
            raise TokenizerError(
                f"{self.source}: the readable encoding gives other ids than the tokenizer for this text, so it "
                "cannot be explained; encode() is right (a character newer than one of the two, or a rule of an "
                "added token)"
            )
        return explanation

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: "Sequence[ToolDefinition]" = (),
        tool_form: "ToolForm | None" = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a dialog, BOS included where the format has one; other arguments as `ChatFormat.encode`.

        `documents` are texts that the answer may draw on: objects with `title` and `text`, or whatever fields the
        model's chat template writes.

        Raises:
            ChatFormatError: If the vocabulary has no chat format or the dialog does not fit it; for documents that the
                template does not read.
            ToolError: If there are tools that the format does not write.
        """
        if self.chat_format is None:
            raise ChatFormatError(
                f"{self.source}: no chat template and no control tokens of a known dialog format (Llama 3, ChatML); "
                "this is a base model's tokenizer: continue a text (`llamarium generate`), or choose a chat model"
            )
        is_read = "documents" in self.chat_format.variables
        if documents or (documents is not None and is_read):  # an empty list needs no template that reads it
            from llamarium.tokenizer.chat.messages import check_documents

            variables = {**(variables or {}), "documents": check_documents(documents)}
        how: Any = {"tools": tools, "tool_form": tool_form, "variables": variables}
        return self.chat_format.encode(messages, add_generation_prompt=add_generation_prompt, **how)

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, or `characters.json`; OutputError if that fails."""
        self.backend.save(Path(folder), self)


def _index(token_id: int) -> int:
    """Take any whole number: an int, or what indexes like one (numpy's, a tensor of one element)."""
    try:
        return operator.index(token_id)
    except TypeError:
        raise TokenizerError(f"token id {show_value(token_id)}: expected a whole number") from None
