"""The model of a request: the served one, under any of its names, or one of its adapters."""

from dataclasses import dataclass

from fastapi import Request

from llamarium.errors import show_value
from llamarium.server.errors import ApiError
from llamarium.server.lifecycle.service import Service


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The model of a request: its name as the request has it, for replies, and the engine's adapter, if it is one."""

    name: str
    adapter: str | None = None


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
        message = f"no model {show_value(name)} is served here; there is: {', '.join((*names, *service.adapters))}"
        raise ApiError(404, message, code="model_not_found", param="model")
    request.scope["notes"]["adapter"] = name
    return ModelChoice(name, name)
