"""Byte-pair encoding that one can read, and that shows its work.

A byte-level BPE vocabulary has a token for each of the 256 bytes, so any text can be written. Longer tokens were
learned: training merged the most frequent pair of neighbours into a new token, again and again, and the order of
these merges is the vocabulary's knowledge. Encoding a text repeats them:

1. The text is cut into pieces, roughly words with the space before them. No token reaches over a cut.
2. Each piece is written as bytes, one part per byte.
3. Of all neighbouring parts that have a merge, the one learned first (the lowest rank; of equals, the leftmost) is
   joined. This repeats until no neighbours have a merge.
4. Each part that is left is a token.

The backends do the same in Rust. This twin exists to be read and to tell each step; tests hold the two equal.

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
    """One step: two neighbours became one part. The lowest rank goes first; `start` counts bytes of the piece."""

    rank: int
    left: bytes
    right: bytes
    start: int

    @property
    def result(self) -> bytes:
        """The part that the two became."""
        return self.left + self.right


@dataclass(frozen=True, slots=True)
class PreToken:
    """A cut of the text and what became of it.

    Attributes:
        start: Where it begins, in bytes of the text.
        merges: The steps in order; none for a single byte, or where the whole piece is one token at once.
    """

    text: str
    start: int
    merges: tuple[Merge, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Token:
    """A token in its text: its bytes, perhaps no whole characters, from `start` to before `end`."""

    id: int
    bytes: bytes
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a text became ids: the pieces of the pre-tokenizer, and the tokens with their places."""

    text: str
    utf8: bytes
    pieces: tuple[PreToken, ...]
    tokens: tuple[Token, ...]

    @property
    def ids(self) -> list[int]:
        """The ids, as `encode` returns them."""
        return [token.id for token in self.tokens]

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON values; bytes appear as a printable `text` and as `bytes`, a list of numbers."""
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
    """The vocabulary as the algorithm needs it.

    Attributes:
        ids: Bytes of each token to its id.
        rank: The rank of merging two neighbours, or None if they never merge.
        cut: The pre-tokenizer: pieces whose concatenation is the text.
        whole_pieces: A piece that is itself a token becomes that token without merging (Llama 3's `ignore_merges`).
        added: Tokens that were given to the vocabulary rather than learned; `cut` makes each a piece.
        prefix: What is put before a text that is not empty.
    """

    ids: Mapping[bytes, int]
    rank: Callable[[bytes, bytes], int | None]
    cut: Callable[[str], list[str]]
    whole_pieces: bool
    added: frozenset[bytes] = frozenset()
    prefix: str = ""

    def explain(self, text: str) -> Explanation:
        """Encode `text`, keeping every step; with a prefix, the places count from its beginning."""
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
        """Join the parts of one piece until no neighbours have a merge.

        Searching all neighbours for the lowest rank before every merge would cost the square of the piece's length
        (a megabyte of spaces is one piece). A heap holds the candidates instead, and each part links to its neighbours.
        Returns the parts that are left, and the merges in order.
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
                continue  # one of the two has been merged with another since
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
    """The parts of a piece, found by the byte at which they begin; a part that was merged away is b""."""

    def __init__(self, piece: bytes) -> None:
        self.at = [piece[i : i + 1] for i in range(len(piece))]
        self.before = list(range(-1, len(piece) - 1))  # where the part before begins

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
    """Give each byte a printable character, as GPT-2's vocabulary files write it (a space is `Ġ`).

    Source: openai/gpt-2, `encoder.py`, `bytes_to_unicode`.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


BYTE_TO_CHARACTER = _byte_spellings()
CHARACTER_TO_BYTE = {character: byte for byte, character in BYTE_TO_CHARACTER.items()}


def spell(data: bytes) -> str:
    """Write bytes in GPT-2's printable characters."""
    return "".join([BYTE_TO_CHARACTER[byte] for byte in data])


def unspell(token: str) -> bytes:
    """Read a token written in GPT-2's printable characters; any other token stands for its own UTF-8."""
    try:
        return bytes([CHARACTER_TO_BYTE[character] for character in token])
    except KeyError:
        return token.encode("utf-8")
