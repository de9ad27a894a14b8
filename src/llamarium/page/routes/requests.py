"""Routes that list the requests of all clients and recompute one of them; only with --inspect-requests."""

import asyncio
import re
import time
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query, Request

from llamarium.engine.counts import OpenedSequence, open_sequence, states_of
from llamarium.engine.engine import Engine
from llamarium.errors import EngineStoppedError
from llamarium.page.executor import Pass
from llamarium.page.open_pass import OpenPass
from llamarium.page.probes.sampling import explain_next
from llamarium.page.routes.passes import pass_view
from llamarium.page.schema.clients import OpenedView, OpenQuery, ParametersView, PrefixView, RequestsView
from llamarium.page.work import passes_of, work_on
from llamarium.sampling.params import parameters_of
from llamarium.sampling.row import SamplingRow
from llamarium.server.errors import ApiError, of_library
from llamarium.server.http.access import owner_of
from llamarium.server.http.body import StrictRoute
from llamarium.server.lifecycle.service import Service
from llamarium.server.prefix.explainer import ShownExplanation

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.generation.text_engine import TextEngine

router = APIRouter(prefix="/inspect", route_class=StrictRoute)

MAX_REQUESTS = 64
"""Maximum number of requests in a response."""

MAX_RUNS = 64
"""Maximum number of block runs per request."""


@router.get("/requests")
async def requests(request: Request) -> RequestsView:
    """Return what the engine is doing between two steps; takes no place among the answers."""
    _check_allowed(request)
    service: Service = request.app.state.service
    _, engine = service.require()
    try:
        views = await asyncio.wrap_future(engine.read(_look))
        names = {str(served.number): name for name, served in engine.adapters.items()}
        prefixes = tuple(map(_prefix_view, service.explainer.newest(owner_of(request))))
        return views.model_copy(update={"adapters": names, "prefixes": prefixes})
    except EngineStoppedError as error:
        raise of_library(error) from None


@router.get("/requests/{name}")
async def opened(request: Request, name: str, query: Annotated[OpenQuery, Query()]) -> OpenedView:
    """Run an answer again as of now, and explain how its next token is chosen; `name` is its number and row, as 7.0."""
    _check_allowed(request)
    number, row = _numbers(name)
    cached_passes = passes_of(request)

    def read(llama: "Llama", engine: "TextEngine") -> OpenedView:
        sequence = engine.read(lambda inner: open_sequence(inner.sequences, number, row, MAX_RUNS)).result()
        if sequence is None:
            raise _unknown()
        adapter = sequence.state.adapter
        chosen = next((name for name, served in engine.adapters.items() if served.number == adapter), None)
        if sequence.is_edited or (adapter >= 0 and chosen is None):
            raise ApiError(409, "this answer's pass has edits, or an adapter that is unloaded", code="not_shown")
        forward_pass = Pass.of([*sequence.prompt_ids, *sequence.answer_ids], chosen, adapter)
        context = OpenPass(llama, engine, request.app.state, cached_passes.add(forward_pass))
        answer, sampler = range(len(sequence.prompt_ids), len(forward_pass.ids)), None
        if not sequence.state.is_embedding:
            sampler = explain_next(context, answer, _row(llama, sequence), query.k)
        return OpenedView(
            request=sequence.state,
            params=_params(sequence),
            run=pass_view(context),
            start=len(sequence.prompt_ids),
            sampler=sampler,
        )

    return await work_on(request, "name", read)


def _numbers(name: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,18})\.([0-9]{1,18})", name)
    if match is None:
        raise _unknown()
    return int(match[1]), int(match[2])


def _unknown() -> ApiError:
    message = "this request has come to its end, or there never was one"
    return ApiError(404, message, code="unknown_request", param="name")


def _check_allowed(request: Request) -> None:
    if not request.app.state.inspects_requests:
        way = "start it with --inspect-requests to show them to every client with its key"
        message = f"this server does not show its clients' requests; {way}"
        raise ApiError(403, message, code="requests_not_inspected")


def _look(engine: Engine) -> RequestsView:
    now = engine.snapshot()
    return RequestsView(
        at_s=time.monotonic(),
        num_running=now.running,
        num_waiting=now.waiting,
        num_blocks=now.num_blocks,
        num_used_blocks=now.used_blocks,
        block_size=engine.cache.block_size,
        generated_tokens=now.counts.generated_tokens,
        requests=tuple(states_of(engine.sequences, MAX_REQUESTS, MAX_RUNS)),
        adapters={},
        prefixes=(),
    )


def _prefix_view(shown: ShownExplanation) -> PrefixView:
    explanation = shown.explanation
    texts = explanation.texts
    return PrefixView(
        number=shown.number,
        num_tokens=explanation.num_tokens,
        matched_tokens=explanation.matched_tokens,
        is_exact=explanation.is_exact,
        reason=explanation.reason,
        message=explanation.sentence(),
        field=explanation.path,
        other_fields=explanation.others,
        first_different_token=explanation.token,
        text_before=texts and texts.before,
        text=texts and texts.now,
        earlier_text=texts and texts.earlier,
    )


def _params(sequence: OpenedSequence) -> ParametersView:
    params = sequence.params
    numbers: dict[str, object] = {
        parameter.name: getattr(params, parameter.name) for parameter in parameters_of("page")
    }
    return ParametersView.model_validate(
        numbers
        | {
            "seed": str(params.seed),
            "max_tokens": params.max_tokens,
            "has_logit_bias": bool(params.logit_bias),
            "has_form": params.grammar is not None,
        }
    )


def _row(llama: "Llama", sequence: OpenedSequence) -> SamplingRow:
    constraint = None if sequence.grammar is None else sequence.grammar.begin(sequence.stops)
    size = llama.config.vocab_size
    return SamplingRow(sequence.params, sequence.prompt_ids, size, sequence.answer_ids, constraint, sequence.stops)
