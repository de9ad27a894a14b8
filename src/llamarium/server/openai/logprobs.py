"""Log-probabilities of tokens in OpenAI's format.

A token is represented by its text, with U+FFFD for partial characters, and in chat completions also by its bytes.
"""

import math
from collections.abc import Sequence
from typing import Any

from llamarium.generation.completion import Alternative, PromptLogprobs, TokenLogprob
from llamarium.server.errors import ApiError
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.streaming import StreamDecoder

MAX_OF_PROMPTS = 2**18
"""Maximum number of prompt log-probabilities in one reply: 131,072 tokens with one alternative each."""

_LEAST = -9999.0  # for a probability of 0, as JSON has no infinity; same as vLLM


def for_chat(tokenizer: Tokenizer, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return the `logprobs` of a choice of a chat completion."""

    def entry(one: Alternative) -> dict[str, Any]:
        spelled = tokenizer.token_bytes(one.token_id)
        text = spelled.decode("utf-8", "replace")
        return {"token": text, "logprob": _finite(one.logprob), "bytes": list(spelled)}

    content = [entry(one) | {"top_logprobs": [entry(other) for other in one.top]} for one in tokens]
    return {"content": content, "refusal": None}


def for_prompt(tokenizer: Tokenizer, tokens: PromptLogprobs) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs` in vLLM's format; the rank of a token that is not among the top ones is None."""

    def entry(one: Alternative, rank: int | None) -> dict[str, Any]:
        return {"logprob": _finite(one.logprob), "rank": rank, "decoded_token": _text(tokenizer, one.token_id)}

    def entries(one: TokenLogprob) -> dict[str, Any]:
        ranked = {str(other.token_id): entry(other, rank) for rank, other in enumerate(one.top, 1)}
        return {str(one.token_id): entry(one, None)} | ranked

    return [None if one is None else entries(one) for one in tokens]


def check_reported(num_tokens: int, num_top: int, times: int, field: str) -> None:
    """Validate the number of prompt log-probabilities in a reply.

    Args:
        num_tokens: Number of prompt tokens.
        num_top: Alternatives per token.
        times: How often the prompt is reported.
        field: The field that requests them, for errors.

    Raises:
        ApiError: 400 if there are more than `MAX_OF_PROMPTS`.
    """
    if (num_reported := num_tokens * (num_top + 1) * times) > MAX_OF_PROMPTS:
        most = f"the maximum is {MAX_OF_PROMPTS:,} (prompt tokens times n times {field} + 1); request fewer"
        message = f"{num_reported:,} log-probabilities of prompts are requested, and {most}"
        raise ApiError(400, message, param=field)


class CompletionLogprobs:
    """Formats the `logprobs` of a completion's choice, token by token.

    Args:
        tokenizer: The model's tokenizer.
        offset: Character offset of the first token.
        decoder: Decodes the tokens, for the offsets.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int, decoder: StreamDecoder) -> None:
        self._tokenizer, self._offset, self._decoder = tokenizer, offset, decoder

    def next(self, ids: Sequence[int], tokens: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """Return the `logprobs` of the next tokens; None is a prompt's first token, which has no log-probability."""
        return {
            "tokens": [_text(self._tokenizer, token_id) for token_id in ids],
            "token_logprobs": [None if one is None else _finite(one.logprob) for one in tokens],
            "top_logprobs": [None if one is None else self._top(one) for one in tokens],
            "text_offset": [self._next_offset(token_id) for token_id in ids],
        }

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        """Return the top tokens and the chosen one by text; among tokens with the same text, the most probable one."""
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
