"""The page as an extension of the server."""

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llamarium.page.assets import asset_routes, read_assets
from llamarium.page.compare.others import Others
from llamarium.page.compare.references import References
from llamarium.page.compare.runs import Runs
from llamarium.page.executor import AdaptedModels
from llamarium.page.passes import Passes
from llamarium.page.prepare import Preparation
from llamarium.page.routes import course, lesson, passes, probes, requests
from llamarium.page.routes.ticket import PATH, Ticket, ticket_routes
from llamarium.page.schema.lesson import ClassLesson
from llamarium.server.app import Extension
from llamarium.server.errors import ErrorBody, documented

HEADER = "x-llamarium-instance"
"""Header of every response with the server's instance name; `web/src/lib/api.ts` reads it."""


class Instance:
    """Middleware that adds a random name of this server instance to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._name = secrets.token_hex(8)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI request, and add the header to its response."""

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = self._name
            await send(message)

        await self._app(scope, receive, send_named)


OTHER_ROUTERS = (passes.router, requests.router, course.router, lesson.router)
"""Routers of everything except probes."""


def page(
    ticket: Ticket | None = None,
    *,
    inspects_requests: bool = False,
    loaded_with: Callable[[], Mapping[str, str | int | bool]] = dict,
    prepares: bool = False,
    compared: tuple[Runs, References] | None = None,
    build_folder: Path | None = None,
    shown_lesson: ClassLesson | None = None,
) -> Extension:
    """Return the page: its files at `/`, which need no API key, and the routes below `/inspect`, which do.

    Args:
        ticket: Ticket that a browser can exchange for the API key.
        inspects_requests: Clients with the API key may see the requests of all clients.
        loaded_with: Returns the arguments of `llamarium.load`, except the model's name, that give the same model;
            called once the model is loaded.
        prepares: Precompute the first views of the first pass.
        compared: Training runs whose checkpoints may be inspected, and reference models for quantization.
        build_folder: Folder of a learner, whose functions may be checked from this machine.
        shown_lesson: Lesson of a teacher to show.
    """
    assets = read_assets()

    def add(app: FastAPI) -> None:
        app.state.passes, app.state.inspects_requests = Passes(), inspects_requests
        if inspects_requests:
            app.state.service.explainer.keep_newest()
        app.state.adapted = AdaptedModels()
        app.state.loaded_with = loaded_with
        app.state.preparation = Preparation(app.state.passes, prepares)
        app.state.others = Others()
        app.state.runs, app.state.references = compared or (Runs(), References())
        app.state.build_folder, app.state.lesson = build_folder, shown_lesson
        for router in (probes.router, *OTHER_ROUTERS):
            app.include_router(router, responses=documented(ErrorBody))
        if ticket is not None:
            app.include_router(ticket_routes(ticket), responses=documented(ErrorBody))
        app.router.routes.extend(asset_routes(assets))
        app.add_middleware(Instance)

    open_paths = set(assets) or {"/"}
    return Extension(add, frozenset(open_paths if ticket is None else open_paths | {PATH}))
