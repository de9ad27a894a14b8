"""What a server was told: where it listens, who may ask, and how much of everything."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from llamarium.runtime.runner import CacheDtype
    from llamarium.tokenizer.tools.forms import ToolForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A server's settings.

    Attributes:
        host: The address that it listens at.
        port: The port; 0 is any that is free.
        uds: A Unix socket to listen at instead.
        api_keys: Who may ask; empty is everybody who reaches it.
        allowed_hosts: Host names that it answers to, besides its own.
        cors_origins: Origins of pages that may ask; "*" is all of them.
        max_num_seqs: Answers that run side by side.
        kv_cache_dtype: What keys and values are kept in.
        max_queue: Answers that may wait besides those that run.
        max_context: Tokens of a request, prompt and answer together; None is what model and cache hold.
        request_timeout_s: Seconds that a request has, its wait in the queue included; None is no limit.
        drain_timeout_s: Seconds that running requests have when the server is told to stop.
        tool_form: How the model is told of tools; None is its dialog format's own way.
        log_format: Of the lines on stderr.
        max_body_bytes: Of a request.
        max_header_bytes: Of a request line and its headers.
        header_timeout_s: Seconds from a connection's first byte, or its opening, to the end of the headers.
        body_timeout_s: Seconds that a body has to arrive.
        read_timeout_s: Seconds that a client may leave what was written unread.
        max_connections: Open at once.
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
    log_format: Literal["text", "json"] = "text"
    max_body_bytes: int = 16 * 2**20
    max_header_bytes: int = 64 * 2**10
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    read_timeout_s: float = 60.0
    max_connections: int = 1000
    ping_s: float = 15.0
