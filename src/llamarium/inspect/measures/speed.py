"""Speed of a model on this machine, and how near it is to the machine's limits.

A new token needs every weight once, and the keys and values of every token before it. So decoding cannot be faster than
memory can be read, and that is measured beside it: `tokens/s * bytes a step <= bytes/s`. A prompt's tokens share each
weight that is read, and rows that are decoded side by side do too; there the processor's arithmetic is the limit.

What is timed is `generate_tokens`, the loop that every answer comes from, greedy and without stop ids. The keys and
values of the tokens before are copies of one block's here: only their number affects the time.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamarium.config import EMBEDDING, ModelConfig
from llamarium.cost import kv_bytes_per_token
from llamarium.errors import ContextLengthError
from llamarium.generation.loop import DialogEngine, generate_tokens
from llamarium.kernels import native
from llamarium.runtime.runner import CacheDtype, Runner
from llamarium.sampling.params import SamplingParams

_READ_BYTES = 2**28  # far more than processors have caches
_READS = 3
_PROBE_TOKENS, _PROBE_STEPS = 32, 4


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one measurement.

    Attributes:
        num_rows: Answers side by side.
        num_cached: Tokens of each row that are in the cache already.
        num_prompt: Tokens of each row that are computed at once after them, at least 1.
        num_new: Tokens of each row that follow one by one; at 0 the prompt is timed, above 0 only what comes after it.
        kv_cache_dtype: Type of cached keys and values.
    """

    num_rows: int = 1
    num_cached: int = 0
    num_prompt: int = 1
    num_new: int = 0
    kv_cache_dtype: CacheDtype = "auto"

    @property
    def num_positions(self) -> int:
        """Positions of the context that a row needs."""
        return self.num_cached + self.num_prompt + self.num_new + 1


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of the whole prompt, or of one step in the mean.

    `kernel_seconds` is the part of it in the C kernels, 0 where PyTorch is used; `memory_bytes_per_s` the speed of
    memory just before, None where it is no limit.
    """

    seconds: float
    kernel_seconds: float
    memory_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class Speed:
    """Medians over the rounds.

    Attributes:
        tokens_per_s: Of all rows in sum.
        seconds: Of the whole prompt, or of one step.
        step_bytes: Weights, keys and values that one step reads once; None for a prompt, and where not all weights
            are read as they are kept, since PyTorch unpacks them or the machine is a GPU.
        memory_bytes_per_s: What all threads together can read from memory; None where `step_bytes` is.
        memory_share: `bytes_per_s` of `memory_bytes_per_s`.
        python_share: The part of the time outside the C kernels, in Python and PyTorch; None without the kernels.
    """

    work: Work
    tokens_per_s: float
    seconds: float
    step_bytes: int | None
    bytes_per_s: float | None
    memory_bytes_per_s: float | None
    memory_share: float | None
    python_share: float | None


def measure(runner: Runner, work: Work, *, num_rounds: int) -> Speed:
    """Run `work` once to warm up, then `num_rounds` times; where memory is the limit, measure that before each.

    Raises:
        ContextLengthError: If the model's context does not hold it.
        MemoryBudgetError: If memory does not hold its cache.
    """
    check_room(runner.config, work)
    num_bytes = step_bytes(runner, work)
    run_round(runner, work)
    memory = None if num_bytes is None else some_memory()
    rounds: list[Round] = []
    for _ in range(num_rounds):
        speed = None if memory is None else memory_speed(memory)
        rounds.append(run_round(runner, work, speed))
    return summarize(work, rounds, num_bytes)


def estimate(runner: Runner, works: Sequence[Work], *, num_rounds: int) -> float:
    """Return about how many seconds the measurements of `works` take, from a short prompt and a few steps.

    What attention costs over a deep cache is not in it.
    """
    length = max(1, min(_PROBE_TOKENS, runner.config.max_position_embeddings - 2))
    run_round(runner, Work())  # warms up
    token_s = run_round(runner, Work(num_prompt=length)).seconds / length
    step_s = run_round(runner, Work(num_new=min(_PROBE_STEPS, length))).seconds

    total_s = 0.0
    for work in works:
        prompt_s = work.num_rows * work.num_prompt * token_s
        total_s += prompt_s + work.num_new * max(step_s, work.num_rows * token_s)
    return total_s * (num_rounds + 1)


def check_room(config: ModelConfig, work: Work) -> None:
    """Refuse more tokens than the model's context holds; ContextLengthError with both numbers."""
    room = config.max_position_embeddings
    if work.num_positions > room:
        raise ContextLengthError(
            f"{work.num_positions} positions are needed, and the model's context holds {room}; ask for fewer tokens"
        )


