"""Auto-regressive generation, from ids to ids: a client of the engine. No text in here.

Every step is the same: run each sequence's uncomputed tokens (its prompt at first, then the token that was chosen
last), choose a token for each, see which end (`llamarium.engine`). The prompts of one call are requests to an engine of
its own, or to one that is kept from one turn of a dialog to the next.
"""

import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from llamarium.config import ModelConfig
from llamarium.engine.engine import MAX_NUM_SEQS, Engine
from llamarium.engine.pace import MAX_CHUNK_TOKENS
from llamarium.engine.proposers.base import ProposerPolicy, check_exact
from llamarium.engine.request import FinishReason, Request, TokenEvent, check_prompt, room_of
from llamarium.engine.scheduler import capacity_blocks
from llamarium.engine.tiers.disk_cache import DiskCache
from llamarium.errors import InputError, OptionError, show_value
from llamarium.runtime.batch import BLOCK_SIZE
from llamarium.runtime.runner import CacheDtype, Runner
from llamarium.sampling.constraint import CompiledGrammar
from llamarium.sampling.params import SamplingParams
from llamarium.sampling.row import check_against_vocabulary

_TWO_ANSWERS = "another answer was begun in the same dialog; end or close a stream before the next one"

__all__ = ["DialogEngine", "FinishReason", "TokenEvent", "check_prompts", "generate_tokens", "run_requests"]


@dataclass(frozen=True, slots=True)
class _PassOptions:
    """How passes are run; see `generate_tokens`."""

    use_cache: bool = True
    kv_cache_dtype: CacheDtype = "auto"
    proposer: ProposerPolicy | None = None
    disk: DiskCache | None = None

    def engine(self, runner: Runner, num_blocks: int) -> Engine:
        """Return an engine for a single caller: large chunks and blocks."""
        return Engine(
            runner,
            num_blocks,
            kv_cache_dtype=self.kv_cache_dtype,
            block_size=BLOCK_SIZE,
            use_cache=self.use_cache,
            chunk=MAX_CHUNK_TOKENS,
            proposer=self.proposer,
            disk=self.disk,
        )


