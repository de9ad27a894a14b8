"""Names the process that answers: another one behind the same address may have another model."""

import secrets

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-llamarium-instance"
"""Of every answer; `web/src/lib/api.ts` reads it."""


class Instance:
    """Middleware that puts a name, drawn once, on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._name = secrets.token_hex(8)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = self._name
            await send(message)

        await self._app(scope, receive, send_named)
