"""Auto-regressive generation, from ids to ids: a client of a `Runner`. Nothing in here knows text.

Every step is the same: run what each row has not run yet (its prompt at first, then the token that was chosen last),
choose a token for each row, see which rows end. A prompt is bound by arithmetic and a single token by reading the
weights, but that is the runner's business. Rows join and leave between any two steps (`generation/kept.py`).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from llamarium.config import ModelConfig
from llamarium.errors import ContextLengthError, InputError, OptionError, show_value
from llamarium.generation.kept import KeptSequence, Memory, PrefixCache, advance
from llamarium.generation.params import SamplingParams
from llamarium.generation.sampler import Chosen, Sampler, SamplingRow
from llamarium.generation.speculate import Lookahead, PromptLookup
from llamarium.runtime.batch import BLOCK_SIZE
from llamarium.runtime.blocks import blocks_for
from llamarium.runtime.runner import CacheDtype, Logits, Runner

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One new token of one row, or its end without one.

    Attributes:
        row: Which answer it belongs to; prompt i's `n` answers are neighbours, in the order of the prompts.
        token_id: The token; -1 where none could be chosen.
        logprob: Its log-probability under the model, before any sampling parameter; NaN unless asked for.
        top: The most probable (id, logprob) pairs, as many as `logprobs` asked for.
        finish_reason: "stop" after a stop id, "length" at `max_tokens` or the end of the context, "error" where the
            row's logits were NaN or infinite, else None.
    """

    row: int
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    finish_reason: FinishReason | None


def generate_tokens(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    stop_ids: Collection[int] = (),
    use_cache: bool = True,
    kv_cache_dtype: CacheDtype = "auto",
    prefix: PrefixCache | None = None,
    cancelled: Collection[int] = (),
    lookup: PromptLookup | None = None,
) -> Iterator[TokenEvent]:
    """Generate answers to all prompts side by side, yielding each token as it is chosen.

    Args:
        runner: Executes the model.
        prompts: Token ids of each prompt; none may be empty.
        params: One for each prompt; `n` of them makes n rows.
        stop_ids: Ids that end a row, besides its own `stop_token_ids`; the stop id itself is yielded.
        use_cache: False recomputes everything for every token: for comparison, never for speed.
        kv_cache_dtype: What keys and values are kept in; a `prefix` has its own.
        prefix: Keys and values of a dialog so far; for one prompt with n = 1.
        cancelled: Rows that the caller puts here end before their next token.
        lookup: Guess tokens ahead (`generation/speculate.py`): the same events, sooner where the text repeats itself.

    Raises:
        InputError: For an empty prompt or an id outside the vocabulary; for a `prefix` with several rows,
            without the cache, or of another runner; if another answer is begun with it meanwhile.
        ContextLengthError: If a prompt leaves no room in the context.
        OptionError: For `lookup` without the cache, or with a model whose tokens it might change; for an unknown
            `kv_cache_dtype`.
        MemoryBudgetError: If there is no memory for the rows' keys and values.
    """
    check_prompts(runner.config, prompts)
    _check_options(runner, prompts, params, use_cache, kv_cache_dtype, prefix, lookup)
    live = _rows(runner.config, prompts, params, stop_ids)
    if prefix is None:
        memory = Memory(runner, sum(blocks_for(row.limit) for row in live) * BLOCK_SIZE, kv_cache_dtype)
        logits_BV = _begin(runner, memory, prompts, live, shares=use_cache)
    else:
        memory, live[0].sequence = prefix.memory, prefix.begin(prompts[0], live[0].limit)
        logits_BV = advance(runner, memory.cache, [live[0].sequence])
    ahead = None
    if lookup is not None:
        is_greedy = all(row.params.temperature == 0 for row in live)
        ahead = Lookahead(runner, memory.cache, lookup, is_greedy=is_greedy and memory.dtype == "auto")
    sampler = Sampler(runner.config.vocab_size, runner.device)
    while True:
        for row, chosen in zip(live, sampler.sample([row.state for row in live], logits_BV), strict=True):
            yield row.accept(chosen)
        live = [row for row in live if row.finish_reason is None and row.number not in cancelled]
        if not live:
            return
        if prefix is not None and live[0].sequence is not prefix.sequence:
            raise InputError("another answer was begun in the same dialog; end or close a stream before the next one")
        going = [row.sequence for row in live]
        if ahead is not None:
            logits_BV = ahead.next_logits(going, min(row.limit - len(row.sequence.ids) for row in live))
            continue
        for sequence in () if use_cache else going:
            sequence.num_run = 0
        logits_BV = advance(runner, memory.cache, going)


