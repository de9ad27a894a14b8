"""Ids to text, one at a time, in whole characters, and up to a stop string.

A token is a run of bytes, and a character (an emoji, a Chinese sign) may begin in one token and end in the next.
Decoding each token alone would show U+FFFD where the full text has a character. The incremental UTF-8 decoder keeps
the bytes of an unfinished character, at most three, until the rest arrives, so a push costs what its token costs.

A stop string may begin in one piece of text and end in a later one, so text that could be the beginning of a stop
string is kept back until it is clear: shown after a near miss, never shown in a match.
"""

import codecs
import operator
from collections.abc import Callable, Collection, Iterable

from llamarium.errors import SamplingError, show_value


class StreamDecoder:
    """Turns ids into text as they come: all pushes and `finish()` joined equal `decode` of all ids."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        hidden: Collection[int] = (),
        *,
        strip_first_space: bool = False,
    ) -> None:
        """Start a stream, which shows nothing of `hidden` ids; `Tokenizer.stream` calls this."""
        self._token_bytes, self._hidden = token_bytes, hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_first_space = strip_first_space
        self._strip_next = strip_first_space

    def push(self, token_id: int) -> str:
        """Take one id; return the characters that are complete now, often "". TokenizerError for an unknown id."""
        shown = self._token_bytes(token_id)
        text = self._decoder.decode(b"" if operator.index(token_id) in self._hidden else shown)
        return self._strip(text) if self._strip_next else text

    def finish(self) -> str:
        """Return what is left: U+FFFD if the ids end inside a character, else "". The stream can begin anew."""
        rest = self._decoder.decode(b"", final=True)
        rest = self._strip(rest) if self._strip_next else rest
        self._decoder.reset()
        self._strip_next = self._strip_first_space
        return rest

    def _strip(self, text: str) -> str:
        self._strip_next = not text
        return text.removeprefix(" ")


class StopStringFilter:
    """Passes text on until a stop string begins, which is `matched` then.

    The match that begins first in the text wins, and of two that begin together the shorter, however the text was
    cut into pieces.
    """

    def __init__(self, stops: Iterable[object]) -> None:
        """Watch for `stops`; none passes everything on."""
        self._stops: list[str] = []
        for stop in [stops] if isinstance(stops, str) else stops:
            if not isinstance(stop, str) or not stop:
                raise SamplingError(f"stop is {show_value(stop)}; expected strings of at least one character")
            self._stops.append(stop)
        self._held = ""
        self.matched: str | None = None

    @property
    def stopped(self) -> bool:
        """A stop string was found; nothing more will be shown."""
        return self.matched is not None

    def push(self, text: str) -> str:
        """Take a piece of text; return what can be shown now."""
        if not self._stops or self.stopped:
            return "" if self.stopped else text
        self._held += text
        start, stop = self._first_match()
        doubtful = self._first_doubt()
        if stop is not None and start <= doubtful:
            return self._stop_at(start, stop)
        shown, self._held = self._held[:doubtful], self._held[doubtful:]
        return shown

    def finish(self) -> str:
        """Return what was kept back, now that no more text comes."""
        if self.stopped:
            return ""
        start, stop = self._first_match()
        if stop is not None:
            return self._stop_at(start, stop)
        shown, self._held = self._held, ""
        return shown

    def _stop_at(self, start: int, stop: str) -> str:
        shown, self._held, self.matched = self._held[:start], "", stop
        return shown

    def _first_match(self) -> tuple[int, str | None]:
        """Return place and string of the first complete match, or (-1, None)."""
        found = [(self._held.find(stop), len(stop), stop) for stop in self._stops if stop in self._held]
        start, _, stop = min(found, default=(-1, 0, None))
        return start, stop

    def _first_doubt(self) -> int:
        """Return where the text's end begins to look like an unfinished stop string."""
        length = len(self._held)
        places = [length]
        for stop in self._stops:
            tails = range(max(0, length - len(stop) + 1), length)
            places.append(next((i for i in tails if stop.startswith(self._held[i:])), length))
        return min(places)
