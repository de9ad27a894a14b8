"""Health, metrics, and properties of the server and its model."""

from fastapi import APIRouter, Request, Response
from starlette.responses import PlainTextResponse

from llamarium import __version__
from llamarium.server.errors import JSON
from llamarium.server.http.body import StrictRoute
from llamarium.server.lifecycle.service import Service

router = APIRouter(route_class=StrictRoute)


@router.get("/health", responses={503: {"description": "The server is loading, draining or broken."}})
async def health(request: Request) -> Response:
    """Return whether requests are answered: 200 if they are, else 503."""
    service: Service = request.app.state.service
    state = service.state
    status: dict[str, object] = {"status": state}
    if state == "loading":
        done, total = service.loading.progress
        status["progress"] = round(done / total, 3) if total else 0.0
    return JSON(status, 200 if state == "ready" else 503)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Return counts and times in Prometheus' text format."""
    return PlainTextResponse(request.app.state.metrics.text(), media_type="text/plain; version=0.0.4")


@router.get("/props")
async def props(request: Request) -> dict[str, object]:
    """Return what is served, and its limits."""
    service: Service = request.app.state.service
    model, engine = service.require()
    settings = service.settings
    chat_format, disk = model.tokenizer.chat_format, engine.disk_use
    return {
        "version": __version__,
        "models": [*request.app.state.names, *engine.adapters],
        "runner": model.runner.name,
        "is_row_exact": model.runner.is_row_exact,
        "dtype": str(model.runner.dtype),
        "kv_cache_dtype": settings.kv_cache_dtype,
        "chat_format": None if chat_format is None else chat_format.name,
        "context": model.config.max_position_embeddings,
        "max_context": service.max_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "max_queue": settings.max_queue,
        "request_timeout_s": settings.request_timeout_s,
        "kv_cache_blocks": engine.snapshot.num_blocks,
        "disk_cache": None if disk is None else {"bytes": disk.num_bytes, "max_bytes": disk.most_bytes},
    }
