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


def sides(known: OpenModel) -> schema.SidesView:
    """List the sides that can be compared, and the memory each takes."""
    kept, references = _others(known), known.state.references
    side, against = first_pair(known.llama, references)
    return schema.SidesView(
        sides=tuple(_view(kept, one) for one in _sides(known)),
        max_bytes=kept.max_bytes,
        max_tokens=MAX_TOKENS,
        side=side,
        against=against,
        note=about_bits(known.llama, references),
        in_bits=measured_in_bits(known.llama, references),
    )


def compare(
    known: OpenPass, side: Name, against: Name, k: Annotated[int, Field(ge=1, le=20)] = 3
) -> schema.ComparisonView:
    """Run two sides over the text of a pass, and compare them; `k` candidates for each token and side."""
    one, llama, kept, every = known.one, known.llama, _others(known), _sides(known)
    check_comparable(one)
    pair = find_side(every, side, "side"), find_side(every, against, "against")
    if pair[0].vocabulary != pair[1].vocabulary:
        message = f"{pair[0].title} and {pair[1].title} read other tokens; choose two of one vocabulary"
        raise QuestionError(message, code="other_vocabulary", param="against")
    tokenizer = pair[0].tokenizer or llama.tokenizer
    wanted = Wanted(pair[0].read(one.ids, llama.tokenizer), NAMES)
    traces = [kept.trace(each, wanted, field=field) for each, field in zip(pair, ("side", "against"), strict=True)]
    for each, trace in zip(pair, traces, strict=True):
        if not math.isfinite(float(trace.arrays["logits", None].sum())):
            raise AnswerError(f"the logits of {each.title} are not finite")
    comparison = compare_passes(*traces, k=k, tokenizer=tokenizer)
    shown = [_view(kept, each) for each in pair]
    return schema.ComparisonView(
        side=shown[0],
        against=shown[1],
        layers=comparison.layers,
        tokens=comparison.tokens,
        kl=comparison.kl,
        same_top=comparison.same_top,
        texts=tuple(map(tokenizer.token_text, wanted.ids)),
    )


def bits(known: OpenPass, of: Name | None = None) -> schema.BitsView:
    """Run a reference over the text of a pass in each type, and measure each against float32.

    Without `of` it is the first of `SidesView.in_bits`.
    """
    check_comparable(known.one)
    kept, references, served = _others(known), known.state.references, known.llama.tokenizer
    name = next(iter(measured_in_bits(known.llama, references)), "") if of is None else of
    every = _sides(known)
    ids = ids_in_bits(name, references)
    known_ids = {ids["NF4"], *(side.id for side in every)}  # any shape can be NF4: without it there is no model
    sides = {kind: find_side(every, side_id, "of") for kind, side_id in ids.items() if side_id in known_ids}
    reference = sides["float32"]
    tokenizer = reference.tokenizer or served
    wanted = Wanted(reference.read(known.one.ids, served), NAMES)
    rows = list[schema.BitsRow]()
    measured = list[tuple[str, float | None, Side]]()
    measured += [(kind, num_bits, sides[kind]) for kind, num_bits in BITS.items() if kind in sides]
    types, num_bits = stored_as(known.llama)
    if types and name in references.of_model(known.llama):  # the model that is shown, against what it was made from
        measured.append((types, num_bits, every[0]))
    for kind, num_bits, side in measured:
        against = kept.trace(reference, wanted, field="of")
        comparison = compare_passes(kept.trace(side, wanted, field="of"), against, k=1)
        rows.append(
            schema.BitsRow(
                type=kind, bits=num_bits, is_shown=side is every[0], kl=comparison.kl, same_top=comparison.same_top,
                errors=tuple(sum(one.relative) / len(one.relative) for one in comparison.layers),
                perplexity=kept.perplexity(side, tokenizer, held_out(), field="of"),
            )
        )  # fmt: skip
    texts = tuple(map(tokenizer.token_text, wanted.ids))
    return schema.BitsView(of=name, texts=texts, rows=tuple(rows), num_characters=len(held_out()))


@functools.cache
def held_out() -> str:
    """Return the text whose perplexity is measured: shakespeare-char did not learn from it."""
    return (packaged_path("shakespeare-char") / "held-out.txt").read_text("utf-8")


def _others(known: OpenModel) -> Others:
    """Return the models besides the one that answers."""
    return known.state.others


def _runs(known: OpenModel) -> Runs:
    """Return the training runs that the server was started with."""
    return known.state.runs


