"""Questions to a pass, as `llamarium.inspect.probes` and `llamarium.inspect.lens` answer them."""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query, Request, Response

from llamarium.generation.text_engine import TextEngine
from llamarium.page.binary import Numbers, respond
from llamarium.page.executor import Executor, Pass
from llamarium.page.passes import Passes
from llamarium.page.schema.probes import (
    AttributionQuery,
    AttributionView,
    ChosenView,
    HeadsQuery,
    HeadsView,
    LensCellView,
    LensGridQuery,
    LensGridView,
    LensPlaceView,
    LensQuery,
    LensView,
    LikelyView,
    NeuronsQuery,
    NeuronsView,
)
from llamarium.page.selection import check_index
from llamarium.page.work import passes_of, work_on
from llamarium.server.errors import ApiError
from llamarium.server.http.body import StrictRoute

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.inspect.lens import LensLayer
    from llamarium.inspect.probes.heads import HeadsJoined
    from llamarium.inspect.trace import Trace

router = APIRouter(prefix="/inspect/passes/{pass_id}", route_class=StrictRoute)

MAX_GRID_TOKENS = 64
"""At each of which the lens reads every layer at once: the whole vocabulary for each place."""


@router.get("/heads")
async def heads(request: Request, pass_id: str, query: Annotated[HeadsQuery, Query()]) -> HeadsView:
    """Return length and share of what each head of a layer adds to a token's stream."""
    kept, one = _known(request, pass_id)

    def read(llama: "Llama", engine: TextEngine) -> HeadsView:
        found = _heads(kept, one, llama, engine, query).to_dict()
        return HeadsView(
            layer=found["layer"],
            position=found["positions"][0],
            norms=found["norms"][0],
            shares=found["shares"][0],
            rounding=found["rounding"][0],
        )

    return await work_on(request, "layer", read, one)


@router.get("/heads/added", response_class=Response)
async def heads_added(request: Request, pass_id: str, query: Annotated[HeadsQuery, Query()]) -> Response:
    """Send what each head of a layer adds to a token's stream; axes N D."""
    kept, one = _known(request, pass_id)

    def read(llama: "Llama", engine: TextEngine) -> Response:
        added_TND = _heads(kept, one, llama, engine, query).added_TND
        return respond(Numbers(added_TND[0].cpu().numpy(), "ND"), "float32")

    return await work_on(request, "layer", read, one)


@router.get("/neurons")
async def neurons(request: Request, pass_id: str, query: Annotated[NeuronsQuery, Query()]) -> NeuronsView:
    """Return the neurons of a layer that fire most at a token, and what they do at the others."""
    kept, one = _known(request, pass_id)

    def read(llama: "Llama", engine: TextEngine) -> NeuronsView:
        from llamarium.inspect.probes.neurons import NAMES, top_neurons

        check_index("layer", query.layer, llama.config.num_hidden_layers)
        at, rows = position_of(one, query.position), range(0, len(one.ids), query.stride)
        seen = _with(at, rows, lambda rows: traced(kept, one, llama, engine, NAMES, [query.layer], rows))
        told = top_neurons(llama.config, seen, query.layer, position=at, k=query.k).to_dict()
        for neuron in told["neurons"]:
            neuron["by_token"] = neuron["by_token"][: len(rows)]
        return NeuronsView.model_validate(told)

    return await work_on(request, "k", read, one)


@router.get("/attribution")
async def attribution(request: Request, pass_id: str, query: Annotated[AttributionQuery, Query()]) -> AttributionView:
    """Divide a token's logit among everything that was added to the stream."""
    kept, one = _known(request, pass_id)

    def read(llama: "Llama", engine: TextEngine) -> AttributionView:
        from llamarium.inspect.probes.attribution import NAMES, attribute

        check_index("against_id", query.against_id, llama.config.vocab_size)
        at, seen = _at_all_depths(kept, one, llama, engine, query, NAMES)
        found = attribute(llama.model, seen, query.token_id, position=at, against_id=query.against_id)
        return AttributionView.model_validate(found.to_dict())

    return await work_on(request, "token_id", read, one)


@router.get("/lens")
async def lens(request: Request, pass_id: str, query: Annotated[LensQuery, Query()]) -> LensView:
    """Return what the stream would say after a token, after attention and after the MLP of each layer."""
    kept, one = _known(request, pass_id)

    def read(llama: "Llama", engine: TextEngine) -> LensView:
        from llamarium.inspect.lens import lens

        at, seen = _at_all_depths(kept, one, llama, engine, query, ("resid_mid", "resid"))
        found = lens(llama.model, seen, query.k, llama.tokenizer, chosen_id=query.token_id)
        return LensView(position=at, token_id=query.token_id, places=tuple(map(_place, found.layers)))

    return await work_on(request, "k", read, one)


