"""Dialogs as ids.

A chat model was trained on dialogs with control tokens between the messages. Writing the whole dialog as one string
and encoding it with control tokens on would let a user write `<|eot_id|>` and speak as the system. Here control
tokens are put by id where the format says, and what people say is encoded with control tokens off.

Llama 3's format and ChatML are built in. A template that comes with a model and is neither runs in `template`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from llamarium.errors import ChatFormatError, show_value

if TYPE_CHECKING:
    from llamarium.tokenizer.base import Tokenizer

ROLES = ("system", "user", "assistant", "tool")

Part = tuple[list[int], bool]
"""Ids of a dialog in one piece, and whether the assistant wrote them: an answer with the token that ends it."""


class ChatFormat(Protocol):
    """How a dialog becomes ids."""

    @property
    def name(self) -> str:
        """The format's name, for `info`."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end an answer."""
        ...

    def encode(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Return the ids of a dialog.

        Args:
            messages: Each with `role` and `content`.
            add_generation_prompt: End with the header of the assistant's next message.

        Raises:
            ChatFormatError: If the dialog does not fit the format.
        """
        ...

    def parts(self, messages: Sequence[Mapping[str, Any]]) -> list[Part]:
        """Return the ids of a dialog in pieces, so that the assistant's can be learned.

        An answer is encoded as a model writes it: by itself, after its header.

        Raises:
            ChatFormatError: If the dialog does not fit the format, or the format cannot tell the pieces apart.
        """
        ...

    def parts_of(self, dialogs: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[list[Part]]:
        """Yield `parts` of each dialog: the way to read many, of which a template needs few processes then.

        Raises:
            ChatFormatError: As `parts`, when the turn of that dialog has come.
        """
        ...


class Llama3Format:
    r"""Llama 3's dialogs: `<|start_header_id|>role<|end_header_id|>\n\ncontent<|eot_id|>`, BOS once at the front.

    White space around a content is stripped, and a tool's message has the role `ipython`.

    Source: meta-llama/llama3, `llama/tokenizer.py`, `ChatFormat`; llama-models, `llama3/chat_format.py`.
    """

    name = "llama3"

    def __init__(self, tokenizer: "Tokenizer") -> None:
        """Take a tokenizer that has Llama 3's control tokens."""
        special = tokenizer.special_tokens
        self._tokenizer = tokenizer
        self._start, self._end, self._turn_end = (special[name] for name in _LLAMA3_TOKENS)
        self.stop_ids = tuple(
            special[name] for name in ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>") if name in special
        )

    def encode(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Return the ids of a dialog; see `ChatFormat.encode`."""
        ids = [i for part, _ in self.parts(messages) for i in part]
        return ids + self._header("assistant") if add_generation_prompt else ids

    def parts(self, messages: Sequence[Mapping[str, Any]]) -> list[Part]:
        """Return the ids of a dialog in pieces; see `ChatFormat.parts`."""
        bos = self._tokenizer.bos_token_id
        parts: list[Part] = [([] if bos is None else [bos], False)]
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        for role, content in read_messages(messages):
            parts.append((self._header("ipython" if role == "tool" else role), False))
            parts.append(([*encode(content.strip()), self._turn_end], role == "assistant"))
        return parts

    def parts_of(self, dialogs: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[list[Part]]:
        """Yield the pieces of each dialog; see `ChatFormat.parts_of`."""
        return map(self.parts, dialogs)

    def _header(self, role: str) -> list[int]:
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        return [self._start, *encode(role), self._end, *encode("\n\n")]


class ChatMLFormat:
    r"""ChatML: `<|im_start|>role\ncontent<|im_end|>\n`, the content as it is.

    Source: openai/openai-python at v0.27, `chatml.md`; SmolLM2's chat template for `default_system`.
    """

    name = "chatml"

    def __init__(self, tokenizer: "Tokenizer", *, default_system: str | None = None) -> None:
        """Take a tokenizer that has ChatML's control tokens.

        Args:
            tokenizer: The tokenizer.
            default_system: What the system says in a dialog that does not begin with a system message.
        """
        special = tokenizer.special_tokens
        self._tokenizer = tokenizer
        self._start, self._end = (special[name] for name in _CHATML_TOKENS)
        self._default_system = default_system
        self.stop_ids = (self._end,)

    def encode(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Return the ids of a dialog; see `ChatFormat.encode`."""
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        ids: list[int] = []
        for role, content in self._turns(messages):
            ids += [self._start, *encode(f"{role}\n{content}"), self._end, *encode("\n")]
        return [*ids, self._start, *encode("assistant\n")] if add_generation_prompt else ids

    def parts(self, messages: Sequence[Mapping[str, Any]]) -> list[Part]:
        """Return the ids of a dialog in pieces; see `ChatFormat.parts`.

        They are those of `encode` but for an answer that begins with a line end, which `encode` joins with its
        header's, as templates do. A model that is asked finds the header's alone.
        """
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        parts: list[Part] = []
        for role, content in self._turns(messages):
            if role == "assistant":
                parts.append(([self._start, *encode("assistant\n")], False))
                parts.append(([*encode(content), self._end], True))
            else:
                parts.append(([self._start, *encode(f"{role}\n{content}"), self._end], False))
            parts.append((encode("\n"), False))
        return parts

    def parts_of(self, dialogs: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[list[Part]]:
        """Yield the pieces of each dialog; see `ChatFormat.parts_of`."""
        return map(self.parts, dialogs)

    def _turns(self, messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        turns = read_messages(messages)
        if self._default_system is not None and turns[0][0] != "system":
            turns.insert(0, ("system", self._default_system))
        return turns


def choose_format(tokenizer: "Tokenizer") -> ChatFormat | None:
    """Return the format of a tokenizer's dialogs.

    The file's template decides: a known one has its format built in, any other runs in the sandbox. Without a template
    the control tokens that the vocabulary has name the format.
    """
    special = tokenizer.special_tokens
    is_llama3 = all(name in special for name in _LLAMA3_TOKENS)
    is_chatml = all(name in special for name in _CHATML_TOKENS)
    template = tokenizer.chat_template
    known = None if template is None else _KNOWN_TEMPLATES.get(template.replace("\\n", "\n").strip())
    if is_llama3 and (template is None or known == "llama3"):
        return Llama3Format(tokenizer)
    if is_chatml and (template is None or known in ("chatml", "smollm2")):
        return ChatMLFormat(tokenizer, default_system=_SMOLLM2_SYSTEM if known == "smollm2" else None)
    if template is None:
        return None
    from llamarium.tokenizer.template import TemplateFormat

    return TemplateFormat(tokenizer, template)


def with_format(tokenizer: "Tokenizer", name: str) -> "Tokenizer":
    """Return a tokenizer whose dialogs are in a format, which its saved files name.

    Args:
        tokenizer: One whose vocabulary has the format's control tokens.
        name: "llama3" or "chatml", whatever template the tokenizer came with. "auto" is its own format: the one of its
            template, else the one that its control tokens name, else none.

    Raises:
        ChatFormatError: For another name, or a vocabulary that lacks control tokens of the format.
    """
    if name == "auto":
        if tokenizer.chat_template is not None or tokenizer.chat_format is None:
            return tokenizer
        name = tokenizer.chat_format.name
    if name not in _FORMATS:
        raise ChatFormatError(f"the dialog format is {show_value(name)}; there are: {', '.join(_FORMATS)}")
    needed, template = _FORMATS[name]
    if missing := [token for token in needed if token not in tokenizer.special_tokens]:
        raise ChatFormatError(f"{tokenizer.source}: has no {', '.join(missing)}, which the format {name} is made of")
    return tokenizer.with_chat_template(template)


def read_messages(messages: object) -> list[tuple[str, str]]:
    """Return role and content of each message.

    Raises:
        ChatFormatError: For no messages, an unknown role or key, or a content that is no text.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ChatFormatError(
            f"a dialog is {show_value(messages)}; expected a list of at least one message, each "
            '{"role": ..., "content": ...}'
        )
    return [_read_message(message, i) for i, message in enumerate(messages)]


def _read_message(message: object, i: int) -> tuple[str, str]:
    if not isinstance(message, Mapping):
        raise ChatFormatError(f"messages[{i}] is {show_value(message)}; expected an object with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ChatFormatError(f"messages[{i}].role is {show_value(role)}; expected {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise ChatFormatError(f"messages[{i}].content is {type(content).__name__}; expected text (str)")
    unknown = [key for key in message if key not in ("role", "content")]
    if unknown:
        raise ChatFormatError(f"messages[{i}] has the keys {show_value(unknown)}; this format has role and content")
    return role, content


_LLAMA3_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

# Templates whose dialogs a built-in format writes, id for id; line ends are real ones here.
_CHATML_MESSAGE = (
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CHATML_TEMPLATE = "{% for message in messages %}" + _CHATML_MESSAGE
_LLAMA3_PROMPT = "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
_LLAMA3_TEMPLATE = (  # unlike the published one below it knows tools, and vocabularies without BOS
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'ipython' if message['role'] == 'tool' else message['role'] %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}" + _LLAMA3_PROMPT
)
_KNOWN_TEMPLATES = {
    _CHATML_TEMPLATE: "chatml",
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n" + _SMOLLM2_SYSTEM + "<|im_end|>\n' }}{% endif %}" + _CHATML_MESSAGE: "smollm2",
    _LLAMA3_TEMPLATE: "llama3",
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}" + _LLAMA3_PROMPT: "llama3",
}
_FORMATS = {"llama3": (_LLAMA3_TOKENS, _LLAMA3_TEMPLATE), "chatml": (_CHATML_TOKENS, _CHATML_TEMPLATE)}