def check_comparable(one: Pass) -> None:
    """Refuse a pass with an adapter or an experiment, and one whose text is too long."""
    if one.adapter is not None or one.experiment is not None:
        message = "the pass has an adapter or is an experiment, which a side names; use a pass of the ids alone"
        raise QuestionError(message, code="invalid_parameter", param="id")
    if len(one.ids) > MAX_TOKENS:
        message = f"the text has {len(one.ids)} tokens, and {MAX_TOKENS} are compared at most; use a shorter text"
        raise QuestionError(message, code="text_too_long", param="id")


def _sides(known: OpenModel) -> list[Side]:
    return sides_of(known.llama, known.engine, known.state.references, _runs(known))


def _view(kept: Others, side: Side) -> schema.SideView:
    return schema.SideView(
        id=side.id, title=side.title, words=side.words, num_bytes=side.num_bytes, seconds=kept.seconds(side),
        vocabulary=side.vocabulary,
    )  # fmt: skip


MAX_ROWS = 64
"""Rows of the table that are followed."""


def runs(known: OpenModel) -> schema.RunsView:
    """Return the runs that the server was started with and that are still there, and their checkpoints' steps."""
    kept = _runs(known)
    readable, steps = kept.readable, {name: kept.steps(name) for name in kept.names}
    steps = {name: found for name, found in steps.items() if found or kept.has_history(name)}
    return schema.RunsView(
        unreadable=tuple(name for name, found in steps.items() if found and name not in readable),
        runs=tuple(_run(kept, name, found if name in readable else []) for name, found in steps.items()),
        max_tokens=MAX_TOKENS,
    )


def run_rows(known: OpenModel, run: str, ids: Ids) -> schema.RunRowsView:
    """Return rows of the embedding table at each checkpoint, all in one projection."""
    wanted = list(dict.fromkeys(int(part) for part in ids.split(",")))
    if len(wanted) > MAX_ROWS:
        message = f"{len(wanted)} rows are requested, and {MAX_ROWS} are followed at most; ask for fewer"
        raise QuestionError(message, code="too_many_numbers", param="ids")
    paths = _runs(known).row_paths(run, wanted)
    return schema.RunRowsView(steps=paths.steps, ids=paths.ids, places=paths.places_SR2.tolist(), share=paths.share)


def run_history(known: OpenModel, run: str) -> RunHistory:
    """Return a run's curves, alarms, samples and settings."""
    return _runs(known).history(run)


def moment(known: OpenPass, run: Name, step: Index, layer: Index) -> schema.MomentView:
    """Return the surprises of a checkpoint at a pass's text; the patterns of `layer` are computed with them."""
    side, seen = _read(known, run, step, layer)
    logits_TV = seen.arrays["logits", None]
    if not np.isfinite(logits_TV).all():
        raise AnswerError(f"the logits of step {step} of {run} are not finite")
    surprises: list[float] = []
    if len(seen.token_ids) > 1:
        (found,) = scored_tokens([logits_TV[:-1]], seen.token_ids[1:])
        surprises = (-found.logprobs_C).tolist()
    tokenizer = side.tokenizer or known.llama.tokenizer
    return schema.MomentView(
        run=run,
        step=step,
        surprises=(None, *surprises),
        loss=sum(surprises) / len(surprises) if surprises else None,
        best=name_candidates(top_candidates(logits_TV[-1:], 1)[0], tokenizer)[0],
        seconds=_others(known).seconds(side),
        ids=seen.token_ids,
        texts=tuple(map(tokenizer.token_text, seen.token_ids)),
    )


def moment_pattern(known: OpenPass, run: Name, step: Index, layer: Index, head: Index) -> Numbers:
    """Send a head's pattern by a checkpoint; axes T S."""
    _, seen = _read(known, run, step, layer)
    pattern_NTS = seen.arrays["pattern", layer]
    check_index("head", head, len(pattern_NTS))
    return Numbers(pattern_NTS[head], "TS")


def _read(known: OpenPass, run: str, step: int, layer: int) -> "tuple[Side, Trace]":
    check_comparable(known.one)
    side = _runs(known).side(known.llama, run, step)
    wanted = Wanted(side.read(known.one.ids, known.llama.tokenizer), ("pattern", "logits"), (layer,))
    return side, _others(known).trace(side, wanted, field="step")


def _run(known: Runs, name: str, steps: list[int]) -> schema.RunView:
    config = known.config(name) if steps else None
    return schema.RunView(
        name=name,
        has_history=known.has_history(name),
        steps=tuple(steps),
        num_bytes=known.num_bytes(name, steps[-1]) if steps else 0,
        num_layers=config.num_hidden_layers if config else 0,
        num_heads=config.num_attention_heads if config else 0,
    )
