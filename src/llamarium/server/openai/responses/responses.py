"""`POST /v1/responses`."""

import asyncio
from typing import Any, Literal

from fastapi import APIRouter, Request, Response

from llamarium.errors import escape, show_value
from llamarium.sampling.keywords import SamplingKeywords
from llamarium.server.answering import AnswerOptions, AnswerRequest, Constraint, FieldNames, Prompts, variables_of
from llamarium.server.dialogs import Dialog, encode_dialog, misplaced
from llamarium.server.errors import JSON, ApiError
from llamarium.server.fields import parameters_in
from llamarium.server.hints import LOGPROBS
from llamarium.server.http.access import owner_of
from llamarium.server.http.body import StrictRoute
from llamarium.server.http.stream import STREAMED
from llamarium.server.lifecycle.service import Service, chosen_model
from llamarium.server.openai.responses.formatter import ResponseFormatter
from llamarium.server.openai.responses.items import ITEMS, Item, MessageItem, add_item
from llamarium.server.openai.responses.requests import NAMES, ResponseRequest, form_of
from llamarium.server.openai.responses.store import ResponseStore
from llamarium.server.other_tools import functions_of
from llamarium.server.replying import reply
from llamarium.tokenizer.tools.request import ToolRequest

router = APIRouter(route_class=StrictRoute)


@router.post("/v1/responses", responses=STREAMED)
async def responses(request: Request, body: ResponseRequest) -> Response:
    """Answer a dialog."""
    model = chosen_model(request, body.model)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options requires stream; set stream to true", param="stream_options")
    service: Service = request.app.state.service
    store, owner, before = service.settings.responses, owner_of(request), list[dict[str, Any]]()
    if body.store and store is None:
        raise misplaced("store", "is true, but this server does not store responses (--store-responses); leave it out")
    if (previous := body.previous_response_id) is not None:
        before = (await _in_store(request, previous, "get", param="previous_response_id"))["items"]
    dialog, tools = await asyncio.to_thread(_read, body, before)
    effort = None if body.reasoning is None else body.reasoning.effort
    generation_request = AnswerRequest(
        model=model,
        prompts=Prompts(
            encode=lambda _: [encode_dialog(service, dialog.messages, tools.offered, effort=effort)],
            messages=dialog.messages,
            variables=variables_of(effort=effort),
        ),
        options=AnswerOptions(sampler=_options(body), max_tokens=body.max_output_tokens, new_text=True),
        names=FieldNames("input", "max_output_tokens", dialog.path_of),
        constraint=Constraint.of(form_of(body), tools),
        salt=body.cache_salt or "",
        is_kept=body.store is not False,
    )

    def keep(response: dict[str, Any]) -> bool:
        assert store is not None
        new_items = _items(body.input)
        items = [*before, *(item.model_dump(exclude_none=True) for item in new_items), *response["output"]]
        return store.put(response["id"], owner, {"items": items, "response": response})

    stored = None if store is None or body.store is False else keep
    formatter = ResponseFormatter(body, model.name, service.tokenizer, stored)
    return await reply(request, generation_request, formatter, streams=body.stream or False)


@router.get("/v1/responses/{response_id}")
async def retrieve(request: Request, response_id: str) -> Response:
    """Return a stored response."""
    return JSON((await _in_store(request, response_id, "get"))["response"])


@router.delete("/v1/responses/{response_id}")
async def delete(request: Request, response_id: str) -> dict[str, object]:
    """Forget a stored response."""
    await _in_store(request, response_id, "delete")
    return {"id": response_id, "object": "response.deleted", "deleted": True}


async def _in_store(request: Request, name: str, action: Literal["get", "delete"], param: str | None = None) -> Any:
    if unread := next(iter(request.query_params), None):
        raise ApiError(400, f"{escape(unread)} is not a field of this request", code="unknown_parameter", param=unread)
    store: ResponseStore | None = request.app.state.service.settings.responses
    stored = store and await asyncio.to_thread(getattr(store, action), name, owner_of(request))
    if not stored:
        why = "start the server with --store-responses" if store is None else "it may have been replaced by newer ones"
        message = f"no response {show_value(name)} is stored for this key: {why}"
        raise ApiError(404, message, code="response_not_found", param=param)
    return stored


def _read(body: ResponseRequest, before: list[dict[str, Any]]) -> tuple[Dialog, ToolRequest]:
    """Return a request's dialog and tools; `before` are the items of the previous response."""
    if not body.input:
        raise ApiError(400, "input is empty; expected a text, or a list of items", param="input")
    dialog = Dialog(NAMES)
    if body.instructions is not None:
        dialog.add("instructions", {"role": "system", "content": body.instructions})
    for item in ITEMS.validate_python(before):
        add_item(dialog, "previous_response_id", item)
    for i, item in enumerate(_items(body.input)):
        add_item(dialog, "input" if isinstance(body.input, str) else f"input[{i}]", item)
    choice = body.tool_choice if isinstance(body.tool_choice, str | None) else body.tool_choice.to_chat()
    functions, path_of = functions_of(body.tools)
    return dialog, dialog.tools(functions, choice, body.parallel_tool_calls, path_of)


def _items(value: str | list[Item]) -> list[Item]:
    return [MessageItem(role="user", content=value)] if isinstance(value, str) else value


def _options(body: ResponseRequest) -> SamplingKeywords:
    has_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not has_logprobs:
        message = f"top_logprobs requires log-probabilities; add {LOGPROBS} to include"
        raise ApiError(400, message, param="top_logprobs")
    options = parameters_in(body, "responses")
    if has_logprobs:
        options["logprobs"] = body.top_logprobs or 0
    return options
