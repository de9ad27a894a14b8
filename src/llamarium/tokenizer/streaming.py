"""Ids to text, one at a time, in whole characters.

A token is a run of bytes, and a character (an emoji, a Chinese sign) may begin in one token and end in the next.
Decoding each token alone would show U+FFFD where the full text has a character. The incremental UTF-8 decoder keeps
the bytes of an unfinished character, at most three, until the rest arrives, so a push costs what its token costs.
"""

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Turns ids into text as they come: all pushes and `finish()` joined equal `decode` of all ids."""

    def __init__(self, visible_bytes: Callable[[int], bytes], *, strip_first_space: bool = False) -> None:
        """Start a stream; `Tokenizer.stream` calls this."""
        self._visible_bytes = visible_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_first_space = strip_first_space
        self._strip_next = strip_first_space

    def push(self, token_id: int) -> str:
        """Take one id; return the characters that are complete now, often "". TokenizerError for an unknown id."""
        return self._strip(self._decoder.decode(self._visible_bytes(token_id)))

    def finish(self) -> str:
        """Return what is left: U+FFFD if the ids end inside a character, else "". The stream can begin anew."""
        rest = self._strip(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        self._strip_next = self._strip_first_space
        return rest

    def _strip(self, text: str) -> str:
        if not self._strip_next or not text:
            return text
        self._strip_next = False
        return text.removeprefix(" ")
