"""Counts of tokens, as OpenAI's completions report them."""

from typing import Any

from llamarium.server.usage import Usage


def for_completions(usage: Usage) -> dict[str, Any]:
    """Return the counts under OpenAI's names."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
