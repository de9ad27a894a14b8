"""The served model: lifecycle state, limits, and the number of answers in flight."""

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from fastapi import Request

from llamarium.errors import OptionError, counted, show_value
from llamarium.generation.text_engine import TextEngine, TextModel
from llamarium.server.errors import ApiError
from llamarium.server.lifecycle.loading import ModelLoader
from llamarium.server.prefix.explainer import PrefixExplainer
from llamarium.server.settings import Settings
from llamarium.tokenizer.base import Tokenizer

State = Literal["loading", "ready", "draining", "broken"]

MAX_ANSWERS = 1024
"""Maximum number of answers per HTTP request, over all of its prompts."""


def check_context(engine: TextEngine, max_context: int | None) -> None:
    """Validate the limit of tokens per request.

    Raises:
        OptionError: If it exceeds the model's context length or the KV cache.
    """
    if max_context is not None and max_context > engine.max_tokens:
        raise OptionError(
            f"max_context is {max_context}; the model's context length and the KV cache (kv_memory) allow "
            f"{engine.max_tokens} tokens per request"
        )


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The model of a request.

    Attributes:
        name: The name in the request, which replies repeat.
        adapter: The engine's adapter with this name, or None for the model itself.
    """

    name: str
    adapter: str | None = None


class ServedModel(TextModel, Protocol):
    """The part of `Llama` that the server needs."""

    name: str
    generation_config: Mapping[str, Any]


class Service:
    """A model, which may still be loading, its engine, and the number of answers in flight.

    Attributes:
        capacity: Maximum number of running and waiting answers; further requests are rejected.
        in_flight: Number of running and waiting answers.
        is_draining: Whether the server is stopping and accepts no more requests.
        explainer: Explains why prompts were not cached.
    """

    def __init__(self, loading: ModelLoader[tuple[ServedModel, TextEngine]], settings: Settings) -> None:
        self.loading, self.settings = loading, settings
        self.capacity = settings.max_num_seqs + settings.max_queue
        self.in_flight = 0
        self.is_draining = False
        self.explainer = PrefixExplainer(settings.api_keys, shows_texts=settings.explain_cache)
        self._typical_s = 1.0

    @property
    def state(self) -> State:
        """The server's lifecycle state."""
        loaded = self.loaded
        if self.loading.failure is not None or (loaded is not None and loaded[1].state == "broken"):
            return "broken"
        if self.is_draining:
            return "draining"
        return "loading" if loaded is None else "ready"

    @property
    def loaded(self) -> tuple[ServedModel, TextEngine] | None:
        """The model and its engine; None until they are loaded."""
        return self.loading.result

    def require(self) -> tuple[ServedModel, TextEngine]:
        """Return the model and its engine.

        Raises:
            ApiError: 503 if the model is loading, or the server is stopping or has failed.
        """
        state, loaded = self.state, self.loaded
        if state == "ready" and loaded is not None:
            return loaded
        message = {
            "loading": "the model is still loading; try again in a moment (/health reports when it is ready)",
            "draining": "the server is stopping and accepts no more requests",
        }.get(state, "the model failed and the server is stopping")
        raise ApiError(503, message, code=state, headers={"retry-after": "1"})

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, also while the server is stopping; ApiError 503 until the model is loaded."""
        _, engine = self.loaded or self.require()
        return engine.tokenizer

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests can choose."""
        _, engine = self.loaded or self.require()
        return tuple(engine.adapters)

    @property
    def max_tokens(self) -> int:
        """Maximum length of a request (prompt and answer) in tokens."""
        _, engine = self.loaded or self.require()
        return min(engine.max_tokens, self.settings.max_context or engine.max_tokens)

    @contextmanager
    def admit(self, num_answers: int, field: str = "n") -> Generator[None]:
        """Count answers as in flight while the body runs; a server that is stopping waits for them.

        Args:
            num_answers: Number of answers.
            field: The request's field that sets the number, for errors.

        Raises:
            ApiError: 503 if the server accepts no requests, 429 if too many answers are in flight, 400 if the number
                exceeds the server's limits.
        """
        self.require()
        if num_answers > self.capacity:
            limit = f"the server accepts {self.capacity} (--max-num-seqs, --max-queue)"
            raise ApiError(400, f"{num_answers} answers are requested, and {limit}; request fewer at once", param=field)
        if num_answers > MAX_ANSWERS:
            message = f"{num_answers} answers are requested; the maximum per request is {MAX_ANSWERS}"
            raise ApiError(400, message, param=field)
        if self.in_flight + num_answers > self.capacity:
            message = (
                f"{counted(self.in_flight, 'answer is', 'answers are')} under way, and {self.capacity} may "
                "run and wait; try again later"
            )
            wait = {"retry-after": str(max(1, min(60, round(self._typical_s))))}
            raise ApiError(429, message, code="rate_limit_exceeded", headers=wait)
        self.in_flight += num_answers
        began = time.monotonic()
        try:
            yield
        finally:
            self.in_flight -= num_answers
            self._typical_s += (time.monotonic() - began - self._typical_s) / 8

    def close(self, timeout_s: float = 0) -> bool:
        """Stop accepting requests, and abort those that do not complete within `timeout_s`.

        Returns:
            Whether all requests were completed.
        """
        self.is_draining = True
        return True if self.loaded is None else self.loaded[1].close(timeout_s)


def chosen_model(request: Request, name: str | None) -> ModelChoice:
    """Return the model or adapter that a request's `model` names; None is the served model.

    Raises:
        ApiError: 404 for an unknown name; 503 for a name other than the model's while the model is loading.
    """
    names: tuple[str, ...] = request.app.state.names
    if name is None or name in names:
        return ModelChoice(name or names[0])
    service: Service = request.app.state.service
    if name not in service.adapters:
        message = f"model {show_value(name)} does not exist; available: {', '.join((*names, *service.adapters))}"
        raise ApiError(404, message, code="model_not_found", param="model")
    request.scope["notes"]["adapter"] = name
    return ModelChoice(name, name)