def check_prompts(config: ModelConfig, prompts: Sequence[Sequence[int]]) -> None:
    """Refuse what the model cannot continue.

    Raises:
        InputError: For no prompt, an empty prompt or an id outside the vocabulary.
        ContextLengthError: If a prompt leaves no room in the context.
    """
    if not prompts:
        raise InputError("no prompt; expected at least one")
    for i, prompt in enumerate(prompts):
        if not prompt:
            which = "the prompt" if len(prompts) == 1 else f"prompt {i}"
            raise InputError(f"{which} has no tokens; expected at least one (a model with a BOS token adds it)")
        if min(prompt) < 0 or max(prompt) >= config.vocab_size:
            span = f"{min(prompt)}..{max(prompt)}"
            raise InputError(f"prompt {i} has token ids {span}; expected 0..{config.vocab_size - 1}")
        if len(prompt) >= config.max_position_embeddings:
            raise ContextLengthError(
                f"prompt {i} has {len(prompt)} tokens and the model's context holds {config.max_position_embeddings}; "
                "shorten the prompt so that an answer fits"
            )


def _check_options(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    use_cache: bool,
    kv_cache_dtype: CacheDtype,
    prefix: PrefixCache | None,
    lookup: PromptLookup | None,
) -> None:
    if kv_cache_dtype not in get_args(CacheDtype):
        expected = ", ".join(get_args(CacheDtype))
        raise OptionError(f"kv_cache_dtype is {show_value(kv_cache_dtype)}; expected {expected}")
    if lookup is not None and not use_cache:
        raise OptionError("prompt_lookup runs its guesses over the cache; leave it out, or use_cache=False")
    if prefix is not None and (not use_cache or len(prompts) != 1 or params[0].n != 1):
        raise InputError("a prefix serves one prompt with one answer and use_cache=True")
    if prefix is not None and prefix.runner is not runner:
        raise InputError("the prefix is of another model; expected one that was made with this model")


@dataclass(slots=True)
class _Row:
    """One answer in the making."""

    number: int
    prompt_idx: int
    params: SamplingParams
    state: SamplingRow
    limit: int  # tokens, prompt included, at which it ends
    stops: frozenset[int]
    finish_reason: FinishReason | None = None
    sequence: KeptSequence = field(init=False)

    def accept(self, chosen: Chosen) -> TokenEvent:
        """Append a token, decide whether the row ends, and say so."""
        if chosen.token_id < 0:
            self.finish_reason = "error"
        else:
            self.sequence.ids.append(chosen.token_id)
            if chosen.token_id in self.stops:
                self.finish_reason = "stop"
            elif len(self.sequence.ids) >= self.limit:
                self.finish_reason = "length"
        return TokenEvent(self.number, chosen.token_id, chosen.logprob, chosen.top, self.finish_reason)


def _rows(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    stop_ids: Collection[int],
) -> list[_Row]:
    rows: list[_Row] = []
    for prompt_idx, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
        limit = min(len(prompt) + wanted.max_tokens, config.max_position_embeddings)
        stops = frozenset((*stop_ids, *wanted.stop_token_ids))
        for single in wanted.rows():
            state = SamplingRow(single, prompt, config.vocab_size)
            rows.append(_Row(len(rows), prompt_idx, single, state, limit, stops))
    return rows


def _begin(
    runner: Runner, memory: Memory, prompts: Sequence[Sequence[int]], rows: Sequence[_Row], *, shares: bool
) -> Logits:
    """Run the prompts, give each row its sequence, and return the logits of each row's first token (B, V).

    Args:
        runner: Executes.
        memory: Has room for all rows.
        prompts: Their ids.
        rows: The answers to them, in the prompts' order.
        shares: The answers to one prompt share its keys and values.
    """
    firsts = {row.prompt_idx: row for row in reversed(rows)} if shares else {row.number: row for row in rows}
    leaders = [firsts[i] for i in sorted(firsts)]
    for row in leaders:
        row.sequence = memory.begin(prompts[row.prompt_idx], row.limit)
    logits = advance(runner, memory.cache, [row.sequence for row in leaders])
    if len(leaders) == len(rows):
        return logits
    for row in rows:
        if row is not firsts[row.prompt_idx]:
            row.sequence = memory.fork(firsts[row.prompt_idx].sequence, row.limit)
    return logits[[row.prompt_idx for row in rows]]
