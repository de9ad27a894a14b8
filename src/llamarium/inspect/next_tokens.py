"""The auto-regressive loop as data: show the candidates, append the best one, repeat.

This is generation itself, with the real prefill, the real decode step and a KV cache; only the sampler is replaced by
"the most probable".
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from llamarium.errors import ContextLengthError, counted
from llamarium.inspect.forward import Memory, advance
from llamarium.inspect.numbers import JsonView, as_array
from llamarium.inspect.tokens import Candidate, check_count, check_ids, name_candidates, top_candidates
from llamarium.runtime.runner import CacheDtype, Runner
from llamarium.tokenizer.base import Tokenizer


@dataclass(frozen=True, slots=True)
class NextStep(JsonView):
    """One turn of the loop, the first of which is step 1.

    `context` is the text so far, and `context_ids` its ids, BOS included; the next step's context ends with `chosen`.
    """

    step: int
    context: str
    context_ids: tuple[int, ...]
    candidates: tuple[Candidate, ...]
    chosen: Candidate


def follow_next_tokens(
    runner: Runner,
    tokenizer: Tokenizer,
    text: str,
    *,
    k: int = 10,
    steps: int = 1,
    stop_ids: Collection[int] | None = None,
    kv_cache_dtype: CacheDtype = "auto",
) -> Iterator[NextStep]:
    """Follow the greedy continuation of `text`, yielding each step as it is made, with its `k` best candidates.

    BOS is put first where the tokenizer has one. It ends after `steps` tokens, or early at a stop id: one of
    `stop_ids`, or if that is None of the tokenizer's end-of-text ids.

    Raises:
        InputError: If the text has no tokens, or `k` or `steps` are out of range.
        ContextLengthError: If text and steps are more than the context holds.
        AnswerError: If the model's logits are not finite.
    """
    check_count(k, "k", runner.config.vocab_size)
    check_count(steps, "steps", runner.config.max_position_embeddings)
    stops = tokenizer.eos_token_ids if stop_ids is None else stop_ids
    ids = check_ids(runner.config, tokenizer.encode(text))
    num_slots, limit = len(ids) + steps - 1, runner.config.max_position_embeddings
    if num_slots > limit:
        raise ContextLengthError(
            f"{counted(len(ids), 'token')} and {counted(steps, 'step')} need {num_slots} positions; the "
            f"model's context holds {limit}"
        )
    memory = Memory(runner, num_slots, kv_cache_dtype)
    sequence = memory.begin(ids, num_slots)
    for step in range(1, steps + 1):
        logits_1V = as_array(advance(runner, memory.cache, [sequence]))
        candidates = name_candidates(top_candidates(logits_1V, k)[0], tokenizer)
        chosen = candidates[0]
        yield NextStep(step, tokenizer.decode(sequence.ids), tuple(sequence.ids), candidates, chosen)
        if chosen.token_id in stops:
            return
        sequence.ids.append(chosen.token_id)
