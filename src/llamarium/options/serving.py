"""Options for serving: arguments of `Llama.engine`, `llamarium serve` and Ray Serve."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llamarium.kv_codes import CacheDtype
from llamarium.options.declare import Options, option
from llamarium.tokenizer.tools.forms import ToolForm

_MAX_SECONDS = 1e9  # longer timeouts overflow clocks


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Options):
    """Options of an engine."""

    max_num_seqs: int = option(64, "maximum number of concurrent sequences", low=1, part="engine")
    kv_memory: int | None = option(
        None,
        "memory of the KV cache, as in 2GiB (default: a quarter of the free memory, up to 4GiB)",
        low=1,
        metavar="SIZE",
        part="engine",
    )
    kv_cache_dtype: CacheDtype = option(
        "auto",
        "KV cache dtype: auto (same as the model), int8 (half the memory of bfloat16), int8-k/int4-v (two fifths), or "
        "int4 (under a third)",
        part="cache",
    )


@dataclass(frozen=True, kw_only=True)
class DraftOptions(Options):
    """Options for speculative decoding, which does not change the answers."""

    draft_model: str | None = option(
        None,
        "a smaller model with the same vocabulary that drafts tokens; the text stays the same (default: none)",
        metavar="NAME",
    )
    prompt_lookup: bool | None = option(
        None, "draft tokens from the prompt and earlier texts; the text stays the same (default: off)"
    )
    ngram_pool: int | None = option(
        None,
        "memory for earlier texts of each API key to draft from, or 0 (default: 12MiB)",
        low=0,
        metavar="SIZE",
    )


@dataclass(frozen=True, kw_only=True)
class AccessOptions(Options):
    """Authentication, and the name of the model in requests."""

    served_model_name: tuple[str, ...] = option(
        (), "name of the model in requests (default: its own)", metavar="NAME", part="name", repeats=True
    )
    api_key_file: Path | None = option(None, "file of API keys, one a line", metavar="FILE", part="keys")
    allow_anyone: bool = option(
        False,
        "listen for other machines without a key: every machine that reaches it may send requests",
        part="keys",
    )


@dataclass(frozen=True, kw_only=True)
class ServingOptions(EngineOptions):
    """Limits and request handling of a server, on one or several machines.

    Attributes:
        request_timeout_s: Seconds per request; None for no limit, which users give as 0.
    """

    allowed_hosts: tuple[str, ...] = option(
        (),
        "host name to answer to, besides the server's own",
        metavar="NAME",
        flag="allowed-host",
        part="access",
        repeats=True,
    )
    cors_origins: tuple[str, ...] = option(
        (),
        "allowed CORS origin, such as https://chat.example, or *",
        metavar="ORIGIN",
        flag="cors-origin",
        part="access",
        repeats=True,
    )
    max_context: int | None = option(
        None, "tokens of a request, prompt and answer (default: the model's)", low=1, part="engine"
    )
    max_queue: int = option(256, "maximum number of waiting answers", low=0, part="limits")
    request_timeout_s: float | None = option(
        600.0,
        "seconds per request, including its wait; 0 is no limit",
        low=0,
        high=_MAX_SECONDS,
        metavar="S",
        flag="request-timeout",
        part="limits",
    )
    drain_timeout_s: float = option(
        30.0,
        "seconds for running answers after SIGTERM or Ctrl-C; a second signal ends them",
        low=0,
        high=_MAX_SECONDS,
        metavar="S",
        flag="drain-timeout",
        part="limits",
    )
    tool_form: ToolForm | None = option(
        None,
        "form of tool definitions and calls (default: the chat template's, or the dialog format's)",
        part="tools",
    )
    open_objects: bool = option(
        False,
        "without strict, let objects have properties that their schema does not list, unless it forbids them",
        part="tools",
    )
    strict_fields: bool = option(
        False,
        "refuse fields that have no effect; else the answer's header x-llamarium-no-effect names them",
        part="answers",
    )
    log_format: Literal["text", "json"] = option("text", "format of the lines on stderr", part="answers")

    def __post_init__(self) -> None:
        """Check the values; a timeout of 0 seconds is replaced by None."""
        super().__post_init__()
        if self.request_timeout_s == 0:
            object.__setattr__(self, "request_timeout_s", None)
