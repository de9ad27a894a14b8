"""Auto-regressive generation, from ids to ids: a client of the engine. Nothing in here knows text.

Every step is the same: run what each row has not run yet (its prompt at first, then the token that was chosen last),
choose a token for each row, see which rows end (`llamarium.engine`). The prompts of one call are requests to an engine
of its own, or to one that is kept from one turn of a dialog to the next.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import get_args

from llamarium.config import ModelConfig
from llamarium.engine.engine import MAX_NUM_SEQS, Engine
from llamarium.engine.pace import MAX_CHUNK_TOKENS
from llamarium.engine.proposers.base import ProposerPolicy, check_exact
from llamarium.engine.request import FinishReason, Request, TokenEvent, check_prompt, room_of
from llamarium.engine.scheduler import capacity_blocks
from llamarium.errors import InputError, OptionError, show_value
from llamarium.runtime.batch import BLOCK_SIZE
from llamarium.runtime.runner import CacheDtype, Runner
from llamarium.sampling.constraint import CompiledGrammar
from llamarium.sampling.params import SamplingParams
from llamarium.sampling.row import check_against_vocabulary

_TWO_ANSWERS = "another answer was begun in the same dialog; end or close a stream before the next one"

__all__ = ["DialogEngine", "FinishReason", "TokenEvent", "check_prompts", "generate_tokens"]


class DialogEngine:
    """An engine that is kept from one turn of a dialog to the next, so that each computes only what is new.

    Args:
        runner: Executes the model.
        dtype: What keys and values are kept in.

    Attributes:
        engine: The same one, until another runner or dtype is asked for.
    """

    def __init__(self, runner: Runner, dtype: CacheDtype = "auto") -> None:
        self._dtype = dtype
        self.engine = _engine(runner, 1, dtype)
        self.number = -1  # of the request that is being answered

    def use(self, runner: Runner, dtype: CacheDtype) -> None:
        """Go on with this runner and dtype; what was kept otherwise is dropped, as it is another model's or rounded."""
        if runner is not self.engine.runner or dtype != self._dtype:
            self._dtype = dtype
            self.engine = _engine(runner, 1, dtype)


def generate_tokens(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    stop_ids: Collection[int] = (),
    use_cache: bool = True,
    kv_cache_dtype: CacheDtype = "auto",
    prefix: DialogEngine | None = None,
    cancelled: Collection[int] = (),
    proposer: ProposerPolicy | None = None,
    grammar: CompiledGrammar | None = None,
) -> Iterator[TokenEvent]:
    """Generate answers to all prompts side by side, yielding each token as it is chosen.

    The call checks its arguments; memory is taken, and the prompts are run, when the first token is asked for. Some
    dozens of answers are run side by side, the others wait for their turn: memory is that of the longest of them.

    Args:
        runner: Executes the model.
        prompts: Token ids of each prompt; none may be empty.
        params: One for each prompt; `n` of them makes n rows.
        stop_ids: Ids that end a row, besides its own `stop_token_ids`; the stop id itself is yielded.
        use_cache: False recomputes everything for every token: for comparison, never for speed.
        kv_cache_dtype: What keys and values are kept in.
        prefix: Keys and values of a dialog so far; for one prompt with n = 1. Those of another runner or in another
            dtype are dropped, once the arguments are accepted.
        cancelled: Rows that the caller puts here end before their next token.
        proposer: Proposes tokens ahead (`engine/proposers/`): the same tokens, sooner.
        grammar: What the grammar of all `params` compiles to, where they have one.

    Yields:
        Events whose `request` is the prompt's place and whose `row` counts all answers, in the order of the prompts.

    Raises:
        InputError: For an empty prompt or an id outside the vocabulary; for a `prefix` with several rows or without
            the cache; if another answer is begun with it meanwhile.
        ContextLengthError: If a prompt leaves no room in the context.
        OptionError: For a `proposer` without the cache, or with a model whose tokens it might change; for an unknown
            `kv_cache_dtype`.
        SamplingError: If parameters name ids or counts outside the vocabulary.
        MemoryBudgetError: If there is no memory for the rows' keys and values.
    """
    check_prompts(runner.config, prompts, [min(1, wanted.max_tokens) for wanted in params])
    _check_options(runner, prompts, params, use_cache, kv_cache_dtype, prefix, proposer)
    requests = [
        Request(prompt, wanted, stop_ids, grammar=grammar) for prompt, wanted in zip(prompts, params, strict=True)
    ]
    for wanted in params:
        check_against_vocabulary(wanted, runner.config.vocab_size)
    if prefix is not None:
        prefix.use(runner, kv_cache_dtype)
        return _answer_in_dialog(prefix, prefix.engine, requests[0], proposer)
    return _answer(runner, requests, use_cache, kv_cache_dtype, cancelled, proposer)


