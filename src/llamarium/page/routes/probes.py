"""Questions to a pass, as `llamarium.inspect.probes` and `llamarium.inspect.lens` answer them."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated

import numpy as np
from fastapi import APIRouter, Query, Request, Response

from llamarium.page.binary import Numbers, respond
from llamarium.page.executor import Pass
from llamarium.page.routes.open_pass import OfPass, OpenPass
from llamarium.page.schema.probes import (
    AttributionQuery,
    AttributionView,
    ChosenView,
    DistancesQuery,
    DistancesView,
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
    RopeQuery,
    RopeView,
)
from llamarium.page.selection import check_index
from llamarium.page.work import work_on
from llamarium.presets import PRESETS
from llamarium.server.errors import ApiError
from llamarium.server.http.body import StrictRoute

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.inspect.lens import LensLayer
    from llamarium.inspect.probes.heads import HeadsJoined
    from llamarium.inspect.trace import Trace

router = APIRouter(prefix="/inspect", route_class=StrictRoute)

MAX_GRID_TOKENS = 64
"""At each of which the lens reads every layer at once: the whole vocabulary for each place."""

MAX_DISTANCES = 4096
"""Of one answer."""


@router.get("/passes/{pass_id}/heads")
async def heads(asked: OfPass, query: Annotated[HeadsQuery, Query()]) -> HeadsView:
    """Return length and share of what each head of a layer adds to a token's stream."""
    at = asked.position(query.position)

    def read(known: OpenPass) -> HeadsView:
        found = _heads(known, query.layer, at).to_dict()
        return HeadsView(
            layer=found["layer"],
            position=at,
            norms=found["norms"][0],
            shares=found["shares"][0],
            rounding=found["rounding"][0],
        )

    return await asked.read("layer", read)


@router.get("/passes/{pass_id}/heads/added", response_class=Response)
async def heads_added(asked: OfPass, query: Annotated[HeadsQuery, Query()]) -> Response:
    """Send what each head of a layer adds to a token's stream; axes N D."""
    at = asked.position(query.position)

    def read(known: OpenPass) -> Response:
        added_TND = _heads(known, query.layer, at).added_TND
        return respond(Numbers(added_TND[0], "ND"), "float32")

    return await asked.read("layer", read)


@router.get("/passes/{pass_id}/neurons")
async def neurons(asked: OfPass, query: Annotated[NeuronsQuery, Query()]) -> NeuronsView:
    """Return the neurons of a layer that fire most at a token, and what they do at the others."""
    at, rows = asked.position(query.position), range(0, len(asked.one.ids), query.stride)

    def read(known: OpenPass) -> NeuronsView:
        from llamarium.inspect.probes.neurons import NAMES, top_neurons

        known.check_layer(query.layer)
        seen = _with(known, NAMES, query.layer, at, rows)
        told = top_neurons(known.llama.config, seen, query.layer, position=at, k=query.k).to_dict()
        for neuron in told["neurons"]:
            neuron["by_token"] = neuron["by_token"][: len(rows)]
        return NeuronsView.model_validate(told)

    return await asked.read("k", read)


@router.get("/passes/{pass_id}/attribution")
async def attribution(asked: OfPass, query: Annotated[AttributionQuery, Query()]) -> AttributionView:
    """Divide a token's logit among everything that was added to the stream."""
    at = asked.position(query.position)

    def read(known: OpenPass) -> AttributionView:
        from llamarium.inspect.probes.attribution import NAMES, attribute

        known.check_token("token_id", query.token_id)
        known.check_token("against_id", query.against_id)
        seen = known.trace(NAMES, known.layers, range(at, at + 1))
        found = attribute(known.llama.runner, seen, query.token_id, position=at, against_id=query.against_id)
        return AttributionView.model_validate(found.to_dict())

    return await asked.read("token_id", read)


