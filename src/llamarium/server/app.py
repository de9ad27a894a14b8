"""The ASGI application: routes and middleware.

From outermost to innermost: `Access` (request ids and the access log), CORS if origins are allowed, `Guard` (host
names, origins, API keys), and the routes of each protocol.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from llamarium.errors import QuestionError
from llamarium.server.anthropic import messages
from llamarium.server.errors import AnthropicErrorBody, ApiError, ErrorBody, documented, of_library
from llamarium.server.faults import refusal_of
from llamarium.server.hints import HEADER
from llamarium.server.http.access import Access, Guard, Log
from llamarium.server.http.body import Bodies
from llamarium.server.lifecycle.service import Service
from llamarium.server.metrics import Metrics
from llamarium.server.openai import chat, completions, embeddings, models
from llamarium.server.openai.responses import responses
from llamarium.server.plain import explain, status, texts
from llamarium.server.prefix.explainer import HEADER as PREFIX_HEADER
from llamarium.server.settings import Settings

_OPENAI = (status, texts, explain, models, chat, completions, embeddings, responses)
_ROUTERS = (*((module.router, ErrorBody) for module in _OPENAI), (messages.router, AnthropicErrorBody))
"""Routers, and the format of their errors."""


@dataclass(frozen=True, slots=True)
class Extension:
    """Routes from outside this package.

    Attributes:
        add: Adds the routes to an application.
        open_paths: Paths that need no API key, e.g. those of public files.
    """

    add: Callable[[FastAPI], None]
    open_paths: frozenset[str] = frozenset()


def create_app(service: Service, names: tuple[str, ...], log: Log, extensions: Sequence[Extension] = ()) -> ASGIApp:
    """Return the application with its middleware; arguments as for `run`."""
    app = create_routes(service, names)
    for extension in extensions:
        extension.add(app)
    return layered(
        app, service.settings, log, frozenset[str]().union(*(extension.open_paths for extension in extensions))
    )


def layered(app: ASGIApp, settings: Settings, log: Log, open_paths: frozenset[str] = frozenset()) -> ASGIApp:
    """Wrap an application in the server's middleware; `open_paths` need no API key."""
    app = Guard(app, settings, open_paths)
    if settings.cors_origins:
        app = CORSMiddleware(
            app,
            settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", HEADER, PREFIX_HEADER],
        )
    return Access(app, log)


def create_routes(service: Service, names: tuple[str, ...]) -> FastAPI:
    """Return the routes without middleware; a request's scope needs `notes`, `request_id` and `began`."""
    app = FastAPI(title="Llamarium", docs_url=None, redoc_url=None)  # FastAPI's pages load scripts from a CDN
    app.state.service, app.state.names, app.state.created = service, names, int(time.time())
    app.state.bodies, app.state.loading_adapter = Bodies(), asyncio.Lock()
    app.state.metrics = Metrics(service, names[0])
    for router, error in _ROUTERS:
        app.include_router(router, responses=documented(error))
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(QuestionError, _on_question)
    return app


def post_paths() -> tuple[str, ...]:
    """Return the paths of all POST routes."""
    routes = (route for router, _ in _ROUTERS for route in router.routes)
    return tuple(route.path for route in routes if isinstance(route, APIRoute) and "POST" in (route.methods or ()))


async def _on_http(request: Request, error: Exception) -> Response:
    """Return the response to an ApiError or one of the framework's errors (404, 405)."""
    if not isinstance(error, ApiError):
        assert isinstance(error, HTTPException)
        message, code = {
            404: (f"{request.url.path} does not exist", "not_found"),
            405: (f"{request.url.path} does not support {request.method}", "method_not_allowed"),
        }.get(error.status_code, (error.detail, None))
        error = ApiError(error.status_code, message, code=code, headers=error.headers)
    return _refuse(request, error)


async def _on_question(request: Request, error: Exception) -> Response:
    assert isinstance(error, QuestionError)
    return _refuse(request, of_library(error))


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    in_query = error.body is None and all(fault["loc"][0] == "query" for fault in error.errors())
    return _refuse(request, refusal_of(error.errors(), dict(request.query_params) if in_query else error.body))


def _refuse(request: Request, error: ApiError) -> Response:
    return error.response(request.scope["path"], request.scope["request_id"])
