"""Keeps digests of earlier prompts, and explains for each new one why its prefix was not cached."""

import hashlib
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from llamarium.engine.prefix import Key
from llamarium.generation.answers import Answers
from llamarium.generation.text_engine import TextEngine
from llamarium.server.prefix.explanation import Explanation, Prompt, PromptRecord, explain, nearest
from llamarium.server.prefix.fields import PromptParts, Value, message_values
from llamarium.tokenizer.base import Tokenizer

BYTES_PER_BLOCK = 64
"""Memory for earlier prompts, in bytes per block of the prefix cache."""

MAX_COMPARED = 128
"""Maximum number of earlier prompts of an API key, newest first, that a prompt is compared with."""

MAX_KEPT_ANSWERS = 4
"""Maximum number of answers per prompt that later prompts are compared with."""

MAX_SHOWN = 64
"""Maximum number of explanations kept for `PrefixExplainer.newest`, over all API keys."""

LONG_PROMPT = 2**14
"""Prompt length in tokens above which storing the answers takes more than 0.1 ms, too long for the event loop."""

HEADER = "x-llamarium-prefix"
"""Response header with the explanation, for requests with a single prompt."""

_NUMBERS = re.compile(r"\[\d+\]")


@dataclass(frozen=True, slots=True)
class Explained:
    """A submitted prompt and its explanation.

    Attributes:
        num_messages: Number of messages of its dialog.
        has_new_message: Whether the answer is a new message of the dialog.
        shows_texts: Whether the usage contains the explanation, with texts.
    """

    prompt: Prompt
    explanation: Explanation
    num_messages: int
    has_new_message: bool
    shows_texts: bool


@dataclass(frozen=True, slots=True)
class ShownExplanation:
    """A request's explanation, shown on the page to the API key's owner.

    Attributes:
        owner: Digest of the API key.
        number: The engine's request number.
    """

    owner: Key
    number: int
    explanation: Explanation


class PromptMemory:
    """The newest prompts, up to `max_bytes` in total. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._lock = max_bytes, threading.Lock()
        self._records = dict[int, PromptRecord]()  # oldest first
        self._of_owner = dict[Key, dict[int, None]]()
        self._next = 0
        self.num_bytes = 0

    def newest(self, owner: Key) -> list[PromptRecord]:
        """Return up to `MAX_COMPARED` prompts of an owner, newest first."""
        with self._lock:
            return [self._records[number] for number in islice(reversed(self._of_owner.get(owner, {})), MAX_COMPARED)]

    def add(self, record: PromptRecord) -> None:
        """Add a prompt; drop those that it continues, and the oldest ones beyond `max_bytes`."""
        size = record.num_bytes
        if size > self._max_bytes:
            return
        with self._lock:
            for number in list(islice(reversed(self._of_owner.get(record.owner, {})), MAX_COMPARED)):
                if self._records[number].is_beginning_of(record):
                    self._forget(number)
            while self.num_bytes + size > self._max_bytes:
                self._forget(next(iter(self._records)))
            self._records[self._next] = record
            self._of_owner.setdefault(record.owner, {})[self._next] = None
            self._next += 1
            self.num_bytes += size

    def _forget(self, number: int) -> None:
        record = self._records.pop(number)
        self.num_bytes -= record.num_bytes
        numbers = self._of_owner[record.owner]
        del numbers[number]
        if not numbers:
            del self._of_owner[record.owner]


class PrefixExplainer:
    """Compares each prompt with the earlier ones of the same API key.

    Args:
        api_keys: The configured API keys; counts refer to them by number, from 1.
        shows_texts: Whether explanations contain the texts around the first difference.
    """

    def __init__(self, api_keys: Sequence[str] = (), *, shows_texts: bool = False) -> None:
        self._names = {key: str(place + 1) for place, key in enumerate(api_keys)}
        self.shows_texts = shows_texts
        self._memory: PromptMemory | None = None
        self._newest: deque[ShownExplanation] | None = None
        self._lock = threading.Lock()
        self._counts = Counter[tuple[str, str, str]]()

    @property
    def counts(self) -> Mapping[tuple[str, str, str], int]:
        """Number of prompts by number of the API key ("0" without keys), reason, and field path without indices."""
        return dict(self._counts)

    @property
    def num_bytes(self) -> int:
        """Memory used by the earlier prompts, in bytes."""
        return 0 if self._memory is None else self._memory.num_bytes

    def keep_newest(self) -> None:
        """Start keeping the newest explanations, with texts, for `newest`."""
        self._newest = deque(maxlen=MAX_SHOWN)

    def newest(self, owner: str) -> list[ShownExplanation]:
        """Return the kept explanations of an API key's requests, newest first."""
        name = _digest(owner)
        with self._lock:
            return [explanation for explanation in reversed(self._newest or ()) if explanation.owner == name]

    def opened(
        self,
        owner: str,
        answers: Answers,
        parts: PromptParts,
        engine: TextEngine,
        tokenizer: Tokenizer,
        path_of: Callable[[str], str] = str,
    ) -> Explained:
        """Explain a prompt that was just submitted, and store it for comparison with later ones.

        Args:
            owner: The request's API key, or "".
            answers: The prompt's running answers.
            parts: The prompt's parts.
            engine: The engine, for its prefix cache.
            tokenizer: The model's tokenizer.
            path_of: Translates a path in chat completions to the request's protocol.
        """
        index = engine.prefix_index
        if self._memory is None:
            self._memory = PromptMemory(BYTES_PER_BLOCK * index.pool.num_blocks)
        name = _digest(owner)
        prompt = Prompt.of(name, answers.root, answers.prompt_ids, index.pool.block_size, parts)
        record = nearest(prompt, self._memory.newest(name))
        shows_texts = self.shows_texts or self._newest is not None
        explanation = explain(prompt, record, index.ids_of, tokenizer, shows_texts=shows_texts)
        self._memory.add(prompt.record())
        translated = replace(
            explanation,
            path=None if explanation.path is None else path_of(explanation.path),
            others=tuple(map(path_of, explanation.others)),
        )
        self._counts[self._names.get(owner, "0"), explanation.reason, _NUMBERS.sub("[]", explanation.path or "")] += 1
        if self._newest is not None:
            with self._lock:
                self._newest.append(ShownExplanation(name, answers.number, translated))
        is_new = bool(parts.messages) and parts.answer_start is None
        return Explained(prompt, translated, len(parts.messages), is_new, self.shows_texts)

    def finished(self, explained: Explained, answers: Answers) -> None:
        """Store the prompt with its answers, which the conversation's next prompt contains."""
        if self._memory is None:
            return
        for row in answers.rows[:MAX_KEPT_ANSWERS]:
            values = list[Value]()
            if row.finish_reason is not None and explained.has_new_message:
                completion = row.completion()
                message = (
                    completion.message if completion.tool_calls else {"role": "assistant", "content": completion.text}
                )
                values = list(message_values(explained.num_messages, message))
            if row.token_ids:
                self._memory.add(explained.prompt.record(row.token_ids, values))


def _digest(owner: str) -> Key:
    return hashlib.blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=16).digest()
