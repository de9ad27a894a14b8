"""Probes of a pass, by `llamarium.inspect.probes` and `llamarium.inspect.lens`."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated

import numpy as np
from fastapi import APIRouter, Query, Request, Response

from llamarium.inspect.lens import STREAMS, Lens
from llamarium.inspect.lens import lens as read_stream
from llamarium.inspect.measures import after_error as errors
from llamarium.inspect.measures import head_kinds as kinds_of
from llamarium.inspect.measures.after_error import AfterError
from llamarium.inspect.measures.head_kinds import HeadKinds
from llamarium.inspect.measures.linear_probe import LinearProbe
from llamarium.inspect.measures.linear_probe import linear_probe as probes_of
from llamarium.inspect.measures.probe_tasks import examples_of
from llamarium.inspect.probes import attribution as attributions
from llamarium.inspect.probes import heads as heads_of
from llamarium.inspect.probes import neurons as neurons_of
from llamarium.inspect.probes import picture as pictures
from llamarium.inspect.probes.attribution import Attribution
from llamarium.inspect.probes.neurons import Neurons
from llamarium.inspect.probes.rope import rope_pairs, score_by_distance
from llamarium.inspect.trace import Trace
from llamarium.page.binary import Numbers, check_size, respond
from llamarium.page.executor import Pass
from llamarium.page.routes.open_pass import OfPass, OpenPass
from llamarium.page.schema import probes as schema
from llamarium.page.selection import check_index, window_of
from llamarium.page.work import work_on
from llamarium.presets import PRESETS
from llamarium.server.errors import ApiError
from llamarium.server.http.body import StrictRoute
from llamarium.server.lifecycle.threads import check_wanted

if TYPE_CHECKING:
    from llamarium.api import Llama

router = APIRouter(prefix="/inspect", route_class=StrictRoute)

MAX_KINDS_TOKENS = 512
"""Of all whose pairs each head has a share."""

MAX_GRID_TOKENS = 64
"""At each of which the lens reads every layer at once: the whole vocabulary for each place."""

MAX_DISTANCES = 4096
"""Of one answer."""

MAX_BLOCK_TOKENS = 2048
"""Of a picture in blocks: each of them looks at each."""

_STEP_BYTES = 160 * 10**6  # of all layers' activations that a picture holds at once: a trace has 256 MB


@router.get("/passes/{pass_id}/heads")
async def heads(requested: OfPass, query: Annotated[schema.HeadsQuery, Query()]) -> schema.HeadsView:
    """Return length and share of what each head of a layer adds to a token's stream."""
    at = requested.position(query.position)

    def read(known: OpenPass) -> schema.HeadsView:
        found = _heads(known, query.layer, at).to_dict()
        return schema.HeadsView(
            layer=found["layer"],
            position=at,
            norms=found["norms"][0],
            shares=found["shares"][0],
            rounding=found["rounding"][0],
        )

    return await requested.read("layer", read)


@router.get("/passes/{pass_id}/heads/added", response_class=Response)
async def heads_added(requested: OfPass, query: Annotated[schema.HeadsQuery, Query()]) -> Response:
    """Send what each head of a layer adds to a token's stream; axes N D."""
    at = requested.position(query.position)

    def read(known: OpenPass) -> Response:
        added_TND = _heads(known, query.layer, at).added_TND
        return respond(Numbers(added_TND[0], "ND"), "float32")

    return await requested.read("layer", read)


@router.get("/passes/{pass_id}/head_kinds")
async def head_kinds(requested: OfPass) -> HeadKinds:
    """Return how much of each head's attention goes to the previous token, the first one, and by induction."""
    num_tokens = len(requested.one.ids)
    if num_tokens > MAX_KINDS_TOKENS:
        message = f"{num_tokens} tokens; heads are sorted on {MAX_KINDS_TOKENS} at most: use a shorter text"
        raise ApiError(400, message, code="invalid_parameter", param="id")
    return await requested.read("id", lambda known: kinds_of.head_kinds(known.trace(kinds_of.NAMES, known.layers)))


