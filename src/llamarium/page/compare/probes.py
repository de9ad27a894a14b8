"""Two models over one text, and the checkpoints of training runs over time."""

import functools
import math
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from llamarium.errors import AnswerError, QuestionError
from llamarium.hub.resolve import packaged_path
from llamarium.inspect.measures.comparison import NAMES, compare_passes
from llamarium.inspect.score import scored_tokens
from llamarium.inspect.tokens import name_candidates, top_candidates
from llamarium.page.binary import Numbers
from llamarium.page.compare import schema
from llamarium.page.compare.others import MAX_TOKENS, Others, Side, Wanted
from llamarium.page.compare.references import BITS
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
from llamarium.page.open_pass import OpenModel, OpenPass
from llamarium.page.probes.probe import Index
from llamarium.page.schema.text import Ids
from llamarium.page.selection import check_index
from llamarium.train.history import RunHistory

if TYPE_CHECKING:
    from llamarium.inspect.trace import Trace

Name = Annotated[str, Field(max_length=300)]
"""Of a side, or of a run."""


def sides(context: OpenModel) -> schema.SidesView:
    """List the sides that can be compared, and the memory each takes."""
    others, references = _others(context), context.state.references
    side, against = first_pair(context.llama, references)
    return schema.SidesView(
        sides=tuple(_view(others, item) for item in _sides(context)),
        max_bytes=others.max_bytes,
        max_tokens=MAX_TOKENS,
        side=side,
        against=against,
        note=about_bits(context.llama, references),
        in_bits=measured_in_bits(context.llama, references),
    )


def compare(
    context: OpenPass, side: Name, against: Name, k: Annotated[int, Field(ge=1, le=20)] = 3
) -> schema.ComparisonView:
    """Run two sides over the text of a pass, and compare them; `k` candidates for each token and side."""
    forward_pass, llama, others, every = context.forward_pass, context.llama, _others(context), _sides(context)
    check_comparable(forward_pass)
    pair = find_side(every, side, "side"), find_side(every, against, "against")
    if pair[0].vocabulary != pair[1].vocabulary:
        message = f"{pair[0].title} and {pair[1].title} read other tokens; choose two of one vocabulary"
        raise QuestionError(message, code="other_vocabulary", param="against")
    tokenizer = pair[0].tokenizer or llama.tokenizer
    selection = Wanted(pair[0].read(forward_pass.ids, llama.tokenizer), NAMES)
    traces = [others.trace(each, selection, field=field) for each, field in zip(pair, ("side", "against"), strict=True)]
    for each, trace in zip(pair, traces, strict=True):
        if not math.isfinite(float(trace.arrays["logits", None].sum())):
            raise AnswerError(f"the logits of {each.title} are not finite")
    comparison = compare_passes(*traces, k=k, tokenizer=tokenizer)
    shown = [_view(others, each) for each in pair]
    return schema.ComparisonView(
        side=shown[0],
        against=shown[1],
        layers=comparison.layers,
        tokens=comparison.tokens,
        kl=comparison.kl,
        same_top=comparison.same_top,
        texts=tuple(map(tokenizer.token_text, selection.ids)),
    )


def bits(context: OpenPass, of: Name | None = None) -> schema.BitsView:
    """Run a reference over the text of a pass in each type, and measure each against float32.

    Without `of` it is the first of `SidesView.in_bits`.
    """
    check_comparable(context.forward_pass)
    others, references, served = _others(context), context.state.references, context.llama.tokenizer
    name = next(iter(measured_in_bits(context.llama, references)), "") if of is None else of
    every = _sides(context)
    ids = ids_in_bits(name, references)
    known_ids = {ids["NF4"], *(side.id for side in every)}  # any shape can be NF4: without it there is no model
    sides = {kind: find_side(every, side_id, "of") for kind, side_id in ids.items() if side_id in known_ids}
    reference = sides["float32"]
    tokenizer = reference.tokenizer or served
    selection = Wanted(reference.read(context.forward_pass.ids, served), NAMES)
    rows = list[schema.BitsRow]()
    measured = list[tuple[str, float | None, Side]]()
    measured += [(kind, num_bits, sides[kind]) for kind, num_bits in BITS.items() if kind in sides]
    types, num_bits = stored_as(context.llama)
    if types and name in references.of_model(context.llama):  # the model that is shown, against what it was made from
        measured.append((types, num_bits, every[0]))
    for kind, num_bits, side in measured:
        against = others.trace(reference, selection, field="of")
        comparison = compare_passes(others.trace(side, selection, field="of"), against, k=1)
        rows.append(
            schema.BitsRow(
                type=kind, bits=num_bits, is_shown=side is every[0], kl=comparison.kl, same_top=comparison.same_top,
                errors=tuple(sum(layer.relative) / len(layer.relative) for layer in comparison.layers),
                perplexity=others.perplexity(side, tokenizer, held_out(), field="of"),
            )
        )  # fmt: skip
    texts = tuple(map(tokenizer.token_text, selection.ids))
    return schema.BitsView(of=name, texts=texts, rows=tuple(rows), num_characters=len(held_out()))


@functools.cache
def held_out() -> str:
    """Return the text whose perplexity is measured: shakespeare-char did not learn from it."""
    return (packaged_path("shakespeare-char") / "held-out.txt").read_text("utf-8")


