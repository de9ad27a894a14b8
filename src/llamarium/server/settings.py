"""A server's settings: its address, access, and limits."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from llamarium.runtime.runner import CacheDtype
    from llamarium.server.openai.responses.store import ResponseStore
    from llamarium.server.recorder import Recorder
    from llamarium.tokenizer.tools.forms import ToolForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A server's settings.

    Attributes:
        port: The port; 0 is any that is free.
        uds: A Unix socket in place of host and port.
        api_keys: Empty is access without a key.
        allowed_hosts: Accepted host names besides its own.
        cors_origins: Origins of pages with access; "*" is all.
        max_queue: Answers that may wait besides those that run.
        max_context: Tokens of a request, prompt and answer together; None is what model and cache hold.
        request_timeout_s: Seconds of a request, with its wait in the queue; None is no limit.
        drain_timeout_s: Seconds for running requests when the server stops.
        tool_form: How tools are presented to the model; None is its dialog format's own way.
        strict_fields: Refuse fields that have no effect (`server/hints.py`).
        open_objects: Objects that are not strict may have other properties than those that their schema lists.
        responses: Where responses are stored; None stores none.
        recorder: Where answers are recorded for `llamarium replay`; None records none.
        adapter_dir: Adapters in folders below it may be loaded by request; None is none.
        allow_interventions: Requests may steer and ablate, and ask for hidden states.
        explain_cache: Usage explains why a prompt's prefix was not cached, with the texts that differ.
        log_format: Of the lines on stderr.
        max_header_bytes: Of a request line and its headers.
        header_timeout_s: Seconds from a connection's first byte, or its opening, to the end of the headers.
        body_timeout_s: Seconds that a body has to arrive.
        read_timeout_s: Seconds until written data has to be read.
        ping_s: Seconds without an event after which a stream gets a comment.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_num_seqs: int = 64
    kv_cache_dtype: "CacheDtype" = "auto"
    max_queue: int = 256
    max_context: int | None = None
    request_timeout_s: float | None = 600.0
    drain_timeout_s: float = 30.0
    tool_form: "ToolForm | None" = None
    strict_fields: bool = False
    open_objects: bool = False
    responses: "ResponseStore | None" = None
    recorder: "Recorder | None" = None
    adapter_dir: Path | None = None
    allow_interventions: bool = False
    explain_cache: bool = False
    log_format: Literal["text", "json"] = "text"
    max_body_bytes: int = 16 * 2**20
    max_header_bytes: int = 64 * 2**10
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    read_timeout_s: float = 60.0
    max_connections: int = 1000
    ping_s: float = 15.0

    @classmethod
    def of(cls, options: Any, **own: Any) -> "Settings":
        """Return the settings of options with the names of `llamarium serve`, and those that one caller alone has."""
        alike = (
            "max_num_seqs", "kv_cache_dtype", "max_queue", "max_context", "tool_form", "strict_fields", "open_objects",
            "log_format",
        )  # fmt: skip
        return cls(
            **{name: getattr(options, name) for name in alike},
            **own,
            allowed_hosts=tuple(options.allowed_host),
            cors_origins=tuple(options.cors_origin),
            request_timeout_s=options.request_timeout or None,
            drain_timeout_s=options.drain_timeout,
        )