@router.get("/passes/{pass_id}/neurons")
async def neurons(requested: OfPass, query: Annotated[schema.NeuronsQuery, Query()]) -> Neurons:
    """Return the neurons of a layer that fire most at a token, and what they do at the others."""
    at, rows = requested.position(query.position), range(0, len(requested.one.ids), query.stride)

    def read(known: OpenPass) -> Neurons:
        known.check_layer(query.layer)
        seen = _with(known, neurons_of.NAMES, query.layer, at, rows)
        return neurons_of.top_neurons(known.llama.config, seen, query.layer, position=at, k=query.k)

    return await requested.read("k", read)


@router.get("/passes/{pass_id}/attribution")
async def attribution(requested: OfPass, query: Annotated[schema.AttributionQuery, Query()]) -> Attribution:
    """Divide a token's logit among everything that was added to the stream."""
    at = requested.position(query.position)

    def read(known: OpenPass) -> Attribution:
        known.check_token("token_id", query.token_id)
        known.check_token("against_id", query.against_id)
        seen = known.trace(attributions.NAMES, known.layers, range(at, at + 1))
        return attributions.attribute(
            known.llama.runner, seen, query.token_id, position=at, against_id=query.against_id
        )

    return await requested.read("token_id", read)


@router.get("/passes/{pass_id}/lens")
async def lens(requested: OfPass, query: Annotated[schema.LensQuery, Query()]) -> Lens:
    """Return what the stream would say after a token, after attention and after the MLP of each layer."""
    at = requested.position(query.position)
    rows, names = range(at, at + 1), STREAMS.values()
    return await requested.read("k", lambda known: _lens(known, names, rows, query.k, query.token_id))


@router.get("/passes/{pass_id}/lens/grid")
async def lens_grid(requested: OfPass, query: Annotated[schema.LensGridQuery, Query()]) -> Lens:
    """Return what the stream would say at each layer and token: the most probable one alone."""
    rows, names = _rows(requested.one, query), (STREAMS[query.after],)
    return await requested.read("token_id", lambda known: _lens(known, names, rows, 1, query.token_id))