@router.get("/passes/{pass_id}/lens")
async def lens(asked: OfPass, query: Annotated[LensQuery, Query()]) -> LensView:
    """Return what the stream would say after a token, after attention and after the MLP of each layer."""
    at = asked.position(query.position)

    def read(known: OpenPass) -> LensView:
        from llamarium.inspect.lens import lens

        known.check_token("token_id", query.token_id)
        seen = known.trace(("resid_mid", "resid"), known.layers, range(at, at + 1))
        found = lens(known.llama.runner, seen, query.k, known.llama.tokenizer, chosen_id=query.token_id)
        return LensView(position=at, token_id=query.token_id, places=tuple(map(_place, found.layers)))

    return await asked.read("k", read)


@router.get("/passes/{pass_id}/lens/grid")
async def lens_grid(asked: OfPass, query: Annotated[LensGridQuery, Query()]) -> LensGridView:
    """Return what the stream would say at each layer and token."""
    rows = _rows(asked.one, query)

    def read(known: OpenPass) -> LensGridView:
        from llamarium.inspect.lens import STREAMS, lens

        known.check_token("token_id", query.token_id)
        seen = known.trace((STREAMS[query.after],), known.layers, rows)
        found = lens(known.llama.runner, seen, 1, known.llama.tokenizer, chosen_id=query.token_id)
        cells = tuple(_cells(layer) for layer in found.layers)
        return LensGridView(after=query.after, token_id=query.token_id, start=query.start, rows=cells)

    return await asked.read("token_id", read)


@router.get("/rope")
async def rope(request: Request, query: Annotated[RopeQuery, Query()]) -> RopeView:
    """Return every pair's frequency, with and without scaling, and its angle at a position."""

    def read(llama: "Llama", _: object) -> RopeView:
        from llamarium.inspect.probes.rope import rope_pairs

        config = llama.config if query.shape is None else PRESETS[query.shape]
        return RopeView(
            position=query.position,
            context=config.max_position_embeddings,
            is_scaled=config.rope_scaling is not None,
            pairs=tuple(pair.to_dict() for pair in rope_pairs(config, query.position)),  # pyright: ignore[reportArgumentType]
        )

    return await work_on(request, "position", read)


@router.get("/passes/{pass_id}/distances")
async def distances(asked: OfPass, query: Annotated[DistancesQuery, Query()]) -> DistancesView:
    """Return the score that a token's query and a token's key would have at each distance."""
    at, wanted = asked.position(query.position), range(0, query.stop, query.stride)
    check_index("key", query.key, len(asked.one.ids))
    if len(wanted) > MAX_DISTANCES:
        message = (
            f"these are {len(wanted):,} distances, and {MAX_DISTANCES:,} are told at most; ask for a larger stride"
        )
        raise ApiError(400, message, code="too_many_numbers", param="stride")

    def read(known: OpenPass) -> DistancesView:
        from llamarium.inspect.probes.rope import score_by_distance

        config = known.llama.config
        known.check_layer(query.layer)
        check_index("head", query.head, config.num_attention_heads)
        seen = known.trace(("q", "k"), [query.layer], range(at, at + 1))
        q_H = seen.arrays["q", query.layer][0, query.head]
        group = config.num_attention_heads // config.num_key_value_heads
        k_H = seen.arrays["k", query.layer][query.key, query.head // group]
        scores = score_by_distance(config, q_H, k_H, wanted)
        return DistancesView(distances=tuple(wanted), scores=tuple(scores))

    return await asked.read("stop", read)


def _with(known: OpenPass, names: Collection[str], layer: int, at: int, rows: range) -> "Trace":
    """Trace some tokens, and behind them the one in question, if it is none of them."""
    from llamarium.inspect.trace import Trace

    some = known.trace(names, [layer], rows)
    if at in rows:
        return some
    alone = known.trace(names, [layer], range(at, at + 1))
    both = {key: np.concatenate([values, alone.arrays[key]]) for key, values in some.arrays.items()}
    return Trace(some.token_ids, (*rows, at), both)


def _heads(known: OpenPass, layer: int, at: int) -> "HeadsJoined":
    from llamarium.inspect.probes.heads import NAMES, heads_joined

    known.check_layer(layer)
    return heads_joined(known.llama.runner, known.trace(NAMES, [layer], range(at, at + 1)), layer)


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