def _others(context: OpenModel) -> Others:
    """Return the models besides the one that answers."""
    return context.state.others


def _runs(context: OpenModel) -> Runs:
    """Return the training runs that the server was started with."""
    return context.state.runs


def check_comparable(forward_pass: Pass) -> None:
    """Refuse a pass with an adapter or an experiment, and one whose text is too long."""
    if forward_pass.adapter is not None or forward_pass.experiment is not None:
        message = "the pass has an adapter or is an experiment, which a side names; use a pass of the ids alone"
        raise QuestionError(message, code="invalid_parameter", param="id")
    if len(forward_pass.ids) > MAX_TOKENS:
        message = (
            f"the text has {len(forward_pass.ids)} tokens, and {MAX_TOKENS} are compared at most; use a shorter text"
        )
        raise QuestionError(message, code="text_too_long", param="id")


def _sides(context: OpenModel) -> list[Side]:
    return sides_of(context.llama, context.engine, context.state.references, _runs(context))


def _view(others: Others, side: Side) -> schema.SideView:
    return schema.SideView(
        id=side.id, title=side.title, words=side.words, num_bytes=side.num_bytes, seconds=others.seconds(side),
        vocabulary=side.vocabulary,
    )  # fmt: skip


MAX_ROWS = 64
"""Rows of the table that are followed."""


def runs(context: OpenModel) -> schema.RunsView:
    """Return the runs that the server was started with and that are still there, and their checkpoints' steps."""
    training_runs = _runs(context)
    readable, steps = training_runs.readable, {name: training_runs.steps(name) for name in training_runs.names}
    steps = {name: run_steps for name, run_steps in steps.items() if run_steps or training_runs.has_history(name)}
    return schema.RunsView(
        unreadable=tuple(name for name, run_steps in steps.items() if run_steps and name not in readable),
        runs=tuple(
            _run(training_runs, name, run_steps if name in readable else []) for name, run_steps in steps.items()
        ),
        max_tokens=MAX_TOKENS,
    )


def run_rows(context: OpenModel, run: str, ids: Ids) -> schema.RunRowsView:
    """Return rows of the embedding table at each checkpoint, all in one projection."""
    row_ids = list(dict.fromkeys(int(part) for part in ids.split(",")))
    if len(row_ids) > MAX_ROWS:
        message = f"{len(row_ids)} rows are requested, and {MAX_ROWS} are followed at most; ask for fewer"
        raise QuestionError(message, code="too_many_numbers", param="ids")
    paths = _runs(context).row_paths(run, row_ids)
    return schema.RunRowsView(steps=paths.steps, ids=paths.ids, places=paths.places_SR2.tolist(), share=paths.share)


def run_history(context: OpenModel, run: str) -> RunHistory:
    """Return a run's curves, alarms, samples and settings."""
    return _runs(context).history(run)


def moment(context: OpenPass, run: Name, step: Index, layer: Index) -> schema.MomentView:
    """Return the surprises of a checkpoint at a pass's text; the patterns of `layer` are computed with them."""
    side, traced = _read(context, run, step, layer)
    logits_TV = traced.arrays["logits", None]
    if not np.isfinite(logits_TV).all():
        raise AnswerError(f"the logits of step {step} of {run} are not finite")
    surprises: list[float] = []
    if len(traced.token_ids) > 1:
        (scored,) = scored_tokens([logits_TV[:-1]], traced.token_ids[1:])
        surprises = (-scored.logprobs_C).tolist()
    tokenizer = side.tokenizer or context.llama.tokenizer
    return schema.MomentView(
        run=run,
        step=step,
        surprises=(None, *surprises),
        loss=sum(surprises) / len(surprises) if surprises else None,
        best=name_candidates(top_candidates(logits_TV[-1:], 1)[0], tokenizer)[0],
        seconds=_others(context).seconds(side),
        ids=traced.token_ids,
        texts=tuple(map(tokenizer.token_text, traced.token_ids)),
    )


def moment_pattern(context: OpenPass, run: Name, step: Index, layer: Index, head: Index) -> Numbers:
    """Send a head's pattern by a checkpoint; axes T S."""
    _, traced = _read(context, run, step, layer)
    pattern_NTS = traced.arrays["pattern", layer]
    check_index("head", head, len(pattern_NTS))
    return Numbers(pattern_NTS[head], "TS")


def _read(context: OpenPass, run: str, step: int, layer: int) -> "tuple[Side, Trace]":
    check_comparable(context.forward_pass)
    side = _runs(context).side(context.llama, run, step)
    selection = Wanted(side.read(context.forward_pass.ids, context.llama.tokenizer), ("pattern", "logits"), (layer,))
    return side, _others(context).trace(side, selection, field="step")


def _run(training_runs: Runs, name: str, steps: list[int]) -> schema.RunView:
    config = training_runs.config(name) if steps else None
    return schema.RunView(
        name=name,
        has_history=training_runs.has_history(name),
        steps=tuple(steps),
        num_bytes=training_runs.num_bytes(name, steps[-1]) if steps else 0,
        num_layers=config.num_hidden_layers if config else 0,
        num_heads=config.num_attention_heads if config else 0,
    )
