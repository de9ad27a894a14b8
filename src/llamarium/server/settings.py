"""A server's settings: address, access, and limits."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llamarium.options.declare import option
from llamarium.options.serving import ServingOptions
from llamarium.server.http.access_keys import KEY_VARIABLE

if TYPE_CHECKING:
    from llamarium.server.openai.responses.store import ResponseStore
    from llamarium.server.recorder import Recorder


@dataclass(frozen=True, kw_only=True)
class Settings(ServingOptions):
    """A server's settings. Options are described where they are declared.

    Attributes:
        responses: Store for responses; None disables storing.
        recorder: Records answers for `llamarium replay`; None disables recording.
        max_body_bytes: Maximum size of a request body.
        max_header_bytes: Maximum size of a request line with its headers.
        header_timeout_s: Maximum time to receive the headers, in seconds.
        body_timeout_s: Maximum time to receive a body, in seconds.
        read_timeout_s: Maximum time for a client to read written data, in seconds.
        max_connections: Maximum number of open connections.
        ping_s: Seconds without an event after which a stream sends a ping.
    """

    host: str = option(
        "127.0.0.1", "address to listen on; 0.0.0.0 is every interface", metavar="ADDRESS", part="network"
    )
    port: int = option(8000, "port to listen on; 0 is any free one", low=0, high=65535, part="network")
    uds: str | None = option(
        None, "Unix socket to listen on instead, for its owner alone", metavar="PATH", part="network"
    )
    api_keys: tuple[str, ...] = option(
        (),
        f"API key; visible in the process list; prefer {KEY_VARIABLE}",
        metavar="KEY",
        flag="api-key",
        part="keys",
        repeats=True,
    )
    allow_interventions: bool = option(
        False,
        "let requests steer and ablate the model for themselves, and see its hidden states (steer, ablate, lens ...)",
        part="access",
    )
    adapter_dir: Path | None = option(
        None,
        "let requests load and unload adapters from folders below it (POST /v1/load_lora_adapter)",
        metavar="DIR",
        part="access",
    )
    explain_cache: bool = option(
        False,
        "explain in the usage why a prompt's prefix was not cached, with the texts that differ",
        part="answers",
    )

    responses: "ResponseStore | None" = None
    recorder: "Recorder | None" = None
    max_body_bytes: int = 16 * 2**20
    max_header_bytes: int = 64 * 2**10
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    read_timeout_s: float = 60.0
    max_connections: int = 1000
    ping_s: float = 15.0
