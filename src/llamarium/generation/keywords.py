"""Keyword arguments as type checkers read them. Written by tools/options.py."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from llamarium.engine.pooling import Places
from llamarium.engine.proposers.draft import DraftModel
from llamarium.engine.proposers.lookup import PromptLookup
from llamarium.generation.text_model import TextModel
from llamarium.runtime.intervention import Edit
from llamarium.sampling.keywords import SamplingKeywords
from llamarium.tokenizer.tools.definition import ToolDefinition


class AnswerKeywords(SamplingKeywords, total=False):
    """Options of an answer; see also `PassOptions`."""

    use_cache: bool
    prompt_lookup: bool | PromptLookup
    draft_model: TextModel | DraftModel | None
    kv_cache_dtype: Literal["auto", "int8", "int8-k/int4-v", "int4"]


class RequestKeywords(TypedDict, total=False):
    """Options of a request; `RequestOptions` declares them."""

    timeout_s: float | None
    adapter: str | None
    salt: str
    ngram_pool: str | None
    must_keep_up: bool
    edits: tuple[Edit, ...]
    places: Places | None


class DialogKeywords(TypedDict, total=False):
    """Options of a dialog; `DialogOptions` declares them."""

    tools: Sequence[Mapping[str, Any] | Callable[..., Any] | ToolDefinition] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    tool_form: Literal["llama3_json", "pythonic", "hermes"] | None
    documents: Sequence[Mapping[str, Any]] | None


class ChatKeywords(AnswerKeywords, DialogKeywords, total=False):
    """Options of an answer in a dialog."""


class StreamKeywords(SamplingKeywords, RequestKeywords, total=False):
    """Options of `TextEngine.stream`."""


class StreamChatKeywords(StreamKeywords, DialogKeywords, total=False):
    """Options of `TextEngine.stream_chat`."""
