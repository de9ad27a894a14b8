"""How positions turn queries and keys, in plain numbers."""

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query, Request

from llamarium.generation.text_engine import TextEngine
from llamarium.page.executor import Pass
from llamarium.page.passes import Passes
from llamarium.page.routes.probes import position_of, traced
from llamarium.page.schema.probes import DistancesQuery, DistancesView, RopeQuery, RopeView
from llamarium.page.selection import check_index
from llamarium.page.work import passes_of, work_on
from llamarium.presets import PRESETS
from llamarium.server.errors import ApiError
from llamarium.server.http.body import StrictRoute

if TYPE_CHECKING:
    from llamarium.api import Llama

MAX_DISTANCES = 4096
"""Of one answer."""

router = APIRouter(prefix="/inspect", route_class=StrictRoute)


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
async def distances(request: Request, pass_id: str, query: Annotated[DistancesQuery, Query()]) -> DistancesView:
    """Return the score that a token's query and a token's key would have at each distance."""
    kept = passes_of(request)
    one = kept.find(pass_id)
    return await work_on(request, "stop", lambda llama, engine: _distances(kept, one, llama, engine, query), one)


def _distances(kept: Passes, one: Pass, llama: "Llama", engine: TextEngine, query: DistancesQuery) -> DistancesView:
    from llamarium.inspect.probes.rope import score_by_distance

    config = llama.config
    check_index("layer", query.layer, config.num_hidden_layers)
    check_index("head", query.head, config.num_attention_heads)
    check_index("key", query.key, len(one.ids))
    wanted = range(0, query.stop, query.stride)
    if len(wanted) > MAX_DISTANCES:
        message = (
            f"these are {len(wanted):,} distances, and {MAX_DISTANCES:,} are told at most; ask for a larger stride"
        )
        raise ApiError(400, message, code="too_many_numbers", param="stride")
    at, group = position_of(one, query.position), config.num_attention_heads // config.num_key_value_heads
    seen = traced(kept, one, llama, engine, ("q", "k"), [query.layer], range(at, at + 1))
    q_H = seen[f"layers.{query.layer}.q"][0, query.head]
    k_H = seen[f"layers.{query.layer}.k"][query.key, query.head // group]
    scores = score_by_distance(config, q_H, k_H, wanted)
    return DistancesView(distances=tuple(wanted), scores=tuple(scores))
