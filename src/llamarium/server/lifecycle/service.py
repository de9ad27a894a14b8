"""The served model: its lifecycle state, its limits, and the number of answers under way."""

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
"""Answers to one HTTP request, over all of its prompts."""


def check_context(engine: TextEngine, max_context: int | None) -> None:
    """Refuse a limit of tokens per request that is above what model and cache hold."""
    if max_context is not None and max_context > engine.max_tokens:
        raise OptionError(
            f"max_context is {max_context}; the model's context length and the KV cache (kv_memory) allow "
            f"{engine.max_tokens} tokens per request"
        )


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The model of a request: its name as the request has it, for replies, and the engine's adapter, if it is one."""

    name: str
    adapter: str | None = None


class ServedModel(TextModel, Protocol):
    """What is served: a `Llama`."""

    name: str
    generation_config: Mapping[str, Any]


class Service:
    """A model that may still be loading, its engine, and the number of answers under way.

    Attributes:
        capacity: How many answers may be under way before a request is refused.
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
        """Lifecycle state."""
        loaded = self.loaded
        if self.loading.failure is not None or (loaded is not None and loaded[1].state == "broken"):
            return "broken"
        if self.is_draining:
            return "draining"
        return "loading" if loaded is None else "ready"

    @property
    def loaded(self) -> tuple[ServedModel, TextEngine] | None:
        """The model and its engine, once they are there."""
        return self.loading.result

    def require(self) -> tuple[ServedModel, TextEngine]:
        """Return the model and its engine; ApiError 503 if they are not there yet, or not any more."""
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
        """The model's, once it is there; also while the server is stopping."""
        _, engine = self.loaded or self.require()
        return engine.tokenizer

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that a request may choose."""
        _, engine = self.loaded or self.require()
        return tuple(engine.adapters)

    @property
    def max_tokens(self) -> int:
        """The most tokens of a request, prompt and answer together."""
        _, engine = self.loaded or self.require()
        return min(engine.max_tokens, self.settings.max_context or engine.max_tokens)

    @contextmanager
    def place(self, num_answers: int, field: str = "n") -> Generator[None]:
        """Count answers as under way while the body runs; a server that stops meanwhile still completes them.

        Args:
            num_answers: How many.
            field: The request's field with that number, for messages.

        Raises:
            ApiError: 503, if no requests are taken; 429, if there is no room besides those that are under way; 400, if
                there never is.
        """
        self.require()
        if num_answers > self.capacity:
            most = f"the server accepts {self.capacity} (--max-num-seqs, --max-queue)"
            raise ApiError(400, f"{num_answers} answers are requested, and {most}; request fewer at once", param=field)
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
        """Take no more requests, abort those that are left after `timeout_s`, and return whether all were completed."""
        self.is_draining = True
        return True if self.loaded is None else self.loaded[1].close(timeout_s)


def chosen_model(request: Request, name: str | None) -> ModelChoice:
    """Return the model that a request's `model` names; without one it is the served model.

    Raises:
        ApiError: 404 for a name that nothing is served under; 503 while that is not known.
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
