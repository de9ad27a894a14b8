"""Creates requests: synthetic ones with given lengths, or from a file; reproducible from a seed.

A synthetic prompt consists of random common English words. With its leading space, each word is one token in
vocabularies such as those of GPT-2 and Llama 3, so N words are N tokens. A server may add tokens (BOS, the chat
template); the summary uses the server's counts.
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
    """A distribution of positive integers.

    Attributes:
        spelling: The distribution as on the command line.
        draw: Returns a sample, from a random number generator.
    """

    spelling: str
    draw: Callable[[random.Random], int]

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Parse `N`, `uniform:LOW:HIGH` (inclusive) or `lognormal:MEAN:SIGMA`.

        MEAN is the mean of the samples, SIGMA the standard deviation of their logarithm.

        Raises:
            OptionError: If the text is invalid.
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
    middle = math.log(mean) - sigma**2 / 2  # so that the mean of the samples is `mean`
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
    """A request.

    Attributes:
        prompt: A text or token ids for completions, or messages for chat completions.
        max_tokens: Maximum number of generated tokens.
    """

    prompt: str | tuple[int, ...] | tuple[Message, ...]
    max_tokens: int

    @property
    def is_chat(self) -> bool:
        """Whether the request is a dialog."""
        return isinstance(self.prompt, tuple) and isinstance(self.prompt[0], Mapping)

    def as_chat(self) -> "LoadRequest":
        """Return the request as a dialog with one user message; InputError if the prompt is token ids."""
        if self.is_chat:
            return self
        if not isinstance(self.prompt, str):
            raise InputError("a prompt of token ids cannot be sent as a dialog")
        return LoadRequest(({"role": "user", "content": self.prompt},), self.max_tokens)


def synthetic(
    prompt_tokens: Lengths, max_tokens: Lengths, *, shared_prefix: int = 0, seed: int | str = 0
) -> Iterator[LoadRequest]:
    """Yield an endless sequence of synthetic requests.

    Args:
        prompt_tokens: Lengths of the prompts, without the shared prefix.
        max_tokens: Maximum lengths of the answers.
        shared_prefix: Number of words with which all prompts start.
        seed: Seed of words and lengths.
    """
    prefix = random.Random(f"prefix {seed}").choices(WORDS, k=shared_prefix)
    source = random.Random(seed)
    while True:
        words = source.choices(WORDS, k=prompt_tokens.draw(source))
        yield LoadRequest(" ".join((*prefix, *words)), max_tokens.draw(source))


def from_file(path: Path, max_tokens: Lengths, *, seed: int = 0) -> list[LoadRequest]:
    """Read requests from a JSONL file.

    Args:
        path: The file; each line has `messages` or a `prompt` (a text or token ids), and optionally `max_tokens`.
        max_tokens: Maximum lengths of answers, for lines without `max_tokens`.
        seed: Seed of these lengths.

    Raises:
        InputError: If the file contains no requests, or a line is invalid.
    """
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
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise InputError(f"{where} is {show_value(row)}; expected an object with prompt or messages")
    fields = cast(dict[str, Any], row)
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
