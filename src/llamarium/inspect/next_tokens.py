"""Greedy generation as data: the candidates of each step and the token that was chosen.

It runs the same prefill and decode steps as `generate`, with a KV cache; only the sampler is replaced by argmax.
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
    """A step of greedy generation.

    Attributes:
        step: Number of the step, from 1.
        context: The text so far.
        context_ids: Its token ids, including BOS.
        candidates: The most likely next tokens, best first.
        chosen: The first candidate, which is appended to the context.
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
    """Yield the steps of a greedy continuation of `text`.

    BOS is prepended if the tokenizer adds it.

    Args:
        runner: Executes the model.
        tokenizer: The model's tokenizer.
        text: The text to continue.
        k: Number of candidates per step.
        steps: Maximum number of steps.
        stop_ids: Ids at which to stop early; None for the tokenizer's end-of-text ids.
        kv_cache_dtype: KV cache dtype.

    Raises:
        InputError: If the text has no tokens, or `k` or `steps` is out of range.
        ContextLengthError: If the text and the steps exceed the context length.
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
