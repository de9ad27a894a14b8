"""Two models over one text."""

import math
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query, Request

from llamarium.inspect.measures.comparison import NAMES, compare_passes
from llamarium.page.compare.others import Others, Side, Wanted
from llamarium.page.compare.runs import Runs
from llamarium.page.compare.schema import CompareQuery, ComparisonView, SidesView, SideView
from llamarium.page.compare.sides import find_side, first_pair, sides_of
from llamarium.page.executor import Pass
from llamarium.page.routes.open_pass import OfPass, OpenPass
from llamarium.page.work import work_on
from llamarium.server.errors import ApiError
from llamarium.server.http.body import StrictRoute

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.generation.text_engine import TextEngine
    from llamarium.inspect.numbers import Floats

router = APIRouter(prefix="/inspect", route_class=StrictRoute)

MAX_TOKENS = 128
"""Of a text that is compared: the logits of all tokens are there at once, of both sides."""


@router.get("/compare")
async def sides(request: Request) -> SidesView:
    """List the sides that can be compared, and the memory each takes."""

    def read(llama: "Llama", engine: "TextEngine") -> SidesView:
        kept, (side, against) = others_of(request), first_pair(llama)
        return SidesView(
            sides=tuple(_view(kept, one) for one in sides_of(llama, engine, runs_of(request))),
            max_bytes=kept.max_bytes,
            max_tokens=MAX_TOKENS,
            side=side,
            against=against,
        )

    return await work_on(request, "side", read)


@router.get("/passes/{pass_id}/compare")
async def compare(request: Request, requested: OfPass, query: Annotated[CompareQuery, Query()]) -> ComparisonView:
    """Run two sides over the text of a pass, and compare them."""
    one = requested.one
    check_comparable(one)

    def read(known: OpenPass) -> ComparisonView:
        llama = known.llama
        kept, every = others_of(request), sides_of(llama, known.engine, runs_of(request))
        pair = find_side(every, query.side, "side"), find_side(every, query.against, "against")
        wanted = Wanted(one.ids, NAMES)
        traces = [kept.trace(side, wanted, field=field) for side, field in zip(pair, ("side", "against"), strict=True)]
        _check_finite(pair, [trace.arrays["logits", None] for trace in traces])
        found = compare_passes(*traces, k=query.k, tokenizer=llama.tokenizer)
        side, against = (_view(kept, side) for side in pair)
        return ComparisonView(
            side=side, against=against, layers=found.layers, tokens=found.tokens, kl=found.kl, same_top=found.same_top
        )

    return await requested.read("side", read)


def others_of(request: Request) -> Others:
    """Return the models besides the one that answers."""
    return request.app.state.others


def runs_of(request: Request) -> Runs:
    """Return the training runs that the server was started with."""
    return request.app.state.runs


def check_comparable(one: Pass) -> None:
    """Refuse a pass with an adapter or an experiment, and one whose text is too long."""
    if one.adapter is not None or one.experiment is not None:
        message = "the pass has an adapter or is an experiment, which a side names; use a pass of the ids alone"
        raise ApiError(400, message, code="invalid_parameter", param="id")
    if len(one.ids) > MAX_TOKENS:
        message = f"the text has {len(one.ids)} tokens, and {MAX_TOKENS} are compared at most; use a shorter text"
        raise ApiError(400, message, code="text_too_long", param="id")


def _check_finite(pair: tuple[Side, Side], logits: "list[Floats]") -> None:
    for side, logits_TV in zip(pair, logits, strict=True):
        if not math.isfinite(float(logits_TV.sum())):
            raise ApiError(500, f"the logits of {side.title} are not finite", code="model_error")


def _view(kept: Others, side: Side) -> SideView:
    return SideView(
        id=side.id, title=side.title, words=side.words, num_bytes=side.num_bytes, seconds=kept.seconds(side)
    )
