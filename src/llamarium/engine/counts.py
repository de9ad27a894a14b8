"""Counters of an engine, and the state of its sequences, as plain data. Never torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from llamarium.engine.request import EngineSequence
from llamarium.sampling.constraint import CompiledGrammar
from llamarium.sampling.params import SamplingParams


@dataclass(slots=True)
class Counts:
    """What an engine has done so far.

    Attributes:
        steps: Passes over the model.
        sought_tokens: Those of the prompts that were looked up in the prefix cache.
        cached_tokens: Those of them that were found, and so not computed.
        disk_tokens: Those of them that came from disk.
        drafted_tokens: Tokens of drafts that were run.
        accepted_tokens: Those of them that were chosen.
    """

    steps: int = 0
    prompt_tokens: int = 0
    sought_tokens: int = 0
    cached_tokens: int = 0
    disk_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preempted: int = 0
    pass_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """An engine between two steps: sequences with and without blocks, blocks in use and in all, and its counts."""

    running: int
    waiting: int
    used_blocks: int
    num_blocks: int
    counts: Counts


Stage = Literal["waiting", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class BlockRun:
    """`count` blocks of a cache from `first` on, each with as many owners."""

    first: int
    count: int
    owners: int


@dataclass(frozen=True, slots=True)
class SequenceState:
    """One sequence between two steps; what is not said here is as in `EngineSequence`.

    Attributes:
        stage: "waiting" has no blocks; "prefill" computes the prompt, or what a preemption dropped; "decode" gets a
            token in every step.
        adapter: Its place among the runner's adapters, -1 for none.
        is_embedding: The prompt's vector is wanted, and no token.
        num_tokens: Tokens of the prompt, and the answer's so far.
        num_shared: How many of its blocks other sequences have, too.
        blocks: The first of them, in the order of positions.
    """

    number: int
    row: int
    stage: Stage
    adapter: int
    is_embedding: bool
    num_prompt: int
    num_tokens: int
    limit: int
    num_computed: int
    num_cached: int
    num_blocks: int
    num_shared: int
    blocks: tuple[BlockRun, ...]


@dataclass(frozen=True, slots=True)
class OpenedSequence:
    """All that a sequence's next token follows from, as of one moment; `params` always with a seed.

    What the model computes for it is not the model's own if it `is_edited`.
    """

    state: SequenceState
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    params: SamplingParams
    stops: frozenset[int]
    grammar: CompiledGrammar | None
    is_edited: bool


def state_of(sequence: EngineSequence, most_runs: int) -> SequenceState:
    """Return a sequence's state, with so many runs of blocks at most."""
    owners = sequence.table.owners()
    stage: Stage = (
        "waiting" if not owners else "prefill" if sequence.num_uncomputed > 1 or not sequence.ids else "decode"
    )
    num_prompt = len(sequence.request.prompt_ids)
    return SequenceState(
        number=sequence.number,
        row=sequence.row,
        stage=stage,
        adapter=sequence.request.adapter,
        is_embedding=sequence.pool is not None,
        num_prompt=num_prompt,
        num_tokens=max(num_prompt, len(sequence.ids)),
        limit=sequence.limit,
        num_computed=sequence.num_computed,
        num_cached=max(0, sequence.num_cached),
        num_blocks=len(owners),
        num_shared=sum(count > 1 for count in owners),
        blocks=_runs(sequence.table.blocks, owners, most_runs),
    )


def states_of(sequences: Iterable[EngineSequence], most: int, most_runs: int) -> list[SequenceState]:
    """Return the states of the first sequences, so many at most."""
    return [state_of(sequence, most_runs) for sequence in islice(sequences, most)]


def open_sequence(sequences: Iterable[EngineSequence], number: int, row: int, most_runs: int) -> OpenedSequence | None:
    """Return a sequence with its ids and parameters, or None if it has ended."""
    found = next((one for one in sequences if (one.number, one.row) == (number, row)), None)
    if found is None:
        return None
    request = found.request
    return OpenedSequence(
        state=state_of(found, most_runs),
        prompt_ids=tuple(request.prompt_ids),
        answer_ids=tuple(found.ids[len(request.prompt_ids) :]),
        params=found.sampling.params.derived(seed=found.sampling.seed),
        stops=found.stops,
        grammar=request.grammar,
        is_edited=bool(request.edits),
    )


def _runs(blocks: Sequence[int], owners: Sequence[int], most: int) -> tuple[BlockRun, ...]:
    """Join neighbouring blocks with as many owners; return the first runs, so many at most."""
    runs: list[BlockRun] = []
    for block, count in zip(blocks, owners, strict=True):
        last = runs[-1] if runs else None
        if last is not None and (last.first + last.count, last.owners) == (block, count):
            runs[-1] = replace(last, count=last.count + 1)
        elif len(runs) == most:
            break
        else:
            runs.append(BlockRun(block, 1, count))
    return tuple(runs)
