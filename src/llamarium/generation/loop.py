"""Auto-regressive generation, from ids to ids: prefill, then one token after another.

Two regimes, two functions. `prefill` runs the prompts through the model at once and keeps their keys and values: it is
bound by arithmetic. `decode_one` runs one new token a row against what is kept: it is bound by reading the weights.
`generate_tokens` is the loop around them. Nothing in here knows text; stop strings live with the tokenizer.

Rows of different lengths stand side by side: they are padded on the right, a slot of the cache is a position, and so
the padding is never seen (`attention/cached.py`).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from llamarium.attention import CachedAttend, CausalAttend, KVCache
from llamarium.config import ModelConfig
from llamarium.errors import ContextLengthError, InputError, OptionError, show_value
from llamarium.generation.sampler import Chosen, Sampler, SamplingParams, SamplingRow
from llamarium.generation.speculate import Lookahead, PromptLookup
from llamarium.model import LlamaForCausalLM

PREFILL_CHUNK = 2048  # tokens a row per pass: bounds the activations of a long prompt, not what is computed

KVCacheDtype = Literal["auto", "int8"]
"""What keys and values are kept in: the model's own dtype, or 8 bits with a scale for each (`attention/cached.py`)."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One new token of one row.

    Attributes:
        row: Which answer it belongs to; prompt i's `n` answers are neighbours, in the order of the prompts.
        token_id: The token.
        logprob: Its log-probability under the model, before any sampling parameter; NaN unless asked for.
        top: The most probable (id, logprob) pairs, as many as `logprobs` asked for.
        finish_reason: "stop" after a stop id, "length" at `max_tokens` or the end of the context, else None.
    """

    row: int
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    finish_reason: Literal["stop", "length"] | None


def kept_dtype(model_dtype: torch.dtype, kv_cache_dtype: KVCacheDtype) -> torch.dtype:
    """Return the dtype of a `KVCache`.

    Raises:
        OptionError: If it is neither "auto" nor "int8".
    """
    if kv_cache_dtype not in get_args(KVCacheDtype):
        expected = ", ".join(get_args(KVCacheDtype))
        raise OptionError(f"kv_cache_dtype is {show_value(kv_cache_dtype)}; expected {expected}")
    return torch.int8 if kv_cache_dtype == "int8" else model_dtype


def new_cache(
    model: LlamaForCausalLM, batch_size: int, num_slots: int, kv_cache_dtype: KVCacheDtype = "auto"
) -> KVCache:
    """Return an empty KV cache on the model's device.

    Raises:
        OptionError: If `kv_cache_dtype` is neither "auto" nor "int8".
        MemoryBudgetError: If there is not that much memory.
    """
    config = model.config
    return KVCache(
        num_layers=config.num_hidden_layers,
        batch_size=batch_size,
        num_slots=num_slots,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=kept_dtype(model.dtype, kv_cache_dtype),
        device=model.device,
    )


@torch.inference_mode()
def prefill(
    model: LlamaForCausalLM,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    *,
    start: int = 0,
    chunk: int = PREFILL_CHUNK,
) -> Tensor:
    """Run the prompts through the model, keep their keys and values, and return each last token's logits (B, V).

    Args:
        model: The model.
        cache: One row for each prompt; slots below `start` already hold what came before.
        prompts: Token ids, of any lengths.
        start: The position of every row's first token.
        chunk: Tokens a row per pass; the result does not depend on it.
    """
    ids_BT = _pad_right(prompts, cache.k[0].device)
    last: list[Tensor | None] = [None] * len(prompts)
    for first in range(0, ids_BT.shape[1], chunk):
        part_BT = ids_BT[:, first : first + chunk]
        attend = CachedAttend(cache, [start + first] * len(prompts), part_BT.shape[1])
        hidden_BTD = model.model(part_BT, attend.positions_BT, attend)
        for row, prompt in enumerate(prompts):
            if first < len(prompt) <= first + chunk:
                last[row] = hidden_BTD[row, len(prompt) - 1 - first]
    return model.logits(torch.stack([hidden_D for hidden_D in last if hidden_D is not None]))


@torch.inference_mode()
def decode_one(model: LlamaForCausalLM, cache: KVCache, ids: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Run one new token a row, keep its key and value, and return the logits of the next (B, V)."""
    attend = CachedAttend(cache, positions, num_tokens=1)
    ids_B1 = torch.tensor(ids, device=attend.positions_BT.device).unsqueeze(1)
    return model.next_logits(ids_B1, attend.positions_BT, attend)


@torch.inference_mode()
def recompute(model: LlamaForCausalLM, rows: Sequence[Sequence[int]]) -> Tensor:
    """Run whole rows without any cache and return each last token's logits (B, V): what `decode_one` saves."""
    ids_BT = _pad_right(rows, model.device)
    positions_1T = torch.arange(ids_BT.shape[1], device=ids_BT.device).unsqueeze(0)
    hidden_BTD = model.model(ids_BT, positions_1T, CausalAttend())
    return model.logits(torch.stack([hidden_BTD[b, len(row) - 1] for b, row in enumerate(rows)]))


