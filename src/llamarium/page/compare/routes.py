"""Two models over one text, and the checkpoints of training runs over time."""

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request, Response

from llamarium.hub.resolve import packaged_path
from llamarium.inspect.measures.comparison import NAMES, compare_passes
from llamarium.inspect.score import scored_tokens
from llamarium.inspect.tokens import name_candidates, top_candidates
from llamarium.page.binary import Numbers, respond
from llamarium.page.compare import schema
from llamarium.page.compare.others import MAX_TOKENS, Others, Side, Wanted
from llamarium.page.compare.references import BITS, References
from llamarium.page.compare.runs import Runs
from llamarium.page.compare.sides import (
    about_bits,
    find_side,
    first_pair,
    ids_in_bits,
    measured_in_bits,
    sides_of,
    stored_as,
)
from llamarium.page.executor import Pass
from llamarium.page.routes.open_pass import OfPass, OpenPass
from llamarium.page.selection import check_index
from llamarium.page.work import work_on
from llamarium.server.errors import ApiError
from llamarium.server.http.body import StrictRoute
from llamarium.tokenizer.base import Tokenizer
from llamarium.train.report.history import number_of

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.generation.text_engine import TextEngine
    from llamarium.inspect.trace import Trace


router = APIRouter(prefix="/inspect", route_class=StrictRoute)


@router.get("/compare")
async def sides(request: Request) -> schema.SidesView:
    """List the sides that can be compared, and the memory each takes."""

    def read(llama: "Llama", engine: "TextEngine") -> schema.SidesView:
        kept, references = others_of(request), references_of(request)
        side, against = first_pair(llama, references)
        return schema.SidesView(
            sides=tuple(_view(kept, one) for one in _sides(request, llama, engine)),
            max_bytes=kept.max_bytes,
            max_tokens=MAX_TOKENS,
            side=side,
            against=against,
            note=about_bits(llama, references),
            in_bits=measured_in_bits(llama, references),
        )

    return await work_on(request, "side", read)


@router.get("/passes/{pass_id}/compare")
async def compare(
    request: Request, requested: OfPass, query: Annotated[schema.CompareQuery, Query()]
) -> schema.ComparisonView:
    """Run two sides over the text of a pass, and compare them."""
    one = requested.one
    check_comparable(one)

    def read(known: OpenPass) -> schema.ComparisonView:
        llama = known.llama
        kept, every = others_of(request), _sides(request, llama, known.engine)
        pair = find_side(every, query.side, "side"), find_side(every, query.against, "against")
        if pair[0].vocabulary != pair[1].vocabulary:
            message = f"{pair[0].title} and {pair[1].title} read other tokens; choose two of one vocabulary"
            raise ApiError(400, message, code="other_vocabulary", param="against")
        tokenizer = pair[0].tokenizer or llama.tokenizer
        wanted = Wanted(pair[0].read(one.ids, llama.tokenizer), NAMES)
        traces = [kept.trace(side, wanted, field=field) for side, field in zip(pair, ("side", "against"), strict=True)]
        for side, trace in zip(pair, traces, strict=True):
            if not math.isfinite(float(trace.arrays["logits", None].sum())):
                raise ApiError(500, f"the logits of {side.title} are not finite", code="model_error")
        found = compare_passes(*traces, k=query.k, tokenizer=tokenizer)
        side, against = (_view(kept, side) for side in pair)
        return schema.ComparisonView(
            side=side, against=against, layers=found.layers, tokens=found.tokens, kl=found.kl, same_top=found.same_top,
            texts=tuple(map(tokenizer.token_text, wanted.ids)),
        )  # fmt: skip

    return await requested.read("side", read)