@router.get("/passes/{pass_id}/picture", response_class=Response)
async def picture(requested: OfPass, query: Annotated[schema.PictureQuery, Query()]) -> Response:
    """Send what a pass is drawn from as a whole, as `inspect/probes/picture.py` says; axis P."""
    columns = window_of(len(requested.one.ids), query)
    if query.blocks and columns.stop > MAX_BLOCK_TOKENS:
        message = f"{columns.stop} tokens; {MAX_BLOCK_TOKENS} at most are shown in blocks: give stride alone"
        raise ApiError(400, message, code="invalid_parameter", param="blocks")

    def read(known: OpenPass) -> Response:
        check_size(pictures.num_pairs(columns) * len(known.layers), "float32")
        config = known.llama.config
        pattern, streams = (
            config.num_attention_heads * len(known.one.ids),
            len(pictures.OF_A_TOKEN) * config.hidden_size,
        )
        of_a_token = 4 * len(known.layers) * (pattern + streams)
        step = max(1, _STEP_BYTES // of_a_token // (columns.step if query.blocks else 1))
        kept = [known.trace(pictures.OF_ALL, [layer]) for layer in known.layers]
        some = (columns[at : at + step] for at in range(0, len(columns), step))
        rows = map(pictures.tokens_of, some) if query.blocks else some
        parts = (known.trace(pictures.OF_A_TOKEN, known.layers, one) for one in rows)
        return respond(Numbers(pictures.far_view(kept, parts, columns, in_blocks=query.blocks), "P"), "float32")

    return await requested.read("stop", read)


@router.get("/rope")
async def rope(request: Request, query: Annotated[schema.RopeQuery, Query()]) -> schema.RopeView:
    """Return every pair's frequency, with and without scaling, and its angle at a position."""

    def read(llama: "Llama", _: object) -> schema.RopeView:
        config = llama.config if query.shape is None else PRESETS[query.shape]
        return schema.RopeView(
            position=query.position,
            context=config.max_position_embeddings,
            is_scaled=config.rope_scaling is not None,
            pairs=rope_pairs(config, query.position),
        )

    return await work_on(request, "position", read)


@router.get("/linear_probe")
async def linear_probe(request: Request, query: Annotated[schema.LinearProbeQuery, Query()]) -> LinearProbe:
    """Return how well a linear map reads a property from the stream, before and after each layer."""

    def read(llama: "Llama", _: object) -> LinearProbe:
        return probes_of(llama.runner, examples_of(query.task, llama.tokenizer), check_wanted=check_wanted)

    return await work_on(request, "task", read)


@router.get("/after_error")
async def after_error(request: Request, query: Annotated[schema.AfterErrorQuery, Query()]) -> AfterError:
    """Return how surprised the model is by texts behind a wrong token, by distance."""

    def read(llama: "Llama", _: object) -> AfterError:
        texts = [llama.encode(text) for text in errors.TEXTS]
        return errors.surprise_after_error(llama.runner, texts, kind=query.kind, check_wanted=check_wanted)

    return await work_on(request, "kind", read)


@router.get("/passes/{pass_id}/distances")
async def distances(requested: OfPass, query: Annotated[schema.DistancesQuery, Query()]) -> schema.DistancesView:
    """Return the score that a token's query and a token's key would have at each distance."""
    at, wanted = requested.position(query.position), range(0, query.stop, query.stride)
    check_index("key", query.key, len(requested.one.ids))
    if len(wanted) > MAX_DISTANCES:
        message = f"these are {len(wanted):,} distances; at most {MAX_DISTANCES:,} are returned: use a larger stride"
        raise ApiError(400, message, code="too_many_numbers", param="stride")

    def read(known: OpenPass) -> schema.DistancesView:
        config = known.llama.config
        known.check_layer(query.layer)
        check_index("head", query.head, config.num_attention_heads)
        seen = known.trace(("q", "k"), [query.layer], range(at, at + 1))
        q_H = seen.arrays["q", query.layer][0, query.head]
        group = config.num_attention_heads // config.num_key_value_heads
        k_H = seen.arrays["k", query.layer][query.key, query.head // group]
        scores = score_by_distance(config, q_H, k_H, wanted)
        return schema.DistancesView(distances=tuple(wanted), scores=tuple(scores))

    return await requested.read("stop", read)


def _with(known: OpenPass, names: Collection[str], layer: int, at: int, rows: range) -> Trace:
    """Trace some tokens, and behind them the one in question, if it is none of them."""
    some = known.trace(names, [layer], rows)
    if at in rows:
        return some
    alone = known.trace(names, [layer], range(at, at + 1))
    both = {key: np.concatenate([values, alone.arrays[key]]) for key, values in some.arrays.items()}
    return Trace(some.token_ids, (*rows, at), both)


def _heads(known: OpenPass, layer: int, at: int) -> heads_of.HeadsJoined:
    known.check_layer(layer)
    return heads_of.heads_joined(known.llama.runner, known.trace(heads_of.NAMES, [layer], range(at, at + 1)), layer)


def _lens(known: OpenPass, names: Collection[str], rows: range, k: int, token_id: int | None) -> Lens:
    known.check_token("token_id", token_id)
    seen = known.trace(names, known.layers, rows)
    return read_stream(known.llama.runner, seen, k, known.llama.tokenizer, chosen_id=token_id)


def _rows(one: Pass, query: schema.LensGridQuery) -> range:
    rows = window_of(len(one.ids), query)
    if len(rows) > MAX_GRID_TOKENS:
        message = (
            f"{len(rows)} tokens are requested, and {MAX_GRID_TOKENS} at most at once; give start and stop, or stride"
        )
        raise ApiError(400, message, code="invalid_parameter", param="stop")
    return rows
