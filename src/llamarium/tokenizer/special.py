"""What counts as text, and the control tokens of a vocabulary."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from llamarium.errors import TokenizerError

Parts = Sequence[str | int]
"""Texts and ids of control tokens, in the order in which they are one string."""


# The shape of a control token, whatever its flag says; the second with full-width bars, as DeepSeek has it.
CONTROL_SHAPE = re.compile(r"<\|[^|]+\|>|<\uff5c[^\uff5c]+\uff5c>")

# What ends an answer wherever a vocabulary has it as a control token. Source: llama.cpp, `llama-vocab.cpp`.
_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|end_of_turn|>"),
        *("<end_of_turn>", "<end_of_utterance>", "<|EOT|>", "<EOT>", "< EOT >", "_<EOT>", "[EOT]", "[EOS]"),
        *("<|return|>", "<|call|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    )
)

# What a model thinks and calls is part of its answer, so these are shown, and end nothing.
_SHOWN = re.compile(r"</?(think|thinking|reasoning|tool_call|tool_calls|tool_response|tools|function)>")

_THOUGHT = re.compile(r"</?(think|thinking|reasoning)>")


class TypedToken(NamedTuple):
    """A token that was added to a vocabulary or has a type in it, unlike those that were learned from texts.

    Attributes:
        spelling: Its text.
        id: Its id.
        is_flagged: The file says that it is a control token.
    """

    spelling: str
    id: int
    is_flagged: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """What a vocabulary's files say about its control tokens.

    Attributes:
        ids: Spelling to id, of every control token: no text of a user becomes one.
        bos: The id before a text, or None.
        eos: The ids that end a text, the file's main one first.
        pad: The id that fills short rows, or None.
        add_bos: `encode` puts `bos` before a text.
        visible: Control tokens that an answer shows. The others are hidden.
        candidates: Spelling to id of added tokens that a chat template would make control tokens.
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
        """The control tokens that an answer does not show."""
        return frozenset(self.ids.values()) - self.visible

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end an answer whatever the dialog's format is: `eos`, and control tokens that are known ends."""
        known = [i for spelling, i in self.ids.items() if spelling in _ENDS]
        if "<|return|>" in self.ids and "<|call|>" in self.ids and "<|end|>" in self.ids:
            known.remove(self.ids["<|end|>"])  # it ends a part of an answer there
        return tuple(dict.fromkeys((*self.eos, *known)))

    @property
    def may_end(self) -> Mapping[str, int]:
        """Spelling and id of the control tokens that a dialog's format may end an answer with."""
        return {text: i for text, i in self.ids.items() if not _SHOWN.fullmatch(text)}

    def with_template(self, template: str) -> "SpecialTokens":
        """Return these, and the candidates that a chat template (or the texts of several) writes."""
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
    """Find the control tokens among the typed ones.

    A control token is one that the file flags, one that has the shape of one, and one that a chat template writes
    literally. Only by the last it stays visible: the file says that it is text.
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
    """Tell whether a chat template writes a token that no word or run of blanks is.

    Templates compare what a model thought, and so do clients that send it back: `<think>` stays a text.
    """
    is_word = not any(c.isalpha() for c in spelling) or all(c.isalnum() or c.isspace() or c == "_" for c in spelling)
    return not is_word and not _THOUGHT.fullmatch(spelling) and spelling in template


def check_text(text: object) -> None:
    """Refuse what is no text, and a lone surrogate, half of a UTF-16 pair, which UTF-8 cannot hold: TokenizerError."""
    if not isinstance(text, str):
        raise TokenizerError(f"expected text (str), found {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text holds the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}; it is no "
            'valid Unicode: read the source with its own encoding, or use errors="replace"'
        ) from None


def split_spellings(text: str, spellings: Collection[str]) -> list[str]:
    """Split into text, token, text, ...: the tokens, of which the longest is found first, stand at the odd places."""
    return _pattern(frozenset(spellings)).split(text) if spellings else [text]


def split_control(text: str, control: Mapping[str, int]) -> list[str | int]:
    """Split into texts and the ids of the control tokens that are spelled between them; no text is empty."""
    split = split_spellings(text, control)
    parts = [control[part] if place % 2 else part for place, part in enumerate(split)]
    return [part for part in parts if part != ""]


@lru_cache(8)
def _pattern(spellings: frozenset[str]) -> re.Pattern[str]:
    return re.compile("(" + "|".join(map(re.escape, sorted(spellings, key=len, reverse=True))) + ")")
