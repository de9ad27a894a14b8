"""Texts as vectors, pooled from an engine's hidden states. Never torch."""

from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamarium.engine.pooling import Pooling
from llamarium.engine.request import Request, TokenEvent
from llamarium.engine.thread import EngineThread
from llamarium.errors import AnswerError, LlamariumError, RequestTimeoutError
from llamarium.generation.loop import check_prompts, run_requests
from llamarium.runtime.runner import Runner
from llamarium.sampling.params import SamplingParams


class Embedding(NamedTuple):
    """A text's vector, float32 (D,) of length 1; its tokens, and how many of them were found in the prefix cache."""

    vector: NDArray[np.float32]
    num_tokens: int
    num_cached: int


def embed(thread: EngineThread, request: Request) -> Future[Embedding]:
    """Submit a request with `pooling` to an engine, and return a future of the vector; errors as `EngineThread.submit`.

    Or a future of a `RequestTimeoutError`, an `EngineStoppedError`, a `GaveWayError`, or an `AnswerError` if the hidden
    states are not finite. Cancelling it aborts the request.
    """
    future: Future[Embedding] = Future()

    def deliver(came: Sequence[TokenEvent] | Exception) -> None:
        with suppress(InvalidStateError):  # it was cancelled meanwhile
            found = came if isinstance(came, Exception) else _embedding(came[-1], len(request.prompt_ids))
            future.set_exception(found) if isinstance(found, Exception) else future.set_result(found)

    number = thread.submit(request, deliver)
    future.add_done_callback(lambda done: thread.abort(number) if done.cancelled() else None)
    return future


def embed_prompts(runner: Runner, prompts: Sequence[Sequence[int]], pooling: Pooling) -> NDArray[np.float32]:
    """Return the vectors of some prompts, (N, D), by an engine of their own.

    InputError or ContextLengthError for prompts that cannot be run, AnswerError if hidden states are not finite.
    """
    check_prompts(runner.config, prompts, [0] * len(prompts))
    params = SamplingParams(max_tokens=1)  # none is chosen
    vectors_ND = np.empty((len(prompts), runner.config.hidden_size), np.float32)
    for event in run_requests(runner, [Request(ids, params, pooling=pooling) for ids in prompts]):
        found = _embedding(event, len(prompts[event.request]))
        if isinstance(found, LlamariumError):
            raise found
        vectors_ND[event.request] = found.vector
    return vectors_ND


def _embedding(event: TokenEvent, num_tokens: int) -> Embedding | LlamariumError:
    if event.finish_reason == "timeout":
        return RequestTimeoutError("the vector was not there in the time that the request had")
    if event.vector is None:
        return AnswerError("the model's hidden states were NaN, infinite or zero, so there is no vector")
    return Embedding(event.vector, num_tokens, event.num_cached)
