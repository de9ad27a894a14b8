"""The server's memory of earlier prompts, and what it says about each new one."""

import hashlib
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llamarium.engine.prefix import Key
from llamarium.generation.answers import Answers
from llamarium.generation.completion import RowText
from llamarium.generation.text_engine import TextEngine
from llamarium.server.prefix.explanation import Explanation, Prompt, explain, nearest
from llamarium.server.prefix.fields import PromptParts, Value, message_values
from llamarium.server.prefix.memory import BYTES_PER_BLOCK, PromptMemory
from llamarium.tokenizer.base import Tokenizer

MAX_KEPT_ANSWERS = 4
"""Answers to one prompt that later prompts are compared with."""

MAX_SHOWN = 64
"""Explanations that are kept for `PrefixExplainer.newest`, over all keys."""

LONG_PROMPT = 2**14
"""Tokens of a prompt from which on it takes longer to keep its answers than an event loop should wait: 0.1 ms."""

HEADER = "x-llamarium-prefix"
"""The header with the explanation of a request with one prompt."""

_NUMBERS = re.compile(r"\[\d+\]")


@dataclass(frozen=True, slots=True)
class Explained:
    """A prompt that was submitted, and its explanation.

    Attributes:
        num_messages: Of its dialog.
        has_new_message: The answer is the dialog's next message.
        shows_texts: The usage has the explanation, with texts.
    """

    prompt: Prompt
    explanation: Explanation
    num_messages: int
    has_new_message: bool
    shows_texts: bool

    @property
    def is_long(self) -> bool:
        """Whether `PrefixExplainer.finished` belongs in a thread."""
        return len(self.prompt.ids) > LONG_PROMPT

    def header(self) -> str:
        """Return the explanation as a header's value."""
        return self.explanation.header()

    def usage(self) -> dict[str, Any]:
        """Return the explanation as a member of a prompt's details, if texts are shown."""
        return {"prefix": self.explanation.to_json()} if self.shows_texts else {}


@dataclass(frozen=True, slots=True)
class ShownExplanation:
    """A request's explanation, as the page shows it to its owner.

    Attributes:
        owner: A digest of the API key.
        number: The request's, as the engine counts them.
    """

    owner: Key
    number: int
    explanation: Explanation


class PrefixExplainer:
    """Compares each prompt with the earlier ones of the same API key.

    Args:
        api_keys: The configured keys; the counts name them by their place.
        shows_texts: Explanations have the texts where two prompts part.
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
        """How many prompts there were, by the place of their key ("0" without keys), reason and kind of field."""
        return dict(self._counts)

    @property
    def num_bytes(self) -> int:
        """Memory of the earlier prompts."""
        return 0 if self._memory is None else self._memory.num_bytes

    def keep_newest(self) -> None:
        """Keep the newest explanations with their texts from now on, for `newest`."""
        self._newest = deque(maxlen=MAX_SHOWN)

    def newest(self, owner: str) -> list[ShownExplanation]:
        """Return the explanations that are kept of one API key's requests, the newest first."""
        name = _digest(owner)
        with self._lock:
            return [one for one in reversed(self._newest or ()) if one.owner == name]

    def opened(
        self,
        owner: str,
        answers: Answers,
        parts: PromptParts,
        engine: TextEngine,
        tokenizer: Tokenizer,
        path_of: Callable[[str], str] = str,
    ) -> Explained:
        """Explain a prompt that was just submitted, and keep what later ones are compared with.

        `owner` is the request's API key, or ""; `path_of` translates a path from chat completions to the protocol's.
        """
        index = engine.prefix_index
        if self._memory is None:
            self._memory = PromptMemory(BYTES_PER_BLOCK * index.pool.num_blocks)
        name = _digest(owner)
        prompt = Prompt.of(name, answers.root, answers.prompt_ids, index.pool.block_size, parts)
        record = nearest(prompt, self._memory.newest(name))
        shows_texts = self.shows_texts or self._newest is not None
        found = explain(prompt, record, index.ids_of, tokenizer, shows_texts=shows_texts)
        self._memory.add(prompt.record())
        translated = replace(
            found, path=None if found.path is None else path_of(found.path), others=tuple(map(path_of, found.others))
        )
        self._counts[self._names.get(owner, "0"), found.reason, _NUMBERS.sub("[]", found.path or "")] += 1
        if self._newest is not None:
            with self._lock:
                self._newest.append(ShownExplanation(name, answers.number, translated))
        is_new = bool(parts.messages) and parts.begun is None
        return Explained(prompt, translated, len(parts.messages), is_new, self.shows_texts)

    def finished(self, explained: Explained, answers: Answers) -> None:
        """Keep the answers as well, which the next prompt of a conversation has."""
        if self._memory is None:
            return
        for row in answers.rows[:MAX_KEPT_ANSWERS]:
            if row.token_ids:
                values = _answer_values(explained, row)
                self._memory.add(explained.prompt.record(row.token_ids, values))


def _digest(owner: str) -> Key:
    return hashlib.blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _answer_values(explained: Explained, row: RowText) -> list[Value]:
    """Return the fields of a whole answer as the dialog's next message."""
    if row.finish_reason is None or not explained.has_new_message:
        return []
    return list(message_values(explained.num_messages, row.completion().message))
