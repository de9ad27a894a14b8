"""The routes of all probes, generated from their table."""

import re
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.datastructures import Default
from fastapi.responses import JSONResponse

from llamarium.generation.text_engine import TextEngine
from llamarium.page.binary import Numbers, respond
from llamarium.page.open_pass import OpenModel, OpenPass
from llamarium.page.probes.probe import Probe
from llamarium.page.probes.table import OF_MODEL, OF_PASS
from llamarium.page.schema.base import PageRequest
from llamarium.page.work import passes_of, stream_on, work_on
from llamarium.server.http.body import StrictRoute
from llamarium.server.http.stream import STREAMED

if TYPE_CHECKING:
    from llamarium.api import Llama

router = APIRouter(prefix="/inspect", route_class=StrictRoute)


def _add(start: str, path: str, probe: Probe) -> None:
    """Add the route of a probe: it finds the pass, validates the query, and runs the probe in a thread."""
    query_type = probe.asked(path)
    has_body = query_type is not None and issubclass(query_type, PageRequest)

    async def answer(request: Request, pass_id: str | None = None, given: Any = None, **in_path: str) -> Any:
        forward_pass = None if pass_id is None else passes_of(request).find(pass_id)
        fields = probe.arguments(given) | in_path

        def read(llama: "Llama", engine: TextEngine) -> Any:
            state = request.app.state
            context = (
                OpenModel(llama, engine, state)
                if forward_pass is None
                else OpenPass(llama, engine, state, forward_pass)
            )
            view = probe.function(context, **fields)
            return respond(view) if isinstance(view, Numbers) else view

        return await (stream_on if probe.is_streamed else work_on)(request, probe.about, read, forward_pass)

    kinds: dict[str, Any] = {"request": Request} | dict.fromkeys(re.findall(r"\{(\w+)\}", start + path), str)
    if query_type is not None:
        kinds["given"] = query_type if has_body else Annotated[query_type, Query()]
    parameters = [Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind) for name, kind in kinds.items()]
    answer.__signature__ = Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    answer.__doc__ = probe.function.__doc__
    is_json = not (probe.is_bulk or probe.is_streamed)
    router.add_api_route(
        f"/{start}{path}",
        answer,
        methods=["POST" if has_body else "GET"],
        name=probe.function.__name__,
        response_model=probe.answer if is_json else None,
        response_class=Default(JSONResponse) if is_json else Response,
        responses=STREAMED if probe.is_streamed else None,
    )


for _path, _probe in OF_MODEL.items():
    _add("", _path, _probe)
for _path, _probe in OF_PASS.items():
    _add("passes/{pass_id}/", _path, _probe)
