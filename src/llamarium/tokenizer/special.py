"""Valid text, and the control tokens of a vocabulary."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from llamarium.errors import TokenizerError

Parts = Sequence[str | int]
"""Texts and ids of control tokens, in the order in which they form one string."""


# Spellings of this form are control tokens whatever the file's flag says; the second has DeepSeek's full-width bars.
CONTROL_SHAPE = re.compile(r"<\|[^|]+\|>|<\uff5c[^\uff5c]+\uff5c>")

# Control tokens that end an answer in any vocabulary. Source: llama.cpp, `llama-vocab.cpp`.
_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|end_of_turn|>"),
        *("<end_of_turn>", "<end_of_utterance>", "<|EOT|>", "<EOT>", "< EOT >", "_<EOT>", "[EOT]", "[EOS]"),
        *("<|return|>", "<|call|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    )
)

# Reasoning and tool calls are part of an answer, so these tokens are visible and do not end it.
_SHOWN = re.compile(r"</?(think|thinking|reasoning|tool_call|tool_calls|tool_response|tools|function)>")

_THOUGHT = re.compile(r"</?(think|thinking|reasoning)>")


class TypedToken(NamedTuple):
    """A token that was added to a vocabulary or has a type, as opposed to one learned from text.

    Attributes:
        spelling: Its text.
        id: Its id.
        is_flagged: Whether the file marks it as a control token.
    """

    spelling: str
    id: int
    is_flagged: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """The control tokens of a vocabulary.

    Attributes:
        ids: All control tokens, spelling to id; a user's text never becomes one.
        bos: The BOS id, or None.
        eos: The EOS ids, the file's main one first.
        pad: The padding id, or None.
        add_bos: Whether `encode` adds `bos`.
        visible: Control tokens that are visible in answers; the others are hidden.
        candidates: Added tokens, spelling to id, that become control tokens if a chat template writes them.
    """

    ids: Mapping[str, int] = field(default_factory=dict[str, int])
    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    add_bos: bool = False
    visible: frozenset[int] = frozenset()
    candidates: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def hidden(self) -> frozenset[int]:
        """The control tokens that are hidden in answers."""
        return frozenset(self.ids.values()) - self.visible

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end an answer in any chat format: `eos`, and control tokens that are known ends."""
        known_ends = [i for spelling, i in self.ids.items() if spelling in _ENDS]
        if "<|return|>" in self.ids and "<|call|>" in self.ids and "<|end|>" in self.ids:
            known_ends.remove(self.ids["<|end|>"])  # in the Harmony format it ends only a part of an answer
        return tuple(dict.fromkeys((*self.eos, *known_ends)))

    @property
    def may_end(self) -> Mapping[str, int]:
        """The control tokens, spelling to id, with which a chat format may end an answer."""
        return {text: i for text, i in self.ids.items() if not _SHOWN.fullmatch(text)}

    def with_template(self, template: str) -> "SpecialTokens":
        """Return the control tokens including the candidates that a chat template (or several, joined) writes."""
        written = {text: i for text, i in self.candidates.items() if _is_written(text, template)}
        if not written:
            return self
        others = {text: i for text, i in self.candidates.items() if text not in written}
        ids, visible = {**self.ids, **written}, self.visible.union(written.values())
        return replace(self, ids=ids, visible=visible, candidates=others)


def find_special_tokens(
    typed: Iterable[TypedToken],
    template: str | None,
    *,
    bos: int | None = None,
    eos: tuple[int, ...] = (),
    pad: int | None = None,
    add_bos: bool = False,
) -> SpecialTokens:
    """Return the control tokens among typed tokens.

    A control token is one that the file flags, that is spelled like one (`CONTROL_SHAPE`), or that the chat template
    writes literally. Those of the last kind stay visible, because the file says that they are text.
    """
    ids: dict[str, int] = {}
    candidates: dict[str, int] = {}
    for token in typed:
        is_control = token.is_flagged or bool(CONTROL_SHAPE.fullmatch(token.spelling)) or token.spelling in _ENDS
        (ids if is_control else candidates)[token.spelling] = token.id
    visible = frozenset(i for text, i in ids.items() if _SHOWN.fullmatch(text) and i not in (bos, *eos, pad))
    special = SpecialTokens(ids=ids, bos=bos, eos=eos, pad=pad, add_bos=add_bos, visible=visible, candidates=candidates)
    return special if template is None else special.with_template(template)


def _is_written(spelling: str, template: str) -> bool:
    """Return whether a chat template writes a token, unless it is a word, blanks, or a reasoning tag.

    Reasoning tags such as `<think>` stay text, because templates and clients search for them in messages.
    """
    is_word = not any(c.isalpha() for c in spelling) or all(c.isalnum() or c.isspace() or c == "_" for c in spelling)
    return not is_word and not _THOUGHT.fullmatch(spelling) and spelling in template


def check_text(text: object) -> None:
    """Validate that `text` is a str without lone surrogates, which UTF-8 cannot represent; TokenizerError otherwise."""
    if not isinstance(text, str):
        raise TokenizerError(f"expected text (str), found {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text has the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, which is not "
            'valid Unicode; decode the source with its actual encoding, or use errors="replace"'
        ) from None


def split_spellings(text: str, spellings: Collection[str]) -> list[str]:
    """Split into text, token, text, ...; tokens have odd indices, and the longest possible token is matched first."""
    return _pattern(frozenset(spellings)).split(text) if spellings else [text]


def split_control(text: str, control: Mapping[str, int]) -> list[str | int]:
    """Split into non-empty texts and the ids of the control tokens spelled between them."""
    split = split_spellings(text, control)
    parts = [control[part] if index % 2 else part for index, part in enumerate(split)]
    return [part for part in parts if part != ""]


@lru_cache(8)
def _pattern(spellings: frozenset[str]) -> re.Pattern[str]:
    return re.compile("(" + "|".join(map(re.escape, sorted(spellings, key=len, reverse=True))) + ")")
