"""What the model is, and the lines of Python that it executes."""

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query, Request, Response

from llamarium.checkpoints.checkpoint import expected_shapes
from llamarium.config import ModelConfig
from llamarium.page.architecture import view_of_model, view_of_shape
from llamarium.page.binary import Numbers, respond
from llamarium.page.schema.model import ModelQuery, ModelView, SourceQuery, SourceView, WeightQuery
from llamarium.page.sources import source_of
from llamarium.page.work import work_on
from llamarium.server.errors import ApiError
from llamarium.server.http.body import StrictRoute

if TYPE_CHECKING:
    from llamarium.api import Llama

router = APIRouter(prefix="/inspect", route_class=StrictRoute)


@router.get("/model")
async def model(request: Request, query: Annotated[ModelQuery, Query()]) -> ModelView:
    """Return the modules, shapes, parameters, bytes and operations of the model at hand, or of a published shape."""
    shape = query.shape
    if shape is not None:
        return await work_on(request, "shape", lambda llama, engine: view_of_shape(shape))
    loaded_with = request.app.state.loaded_with
    return await work_on(request, "shape", lambda llama, engine: view_of_model(llama, engine, loaded_with))


@router.get("/source")
async def source(request: Request, query: Annotated[SourceQuery, Query()]) -> SourceView:
    """Return the lines that a part of the model executes, as they are installed."""
    return await work_on(request, "name", lambda llama, engine: source_of(query.name))


@router.get("/weights", response_class=Response)
async def weight(request: Request, query: Annotated[WeightQuery, Query()]) -> Response:
    """Send a weight that is a vector: a norm's."""

    def read(llama: "Llama", _: object) -> Numbers:
        _check_vector(llama.config, query.key)
        return Numbers(llama.runner.dequantize(query.key), "D")

    return respond(await work_on(request, "key", read), "float32")


def _check_vector(config: ModelConfig, key: str) -> None:
    known = [name for name, shape in expected_shapes(config).items() if len(shape) == 1]
    if key not in known:
        raise ApiError(
            404,
            f"no vector of weights has this key; there are {known[0]} and the like",
            code="unknown_weight",
            param="key",
        )
