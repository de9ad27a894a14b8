"""`GET /v1/models`: the names of the model and its adapters."""

from fastapi import APIRouter, Request

from llamarium.server.http.body import StrictRoute
from llamarium.server.lifecycle.service import Service
from llamarium.server.naming import chosen_model

router = APIRouter(route_class=StrictRoute)


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, object]:
    """List the names."""
    service: Service = request.app.state.service
    names = (*request.app.state.names, *service.adapters)
    return {"object": "list", "data": [_describe(request, name) for name in names]}


@router.get("/v1/models/{model:path}")
async def one_model(request: Request, model: str) -> dict[str, object]:
    """Describe one."""
    chosen_model(request, model)
    return _describe(request, model)


def _describe(request: Request, name: str) -> dict[str, object]:
    """Describe a name as vLLM does; an adapter's parent is its model."""
    state = request.app.state
    is_adapter = name not in state.names
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "llamarium",
        "root": name if is_adapter else state.names[0],
        "parent": state.names[0] if is_adapter else None,
        "max_model_len": state.service.max_tokens,
    }
