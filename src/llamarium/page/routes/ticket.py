"""The route that exchanges a ticket for the API key, for the browser that `llamarium inspect` opens."""

from fastapi import APIRouter, Response

from llamarium.page.schema.clients import TicketRequest, TicketView
from llamarium.page.ticket import Ticket
from llamarium.server.errors import ApiError
from llamarium.server.http.body import StrictRoute

PATH = "/inspect/ticket"


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
