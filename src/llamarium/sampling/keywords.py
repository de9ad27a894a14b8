"""Keyword arguments as type checkers read them. Written by tools/options.py."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from llamarium.sampling.grammar.description import Grammar
from llamarium.sampling.parameter import LogitsProcessor


class SamplingKeywords(TypedDict, total=False):
    """Options of an answer: fields of `SamplingParams`, and forms that are short for a `grammar`."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    n: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    grammar: Grammar | None
    logits_processor: LogitsProcessor | None
    max_new_tokens: int | None
    json_schema: Mapping[str, Any] | str | None
    json_object: bool | None
    regex: str | None
    choice: Sequence[str] | None
