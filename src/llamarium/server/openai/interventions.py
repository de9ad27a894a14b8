"""Interventions per request (steering and ablation), and hidden states and the logit lens of each choice.

The engine applies them in the same forward pass as other requests (`runtime/intervention.py`), whose tokens do not
change.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from llamarium.engine.pooling import Places, State, Vector
from llamarium.engine.request import check_prompt
from llamarium.errors import LlamariumError, counted
from llamarium.generation.text_engine import TextEngine
from llamarium.inspect.forward import num_rows
from llamarium.inspect.numbers import split
from llamarium.inspect.tokens import top_candidates
from llamarium.runtime.intervention import Edit
from llamarium.runtime.runner import Runner
from llamarium.server.errors import ApiError, of_library
from llamarium.server.fields import Body
from llamarium.server.lifecycle.service import ModelChoice, ServedModel, Service
from llamarium.server.openai.forms import Formed
from llamarium.tokenizer.base import Tokenizer

MAX_NUMBERS = 2**18
"""Maximum number of values in the hidden states of one reply."""

MAX_READ = 256
"""Maximum number of logit lens positions in one reply, as each is multiplied with the whole LM head."""

_Positions = Annotated[list[int], Field(min_length=1, max_length=1024)]
_Layers = Annotated[list[int], Field(min_length=1, max_length=256)]


class Steering(Body):
    """A vector that is added to the stream after a layer, times `strength`: given, or the difference of two prompts.

    Attributes:
        toward: Its difference to `away`, both at their last tokens, is the vector.
        positions: Of the text, prompt and answer, where it is added; all where left out.
    """

    layer: int = Field(description="layer after which the vector is added")
    strength: float = Field(1.0, ge=-1000, le=1000, description="factor of the vector, -1000 to 1000")
    vector: list[Annotated[float, Field(allow_inf_nan=False)]] | None = Field(
        None, description="vector of the model's hidden size"
    )
    toward: str | None = Field(None, description="prompt to steer toward; the vector is its difference to `away`")
    away: str | None = Field(None, description="prompt to steer away from")
    positions: _Positions | None = Field(None, description="positions at which the vector is added (default: all)")


class Ablation(Body):
    """What adds nothing: heads by layer and head, as in "3.2", and MLPs by layer."""

    heads: list[Annotated[str, Field(pattern=r"^[0-9]{1,4}\.[0-9]{1,4}$")]] = Field(
        [], max_length=256, description='attention heads to remove, as "layer.head"'
    )
    mlps: list[int] = Field([], max_length=256, description="layers whose MLPs are removed")


class Wanted(Body):
    """Places in the residual stream: after layers, at positions of the text; negative ones count from the prompt's end.

    The answer's own positions follow those of the prompt.
    """

    layers: _Layers = Field(description="layers after which the residual stream is read")
    positions: _Positions = Field([-1], description="positions to read; negative ones count from the prompt's end")

    def places(self, num_prompt: int) -> Places:
        """Return the layers and absolute positions for a prompt of `num_prompt` tokens."""
        return Places(self.layers, [at + num_prompt if at < 0 else at for at in self.positions])


class WantedLens(Wanted):
    """Where the head reads the stream; `k` tokens of each place, the most probable first."""

    k: int = Field(5, ge=1, le=50, description="number of most likely tokens per position")


class Intervened(Formed):
    """The fields about interventions and hidden states, for both kinds of completions."""

    steer: Steering | Annotated[list[Steering], Field(min_length=1, max_length=16)] | None = Field(
        None, description="vectors added to the residual stream; requires `--allow-interventions`"
    )
    ablate: Ablation | None = Field(
        None, description="attention heads and MLPs to remove; requires `--allow-interventions`"
    )
    hidden_states: Wanted | None = Field(
        None, description="residual stream to return; requires `--allow-interventions`"
    )
    lens: WantedLens | None = Field(None, description="logit lens to return; requires `--allow-interventions`")


INTERVENTION_FIELDS = frozenset(Intervened.__annotations__)
"""Fields for interventions and hidden states; without any of them, `interventions_of` need not be called."""


def interventions_of(
    service: Service, body: Intervened, choice: ModelChoice, num_answers: int
) -> "Interventions | None":
    """Return the interventions and requested hidden states of a request, or None without any.

    Raises:
        ApiError: 400 if they are not enabled on this server.
    """
    set_fields = [name for name in Intervened.__annotations__ if getattr(body, name) is not None]
    if not set_fields:
        return None
    if not service.settings.allow_interventions:
        message = f"{set_fields[0]} is disabled on this server; start it with --allow-interventions to enable it"
        raise ApiError(400, message, code="unsupported_parameter", param=set_fields[0])
    return Interventions(service, body, choice, num_answers)


class Interventions:
    """The interventions and requested hidden states of a request; called for each prompt (`server/answering.py`)."""

    def __init__(self, service: Service, body: Intervened, choice: ModelChoice, num_answers: int) -> None:
        self._most, self._body, self._num_answers = service.max_tokens, body, num_answers
        salt, timeout_s = body.cache_salt or "", service.settings.request_timeout_s
        self._how: dict[str, Any] = {"adapter": choice.adapter, "salt": salt, "timeout_s": timeout_s}
        self._edits: tuple[Edit, ...] | None = None

    def __call__(
        self, model: ServedModel, engine: TextEngine, num_prompt: int, num_tokens: int
    ) -> tuple[tuple[Edit, ...], Places | None]:
        """Return the edits, and the layers and positions of requested hidden states.

        Args:
            model: The served model.
            engine: Its engine, which computes steering vectors from pairs of prompts.
            num_prompt: Number of prompt tokens.
            num_tokens: Maximum number of tokens of prompt and answer.

        Raises:
            ApiError: If a layer, head, position or vector is invalid, or too many values are requested.
        """
        places = self._places(model, num_prompt, num_tokens)
        if self._edits is None:
            self._edits = (*self._steering(model, engine), *self._ablation(model))
        return self._edits, places

    def _steering(self, model: ServedModel, engine: TextEngine) -> Iterator[Edit]:
        steerings, size = self._body.steer or [], model.config.hidden_size
        for place, steering in enumerate(steerings if isinstance(steerings, list) else [steerings]):
            path = f"steer[{place}]" if isinstance(steerings, list) else "steer"
            _check(f"{path}.layer", steering.layer, model.config.num_hidden_layers)
            for i, position in enumerate(steering.positions or ()):
                _check(f"{path}.positions[{i}]", position, model.config.max_position_embeddings)
            if (steering.vector is None) == (steering.toward is None) or (steering.away is None) != (
                steering.toward is None
            ):
                raise ApiError(400, f"{path}: expected vector, or toward and away", param=path)
            if steering.vector is not None and len(steering.vector) != size:
                numbers = counted(len(steering.vector), "number")
                message = f"{path}.vector has {numbers}; expected {size}, the model's hidden size"
                raise ApiError(400, message, param=f"{path}.vector")
            vector = (
                self._direction(model, engine, steering, path) if steering.vector is None else np.array(steering.vector)
            )
            added = steering.strength * vector.astype(np.float64)
            if not (abs(added) <= np.finfo(np.float32).max).all():
                raise ApiError(400, f"{path}: strength times vector is not finite; use smaller numbers", param=path)
            positions = None if steering.positions is None else tuple(steering.positions)
            yield Edit("residual", steering.layer, None, positions, add=added.astype(np.float32))

    def _direction(self, model: ServedModel, engine: TextEngine, steering: Steering, path: str) -> Vector:
        pair: list[list[int]] = []
        for name, text in (("toward", steering.toward or ""), ("away", steering.away or "")):
            try:
                model.tokenizer.check_length(text, self._most)
                pair.append(model.tokenizer.encode(text))
                check_prompt(model.config, pair[-1])
            except LlamariumError as error:
                raise of_library(error, field=f"{path}.{name}", source=model.tokenizer.source) from None
        return engine.direction(pair[0], pair[1], steering.layer, **self._how)

    def _ablation(self, model: ServedModel) -> Iterator[Edit]:
        config, ablation = model.config, self._body.ablate
        if ablation is None:
            return
        if not (ablation.heads or ablation.mlps):
            raise ApiError(400, "ablate has no heads and no mlps; expected at least one", param="ablate")
        for i, name in enumerate(ablation.heads):
            layer, head = map(int, name.split("."))
            path = f"ablate.heads[{i}]"
            _check(f"the layer of {path}", layer, config.num_hidden_layers, path)
            _check(f"the head of {path}", head, config.num_attention_heads, path)
            yield Edit("head", layer, head, factor=0.0)
        for i, layer in enumerate(ablation.mlps):
            _check(f"ablate.mlps[{i}]", layer, config.num_hidden_layers)
            yield Edit("mlp", layer, factor=0.0)

    def _places(self, model: ServedModel, num_prompt: int, num_tokens: int) -> Places | None:
        layers, positions, config = set[int](), set[int](), model.config
        for name, limit, size in (("hidden_states", MAX_NUMBERS, config.hidden_size), ("lens", MAX_READ, 1)):
            selection: Wanted | None = getattr(self._body, name)
            if selection is None:
                continue
            places = selection.places(num_prompt)
            for i, layer in enumerate(places.layers):
                _check(f"{name}.layers[{i}]", layer, config.num_hidden_layers)
            for i, position in enumerate(selection.positions):
                _check(f"{name}.positions[{i}]", position, max(num_tokens - 1, num_prompt), minimum=-num_prompt)
            if (count := len(places.layers) * len(places.positions) * size * self._num_answers) > limit:
                message = f"{name} requests {count:,} numbers" if size > 1 else f"{name} requests {count:,} positions"
                raise ApiError(400, f"{message}; the maximum is {limit:,}: request fewer", param=name)
            layers.update(places.layers)
            positions.update(places.positions)
        return Places(sorted(layers), sorted(positions)) if layers else None


def _check(subject: str, value: int, size: int, param: str | None = None, minimum: int = 0) -> None:
    if not minimum <= value < size:
        message = f"{subject} is {value}; expected {minimum} to {size - 1}"
        raise ApiError(400, message, code="invalid_parameter", param=param or subject)


def shown(
    body: Intervened, states: Sequence[State], num_prompt: int, runner: Runner, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Return the members `hidden_states` and `lens` of a choice; non-finite vectors and logits become null.

    Args:
        body: The request.
        states: The choice's hidden states.
        num_prompt: Number of prompt tokens.
        runner: Applies the final norm and LM head.
        tokenizer: The model's tokenizer.
    """
    members: dict[str, Any] = {}
    for name, selection in (("hidden_states", body.hidden_states), ("lens", body.lens)):
        if selection is None:
            continue
        layers, positions = selection.places(num_prompt)
        chosen = [state for state in states if state.layer in layers and state.position in positions]
        read = _values(chosen) if selection is body.hidden_states else _lens(chosen, body.lens, runner, tokenizer)
        members[name] = [
            {"layer": state.layer, "position": state.position, **values}
            for state, values in zip(chosen, read, strict=True)
        ]
    return members


def _values(states: Sequence[State]) -> Iterator[dict[str, Any]]:
    for state in states:
        yield {"values": state.values.tolist() if np.isfinite(state.values).all() else None}


def _lens(
    states: Sequence[State], selection: WantedLens | None, runner: Runner, tokenizer: Tokenizer
) -> Iterator[dict[str, Any]]:
    assert selection is not None
    streams_MD = np.array([item.values for item in states], np.float32)
    for part_CD in split(streams_MD, num_rows(runner.config.vocab_size)):
        with np.errstate(all="ignore"):  # hidden states may be non-finite
            logits_CV = runner.read_stream(part_CD)
        for logits_V in logits_CV:
            best = top_candidates(logits_V[None], selection.k)[0] if np.isfinite(logits_V).all() else None
            yield {
                "tokens": None if best is None else [
                    {"token": tokenizer.token_text(item.token_id), "id": item.token_id, "probability": item.probability}
                    for item in best
                ]
            }  # fmt: skip
