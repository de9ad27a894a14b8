"""Log-probabilities of tokens, as OpenAI reports them.

A token is told by its text, which for a part of a character is U+FFFD, and in chats by its bytes, too.
"""

import math
from collections.abc import Sequence
from typing import Any

from llamarium.generation.logprobs import Alternative, TokenLogprob
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.streaming import StreamDecoder

_LEAST = -9999.0  # what a probability of nothing is told as, since JSON has no infinity; vLLM's too


def for_chat(tokenizer: Tokenizer, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return the `logprobs` of a choice of a chat completion."""

    def entry(one: Alternative) -> dict[str, Any]:
        spelled = tokenizer.token_bytes(one.token_id)
        text = spelled.decode("utf-8", "replace")
        return {"token": text, "logprob": _finite(one.logprob), "bytes": list(spelled)}

    content = [entry(one) | {"top_logprobs": [entry(other) for other in one.top]} for one in tokens]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Words the `logprobs` of a choice of a completion, from the beginning of its text on.

    Args:
        tokenizer: The model's.
        offset: Characters of the choice's text before it.
        decoder: Shows what the text has of each token.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int, decoder: StreamDecoder) -> None:
        self._tokenizer, self._offset, self._decoder = tokenizer, offset, decoder

    def tell(self, ids: Sequence[int], tokens: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """Return what is told of the next tokens.

        Args:
            ids: The tokens.
            tokens: Their log-probabilities; None where nothing comes before one.
        """
        return {
            "tokens": [_text(self._tokenizer, token_id) for token_id in ids],
            "token_logprobs": [None if one is None else _finite(one.logprob) for one in tokens],
            "top_logprobs": [None if one is None else self._top(one) for one in tokens],
            "text_offset": [self._next_offset(token_id) for token_id in ids],
        }

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        """Return the most probable tokens, and the one that came; of several with the same text the most probable."""
        found: dict[str, float] = {}
        for other in (*one.top, one):
            found.setdefault(_text(self._tokenizer, other.token_id), _finite(other.logprob))
        return found

    def _next_offset(self, token_id: int) -> int:
        offset = self._offset
        self._offset += len(self._decoder.push(token_id))
        return offset


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
