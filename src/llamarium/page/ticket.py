"""A single-use ticket that a browser exchanges for the API key.

Other users of a machine can read a browser's command line, so the link that is opened has a ticket instead of the key.
The page exchanges the ticket for the key; this works once.
"""

import hmac
import secrets
import threading
import time

_NUM_BYTES = 24
_LIFETIME_S = 300.0  # long enough for a browser that restores many tabs


class Ticket:
    """Exchanges `value`, which is part of the link, for the server's API key, once."""

    def __init__(self, key: str) -> None:
        self.value = secrets.token_urlsafe(_NUM_BYTES)
        self._key: str | None = key
        self._end = time.monotonic() + _LIFETIME_S
        self._lock = threading.Lock()

    def redeem(self, value: str) -> str | None:
        """Return the key, or None if the value is wrong, used already or expired."""
        with self._lock:
            if not hmac.compare_digest(value.encode(), self.value.encode()) or time.monotonic() > self._end:
                return None
            key, self._key = self._key, None
            return key
