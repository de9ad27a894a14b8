"""The tokenizer: text to ids, ids to text.

Three rules hold for every vocabulary:

- Text never becomes a control token. The spelling of a control token inside a text (`<|eot_id|>`) is encoded as
  ordinary characters, unless the caller passes `parse_special=True`.
- The BOS token is added exactly once, or never if the vocabulary's files say so.
- `decode(encode(text)) == text`. Tokens are bytes, and a character may span several tokens, so decoding joins bytes
  first and decodes UTF-8 second. A `tokenizer.json` whose rules change text causes a warning when it is loaded.
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

_PLAIN_CHARACTERS = 16  # per token of the limit: `check_length` does not look at shorter texts
_PART_CHARACTERS = 2**16  # encoded at a time by `check_length`


class Backend(Protocol):
    """A vocabulary and its encoding rules; `Tokenizer` adds BOS, decoding and dialogs.

    Implementations derive from it. The default `encode_parts` and `encode_parsed` are correct for vocabularies in which
    the surroundings of a text do not change its ids; others override them.
    """

    def encode(self, text: str) -> list[int]:
        """Encode valid Unicode text; spellings of control tokens are ordinary characters."""
        ...

    def encode_parts(self, parts: Parts) -> list[int]:
        """Encode texts and control tokens as one string, with the vocabulary's rules around control tokens.

        Only the first part counts as the beginning of a text: a space that the vocabulary puts before a text, and white
        space that a control token strips, are as in the encoding of the whole string. Spellings of control tokens
        inside a text are ordinary characters.

        Args:
            parts: Ids of control tokens, and texts, none of which is empty or adjacent to another.
        """
        return [i for part in parts for i in (self.encode(part) if isinstance(part, str) else (part,))]

    def encode_parsed(self, text: str, control: Mapping[str, int]) -> list[int]:
        """Encode a text in which spellings of the control tokens `control` (spelling to id) become these tokens."""
        return self.encode_parts(split_control(text, control))

    def with_control(self, control: Mapping[str, int]) -> "Backend":
        """Return a backend for the same vocabulary with these control tokens (spelling to id)."""
        return self

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a token, or None if there is no such token."""
        ...

    def byte_level_bpe(self) -> "ByteLevelBPE":
        """Return the readable implementation that shows the merges; TokenizerError if there is none."""
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
        """Wrap a backend; called by the readers (`load_tokenizer_file`, `from_gguf_metadata`).

        With `strip_first_space`, encoding puts a space before the text, which decoding removes (Llama 2).
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
        """The BOS id, or None."""
        return self.special.bos

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The EOS ids; in dialogs, the chat format's `stop_ids` end an answer."""
        return self.special.eos

    @property
    def pad_token_id(self) -> int | None:
        """The padding id, or None."""
        return self.special.pad

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """All control tokens, spelling to id."""
        return self.special.ids

    @property
    def chat_template(self) -> str | None:
        """The Jinja template for dialogs without tools, or None."""
        return self.chat_templates.default

    @cached_property
    def chat_format(self) -> "ChatFormat | None":
        """The chat format: built in for Llama 3 and ChatML, else the file's template, else None."""
        from llamarium.tokenizer.chat.choose import choose_format

        return choose_format(self)

    def with_chat_template(self, template: str) -> Self:
        """Return a tokenizer with the same vocabulary and another chat template, which `save` also writes."""
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
        """Return the ids of `text`.

        Args:
            text: Any valid Unicode text.
            add_special_tokens: Add BOS if the vocabulary uses it, unless the ids start with it already.
            parse_special: Encode spellings of control tokens as control tokens. Only for trusted text: a user's text
                could otherwise end its own turn.

        Raises:
            TokenizerError: For a lone surrogate, or a character that the vocabulary lacks.
        """
        check_text(text)
        ids = self.backend.encode_parsed(text, self.special.ids) if parse_special else self.backend.encode(text)
        bos = self.special.bos
        if add_special_tokens and self.special.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def check_length(self, text: str, num_tokens: int) -> None:
        """Raise a ContextLengthError if a text is far too long for `num_tokens`, without encoding all of it.

        Encoding takes hundreds of bytes of memory per byte of text. So a long text is encoded part by part, until there
        are more than twice as many tokens as allowed. A text that passes may still be too long; the exact check counts
        its tokens.
        """
        if len(text) <= _PLAIN_CHARACTERS * num_tokens:
            return
        count = 0
        for start in range(0, len(text), _PART_CHARACTERS):
            count += len(self.backend.encode(text[start : start + _PART_CHARACTERS]))
            if count > 2 * num_tokens:
                read, measured = start + _PART_CHARACTERS, f"its {len(text):,} characters are"
                measured = (
                    measured if read >= len(text) else f"of its {len(text):,} characters the first {read:,} alone are"
                )
                raise ContextLengthError(
                    f"the prompt is too long: {measured} {count:,} tokens; this model's maximum context length is "
                    f"{num_tokens} tokens: use a shorter text"
                )

    def encode_parts(self, parts: Parts) -> list[int]:
        """Return the ids of texts and control tokens as one string, without BOS.

        A user's text is passed as a text, so it cannot become a control token.

        Args:
            parts: Texts and ids of control tokens; adjacent texts are joined.

        Raises:
            TokenizerError: As `encode`, and for an id that is not a control token.
        """
        joined: list[str | int] = []
        for part in parts:
            if not isinstance(part, str):
                index = _index(part)
                if index not in self._control_ids:
                    problem = f"the id {index} is not a control token; pass its text instead"
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
        """Return the ids of a text that continues `ids`, such as the given beginning of an answer; errors as `encode`.

        A vocabulary that puts a space before a text puts none here.
        """
        check_text(text)
        last = next((i for i in reversed(range(len(ids))) if ids[i] in self._control_ids), None)
        tail = list(ids if last is None else ids[last:])  # no rule looks back across a control token
        control = tail[: last is not None]
        before = b"".join(map(self.token_bytes, tail[len(control) :])).decode("utf-8", "replace")
        for start in (before, before.removeprefix(" ")):  # without the space that a vocabulary may put before a text
            if self.encode_parts([*control, start]) == tail:
                whole = self.encode_parts([*control, start, text])
                if whole[: len(tail)] == tail:
                    return whole[len(tail) :]
        return self.backend.encode(text)

    def split_special(self, text: str) -> list[str]:
        """Split into text, control token, text, ...; control tokens have odd indices."""
        return split_spellings(text, self.special.ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. Invalid UTF-8 becomes U+FFFD.

        Args:
            ids: Token ids.
            skip_special_tokens: Omit control tokens, except those that are visible in answers.

        Raises:
            TokenizerError: For an id outside the vocabulary, or if `ids` is not a sequence of ids.
        """
        if not isinstance(ids, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TokenizerError(f"expected token ids, found {type(ids).__name__}")
        visible = self.visible_bytes
        text = b"".join([visible(i, skip_special_tokens) for i in ids]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strip_first_space else text

    def stream(
        self, *, skip_special_tokens: bool = True, continuation: bool = False, spelled: Collection[int] = ()
    ) -> StreamDecoder:
        """Return a decoder that takes one id at a time and returns only complete characters.

        Args:
            skip_special_tokens: Omit control tokens, except those that are visible in answers.
            continuation: Whether the ids continue a text, such as a prompt. If not, Llama 2's space before a text is
                removed, as in `decode`.
            spelled: Control tokens that are not omitted, such as those that introduce tool calls.
        """
        hidden = self._hidden_ids.difference(spelled) if skip_special_tokens else frozenset[int]()
        strip_first_space = self.strip_first_space and not continuation
        return StreamDecoder(self.token_bytes, hidden, strip_first_space=strip_first_space)

    def visible_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """Return the bytes that `decode` shows for an id: none for a skipped control token."""
        index = _index(token_id)
        return b"" if skip_special_tokens and index in self._hidden_ids else self.token_bytes(index)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, for a control token its spelling; TokenizerError for an unknown id."""
        index = _index(token_id)
        cached = self._bytes.get(index)
        return self._look_up(index) if cached is None else cached

    def has_token(self, token_id: int) -> bool:
        """Return whether the vocabulary has this id; there may be holes."""
        return 0 <= token_id < self.vocab_size and self.backend.token_bytes(token_id) is not None

    def allow_unused_ids(self, num_rows: int) -> None:
        """Let the ids from `vocab_size` to `num_rows` - 1 stand for nothing: a model's table may have spare rows.

        A model can give such an id a probability, so it needs a text (none) and a name in tables (`<49200>`).
        """
        self._num_rows = max(num_rows, self.vocab_size)

    def _look_up(self, index: int) -> bytes:
        if self.vocab_size <= index < self._num_rows:
            return b""
        token = self.backend.token_bytes(index) if 0 <= index < self.vocab_size else None
        if token is None:
            raise TokenizerError(
                f"{self.source}: no token has the id {index}; ids are 0 to {self.vocab_size - 1} "
                "(does the model belong to another tokenizer?)"
            )
        return self._bytes.setdefault(index, token)

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
                f"{self.source}: no chat template and no control tokens of a known chat format (Llama 3, ChatML); "
                "this is a base model's tokenizer: use `llamarium generate`, or choose a chat model"
            )
        is_read = "documents" in self.chat_format.variables
        if documents or (documents is not None and is_read):  # an empty list needs no template that reads it
            from llamarium.tokenizer.chat.messages import check_documents

            variables = {**(variables or {}), "documents": check_documents(documents)}
        options: Any = {"tools": tools, "tool_form": tool_form, "variables": variables}
        return self.chat_format.encode(messages, add_generation_prompt=add_generation_prompt, **options)

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, or `characters.json`; OutputError if it fails."""
        self.backend.save(Path(folder), self)


def _index(token_id: int) -> int:
    """Return an id as an int; numpy integers and tensors of one element are accepted."""
    try:
        return operator.index(token_id)
    except TypeError:
        raise TokenizerError(f"token id {show_value(token_id)}: expected a whole number") from None
