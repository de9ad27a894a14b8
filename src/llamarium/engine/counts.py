"""Engine counters and sequence states as plain data. Torch-free."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from llamarium.engine.request import EngineSequence
from llamarium.sampling.constraint import CompiledGrammar
from llamarium.sampling.params import SamplingParams


@dataclass(slots=True)
class Counts:
    """Cumulative counters of an engine.

    Attributes:
        steps: Forward passes over the model.
        prompt_tokens: Tokens of all prompts, cached ones included.
        sought_tokens: Prompt tokens looked up in the prefix cache.
        cached_tokens: Prompt tokens found there, which are not computed again.
        disk_tokens: Cached tokens that were read from disk.
        drafted_tokens: Draft tokens that were verified.
        accepted_tokens: Draft tokens that were accepted.
        preempted: Preemptions.
        pass_s: Seconds spent in forward passes.
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
    """An engine between two steps: running and waiting sequences, used and total blocks, and a copy of its counters."""

    running: int
    waiting: int
    used_blocks: int
    num_blocks: int
    counts: Counts


Stage = Literal["waiting", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class BlockRun:
    """`count` consecutive blocks starting at `first`, each with the same number of `owners`."""

    first: int
    count: int
    owners: int


@dataclass(frozen=True, slots=True)
class SequenceState:
    """The state of a sequence between two steps; see `EngineSequence` for the other fields.

    Attributes:
        stage: "waiting" (no blocks), "prefill" (computing the prompt, or recomputing after a preemption) or "decode"
            (one token per step).
        adapter: Index of the runner's adapter, -1 for none.
        is_embedding: True if the request returns the prompt's vector instead of tokens.
        num_tokens: Tokens of the prompt and of the answer so far.
        num_shared: Number of its blocks that other sequences share.
        blocks: Its first blocks, in the order of positions.
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
    """Everything that determines a sequence's next token, at one moment.

    Attributes:
        params: Sampling parameters, always with a seed.
        is_edited: True if the request edits activations, so that the logits are not the plain model's.
    """

    state: SequenceState
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    params: SamplingParams
    stops: frozenset[int]
    grammar: CompiledGrammar | None
    is_edited: bool


def state_of(sequence: EngineSequence, most_runs: int) -> SequenceState:
    """Return the state of a sequence, with up to `most_runs` runs of blocks."""
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


def states_of(sequences: Iterable[EngineSequence], limit: int, most_runs: int) -> list[SequenceState]:
    """Return the states of the first sequences, up to `limit`."""
    return [state_of(sequence, most_runs) for sequence in islice(sequences, limit)]


def open_sequence(sequences: Iterable[EngineSequence], number: int, row: int, most_runs: int) -> OpenedSequence | None:
    """Return a live sequence with its ids and parameters, or None if it has ended."""
    sequence = next((candidate for candidate in sequences if (candidate.number, candidate.row) == (number, row)), None)
    if sequence is None:
        return None
    request = sequence.request
    return OpenedSequence(
        state=state_of(sequence, most_runs),
        prompt_ids=tuple(request.prompt_ids),
        answer_ids=tuple(sequence.ids[len(request.prompt_ids) :]),
        params=sequence.sampling.params.derived(seed=sequence.sampling.seed),
        stops=sequence.stops,
        grammar=request.grammar,
        is_edited=bool(request.edits),
    )


def _runs(blocks: Sequence[int], owners: Sequence[int], limit: int) -> tuple[BlockRun, ...]:
    """Merge consecutive blocks with the same number of owners; return up to `limit` runs."""
    runs: list[BlockRun] = []
    for block, count in zip(blocks, owners, strict=True):
        last = runs[-1] if runs else None
        if last is not None and (last.first + last.count, last.owners) == (block, count):
            runs[-1] = replace(last, count=last.count + 1)
        elif len(runs) == limit:
            break
        else:
            runs.append(BlockRun(block, 1, count))
    return tuple(runs)
