"""From a ticket to the key."""

from llamarium.page.schema.base import Answer
from llamarium.server.fields import Body


class TicketRequest(Body):
    """`POST /inspect/ticket`: what stood in the link that was opened."""

    ticket: str


class TicketView(Answer):
    """The server's key, for this tab."""

    key: str