class PrefixCache:
    """The keys and values of one growing sequence, so that a dialog's next turn computes only what is new."""

    def __init__(self, model: LlamaForCausalLM, kv_cache_dtype: KVCacheDtype = "auto") -> None:
        self.model = model
        self.ids: list[int] = []
        self.cache = new_cache(model, 1, 0, kv_cache_dtype)

    def prefill(self, ids: Sequence[int], num_slots: int) -> Tensor:
        """Make the cache hold exactly `ids`, computing only what follows the common prefix; return logits (1, V).

        Args:
            ids: The whole sequence.
            num_slots: How many positions the sequence may grow to.
        """
        same = 0
        while same < min(len(ids) - 1, len(self.ids)) and ids[same] == self.ids[same]:
            same += 1
        self.ids = list(ids[:same])  # what an interrupted pass leaves behind is still true
        if num_slots > self.cache.num_slots:
            room = self.model.config.max_position_embeddings
            self.cache = self.cache.grown(max(num_slots, min(2 * num_slots, room)))
        logits_BV = prefill(self.model, self.cache, [ids[same:]], start=same)
        self.ids = list(ids)
        return logits_BV


def generate_tokens(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    stop_ids: Collection[int] = (),
    use_cache: bool = True,
    kv_cache_dtype: KVCacheDtype = "auto",
    prefix: PrefixCache | None = None,
    cancelled: Collection[int] = (),
    lookup: PromptLookup | None = None,
) -> Iterator[TokenEvent]:
    """Generate answers to all prompts side by side, yielding each token as it is chosen.

    Args:
        model: The model.
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
            without the cache, or of another model.
        ContextLengthError: If a prompt leaves no room in the context.
        OptionError: For `lookup` without the cache, or with a model whose tokens it might change.
    """
    check_prompts(model.config, prompts)
    if lookup is not None and not use_cache:
        raise OptionError("prompt_lookup runs its guesses over the cache; leave it out, or use_cache=False")
    if prefix is not None and (not use_cache or len(prompts) != 1 or params[0].n != 1):
        raise InputError("a prefix serves one prompt with one answer and use_cache=True")
    if prefix is not None and prefix.model is not model:
        raise InputError("the prefix is of another model; expected one that was made with this model")
    live = _rows(model.config, prompts, params, stop_ids)
    sampler = Sampler(model.config.vocab_size, model.device)
    cache, logits_BV = _begin(model, prompts, live, use_cache=use_cache, kv_cache_dtype=kv_cache_dtype, prefix=prefix)
    ahead = None
    if lookup is not None and cache is not None:
        is_greedy = all(row.params.temperature == 0 for row in live)
        ahead = Lookahead(model, cache, [row.ids for row in live], lookup, is_greedy=is_greedy)
    while True:
        yield from _accept(live, sampler.sample([row.sampling for row in live], logits_BV))
        going = [i for i, row in enumerate(live) if row.finish_reason is None and row.number not in cancelled]
        if not going:
            return
        if len(going) < len(live):
            live = [live[i] for i in going]
            if cache is not None:
                cache.keep_rows(going)
            if ahead is not None:
                ahead.keep(going)
        if cache is None:
            logits_BV = recompute(model, [row.ids for row in live])
        elif ahead is not None:
            logits_BV = ahead.next_logits(min(row.limit - len(row.ids) for row in live))
        else:
            logits_BV = decode_one(model, cache, [row.ids[-1] for row in live], [len(row.ids) - 1 for row in live])
        if prefix is not None:
            prefix.ids = list(live[0].ids)


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


@dataclass(slots=True)
class _Row:
    """One answer in the making."""

    number: int
    prompt_idx: int
    params: SamplingParams
    sampling: SamplingRow
    ids: list[int]
    limit: int  # tokens, prompt included, at which it ends
    stops: frozenset[int]
    finish_reason: Literal["stop", "length"] | None = None


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
            sampling = SamplingRow(single, prompt, config.vocab_size)
            rows.append(_Row(len(rows), prompt_idx, single, sampling, list(prompt), limit, stops))
    return rows


def _begin(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[_Row],
    *,
    use_cache: bool,
    kv_cache_dtype: KVCacheDtype,
    prefix: PrefixCache | None,
) -> tuple[KVCache | None, Tensor]:
    """Run the prompts; return the cache, if there is to be one, and the logits of each row's first token (B, V)."""
    if not use_cache:
        return None, recompute(model, [row.ids for row in rows])
    slots = max(row.limit for row in rows)
    if prefix is not None:
        logits_BV = prefix.prefill(prompts[0], slots)
        return prefix.cache, logits_BV
    cache = new_cache(model, len(prompts), slots, kv_cache_dtype)
    logits_BV = prefill(model, cache, prompts)
    if len(rows) > len(prompts):  # n answers share one prefill
        cache.keep_rows([row.prompt_idx for row in rows])
        logits_BV = logits_BV[[row.prompt_idx for row in rows]]
    return cache, logits_BV


def _accept(rows: Sequence[_Row], chosen: Sequence[Chosen]) -> Iterator[TokenEvent]:
    """Append each row's token, decide whether the row ends, and say so."""
    ids = [one.id_of(i) for i, one in enumerate(chosen)]  # raises before any row moves on
    for row, one, token_id in zip(rows, chosen, ids, strict=True):
        row.ids.append(token_id)
        if token_id in row.stops:
            row.finish_reason = "stop"
        elif len(row.ids) >= row.limit:
            row.finish_reason = "length"
        yield TokenEvent(row.number, token_id, one.logprob, one.top, row.finish_reason)


def _pad_right(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """(B, T) of the longest row; what fills the short ones is never seen."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