@router.get("/passes/{pass_id}/bits")
async def bits(request: Request, requested: OfPass, query: Annotated[schema.BitsQuery, Query()]) -> schema.BitsView:
    """Run a reference over the text of a pass in each type, and measure each against float32."""
    check_comparable(requested.one)

    def read(known: OpenPass) -> schema.BitsView:
        kept, references, served = others_of(request), references_of(request), known.llama.tokenizer
        name = next(iter(measured_in_bits(known.llama, references)), "") if query.of is None else query.of
        every = _sides(request, known.llama, known.engine)
        ids = ids_in_bits(name, references)
        known_ids = {ids["NF4"], *(side.id for side in every)}  # any shape can be NF4: without it there is no model
        sides = {kind: find_side(every, found, "of") for kind, found in ids.items() if found in known_ids}
        reference = sides["float32"]
        tokenizer = reference.tokenizer or served
        wanted = Wanted(reference.read(requested.one.ids, served), NAMES)
        rows = list[schema.BitsRow]()
        measured = list[tuple[str, float | None, Side]]()
        measured += [(kind, num_bits, sides[kind]) for kind, num_bits in BITS.items() if kind in sides]
        types, num_bits = stored_as(known.llama)
        if types and name in references.of_model(known.llama):  # the model that is shown, against what it was made from
            measured.append((types, num_bits, every[0]))
        for kind, num_bits, side in measured:
            against = kept.trace(reference, wanted, field="of")
            found = compare_passes(kept.trace(side, wanted, field="of"), against, k=1)
            rows.append(
                schema.BitsRow(
                    type=kind, bits=num_bits, is_shown=side is every[0], kl=found.kl, same_top=found.same_top,
                    errors=tuple(sum(one.relative) / len(one.relative) for one in found.layers),
                    perplexity=kept.perplexity(side, tokenizer, held_out(), field="of"),
                )
            )  # fmt: skip
        texts = tuple(map(tokenizer.token_text, wanted.ids))
        return schema.BitsView(of=name, texts=texts, rows=tuple(rows), num_characters=len(held_out()))

    return await requested.read("of", read)


@functools.cache
def held_out() -> str:
    """Return the text whose perplexity is measured: shakespeare-char did not learn from it."""
    return (packaged_path("shakespeare-char") / "held-out.txt").read_text("utf-8")


def others_of(request: Request) -> Others:
    """Return the models besides the one that answers."""
    return request.app.state.others


def references_of(request: Request) -> References:
    """Return the models in 16 or 32 bits that are compared in fewer."""
    return request.app.state.references


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


def _sides(request: Request, llama: "Llama", engine: "TextEngine") -> list[Side]:
    return sides_of(llama, engine, references_of(request), runs_of(request))


def _view(kept: Others, side: Side) -> schema.SideView:
    return schema.SideView(
        id=side.id, title=side.title, words=side.words, num_bytes=side.num_bytes, seconds=kept.seconds(side),
        vocabulary=side.vocabulary,
    )  # fmt: skip


MAX_ROWS = 64
"""Rows of the table that are followed."""


@router.get("/runs")
async def runs(request: Request) -> schema.RunsView:
    """Return the runs that the server was started with and that are still there, and their checkpoints' steps."""

    def read(llama: object, engine: object) -> schema.RunsView:
        known = runs_of(request)
        steps = {name: found for name in known.names if (found := known.steps(name))}
        unreadable = tuple(name for name in steps if name not in known.readable)
        return schema.RunsView(
            unreadable=unreadable,
            runs=tuple(_run(known, name, found) for name, found in steps.items() if name not in unreadable),
            max_tokens=MAX_TOKENS,
        )

    return await work_on(request, "run", read)


@router.get("/runs/{run}/rows")
async def rows(request: Request, run: str, query: Annotated[schema.RunRowsQuery, Query()]) -> schema.RunRowsView:
    """Return rows of the embedding table at each checkpoint, all in one projection."""
    ids = list(dict.fromkeys(int(part) for part in query.ids.split(",")))
    if len(ids) > MAX_ROWS:
        message = f"{len(ids)} rows are requested, and {MAX_ROWS} are followed at most; ask for fewer"
        raise ApiError(400, message, code="too_many_numbers", param="ids")

    def read(llama: object, engine: object) -> schema.RunRowsView:
        found = runs_of(request).row_paths(run, ids)
        return schema.RunRowsView(steps=found.steps, ids=found.ids, places=found.places_SR2.tolist(), share=found.share)

    return await work_on(request, "ids", read)


