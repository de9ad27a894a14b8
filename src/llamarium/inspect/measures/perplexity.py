"""Perplexity of a text of any length, through a sliding window.

A text longer than the context is read in windows of `context` tokens, each beginning `stride` tokens after the one
before. What a window shares with the one before is context only; what is new in it is scored. So every token is scored
exactly once, and, but for the first window's, with at least `context` - `stride` tokens before it:

    context 6, stride 2        0 1 2 3 4 5 6 7 8
    first window              [. s s s s s]             s scored, . context
    second                        [. . . . s s]
    third                             [. . . . s]

With a stride of the whole context, windows share the last token of the one before, so that their first new token has
one before it, too.

A smaller stride gives each token more context and so a lower perplexity, and costs more windows. Numbers are comparable
for the same context, stride and tokenizer only; bits per byte are so for any tokenizer, since they count the bytes of
the file.

Source: "Perplexity of fixed-length models" in Hugging Face's documentation of transformers.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from llamarium.config import ModelConfig
from llamarium.errors import InputError, LlamariumError
from llamarium.inspect.forward import logits_of
from llamarium.inspect.numbers import JsonView
from llamarium.inspect.score import e_to_the, scored_tokens
from llamarium.inspect.tokens import check_count
from llamarium.runtime.runner import Runner
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.pieces import encode_pieces
from llamarium.tokenizer.special import check_text

DEFAULT_CONTEXT = 2048
"""Default tokens of a window: the usual number in papers, and fewer than most contexts."""


@dataclass(frozen=True, slots=True)
class Perplexity(JsonView):
    """Perplexity of a text.

    Attributes:
        nats: -log P of the scored tokens in sum, natural.
        num_tokens: Scored tokens; with BOS before the text, all of its own.
        num_bytes: UTF-8 bytes of the text.
        context: Tokens of a window.
        stride: Tokens from the beginning of one window to that of the next.
        bos: Whether BOS was put before the text; it is context, and not scored.
    """

    computed = "perplexity", "bits_per_byte"

    nats: float
    num_tokens: int
    num_bytes: int
    context: int
    stride: int
    num_windows: int
    bos: bool

    @property
    def perplexity(self) -> float:
        """exp(nats / tokens): the number of equally likely tokens that would be as hard to predict."""
        return e_to_the(self.nats / self.num_tokens)

    @property
    def bits_per_byte(self) -> float:
        """Bits of each byte of the text in an ideal coder that uses the model; 8 is no gain.

        Without BOS the text's first token has no probability; its bytes are counted all the same.
        """
        return self.nats / math.log(2) / self.num_bytes


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens `begin` to `end` (exclusive) of a text, read at once; those before `first` are context and not scored."""

    begin: int
    end: int
    first: int


def windows(
    num_tokens: int, context: int, stride: int, progress: Callable[[int, int], None] | None = None
) -> Iterator[Window]:
    """Yield the windows over a text; each token but the very first is scored in exactly one of them.

    A window's last token is scored and not read, so that one of `context` + 1 tokens is read with `context`.
    `progress` is called with (tokens done, tokens in all) after each.
    """
    first = 1
    shared = 1 if stride == context else 0  # tokens of the window before, where it would share none
    for begin in range(0, num_tokens, stride):
        end = min(begin + context, num_tokens)
        yield Window(max(0, begin - shared), end, first)
        if progress is not None:
            progress(end, num_tokens)
        first = end
        if end == num_tokens:
            return


def perplexity_of_text(
    runner: Runner,
    tokenizer: Tokenizer,
    text: str,
    *,
    context: int | None = None,
    stride: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Measure a text of any length, encoded in pieces; see `Llama.perplexity`.

    Raises:
        TokenizerError: If the text cannot be encoded.
        InputError: If it has no token to score, or `context` or `stride` is out of range.
        LlamariumError: If the model's logits are NaN.
    """
    context, stride = check_window(runner.config, context, stride)
    ids, bos = scored_ids(tokenizer, text)
    sums = [_window_nats(runner, ids, window) for window in windows(len(ids), context, stride, progress)]
    nats = check_number(math.fsum(sums), "the model")
    return Perplexity(nats, len(ids) - 1, len(text.encode()), context, stride, len(sums), bos)


def check_number(nats: float, subject: str) -> float:
    """Return `nats`; LlamariumError if it is NaN, as damaged weights make it."""
    if math.isnan(nats):
        raise LlamariumError(
            f"{subject} returns NaN for this text, so nothing can be measured; its weights may be damaged "
            "(load(strict=True) checks them)"
        )
    return nats


def scored_ids(tokenizer: Tokenizer, text: str) -> tuple[list[int], bool]:
    """Return the ids of a text of any length, and whether the first is a BOS.

    Raises:
        TokenizerError: If the text cannot be encoded.
        InputError: If it has no token to score.
    """
    check_text(text)
    ids = list(chain.from_iterable(encode_pieces(tokenizer, text)))
    special = tokenizer.special
    bos = special.add_bos and special.bos is not None and ids[:1] != [special.bos]
    if bos and special.bos is not None:
        ids.insert(0, special.bos)
    if len(ids) < 2:
        raise InputError("the text has no token with another before it, so none has a probability; give a longer text")
    return ids, bos


def check_window(config: ModelConfig, context: int | None, stride: int | None) -> tuple[int, int]:
    """Return context and stride with their defaults filled in; InputError if one is out of range."""
    limit = config.max_position_embeddings
    if context is None:
        context = min(DEFAULT_CONTEXT, limit)
    check_count(context, "context", limit)
    if context < 2:
        raise InputError("context is 1; expected at least 2: a token needs one before it to have a probability")
    if stride is None:
        stride = context // 2
    check_count(stride, "stride", context)
    return context, stride


def _window_nats(runner: Runner, ids: Sequence[int], window: Window) -> float:
    logits = logits_of(runner, ids[window.begin : window.end - 1], window.end - window.first)
    scored = scored_tokens(logits, ids[window.first : window.end])
    return -math.fsum(chain.from_iterable(chunk.logprobs_C.tolist() for chunk in scored))
