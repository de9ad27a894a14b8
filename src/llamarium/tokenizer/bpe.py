"""A readable implementation of byte-level BPE that reports its steps.

A byte-level BPE vocabulary has a token for each of the 256 bytes, so any text can be encoded. Longer tokens are
learned: training repeatedly merges the most frequent pair of adjacent tokens into a new token. The order of these
merges defines the encoding:

1. The pre-tokenizer splits the text into pieces, roughly words with the preceding space. No token crosses a split.
2. Each piece is split into its bytes.
3. Of all adjacent parts that have a merge, the pair with the lowest rank (the leftmost of equals) is merged. This
   repeats until no adjacent parts have a merge.
4. Each remaining part is a token.

The backends do the same in Rust. This implementation is for reading and for showing each step; tests compare the two.

Source: Sennrich, Haddow, Birch 2016, "Neural Machine Translation of Rare Words with Subword Units", section 3.2;
the byte-level form from Radford et al. 2019 (GPT-2), section 2.2.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llamarium.errors import escape


@dataclass(frozen=True, slots=True)
class Merge:
    """A merge of two adjacent parts; `start` is a byte offset in the piece."""

    rank: int
    left: bytes
    right: bytes
    start: int

    @property
    def result(self) -> bytes:
        """The merged part."""
        return self.left + self.right


@dataclass(frozen=True, slots=True)
class PreToken:
    """A piece of the text, with its merges and token ids.

    Attributes:
        text: The piece.
        start: Byte offset in the text.
        merges: Merges in order; empty for a single byte, or if the piece becomes a token without merging.
        ids: Token ids.
    """

    text: str
    start: int
    merges: tuple[Merge, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Token:
    """A token with its bytes, which may be part of a character, and its byte range [start, end) in the text."""

    id: int
    bytes: bytes
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """The encoding of a text step by step: the pieces of the pre-tokenizer, and the tokens with their byte ranges."""

    text: str
    utf8: bytes
    pieces: tuple[PreToken, ...]
    tokens: tuple[Token, ...]

    @property
    def ids(self) -> list[int]:
        """Token ids, as `encode` returns them."""
        return [token.id for token in self.tokens]

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as JSON values; bytes appear as printable `text` and as a list of numbers, `bytes`."""
        pieces = [
            {"text": one.text, "start": one.start, "merges": list(map(_shown_merge, one.merges)), "ids": list(one.ids)}
            for one in self.pieces
        ]
        tokens = [{"id": one.id, **_shown(one.bytes), "start": one.start, "end": one.end} for one in self.tokens]
        return {"text": self.text, "utf8": list(self.utf8), "pieces": pieces, "ids": self.ids, "tokens": tokens}


def _shown_merge(merge: Merge) -> dict[str, Any]:
    parts = {name: _shown(getattr(merge, name)) for name in ("left", "right", "result")}
    return {"rank": merge.rank, **parts, "start": merge.start}


def _shown(data: bytes) -> dict[str, Any]:
    return {"text": escape(data.decode("utf-8", "backslashreplace"), limit=10_000), "bytes": list(data)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteLevelBPE:
    """A byte-level BPE vocabulary.

    Attributes:
        ids: Id of each token, by its bytes.
        rank: Returns the rank of merging two adjacent parts, or None if they have no merge.
        cut: Pre-tokenizer: returns pieces whose concatenation is the text.
        whole_pieces: A piece that is a token becomes that token without merging (Llama 3's `ignore_merges`).
        added: Added tokens; `cut` makes each of them a piece.
        prefix: Prefix of non-empty texts.
    """

    ids: Mapping[bytes, int]
    rank: Callable[[bytes, bytes], int | None]
    cut: Callable[[str], list[str]]
    whole_pieces: bool
    added: frozenset[bytes] = frozenset()
    prefix: str = ""

    def explain(self, text: str) -> Explanation:
        """Encode `text` and record every step; byte offsets include the prefix."""
        text = self.prefix + text if text else text
        pieces: list[PreToken] = []
        tokens: list[Token] = []
        start = 0
        for cut in self.cut(text):
            parts, merges = self.merge(cut.encode("utf-8"))
            pieces.append(PreToken(cut, start, tuple(merges), tuple(self.ids[part] for part in parts)))
            for part in parts:
                tokens.append(Token(self.ids[part], part, start, start + len(part)))
                start += len(part)
        return Explanation(text, text.encode("utf-8"), tuple(pieces), tuple(tokens))

    def merge(self, piece: bytes) -> tuple[list[bytes], list[Merge]]:
        """Merge the parts of a piece until no adjacent parts have a merge; return the parts and the merges in order.

        Searching for the lowest rank before every merge would take quadratic time (a megabyte of spaces is one piece),
        so candidates are kept in a heap, and each part links to its neighbors.
        """
        if piece in self.added or (self.whole_pieces and piece in self.ids):
            return [piece], []
        parts = _Parts(piece)
        heap = [candidate for start in range(len(piece)) for candidate in self._candidate(parts, start)]
        heapq.heapify(heap)
        merges: list[Merge] = []
        while heap:
            rank, start, left, right = heapq.heappop(heap)
            if parts.pair_at(start) != (left, right):
                continue  # stale: one of the parts has been merged with another
            merges.append(Merge(rank, left, right, start))
            parts.join(start)
            for place in (parts.before[start], start):
                for candidate in self._candidate(parts, place):
                    heapq.heappush(heap, candidate)
        return [part for part in parts.at if part], merges

    def _candidate(self, parts: "_Parts", start: int) -> Iterator[tuple[int, int, bytes, bytes]]:
        """Yield the merge of the part at `start` with its right neighbour, if there is one."""
        pair = parts.pair_at(start)
        rank = None if pair is None else self.rank(*pair)
        if pair is not None and rank is not None:
            yield rank, start, *pair


class _Parts:
    """The parts of a piece by their start offset; merged parts are b""."""

    def __init__(self, piece: bytes) -> None:
        self.at = [piece[i : i + 1] for i in range(len(piece))]
        self.before = list(range(-1, len(piece) - 1))  # start of the previous part

    def pair_at(self, start: int) -> tuple[bytes, bytes] | None:
        if start < 0:
            return None
        left = self.at[start]
        after = start + len(left)
        return (left, self.at[after]) if left and after < len(self.at) else None

    def join(self, start: int) -> None:
        left, right = self.at[start], self.at[start + len(self.at[start])]
        self.at[start + len(left)] = b""
        self.at[start] = left + right
        after = start + len(left) + len(right)
        if after < len(self.at):
            self.before[after] = start


def _byte_spellings() -> dict[int, str]:
    """Return a printable character for each byte, as in GPT-2's vocabulary files (a space is `Ġ`).

    Source: openai/gpt-2, `encoder.py`, `bytes_to_unicode`.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


BYTE_TO_CHARACTER = _byte_spellings()
CHARACTER_TO_BYTE = {character: byte for byte, character in BYTE_TO_CHARACTER.items()}


def spell(data: bytes) -> str:
    """Convert bytes to GPT-2's printable characters."""
    return "".join([BYTE_TO_CHARACTER[byte] for byte in data])


def unspell(token: str) -> bytes:
    """Convert a token in GPT-2's printable characters to bytes; any other token to its UTF-8."""
    try:
        return bytes([CHARACTER_TO_BYTE[character] for character in token])
    except KeyError:
        return token.encode("utf-8")
