"""Multi-turn dialogs that keep their KV cache between turns."""

import copy
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar, Unpack

from llamarium.engine.tiers.disk_cache import DiskCache
from llamarium.errors import SamplingError
from llamarium.generation.completion import Piece, message_of
from llamarium.generation.dialog import CHAT_MAX_TOKENS
from llamarium.generation.keywords import ChatKeywords
from llamarium.generation.loop import DialogEngine
from llamarium.generation.options import PassOptions
from llamarium.keywords import shows_options
from llamarium.runtime.runner import Runner
from llamarium.sampling.params import SamplingParams
from llamarium.tokenizer.tools.deltas import Delta, calls_of, text_of


class ChatModel(Protocol):
    """The part of `Llama` that a conversation needs."""

    @property
    def runner(self) -> Runner: ...  # noqa: D102
    def stream_chat(  # noqa: D102
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        prefix: DialogEngine | None = None,
        **options: Unpack[ChatKeywords],
    ) -> Iterator[Piece]: ...


ChatModelT = TypeVar("ChatModelT", bound=ChatModel)


class Conversation(Generic[ChatModelT]):
    """A multi-turn dialog; `messages`, a list of {"role", "content"}, may be changed between turns.

    With a `disk_cache`, later processes also reuse its KV cache; OptionError if the model does not support one.

    >>> dialog = smollm2.conversation("You answer in one word.")
    >>> "".join(piece.text for piece in dialog.say("What is the capital of France?", temperature=0, max_tokens=8))
    'The capital of France is Paris.'
    >>> [message["role"] for message in dialog.messages]
    ['system', 'user', 'assistant']
    """

    def __init__(self, llama: ChatModelT, system: str | None = None, disk_cache: DiskCache | None = None) -> None:
        self.llama = llama
        self.messages: list[dict[str, Any]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self._prefix = DialogEngine(llama.runner, disk=disk_cache)

    @shows_options(SamplingParams, PassOptions, error=SamplingError, max_tokens=CHAT_MAX_TOKENS)
    def say(self, text: str, params: SamplingParams | None = None, **options: Unpack[ChatKeywords]) -> Generator[Piece]:
        """Send a user message and stream the answer; both are in `messages` once the stream ends or is closed.

        Options are those of `Llama.chat`; they are validated at once.

        >>> dialog = smollm2.conversation()
        >>> "".join(piece.text for piece in dialog.say("What is the capital of France?", temperature=0, max_tokens=8))
        'The capital of France is Paris.'

        Of an interrupted answer, `messages` has the text so far. If there is no answer at all, for example because the
        dialog exceeds the context, the user message is not added either.
        """
        return self._answer([{"role": "user", "content": text}], params, options)

    @shows_options(SamplingParams, PassOptions, error=SamplingError, max_tokens=CHAT_MAX_TOKENS)
    def go_on(self, params: SamplingParams | None = None, **options: Unpack[ChatKeywords]) -> Generator[Piece]:
        """Stream the answer to the current `messages`, for example after adding the results of tool calls; as `say`.

        >>> dialog = smollm2.conversation()
        >>> dialog.messages.append({"role": "user", "content": "What is the capital of France?"})
        >>> "".join(piece.text for piece in dialog.go_on(temperature=0, max_tokens=8))
        'The capital of France is Paris.'
        """
        return self._answer([], params, options)

    def fork(self) -> Self:
        """Return a branch that continues from here independently and reuses the KV cache of the common messages.

        Branches share one engine, so only one can answer at a time, and closing one closes all.

        >>> branch = dialog.fork()
        >>> len(branch.messages) == len(dialog.messages) == 2
        True
        """
        branch = copy.copy(self)
        branch.messages = copy.deepcopy(self.messages)
        return branch

    def close(self) -> None:
        """Flush the disk cache and end the conversation.

        >>> dialog.close()
        """
        self._prefix.close()

    def _answer(
        self, new_messages: list[dict[str, Any]], params: SamplingParams | None, options: ChatKeywords
    ) -> Generator[Piece]:
        pieces = self.llama.stream_chat([*self.messages, *new_messages], params, prefix=self._prefix, **options)
        return self._following(new_messages, pieces)

    def _following(self, new_messages: list[dict[str, Any]], pieces: Iterator[Piece]) -> Generator[Piece]:
        deltas: list[Delta] = []
        has_started = False
        try:
            for piece in pieces:
                has_started = True
                deltas += piece.deltas
                yield piece
        finally:
            if has_started:
                self.messages += [*new_messages, message_of(text_of(deltas), calls_of(deltas))]
