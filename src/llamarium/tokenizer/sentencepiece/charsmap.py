"""The normalization rules of a SentencePiece file, which replace character sequences.

They are stored as a double-array trie: the child of a node for byte b is at index base XOR b. The layout is four bytes
with the size of the array, the array with 32 bits per node, and the replacements, each terminated by a zero byte. The
bits of a node are: 0 to 7, its byte; 8, whether a rule ends here; 9, whether the base is in units of 256; 10 to 31, the
base XOR the node's index. The node at the base itself, with bit 31 set, is a leaf, whose other bits are the offset of
the replacement.

Source: google/sentencepiece, `src/normalizer.cc`; Darts-clone, `darts.h`.
"""

import sys
from array import array

from llamarium.errors import TokenizerError

_MAX_BYTES = 256  # maximum length of a rule's match; NFKC's longest has 33
_LEAF = 1 << 31
_BYTE = 0xFF


class Charsmap:
    """Replacement rules, looked up directly in the stored trie."""

    def __init__(self, data: bytes, source: str) -> None:
        """Parse the rules of a file, possibly none; TokenizerError if they are malformed."""
        self._source = source
        self._nodes = array("I")
        self._replacements = b""
        self._needs_more: dict[str, bool] = {}
        if not data:
            return
        size = int.from_bytes(data[:4], "little")
        if len(data) <= 4 or size >= len(data) - 4 or size % 4 or not size:
            raise self._damaged(f"{len(data)} bytes for an array of {size} and its replacements")
        self._nodes.frombytes(data[4 : 4 + size])
        if sys.byteorder == "big":
            self._nodes.byteswap()
        self._replacements = data[4 + size :]
        if self._replacements[-1:] != b"\0":
            raise self._damaged("the last replacement does not end")

    def starts(self, character: str) -> bool:
        """Return whether a rule's match begins with this character."""
        return self._walk(character.encode("utf-8"))[0]

    def needs_more(self, character: str) -> bool:
        """Return whether every match that begins with this character continues with a non-ASCII one, e.g. an accent."""
        if character not in self._needs_more:
            data = character.encode("utf-8")
            is_ascii = (self._walk(data + bytes([byte]))[0] for byte in range(128))
            self._needs_more[character] = self._walk(data)[1] < len(data) and not any(is_ascii)
        return self._needs_more[character]

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def longest(self, text: str, start: int) -> tuple[int, str]:
        """Return the number of characters that the longest rule replaces at `start`, and the replacement; 0 if none."""
        data = text[start : start + _MAX_BYTES].encode("utf-8")[:_MAX_BYTES]
        _, num_bytes, place = self._walk(data)
        if not num_bytes:
            return 0, ""
        if place >= len(self._replacements):
            raise self._damaged("a replacement lies outside")
        end = self._replacements.index(b"\0", place)
        try:
            return len(data[:num_bytes].decode("utf-8")), self._replacements[place:end].decode("utf-8")
        except UnicodeDecodeError:
            raise self._damaged("a rule is not UTF-8") from None

    def _walk(self, data: bytes) -> tuple[bool, int, int]:
        """Follow bytes through the trie.

        Returns whether there are nodes for all of them, the length of the longest rule, and its replacement's offset.
        """
        nodes = self._nodes
        found = place = 0
        base = _base(nodes[0], 0) if nodes else 0
        for count, byte in enumerate(data, 1):
            at = base ^ byte
            if at >= len(nodes) or not byte:
                return False, found, place
            node = nodes[at]
            if node & (_LEAF | _BYTE) != byte:
                return False, found, place
            base = _base(node, at)
            if node & 1 << 8:
                if base >= len(nodes) or not nodes[base] & _LEAF:
                    raise self._damaged("a rule has no replacement")
                found, place = count, nodes[base] ^ _LEAF
        return True, found, place

    def _damaged(self, found: str) -> TokenizerError:
        return TokenizerError(f"{self._source}: damaged normalization rules: {found}; copy or download the file again")


def _base(node: int, at: int) -> int:
    """Return the base index of the children of the node at `at`."""
    return at ^ (node >> 10 << (8 if node & 1 << 9 else 0))
