"""Autoregressive generation from ids to ids, on top of the engine. No text.

The prompts of a call become requests to a new engine, or to one that is kept between the turns of a dialog.
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

_TWO_ANSWERS = "another answer was started in the same dialog; finish or close its stream before the next one"

__all__ = ["DialogEngine", "FinishReason", "TokenEvent", "check_prompts", "generate_tokens", "run_requests"]


@dataclass(frozen=True, slots=True)
class _PassOptions:
    """Options of passes; see `generate_tokens`."""

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
    """An engine that is kept between the turns of a dialog, so that each turn computes only what is new.

    With a `disk`, later processes also reuse it. OptionError if the runner does not support one.
    """

    def __init__(self, runner: Runner, dtype: CacheDtype = "auto", disk: DiskCache | None = None) -> None:
        self._disk = disk
        self.engine = self._begin(runner, dtype)
        self._number = -1  # number of the live request

    def _begin(self, runner: Runner, dtype: CacheDtype) -> Engine:
        self._dtype = dtype
        engine = _PassOptions(kv_cache_dtype=dtype, disk=self._disk).engine(runner, 1)
        self.close = weakref.finalize(self, engine.close)
        return engine

    def use(self, runner: Runner, dtype: CacheDtype) -> None:
        """Use this runner and dtype from now on; a change drops the KV cache."""
        if runner is not self.engine.runner or dtype != self._dtype:
            self.close()
            self.engine = self._begin(runner, dtype)

    def answer(self, engine: Engine, request: Request, proposer: ProposerPolicy | None) -> Iterator[TokenEvent]:
        """Yield the tokens of a request; `engine` is the dialog's engine at the time of the call."""
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
    """Generate answers to all prompts in one batch, and yield each token as it is sampled.

    The call validates its arguments; memory is allocated when the first token is requested.

    Args:
        runner: Runs the model.
        prompts: Token ids of each prompt; none may be empty.
        params: Sampling parameters of each prompt; a prompt has `n` rows.
        stop_ids: Ids that end a row, in addition to its `stop_token_ids`; the stop id itself is yielded.
        use_cache: False recomputes all tokens in every step, for comparison only.
        kv_cache_dtype: KV cache dtype.
        prefix: The engine of a dialog; for one prompt with n = 1.
        cancelled: A collection to which the caller may add rows that end before their next token.
        proposer: Speculative decoding (`engine/proposers/`): the same tokens in fewer steps.
        grammar: The compiled grammar of `params`, if they have one.

    Yields:
        Events; `request` is the index of the prompt, and `row` counts the rows of all prompts in their order.

    Raises:
        LlamariumError: As `Engine.prepare`.
        OptionError or InputError: If options contradict each other.
    """
    options = _PassOptions(use_cache, kv_cache_dtype, proposer)
    check_prompts(runner.config, prompts, [min(1, row_params.max_tokens) for row_params in params])
    _check_options(runner, params, options, prefix)
    for row_params in params:
        check_against_vocabulary(row_params, runner.config.vocab_size)
    requests = [
        Request(*prompt_and_params, stop_ids, grammar=grammar)
        for prompt_and_params in zip(prompts, params, strict=True)
    ]
    if prefix is None:
        return _answer(runner, requests, options, cancelled)
    prefix.use(runner, kv_cache_dtype)
    return prefix.answer(prefix.engine, requests[0], proposer)


def run_requests(runner: Runner, requests: Sequence[Request]) -> Iterator[TokenEvent]:
    """Yield the events of all requests, from a new engine."""
    engine = _engine_for(runner, requests, _PassOptions())
    for request in requests:
        engine.add(request)
    yield from engine.run()


def _engine_for(runner: Runner, requests: Sequence[Request], options: _PassOptions) -> Engine:
    """Return an engine with room for as many of the longest requests as run concurrently."""
    rooms = [room_of(runner.config, request) for request in requests for _ in range(request.params.n)]
    longest = sorted(rooms, reverse=True)[:MAX_NUM_SEQS]
    num_blocks = sum(capacity_blocks(room, BLOCK_SIZE) + 1 for room in longest) - 1  # a spare block for each other
    return options.engine(runner, num_blocks)


def _answer(
    runner: Runner, requests: Sequence[Request], options: _PassOptions, cancelled: Collection[int]
) -> Iterator[TokenEvent]:
    """Yield the tokens of all requests, from a new engine."""
    engine, first_rows = _engine_for(runner, requests, options), [0]
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
    """Validate prompts; `rooms` is how many tokens must fit after each.

    Raises:
        InputError: If there is no prompt, or one is empty or has an id outside the vocabulary.
        ContextLengthError: If a prompt leaves no room in the context.
    """
    if not prompts:
        raise InputError("no prompt; expected at least one")
    for i, (prompt, room) in enumerate(zip(prompts, rooms, strict=True)):
        check_prompt(config, prompt, "the prompt" if len(prompts) == 1 else f"prompt {i}", room=room)


def _check_options(
    runner: Runner, params: Sequence[SamplingParams], options: _PassOptions, prefix: DialogEngine | None
) -> None:
    if options.kv_cache_dtype not in get_args(CacheDtype):
        expected = ", ".join(get_args(CacheDtype))
        raise OptionError(f"kv_cache_dtype is {show_value(options.kv_cache_dtype)}; expected {expected}")
    if options.proposer is not None and not options.use_cache:
        raise OptionError(
            f"{options.proposer.option} needs the KV cache; leave out {options.proposer.option}, or use_cache=False"
        )
    if prefix is not None and (not options.use_cache or len(params) != 1 or params[0].n != 1):
        raise InputError("prefix supports only one prompt with one answer and use_cache=True")
    if options.proposer is not None:
        is_greedy = options.kv_cache_dtype == "auto" and all(row_params.temperature == 0 for row_params in params)
        check_exact(runner, options.proposer, is_greedy=is_greedy)