@router.get("/lens/grid")
async def lens_grid(request: Request, pass_id: str, query: Annotated[LensGridQuery, Query()]) -> LensGridView:
    """Return what the stream would say at each layer and token."""
    kept, one = _known(request, pass_id)
    rows = _rows(one, query)

    def read(llama: "Llama", engine: TextEngine) -> LensGridView:
        from llamarium.inspect.lens import STREAMS, lens

        check_index("token_id", query.token_id, llama.config.vocab_size)
        seen = traced(kept, one, llama, engine, (STREAMS[query.after],), range(llama.config.num_hidden_layers), rows)
        found = lens(llama.model, seen, 1, llama.tokenizer, chosen_id=query.token_id)
        cells = tuple(_cells(layer) for layer in found.layers)
        return LensGridView(after=query.after, token_id=query.token_id, start=query.start, rows=cells)

    return await work_on(request, "token_id", read, one)


def position_of(one: Pass, position: int | None) -> int:
    """Return the token that is asked about; the last where none is named.

    Raises:
        ApiError: 400, if there is no such token.
    """
    check_index("position", position, len(one.ids))
    return len(one.ids) - 1 if position is None else position


def traced(
    kept: Passes,
    one: Pass,
    llama: "Llama",
    engine: TextEngine,
    names: Collection[str],
    layers: Collection[int],
    rows: range | None = None,
) -> "Trace":
    """Return the pass's trace, where the modules are; of all tokens where no rows are given."""
    every = range(len(one.ids)) if rows is None else rows
    return kept.trace(Executor.of(llama, engine), one, names, layers, every, llama.model.device)


def _with(at: int, rows: range, trace: Callable[[range], "Trace"]) -> "Trace":
    """Trace some tokens, and behind them the one in question, if it is none of them."""
    import torch

    from llamarium.inspect.trace import Trace

    some = trace(rows)
    if at in rows:
        return some
    alone = trace(range(at, at + 1))
    return Trace(some.token_ids, (*rows, at), {key: torch.cat([some[key], alone[key]]) for key in some})


def _known(request: Request, pass_id: str) -> tuple[Passes, Pass]:
    kept = passes_of(request)
    return kept, kept.find(pass_id)


def _heads(kept: Passes, one: Pass, llama: "Llama", engine: TextEngine, query: HeadsQuery) -> "HeadsJoined":
    from llamarium.inspect.probes.heads import NAMES, heads_joined

    check_index("layer", query.layer, llama.config.num_hidden_layers)
    at = position_of(one, query.position)
    seen = traced(kept, one, llama, engine, NAMES, [query.layer], range(at, at + 1))
    return heads_joined(llama.model, seen, query.layer)


def _at_all_depths(
    kept: Passes,
    one: Pass,
    llama: "Llama",
    engine: TextEngine,
    query: AttributionQuery | LensQuery,
    names: Collection[str],
) -> "tuple[int, Trace]":
    """Return the token that is asked about, and its trace in all layers."""
    check_index("token_id", query.token_id, llama.config.vocab_size)
    at = position_of(one, query.position)
    layers = range(llama.config.num_hidden_layers)
    return at, traced(kept, one, llama, engine, names, layers, range(at, at + 1))


def _place(layer: "LensLayer") -> LensPlaceView:
    told = layer.to_dict()
    chosen = told["chosen"][0] if told["chosen"] else None
    return LensPlaceView.model_validate({**told, "candidates": told["candidates"][0], "chosen": chosen})


def _rows(one: Pass, query: LensGridQuery) -> range:
    """Return the tokens that are asked about."""
    stop = len(one.ids) if query.stop is None else query.stop
    check_index("start", query.start, len(one.ids))
    if not query.start < stop <= len(one.ids):
        message = f"stop is {stop}; expected {query.start + 1} to {len(one.ids)}"
        raise ApiError(400, message, code="invalid_parameter", param="stop")
    if stop - query.start > MAX_GRID_TOKENS:
        message = (
            f"{stop - query.start} tokens are asked about, and {MAX_GRID_TOKENS} at most at once; give start and stop"
        )
        raise ApiError(400, message, code="invalid_parameter", param="stop")
    return range(query.start, stop)


def _cells(layer: "LensLayer") -> tuple[LensCellView, ...]:
    """Return one layer's row of the grid."""
    told = layer.to_dict()
    chosen = told["chosen"] or [None] * len(told["candidates"])
    rows = zip(told["candidates"], chosen, strict=True)
    return tuple(LensCellView(best=LikelyView(**best), chosen=one and ChosenView(**one)) for (best,), one in rows)
