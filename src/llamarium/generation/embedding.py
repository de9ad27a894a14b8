"""Text embeddings, pooled from hidden states. Torch-free."""

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
    """A text's vector, float32 (D,) of length 1, its number of tokens, and how many the prefix cache supplied."""

    vector: NDArray[np.float32]
    num_tokens: int
    num_cached: int


def embed(thread: EngineThread, request: Request) -> Future[Embedding]:
    """Submit a request with `pooling` and return a future of the embedding; errors as `EngineThread.submit`.

    The future fails with a RequestTimeoutError, an EngineStoppedError, an OverloadedError, or an AnswerError if the
    hidden states are not finite. Cancelling it aborts the request.
    """
    future: Future[Embedding] = Future()

    def deliver(delivered: Sequence[TokenEvent] | Exception) -> None:
        with suppress(InvalidStateError):  # cancelled meanwhile
            outcome = (
                delivered if isinstance(delivered, Exception) else _embedding(delivered[-1], len(request.prompt_ids))
            )
            future.set_exception(outcome) if isinstance(outcome, Exception) else future.set_result(outcome)

    number = thread.submit(request, deliver)
    future.add_done_callback(lambda done: thread.abort(number) if done.cancelled() else None)
    return future


def embed_prompts(runner: Runner, prompts: Sequence[Sequence[int]], pooling: Pooling) -> NDArray[np.float32]:
    """Return the vectors of some prompts, (N, D).

    Raises:
        InputError or ContextLengthError: If a prompt cannot be run.
        AnswerError: If hidden states are not finite.
    """
    check_prompts(runner.config, prompts, [0] * len(prompts))
    params = SamplingParams(max_tokens=1)  # unused
    vectors_ND = np.empty((len(prompts), runner.config.hidden_size), np.float32)
    for event in run_requests(runner, [Request(ids, params, pooling=pooling) for ids in prompts]):
        outcome = _embedding(event, len(prompts[event.request]))
        if isinstance(outcome, LlamariumError):
            raise outcome
        vectors_ND[event.request] = outcome.vector
    return vectors_ND


def _embedding(event: TokenEvent, num_tokens: int) -> Embedding | LlamariumError:
    if event.finish_reason == "timeout":
        return RequestTimeoutError("the request timed out before its vector was computed")
    if event.vector is None:
        return AnswerError("the model's hidden states are NaN, infinite or zero, so the text has no embedding")
    return Embedding(event.vector, num_tokens, event.num_cached)