def summarize(work: Work, rounds: list[Round], num_step_bytes: int | None) -> Speed:
    """Return the medians; a share is the median of the rounds' shares, as a machine's speed changes between them."""
    num_tokens = work.num_rows * (1 if work.num_new else work.num_prompt)
    seconds = statistics.median(measured.seconds for measured in rounds)
    memory = [measured.memory_bytes_per_s for measured in rounds if measured.memory_bytes_per_s is not None]
    share = python_share = None
    if num_step_bytes is not None:
        share = statistics.median(
            num_step_bytes / measured.seconds / speed for measured, speed in zip(rounds, memory, strict=True)
        )
    if all(measured.kernel_seconds for measured in rounds):
        python_share = statistics.median(1 - measured.kernel_seconds / measured.seconds for measured in rounds)
    return Speed(
        work=work,
        tokens_per_s=num_tokens / seconds,
        seconds=seconds,
        step_bytes=num_step_bytes,
        bytes_per_s=None if num_step_bytes is None else num_step_bytes / seconds,
        memory_bytes_per_s=statistics.median(memory) if memory else None,
        memory_share=share,
        python_share=python_share,
    )


def step_bytes(runner: Runner, work: Work) -> int | None:
    """Return the bytes that a step of decoding reads in the mean, None where unknown."""
    if not work.num_new or not runner.is_native:
        return None
    num_slots = work.num_cached + work.num_prompt + work.num_new / 2
    kv_dtype = runner.kv_dtype if work.kv_cache_dtype == "auto" else work.kv_cache_dtype
    slot_bytes = kv_bytes_per_token(runner.config, kv_dtype)
    return weight_bytes(runner) + round(work.num_rows * num_slots * slot_bytes)


def weight_bytes(runner: Runner) -> int:
    """Return the bytes of all weights that a step reads, each once; a table that is not the head is hardly read."""
    is_tied = runner.config.tie_word_embeddings
    return sum(weight.num_bytes for key, weight in runner.weights.items() if is_tied or key != EMBEDDING)


def run_round(runner: Runner, work: Work, memory_bytes_per_s: float | None = None) -> Round:
    """Time one round; `memory_bytes_per_s` is noted with it."""
    ids = [i % runner.config.vocab_size for i in range(work.num_cached + work.num_prompt)]
    prefix = None
    if work.num_cached:
        prefix = DialogEngine(runner, work.kv_cache_dtype)
        prefix.engine.reserve(work.num_positions)
        prefix.engine.fill_cache_for_benchmark(ids[: work.num_cached])
    params = SamplingParams(temperature=0.0, max_tokens=work.num_new + 1)
    begin = _now()
    vocab_size = runner.config.vocab_size
    prompts = [[(token + row) % vocab_size for token in ids] for row in range(work.num_rows)]  # nothing in common
    all_params = [params] * work.num_rows
    events = generate_tokens(runner, prompts, all_params, prefix=prefix, kv_cache_dtype=work.kv_cache_dtype)
    times = [_now() for event in events if event.row == work.num_rows - 1]  # once all prompts have been read
    (start, start_busy), (stop, stop_busy) = (times[0], times[-1]) if work.num_new else (begin, times[0])
    num_steps = max(1, work.num_new)
    kernel_seconds = (stop_busy - start_busy) / num_steps if runner.is_native else 0.0
    return Round((stop - start) / num_steps, kernel_seconds, memory_bytes_per_s)


def _now() -> tuple[float, float]:
    """Return the time, and how much of it the kernels have had, both in seconds."""
    return time.perf_counter(), native.busy_ns() / 1e9


def some_memory() -> NDArray[np.float32]:
    """Return memory to read, larger than processors' caches, and written, so that each page is there."""
    return np.ones(_READ_BYTES // 4, np.float32)


def memory_speed(memory: NDArray[np.float32]) -> float:
    """Return the bytes a second that all threads together read from it, at best; for the C kernels' threads."""
    return memory.nbytes / (min(native.read_ns(memory) for _ in range(_READS)) / 1e9)
