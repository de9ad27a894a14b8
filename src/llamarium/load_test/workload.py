"""Requests: synthetic ones of a wanted length, or those of a file; the same ones for the same seed.

A synthetic prompt has random common English words. With the space before it each is one token in the vocabularies of
GPT-2, Llama 3 and their like, so N words are N tokens. A server may add tokens (BOS, a dialog's template); the summary
uses the server's own count.
"""

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from llamarium.errors import InputError, OptionError, show_value

_SPELLINGS = "N, uniform:LOW:HIGH or lognormal:MEAN:SIGMA"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers of at least 1.

    Attributes:
        spelling: As on the command line.
        draw: Returns the next one, from a generator of random numbers.
    """

    spelling: str
    draw: Callable[[random.Random], int]

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Read `N`, `uniform:LOW:HIGH` (inclusive) or `lognormal:MEAN:SIGMA`.

        MEAN is the mean of the drawn numbers; SIGMA the standard deviation of its logarithm.
        """
        kind, *words = text.split(":")
        try:
            if not words:
                return cls(text, _uniform(int(kind), int(kind)))
            first, second = words
            if kind == "uniform":
                return cls(text, _uniform(int(first), int(second)))
            if kind == "lognormal":
                return cls(text, _lognormal(float(first), float(second)))
        except ValueError:
            pass
        raise OptionError(f"expected {_SPELLINGS}, with numbers of at least 1 (SIGMA: 0), found {text!r}")


def _uniform(low: int, high: int) -> Callable[[random.Random], int]:
    if not 1 <= low <= high:
        raise ValueError
    return lambda source: source.randint(low, high)


def _lognormal(mean: float, sigma: float) -> Callable[[random.Random], int]:
    if not (1 <= mean < math.inf and 0 <= sigma < math.inf):
        raise ValueError
    middle = math.log(mean) - sigma**2 / 2  # so that the mean of the drawn numbers is `mean`
    return lambda source: max(1, round(source.lognormvariate(middle, sigma)))


WORDS = tuple(
    "the of and to in is that for it was on as with be by this are from at or an have not they which one you were all "
    "her she there would their we him been has when who will no more if out so said what up its about into than them "
    "can only other time new some could these two may first then do any like my now over such our man me even most "
    "made after also did many must before back see through way where get much go well your know should down work year "
    "because come people just say each those take day good how long little own old great still life being here world "
    "house under last never place same another while right hand might part small every three think".split()
)

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request: a text or token ids for completions, or a dialog's messages, and the answer's length."""

    prompt: str | tuple[int, ...] | tuple[Message, ...]
    max_tokens: int

    @property
    def is_chat(self) -> bool:
        """Whether it is a dialog."""
        return isinstance(self.prompt, tuple) and isinstance(self.prompt[0], Mapping)

    def as_chat(self) -> "LoadRequest":
        """Return the request as a dialog with one user message."""
        if self.is_chat:
            return self
        if not isinstance(self.prompt, str):
            raise InputError("a prompt of token ids cannot be sent as a dialog")
        return LoadRequest(({"role": "user", "content": self.prompt},), self.max_tokens)


def synthetic(
    prompt_tokens: Lengths, max_tokens: Lengths, *, shared_prefix: int = 0, seed: int | str = 0
) -> Iterator[LoadRequest]:
    """Yield requests without end: prompts begin with `shared_prefix` common words, and have drawn lengths."""
    prefix = random.Random(f"prefix {seed}").choices(WORDS, k=shared_prefix)
    source = random.Random(seed)
    while True:
        own = source.choices(WORDS, k=prompt_tokens.draw(source))
        yield LoadRequest(" ".join((*prefix, *own)), max_tokens.draw(source))


def from_file(path: Path, max_tokens: Lengths, *, seed: int = 0) -> list[LoadRequest]:
    """Read a JSONL file's requests: `messages`, or a `prompt` (a text or token ids), and optionally `max_tokens`."""
    lines = [(number, line) for number, line in enumerate(_lines(path), 1) if line.strip()]
    if not lines:
        raise InputError(f"{path} contains no requests; expected one JSON object per line, with prompt or messages")
    source = random.Random(seed)
    return [_parsed(f"{path}, line {number}", line, max_tokens, source) for number, line in lines]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8: {error}") from None


def _parsed(where: str, line: str, lengths: Lengths, source: random.Random) -> LoadRequest:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{where} is {show_value(found)}; expected an object with prompt or messages")
    fields = cast(dict[str, Any], found)
    prompt = _prompt(fields)
    if prompt is None:
        raise InputError(
            f"{where}: expected a prompt (a text or token ids) or messages (objects), found {show_value(fields)}"
        )
    max_tokens = fields.get("max_tokens", lengths.draw(source))
    if type(max_tokens) is not int or max_tokens < 1:
        raise InputError(f"{where}: max_tokens is {show_value(max_tokens)}; expected an integer of at least 1")
    return LoadRequest(prompt, max_tokens)


def _prompt(fields: Mapping[str, Any]) -> str | tuple[int, ...] | tuple[Message, ...] | None:
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if isinstance(prompt, str) and prompt and messages is None:
        return prompt
    if _all(prompt, int) and messages is None:
        return tuple(cast(Sequence[int], prompt))
    if _all(messages, dict) and prompt is None:
        return tuple(cast(Sequence[Message], messages))
    return None


def _all(values: object, kind: type) -> bool:
    return isinstance(values, list) and bool(values) and all(type(v) is kind for v in cast(list[object], values))
