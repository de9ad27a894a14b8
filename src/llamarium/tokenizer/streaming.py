"""Streaming: decode ids one at a time into whole characters, up to a stop string.

A token is a sequence of bytes, and a character such as an emoji may span several tokens, so decoding each token alone
would show U+FFFD. The incremental UTF-8 decoder keeps the bytes of an incomplete character, at most three, until the
rest arrives.

A stop string may also span several pieces of text. Text that could be the beginning of a stop string is held back until
it is known whether it is.
"""

import codecs
import operator
from collections.abc import Callable, Collection, Iterable

from llamarium.errors import SamplingError, show_value


class StreamDecoder:
    """Decodes ids incrementally; all results of `push` and `finish`, joined, equal `decode` of all ids."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        hidden: Collection[int] = (),
        *,
        strip_first_space: bool = False,
    ) -> None:
        """Start a stream that omits `hidden` ids; called by `Tokenizer.stream`."""
        self._token_bytes, self._hidden = token_bytes, hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_first_space = strip_first_space
        self._strip_next = strip_first_space

    def push(self, token_id: int) -> str:
        """Add an id and return the new complete characters, often ""; TokenizerError for an unknown id."""
        shown = self._token_bytes(token_id)
        text = self._decoder.decode(b"" if operator.index(token_id) in self._hidden else shown)
        return self._strip(text) if self._strip_next else text

    def finish(self) -> str:
        """Return the rest, U+FFFD if the ids end inside a character, else ""; the stream can then be reused."""
        rest = self._decoder.decode(b"", final=True)
        rest = self._strip(rest) if self._strip_next else rest
        self._decoder.reset()
        self._strip_next = self._strip_first_space
        return rest

    def _strip(self, text: str) -> str:
        self._strip_next = not text
        return text.removeprefix(" ")


class StopStringFilter:
    """Passes text through up to a stop string, which is then in `matched`.

    The match that starts first in the text wins, and the shorter of two that start at the same place, however the text
    is split into pieces.
    """

    def __init__(self, stops: Iterable[object]) -> None:
        """Look for `stops`; without any, all text passes."""
        self._stops: list[str] = []
        for stop in [stops] if isinstance(stops, str) else stops:
            if not isinstance(stop, str) or not stop:
                raise SamplingError(f"stop is {show_value(stop)}; expected strings of at least one character")
            self._stops.append(stop)
        self._held = ""
        self.matched: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found, after which nothing more passes."""
        return self.matched is not None

    def push(self, text: str) -> str:
        """Add a piece of text; return what passes now."""
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
        """Return the text that was held back, at the end of the text."""
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
        """Return the place and the string of the first complete match, or (-1, None)."""
        matches = [(self._held.find(stop), len(stop), stop) for stop in self._stops if stop in self._held]
        start, _, stop = min(matches, default=(-1, 0, None))
        return start, stop

    def _first_doubt(self) -> int:
        """Return the place from which on the text could be the beginning of a stop string."""
        length = len(self._held)
        places = [length]
        for stop in self._stops:
            tails = range(max(0, length - len(stop) + 1), length)
            places.append(next((i for i in tails if stop.startswith(self._held[i:])), length))
        return min(places)
