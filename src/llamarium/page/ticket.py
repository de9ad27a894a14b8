"""A ticket that lets one browser in, once.

Other users of a machine can read a browser's command line, so the link that is opened there has no key in it. The
page exchanges the ticket for the key; it works once.
"""

import hmac
import secrets
import threading
import time

_NUM_BYTES = 24
_LIFETIME_S = 300.0  # from its making; a browser that starts with many tabs takes a while


class Ticket:
    """Exchanges `value`, which stands in the link, for the server's key, once."""

    def __init__(self, key: str) -> None:
        self.value = secrets.token_urlsafe(_NUM_BYTES)
        self._key: str | None = key
        self._end = time.monotonic() + _LIFETIME_S
        self._lock = threading.Lock()

    def redeem(self, value: str) -> str | None:
        """Return the key, or None: for another value, a second time, and too late."""
        with self._lock:
            if not hmac.compare_digest(value.encode(), self.value.encode()) or time.monotonic() > self._end:
                return None
            key, self._key = self._key, None
            return key
