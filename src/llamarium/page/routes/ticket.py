"""A single-use ticket that a browser exchanges for the API key.

Other users of a machine can read a browser's command line, so the link that is opened has a ticket instead of the key.
The page exchanges the ticket for the key; this works once.
"""

import hmac
import secrets
import threading
import time

from fastapi import APIRouter, Response

from llamarium.page.schema.clients import TicketRequest, TicketView
from llamarium.server.errors import ApiError
from llamarium.server.http.body import StrictRoute

PATH = "/inspect/ticket"

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


def ticket_routes(ticket: Ticket) -> APIRouter:
    """Return the route that exchanges a ticket for the key."""
    router = APIRouter(route_class=StrictRoute)

    @router.post(PATH)
    async def redeem(body: TicketRequest, response: Response) -> TicketView:  # pyright: ignore[reportUnusedFunction]
        """Give the key for the ticket, once."""
        key = ticket.redeem(body.ticket)
        if key is None:
            message = "this way in has been used, or is too old; open the link that `llamarium inspect` printed"
            raise ApiError(401, message, code="invalid_ticket", param="ticket")
        response.headers["cache-control"] = "no-store"
        return TicketView(key=key)

    return router
