"""The line that a person at a terminal sees: who is being answered, how fast, and how full the cache is."""

import time

from llamarium.server.http.log import Log
from llamarium.server.lifecycle.service import Service

_EVERY_S = 0.5


class StatusLine:
    """Shows what a server is doing, where there is a terminal.

    Args:
        service: The server's.
        log: Has the line.
    """

    def __init__(self, service: Service, log: Log) -> None:
        self._service, self._log = service, log
        self._next_s = 0.0
        self._seen = (0.0, 0)  # when there were how many tokens

    def show(self) -> None:
        """Show the line, if it is time."""
        now = time.monotonic()
        if now >= self._next_s and self._log.shows_status:
            self._next_s = now + _EVERY_S
            self._log.status(self._text(now))

    def _text(self, now: float) -> str:
        if self._service.loaded is None:
            done, total = self._service.progress
            return f"loading {100 * done // total if total else 0} %"
        seen = self._service.loaded[1].snapshot
        before_s, before = self._seen
        self._seen = now, seen.counts.generated_tokens
        rate = (seen.counts.generated_tokens - before) / (now - before_s)
        share = 100 * seen.used_blocks / seen.num_blocks
        return f"{seen.running} running, {seen.waiting} waiting, {rate:.0f} tokens/s, cache {share:.0f} %"
