"""What an engine counts, and what it is doing, as plain data. Never torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from llamarium.engine.sequence import EngineSequence
from llamarium.sampling.constraint import CompiledGrammar
from llamarium.sampling.params import SamplingParams


@dataclass(slots=True)
class Counts:
    """What an engine has done so far.

    Attributes:
        steps: Passes over the model.
        prompt_tokens: Of requests that were begun.
        sought_tokens: Those of them whose keys and values were looked for.
        cached_tokens: Those of them that were not run, as their keys and values were there.
        generated_tokens: Chosen.
        drafted_tokens: Guessed, and run to see whether they come.
        accepted_tokens: Those of them that came.
        preempted: How often an answer had to give its blocks back.
        pass_s: Seconds that the passes took.
    """

    steps: int = 0
    prompt_tokens: int = 0
    sought_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preempted: int = 0
    pass_s: float = 0.0

    def note_prompt(self, num_tokens: int, num_sought: int, num_cached: int) -> None:
        """Count a request's prompt, which has been run to its end."""
        self.prompt_tokens += num_tokens
        self.sought_tokens += num_sought
        self.cached_tokens += num_cached


Stage = Literal["waiting", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks of a cache that lie side by side, with as many owners each.

    Attributes:
        first: The first of them.
        count: How many.
        owners: How many answers have them.
    """

    first: int
    count: int
    owners: int


@dataclass(frozen=True, slots=True)
class SequenceState:
    """One answer in the making, between two steps.

    Attributes:
        number: Of its request, by arrival.
        row: Which of the request's answers.
        stage: "waiting" has no blocks; "prefill" reads the prompt, or what was given back; "decode" gets a token in
            every step.
        adapter: Its place among the runner's adapters, -1 for none.
        is_embedding: The prompt's vector is wanted, and no token.
        num_prompt: Tokens of the prompt.
        num_tokens: Those, and the answer's so far.
        limit: At how many tokens it ends at the latest.
        num_computed: Tokens whose keys and values are in the cache.
        num_cached: Tokens of the prompt that were there when it began.
        num_blocks: Blocks that it has.
        num_shared: Those of them that others have, too.
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
    """All that the next token of an answer follows from, as of one moment.

    Attributes:
        state: What it is doing.
        prompt_ids: The prompt's tokens.
        answer_ids: The answer's so far.
        params: What is asked of the sampler, the seed always given.
        stops: Ids that end it.
        grammar: What its form compiles to, if it has one.
    """

    state: SequenceState
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    params: SamplingParams
    stops: frozenset[int]
    grammar: CompiledGrammar | None


def state_of(sequence: EngineSequence, most_runs: int) -> SequenceState:
    """Return what an answer is doing; of its blocks so many runs at most."""
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
    """Return what the first answers are doing, so many at most."""
    return [state_of(sequence, most_runs) for sequence in islice(sequences, most)]


def open_sequence(sequences: Iterable[EngineSequence], number: int, row: int, most_runs: int) -> OpenedSequence | None:
    """Return one of the answers with its ids and parameters, or None if it is not in the making any more."""
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
    )


def _runs(blocks: Sequence[int], owners: Sequence[int], most: int) -> tuple[BlockRun, ...]:
    """Put blocks together that lie side by side and have as many owners; the first runs, so many at most."""
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
