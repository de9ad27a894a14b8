"""`GET /v1/models`: the names of the model and its adapters, and vLLM's routes to load and unload adapters."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import PlainTextResponse

from llamarium.errors import LlamariumError, OptionError, show_value
from llamarium.server.errors import ApiError
from llamarium.server.fields import Body
from llamarium.server.http.body import StrictRoute
from llamarium.server.lifecycle.service import Service, chosen_model
from llamarium.server.lifecycle.threads import in_own_thread

router = APIRouter(route_class=StrictRoute)


_SAID: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}

MAX_ADAPTERS = 64
"""Maximum number of loaded adapters, if requests load them."""


class LoadRequest(Body):
    """`POST /v1/load_lora_adapter`; `load_inplace` replaces an adapter of this name."""

    lora_name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$", description="name of the adapter in requests"
    )
    lora_path: str = Field(min_length=1, max_length=4096, description="folder of the adapter, below `--adapter-dir`")
    load_inplace: bool = Field(False, description="true: replace an adapter of this name")


class UnloadRequest(Body):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str = Field(description="name of the adapter")


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
    """Return the description of a name in vLLM's format; an adapter's parent is its base model."""
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


@router.post("/v1/load_lora_adapter", responses=_SAID)
async def load_adapter(request: Request, body: LoadRequest) -> PlainTextResponse:
    """Load an adapter from a folder below --adapter-dir; running requests go on."""
    service: Service = request.app.state.service
    folder, name = _folder(service, body.lora_path), body.lora_name
    _, engine = service.require()
    if name in request.app.state.names:
        raise ApiError(400, f"{name} is the model's own name; choose another name", param="lora_name")
    async with request.app.state.loading_adapter:
        if name in engine.adapters and not body.load_inplace:
            message = f"the lora adapter '{name}' has already been loaded; unload it, or set load_inplace to true"
            raise ApiError(400, message, param="lora_name")
        if name not in engine.adapters and len(engine.adapters) >= MAX_ADAPTERS:
            message = f"{MAX_ADAPTERS} adapters are loaded, which is the maximum; unload one"
            raise ApiError(400, message, param="lora_name")
        try:
            await in_own_thread(lambda: engine.add_adapter(name, folder))
        except LlamariumError as error:
            message = str(error).replace(str(folder), body.lora_path)  # hides the server's paths
            raise ApiError(400, message, code="invalid_adapter", param="lora_path") from None
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@router.post("/v1/unload_lora_adapter", responses=_SAID)
async def unload_adapter(request: Request, body: UnloadRequest) -> PlainTextResponse:
    """Unload an adapter: requests to it finish, new ones do not find it."""
    service: Service = request.app.state.service
    _check_allowed(service)
    _, engine = service.require()
    try:
        await in_own_thread(lambda: engine.choices.remove(body.lora_name))
    except OptionError:
        message = f"adapter {show_value(body.lora_name)} is not loaded; GET /v1/models lists the loaded ones"
        raise ApiError(404, message, code="model_not_found", param="lora_name") from None
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _check_allowed(service: Service) -> Path:
    root = service.settings.adapter_dir
    if root is None:
        message = "loading adapters is disabled on this server; start it with --adapter-dir to enable it"
        raise ApiError(400, message, code="unsupported_parameter", param="lora_name")
    return root.resolve()


def _folder(service: Service, path: str) -> Path:
    """Return an adapter's folder; ApiError unless the folder and its files are below `adapter_dir`, links followed."""
    root = _check_allowed(service)
    folder, is_inside, is_folder = root, False, False
    with suppress(OSError, ValueError, RuntimeError):  # e.g. a NUL, a link loop, or a name that is too long
        folder = (root / path).resolve()
        is_folder = folder.is_dir()
        places = [folder, *(file.resolve() for file in (folder.iterdir() if is_folder else ()))]
        is_inside = folder != root and all(place.is_relative_to(root) for place in places)
    quoted = show_value(path)
    if not is_inside:
        message = f"lora_path is {quoted}, which is outside of --adapter-dir (symbolic links are followed)"
        raise ApiError(400, message, code="invalid_adapter", param="lora_path")
    if not is_folder:
        raise ApiError(404, f"lora_path {quoted} is not an adapter folder", code="model_not_found", param="lora_path")
    return folder
