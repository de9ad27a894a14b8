"""The route that creates passes."""

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request

from llamarium.engine.request import check_prompt, too_long
from llamarium.generation.text_engine import TextEngine
from llamarium.inspect.forward import PREFILL_CHUNK
from llamarium.page.executor import Pass
from llamarium.page.open_pass import OpenPass
from llamarium.page.prepare import Preparation
from llamarium.page.probes.text import token_view
from llamarium.page.schema import passes as schema
from llamarium.page.selection import check_index
from llamarium.page.work import passes_of, work_on
from llamarium.server.errors import ApiError, of_library
from llamarium.server.http.body import StrictRoute
from llamarium.server.lifecycle.service import Service
from llamarium.server.openai.fields import dialog_ids
from llamarium.tokenizer.base import Tokenizer

if TYPE_CHECKING:
    from llamarium.api import Llama

router = APIRouter(prefix="/inspect", route_class=StrictRoute)


@router.post("/passes")
async def passes(request: Request, body: schema.PassRequest) -> schema.PassView:
    """Name the pass over a text, its ids or a dialog, and tell its tokens. Nothing is run yet."""
    service: Service = request.app.state.service
    preparation: Preparation = request.app.state.preparation
    field = _given(body)

    def read(llama: "Llama", engine: TextEngine) -> schema.PassView:
        ids = _ids(body, llama.tokenizer, service)
        check_prompt(llama.config, ids, room=0)
        _check_experiment(body, len(ids))
        forward_pass = Pass.of(ids, body.adapter, _adapter_idx(engine, body.adapter), _experiment(body))
        preparation.begin(llama, engine, forward_pass)
        return pass_view(OpenPass(llama, engine, request.app.state, passes_of(request).add(forward_pass)))

    return await work_on(request, field, read)


def _given(body: schema.PassRequest) -> str:
    fields = [name for name in ("text", "ids", "messages") if getattr(body, name) is not None]
    if len(fields) != 1:
        raise ApiError(
            400, f"expected text, ids or messages, one of them; found {', '.join(fields) or 'none'}", param="text"
        )
    if body.add_special_tokens is not None and fields != ["text"]:
        message = f"add_special_tokens belongs to text, and {fields[0]} are given; leave it out"
        raise ApiError(400, message, param="add_special_tokens")
    return fields[0]


def _ids(body: schema.PassRequest, tokenizer: Tokenizer, service: Service) -> list[int]:
    most = service.max_tokens
    if body.ids is not None:
        if len(body.ids) > most:
            raise of_library(too_long(len(body.ids), 0, most), field="ids")
        return body.ids
    if body.messages is not None:
        return dialog_ids(service, body.messages)
    assert body.text is not None
    tokenizer.check_length(body.text, most)
    return tokenizer.encode(body.text, add_special_tokens=body.add_special_tokens is not False)


def _experiment(body: schema.PassRequest) -> schema.ExperimentFields | None:
    """Return the experiment, or None if it changes nothing."""
    return None if body.experiment == schema.ExperimentFields() else body.experiment


def _check_experiment(body: schema.PassRequest, num_tokens: int) -> None:
    requested = _experiment(body)
    if requested is None:
        return
    if not requested.rotation and requested.rope_scaling != "model":
        message = "rope_scaling is given beside rotation, which is off, so that nothing is turned; give one"
        raise ApiError(400, message, param="experiment.rope_scaling")
    for place, position in enumerate(requested.hidden):
        check_index(f"experiment.hidden[{place}]", position, num_tokens)
    if (requested.bidirectional or requested.hidden) and num_tokens > PREFILL_CHUNK:
        message = f"{num_tokens} tokens; with another mask a text is run as a whole, {PREFILL_CHUNK} at most"
        raise ApiError(400, message, param="experiment")


def _adapter_idx(engine: TextEngine, adapter: str | None) -> int:
    if adapter is None:
        return -1
    served = engine.adapters  # adapters may be loaded and unloaded concurrently
    if adapter not in served:
        names = ", ".join(served) or "none"
        raise ApiError(
            404, f"no adapter of this name is served; there is: {names}", code="unknown_adapter", param="adapter"
        )
    return served[adapter].number


def pass_view(context: OpenPass) -> schema.PassView:
    """Return the view of a pass."""
    forward_pass, executor = context.forward_pass, context.executor
    runner = executor.runner_of(forward_pass)
    return schema.PassView(
        id=forward_pass.id,
        tokens=tuple(token_view(context.llama.tokenizer, token_id) for token_id in forward_pass.ids),
        adapter=forward_pass.adapter,
        experiment=forward_pass.experiment,
        runner=runner.name,
        dtype=runner.dtype,
        kv_dtype=executor.kv_dtype_of(forward_pass),
    )
