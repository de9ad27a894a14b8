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

    def entry(alternative: Alternative) -> dict[str, Any]:
        spelled = tokenizer.token_bytes(alternative.token_id)
        text = spelled.decode("utf-8", "replace")
        return {"token": text, "logprob": _finite(alternative.logprob), "bytes": list(spelled)}

    content = [entry(token) | {"top_logprobs": [entry(alternative) for alternative in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def for_prompt(tokenizer: Tokenizer, tokens: PromptLogprobs) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs` in vLLM's format; the rank of a token that is not among the top ones is None."""

    def entry(alternative: Alternative, rank: int | None) -> dict[str, Any]:
        return {
            "logprob": _finite(alternative.logprob),
            "rank": rank,
            "decoded_token": _text(tokenizer, alternative.token_id),
        }

    def entries(token: TokenLogprob) -> dict[str, Any]:
        ranked = {str(alternative.token_id): entry(alternative, rank) for rank, alternative in enumerate(token.top, 1)}
        return {str(token.token_id): entry(token, None)} | ranked

    return [None if token is None else entries(token) for token in tokens]


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
        limit = f"the maximum is {MAX_OF_PROMPTS:,} (prompt tokens times n times {field} + 1); request fewer"
        message = f"{num_reported:,} log-probabilities of prompts are requested, and {limit}"
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
            "token_logprobs": [None if token is None else _finite(token.logprob) for token in tokens],
            "top_logprobs": [None if token is None else self._top(token) for token in tokens],
            "text_offset": [self._next_offset(token_id) for token_id in ids],
        }

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        """Return the top tokens and the chosen one by text; among tokens with the same text, the most probable one."""
        logprob_of: dict[str, float] = {}
        for alternative in (*token.top, token):
            logprob_of.setdefault(_text(self._tokenizer, alternative.token_id), _finite(alternative.logprob))
        return logprob_of

    def _next_offset(self, token_id: int) -> int:
        offset = self._offset
        self._offset += len(self._decoder.push(token_id))
        return offset


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
