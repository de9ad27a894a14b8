"""Normalize a text before segmentation: apply rules, strip spaces, and write them as ▁.

Source: google/sentencepiece, `src/normalizer.cc`.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from llamarium.tokenizer.sentencepiece.charsmap import Charsmap
from llamarium.tokenizer.sentencepiece.model import SentencePieceModel
from llamarium.tokenizer.sentencepiece.piece_type import PieceType

SPACE = "\u2581"
_RUN = re.compile(" +")


class Rules(Protocol):
    """A set of texts to match, with replacements."""

    def starts(self, character: str) -> bool:
        """Return whether one of the texts begins with this character."""
        ...

    def needs_more(self, character: str) -> bool:
        """Return whether all texts that begin with this character are known to continue with a non-ASCII one."""
        ...

    def longest(self, text: str, start: int) -> tuple[int, str]:
        """Return the length of the longest match at `start`, and its replacement; 0 if there is none."""
        ...


class KeptTexts:
    """Texts that are kept unchanged: user-defined pieces."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Index the texts."""
        self._sorted: dict[str, list[str]] = {}  # by their first character
        for text in sorted(set(texts)):
            self._sorted.setdefault(text[0], []).append(text)
        self._longest = {first: max(map(len, group)) for first, group in self._sorted.items()}

        self._lengths: dict[str, list[int]] = {}  # of those that a text begins with, itself included
        for group in self._sorted.values():
            beginnings: list[str] = []
            for text in group:
                while beginnings and not text.startswith(beginnings[-1]):
                    beginnings.pop()
                beginnings.append(text)
                self._lengths[text] = list(map(len, beginnings))

    def __bool__(self) -> bool:
        return bool(self._sorted)

    def starts(self, character: str) -> bool:
        """Whether one of the texts begins with this character."""
        return character in self._sorted

    def needs_more(self, character: str) -> bool:
        """Return False, as there are few such texts."""
        return False

    def longest(self, text: str, start: int) -> tuple[int, str]:
        """Return the length of the longest text at `start`, and the text; 0 if there is none."""
        if (group := self._sorted.get(text[start])) is None:
            return 0, ""
        here = text[start : start + self._longest[text[start]]]
        place = bisect_right(group, here)
        if place == 0:
            return 0, ""

        # What `here` begins with sorts before it, and all that sorts between the two begins with the same.
        nearest = group[place - 1]
        lengths = self._lengths[nearest]
        num_equal = bisect_left(lengths, True, key=lambda size: here[:size] != nearest[:size])
        size = lengths[num_equal - 1] if num_equal else 0
        return size, nearest[:size]


def split_matches(text: str, rules: Sequence[Rules]) -> Iterator[tuple[str, str | None]]:
    """Match rules from left to right; yield pairs of unmatched text and the replacement of the match after it.

    If several rules match, the first one is used. The last pair has None.
    """
    candidates = _candidates(text, rules)
    done = position = 0
    while candidates is not None and (candidate := candidates.search(text, position)):
        start = candidate.start()
        position = start + 1
        for rule in rules:
            size, replacement = rule.longest(text, start)
            if size:
                yield text[done:start], replacement
                done = position = start + size
                break
    yield text[done:], None


def _candidates(text: str, rules: Sequence[Rules]) -> re.Pattern[str] | None:
    """Return a pattern for the positions where a rule may match; None if there are none."""
    alone: list[str] = []
    before_others: list[str] = []
    for character in set(text) if rules else ():
        matching = [rule for rule in rules if rule.starts(character)]
        if matching:
            needs_more = all(rule.needs_more(character) for rule in matching)
            (before_others if needs_more else alone).append(re.escape(character))
    patterns = [f"[{''.join(alone)}]"] if alone else []
    patterns += [f"[{''.join(before_others)}](?=[^\\0-\\x7f])"] if before_others else []
    return re.compile("|".join(patterns)) if patterns else None


class Normalizer:
    """Normalizes texts for a vocabulary."""

    def __init__(self, model: SentencePieceModel, source: str) -> None:
        """Read the model's rules; TokenizerError if they are damaged."""
        user_defined = KeptTexts(model.pieces[i] for i in model.of_type(PieceType.USER_DEFINED))
        self._rules = [rules for rules in (user_defined, Charsmap(model.charsmap, source)) if rules]
        self._removes_spaces = model.remove_extra_whitespaces
        self._escapes = model.escape_whitespaces
        self._suffix = model.whitespace_as_suffix
        self._has_dummy = model.add_dummy_prefix

    def normalize(self, text: str, *, dummy_prefix: bool = True) -> str:
        """Return the normalized text; `dummy_prefix` False adds no space before or after it."""
        pieces = self._applied(text)
        normalized = "".join(_without_extra_spaces(pieces)) if self._removes_spaces else "".join(pieces)
        if not normalized:
            return ""
        space = SPACE if self._escapes else " "
        has_dummy = self._has_dummy and dummy_prefix
        normalized = (space if has_dummy and not self._suffix else "") + normalized.replace(" ", space)
        if self._removes_spaces:
            normalized = normalized.rstrip(space)
        return normalized + (space if has_dummy and self._suffix else "")

    def _applied(self, text: str) -> Iterator[str]:
        """Yield the text with the rules applied: unmatched, replacement, unmatched, ..."""
        for plain, replacement in split_matches(text, self._rules):
            yield plain
            if replacement is not None:
                yield replacement


def _without_extra_spaces(pieces: Iterator[str]) -> Iterator[str]:
    """Drop leading and repeated spaces; spaces within a replacement are kept, except its first."""
    after_space = True
    for number, piece in enumerate(pieces):
        kept = piece if number % 2 else _RUN.sub(" ", piece)
        kept = kept.lstrip(" ") if after_space else kept
        if kept:
            after_space = kept.endswith(" ")
            yield kept