class DialogEngine:
    """An engine that is kept from one turn of a dialog to the next, so that each computes only what is new.

    With a `disk`, so does the dialog's next process. OptionError if this runner cannot have one.
    """

    def __init__(self, runner: Runner, dtype: CacheDtype = "auto", disk: DiskCache | None = None) -> None:
        self._disk = disk
        self.engine = self._begin(runner, dtype)
        self._number = -1  # of the live request

    def _begin(self, runner: Runner, dtype: CacheDtype) -> Engine:
        self._dtype = dtype
        engine = _PassOptions(kv_cache_dtype=dtype, disk=self._disk).engine(runner, 1)
        self.close = weakref.finalize(self, engine.close)
        return engine

    def use(self, runner: Runner, dtype: CacheDtype) -> None:
        """Go on with this runner and dtype; keys and values of others are dropped."""
        if runner is not self.engine.runner or dtype != self._dtype:
            self.close()
            self.engine = self._begin(runner, dtype)

    def answer(self, engine: Engine, request: Request, proposer: ProposerPolicy | None) -> Iterator[TokenEvent]:
        """Yield the tokens of a request, from the engine that the dialog had when the request came."""
        if self.engine is not engine:
            raise InputError(_TWO_ANSWERS)
        engine.abort(self._number)
        engine.reserve(room_of(engine.runner.config, request))
        engine.use_proposer(proposer)
        self._number = number = engine.add(request)
        try:
            while number in engine.live:
                yield from engine.step()
                if self._number != number or self.engine is not engine:
                    raise InputError(_TWO_ANSWERS)
        finally:
            engine.abort(number)


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

    The call checks its arguments; memory is taken and prompts are run when the first token is asked for.

    Args:
        runner: Executes the model.
        prompts: Token ids of each prompt; none may be empty.
        params: One for each prompt; `n` of them makes n rows.
        stop_ids: Ids that end a row, besides its own `stop_token_ids`; the stop id itself is yielded.
        use_cache: False recomputes everything for every token: for comparison, never for speed.
        kv_cache_dtype: What keys and values are kept in.
        prefix: Keys and values of a dialog so far; for one prompt with n = 1.
        cancelled: Rows that the caller puts here end before their next token.
        proposer: Proposes tokens ahead (`engine/proposers/`): the same tokens, sooner.
        grammar: The compiled grammar of all `params`, if they have one.

    Yields:
        Events whose `request` is the prompt's place and whose `row` counts all answers, in the order of the prompts.

    Raises:
        LlamariumError: As `Engine.prepare`; an OptionError or InputError for options that do not go together.
    """
    how = _PassOptions(use_cache, kv_cache_dtype, proposer)
    check_prompts(runner.config, prompts, [min(1, wanted.max_tokens) for wanted in params])
    _check_options(runner, params, how, prefix)
    for wanted in params:
        check_against_vocabulary(wanted, runner.config.vocab_size)
    requests = [Request(*one, stop_ids, grammar=grammar) for one in zip(prompts, params, strict=True)]
    if prefix is None:
        return _answer(runner, requests, how, cancelled)
    prefix.use(runner, kv_cache_dtype)
    return prefix.answer(prefix.engine, requests[0], proposer)


def run_requests(runner: Runner, requests: Sequence[Request]) -> Iterator[TokenEvent]:
    """Yield the events of all requests, from an engine of their own."""
    engine = _engine_for(runner, requests, _PassOptions())
    for request in requests:
        engine.add(request)
    yield from engine.run()


def _engine_for(runner: Runner, requests: Sequence[Request], how: _PassOptions) -> Engine:
    """Return an engine with room for the longest of some requests, as many as run side by side."""
    rooms = [room_of(runner.config, request) for request in requests for _ in range(request.params.n)]
    most = sorted(rooms, reverse=True)[:MAX_NUM_SEQS]
    num_blocks = sum(capacity_blocks(room, BLOCK_SIZE) + 1 for room in most) - 1  # one that each may take next
    return how.engine(runner, num_blocks)


def _answer(
    runner: Runner, requests: Sequence[Request], how: _PassOptions, cancelled: Collection[int]
) -> Iterator[TokenEvent]:
    """Yield the tokens of all requests, from an engine of their own."""
    engine, first_rows = _engine_for(runner, requests, how), [0]
    for request in requests:
        engine.add(request)
        first_rows.append(first_rows[-1] + request.params.n)
    for event in engine.run():
        row = first_rows[event.request] + event.row
        if row in cancelled:
            engine.abort(event.request, event.row)
        else:
            yield event._replace(row=row)


def check_prompts(config: ModelConfig, prompts: Sequence[Sequence[int]], rooms: Sequence[int]) -> None:
    """Refuse prompts that the model cannot continue, each by so many tokens at least.

    InputError for no prompt, an empty prompt or an id outside the vocabulary; ContextLengthError if a prompt leaves no
    room in the context.
    """
    if not prompts:
        raise InputError("no prompt; expected at least one")
    for i, (prompt, room) in enumerate(zip(prompts, rooms, strict=True)):
        check_prompt(config, prompt, "the prompt" if len(prompts) == 1 else f"prompt {i}", room=room)


def _check_options(
    runner: Runner, params: Sequence[SamplingParams], how: _PassOptions, prefix: DialogEngine | None
) -> None:
    if how.kv_cache_dtype not in get_args(CacheDtype):
        expected = ", ".join(get_args(CacheDtype))
        raise OptionError(f"kv_cache_dtype is {show_value(how.kv_cache_dtype)}; expected {expected}")
    if how.proposer is not None and not how.use_cache:
        raise OptionError(f"{how.proposer.option} runs its guesses over the cache; leave it out, or use_cache=False")
    if prefix is not None and (not how.use_cache or len(params) != 1 or params[0].n != 1):
        raise InputError("a prefix serves one prompt with one answer and use_cache=True")
    if how.proposer is not None:
        is_greedy = how.kv_cache_dtype == "auto" and all(wanted.temperature == 0 for wanted in params)
        check_exact(runner, how.proposer, is_greedy=is_greedy)