def _answer(
    runner: Runner,
    requests: Sequence[Request],
    use_cache: bool,
    kv_cache_dtype: CacheDtype,
    cancelled: Collection[int],
    proposer: ProposerPolicy | None,
) -> Iterator[TokenEvent]:
    """Yield the tokens of all requests, from an engine of their own."""
    rooms = [room_of(runner.config, request) for request in requests for _ in range(request.params.n)]
    most = sorted(rooms, reverse=True)[:MAX_NUM_SEQS]
    num_blocks = sum(capacity_blocks(room, BLOCK_SIZE) + 1 for room in most) - 1  # one that each may take next
    engine = _engine(runner, num_blocks, kv_cache_dtype, use_cache=use_cache, proposer=proposer)
    first_rows = [0]
    for request in requests:
        engine.add(request)
        first_rows.append(first_rows[-1] + request.params.n)
    for event in engine.run():
        row = first_rows[event.request] + event.row
        if row in cancelled:
            engine.abort(event.request, event.row)
        else:
            yield event._replace(row=row)


def _answer_in_dialog(
    prefix: DialogEngine, engine: Engine, request: Request, proposer: ProposerPolicy | None
) -> Iterator[TokenEvent]:
    """Yield the tokens of a request, from the engine that the dialog had when it was asked for."""
    if prefix.engine is not engine:
        raise InputError(_TWO_ANSWERS)
    engine.abort(prefix.number)
    engine.reserve(room_of(engine.runner.config, request))
    engine.use_proposer(proposer)
    prefix.number = number = engine.add(request)
    try:
        while engine.is_live(number):
            yield from engine.step()
            if prefix.number != number or prefix.engine is not engine:
                raise InputError(_TWO_ANSWERS)
    finally:
        engine.abort(number)


def _engine(
    runner: Runner,
    num_blocks: int,
    kv_cache_dtype: CacheDtype,
    *,
    use_cache: bool = True,
    proposer: ProposerPolicy | None = None,
) -> Engine:
    """Return an engine that nobody but one caller waits for: prompts are read in large chunks, over large blocks."""
    return Engine(
        runner,
        num_blocks,
        kv_cache_dtype=kv_cache_dtype,
        block_size=BLOCK_SIZE,
        use_cache=use_cache,
        chunk=MAX_CHUNK_TOKENS,
        proposer=proposer,
    )


def check_prompts(config: ModelConfig, prompts: Sequence[Sequence[int]], rooms: Sequence[int]) -> None:
    """Refuse what the model cannot continue.

    Args:
        config: The model's.
        prompts: Token ids of each.
        rooms: How many tokens an answer to each has at least.

    Raises:
        InputError: For no prompt, an empty prompt or an id outside the vocabulary.
        ContextLengthError: If a prompt leaves no room in the context.
    """
    if not prompts:
        raise InputError("no prompt; expected at least one")
    for i, (prompt, room) in enumerate(zip(prompts, rooms, strict=True)):
        check_prompt(config, prompt, "the prompt" if len(prompts) == 1 else f"prompt {i}", room=room)


def _check_options(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    use_cache: bool,
    kv_cache_dtype: CacheDtype,
    prefix: DialogEngine | None,
    proposer: ProposerPolicy | None,
) -> None:
    if kv_cache_dtype not in get_args(CacheDtype):
        expected = ", ".join(get_args(CacheDtype))
        raise OptionError(f"kv_cache_dtype is {show_value(kv_cache_dtype)}; expected {expected}")
    if proposer is not None and not use_cache:
        raise OptionError(f"{proposer.option} runs its guesses over the cache; leave it out, or use_cache=False")
    if prefix is not None and (not use_cache or len(prompts) != 1 or params[0].n != 1):
        raise InputError("a prefix serves one prompt with one answer and use_cache=True")
    if proposer is not None:
        is_greedy = kv_cache_dtype == "auto" and all(wanted.temperature == 0 for wanted in params)
        check_exact(runner, proposer, is_greedy=is_greedy)
