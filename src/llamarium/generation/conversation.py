"""A dialog of several turns, whose keys and values are kept from turn to turn."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from llamarium.generation.completion import Piece
from llamarium.generation.kept import PrefixCache

if TYPE_CHECKING:
    from llamarium.api import Llama


class Conversation:
    """A dialog of several turns.

    Attributes:
        messages: What has been said, as {"role", "content"}; change it freely between turns.
    """

    def __init__(self, llama: "Llama", system: str | None = None) -> None:
        self.llama = llama
        self.messages: list[dict[str, str]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self._prefix = PrefixCache(llama.runner)

    def say(self, text: str, **options: Any) -> Iterator[Piece]:
        """Say something and stream the answer; both are in `messages` when the stream ends or is closed.

        Options are those of `Llama.chat`.

        An answer that is interrupted stays as far as it got. If the dialog cannot be answered (it has outgrown the
        context, say), what was said is taken back.
        """
        said = [*self.messages, {"role": "user", "content": text}]
        pieces = self.llama.stream_chat(said, prefix=self._prefix, **options)
        answer: list[str] = []
        try:
            for piece in pieces:
                answer.append(piece.text)
                yield piece
        finally:
            if answer:
                self.messages.append({"role": "user", "content": text})
                self.messages.append({"role": "assistant", "content": "".join(answer)})