@router.get("/runs/{run}/groups")
async def groups(request: Request, run: str) -> schema.GroupsView:
    """Return groups of answers of a run on rewards, as its journal has them."""

    def read(llama: object, engine: object) -> schema.GroupsView:
        return schema.GroupsView(groups=tuple(_group(event) for event in runs_of(request).groups(run)))

    return await work_on(request, "run", read)


@router.get("/passes/{pass_id}/moment")
async def moment(
    request: Request, requested: OfPass, query: Annotated[schema.MomentQuery, Query()]
) -> schema.MomentView:
    """Return the surprises of a checkpoint at a pass's text."""
    check_comparable(requested.one)

    def read(known: OpenPass) -> schema.MomentView:
        side, seen = _read(request, known, query)
        tokenizer = side.tokenizer or known.llama.tokenizer
        return _moment(tokenizer, query, seen, others_of(request).seconds(side))

    return await requested.read("layer", read)


@router.get("/passes/{pass_id}/moment/pattern", response_class=Response)
async def pattern(
    request: Request, requested: OfPass, query: Annotated[schema.MomentPatternQuery, Query()]
) -> Response:
    """Send a head's pattern by a checkpoint; axes T S."""
    check_comparable(requested.one)

    def read(known: OpenPass) -> Response:
        _, seen = _read(request, known, query)
        pattern_NTS = seen.arrays["pattern", query.layer]
        check_index("head", query.head, len(pattern_NTS))
        return respond(Numbers(pattern_NTS[query.head], "TS"), "float32")

    return await requested.read("layer", read)


def _read(request: Request, known: OpenPass, query: schema.MomentQuery) -> "tuple[Side, Trace]":
    side = runs_of(request).side(known.llama, query.run, query.step)
    ids = side.read(known.one.ids, known.llama.tokenizer)
    wanted = Wanted(ids, ("pattern", "logits"), (query.layer,))
    return side, others_of(request).trace(side, wanted, field="step")


def _group(event: Mapping[str, Any]) -> schema.GroupView:
    answers = [
        schema.RewardedView(
            text=str(one.get("text", "")),
            reward=number_of(one.get("reward")),
            advantage=number_of(one.get("advantage")),
        )
        for one in event.get("answers", ())
        if isinstance(one, dict)
    ]
    answers.sort(key=lambda one: -(one.advantage or 0.0))
    return schema.GroupView(step=int(event["step"]), prompt=str(event.get("prompt", "")), answers=tuple(answers))


def _run(known: Runs, name: str, steps: list[int]) -> schema.RunView:
    config = known.config(name)
    return schema.RunView(
        name=name, steps=tuple(steps), num_bytes=known.num_bytes(name, steps[-1]),
        num_layers=config.num_hidden_layers, num_heads=config.num_attention_heads,
    )  # fmt: skip


def _moment(tokenizer: Tokenizer, query: schema.MomentQuery, seen: "Trace", seconds: float | None) -> schema.MomentView:
    logits_TV = seen.arrays["logits", None]
    if not np.isfinite(logits_TV).all():
        message = f"the logits of step {query.step} of {query.run} are not finite"
        raise ApiError(500, message, code="model_error", param="step")
    surprises: list[float] = []
    if len(seen.token_ids) > 1:
        (found,) = scored_tokens([logits_TV[:-1]], seen.token_ids[1:])
        surprises = (-found.logprobs_C).tolist()
    best = name_candidates(top_candidates(logits_TV[-1:], 1)[0], tokenizer)[0]
    return schema.MomentView(
        run=query.run,
        step=query.step,
        surprises=(None, *surprises),
        loss=sum(surprises) / len(surprises) if surprises else None,
        best=best,
        seconds=seconds,
        ids=seen.token_ids,
        texts=tuple(map(tokenizer.token_text, seen.token_ids)),
    )
