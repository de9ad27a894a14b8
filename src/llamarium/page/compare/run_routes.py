"""Checkpoints of training runs: rows of the table, patterns and losses over time."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request, Response

from llamarium.inspect.score import scored_tokens
from llamarium.inspect.tokens import name_candidates, top_candidates
from llamarium.page.binary import Numbers, respond
from llamarium.page.compare import schema
from llamarium.page.compare.others import MAX_TOKENS, Side, Wanted
from llamarium.page.compare.routes import check_comparable, others_of, runs_of
from llamarium.page.compare.runs import Runs
from llamarium.page.routes.open_pass import OfPass, OpenPass
from llamarium.page.selection import check_index
from llamarium.page.work import work_on
from llamarium.server.errors import ApiError
from llamarium.server.http.body import StrictRoute
from llamarium.tokenizer.base import Tokenizer
from llamarium.train.report.history import number_of

if TYPE_CHECKING:
    from llamarium.inspect.trace import Trace

router = APIRouter(prefix="/inspect", route_class=StrictRoute)

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
    """Let a checkpoint read the text: its logits, and a layer's patterns."""
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
