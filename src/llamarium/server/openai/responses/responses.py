"""`POST /v1/responses`."""

import asyncio

from fastapi import APIRouter, Request, Response

from llamarium.sampling.params import GenerationOptions
from llamarium.server.answering import AnswerRequest
from llamarium.server.dialogs import Dialog, encode_dialog
from llamarium.server.errors import ApiError
from llamarium.server.fields import parameters_in
from llamarium.server.hints import LOGPROBS
from llamarium.server.http.body import StrictRoute
from llamarium.server.http.stream import STREAMED
from llamarium.server.lifecycle.service import Service
from llamarium.server.naming import chosen_model
from llamarium.server.openai.responses.formatter import ResponseFormatter
from llamarium.server.openai.responses.items import add_item
from llamarium.server.openai.responses.requests import ResponseRequest, form_of
from llamarium.server.openai.responses.tools import NAMES
from llamarium.server.replying import reply
from llamarium.tokenizer.tools.request import ToolRequest

router = APIRouter(route_class=StrictRoute)


@router.post("/v1/responses", responses=STREAMED)
async def responses(request: Request, body: ResponseRequest) -> Response:
    """Answer a dialog."""
    model = chosen_model(request, body.model)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options is given without stream; set stream to true", param="stream_options")
    service: Service = request.app.state.service
    dialog, tools = await asyncio.to_thread(_read, body)
    effort = None if body.reasoning is None else body.reasoning.effort
    asked = AnswerRequest(
        model=model,
        encode=lambda _: [encode_dialog(service, dialog.messages, tools.offered, effort=effort)],
        options=_options(body),
        form=form_of(body),
        tools=tools,
        messages=dialog.messages,
        path_of=dialog.path_of,
        max_tokens=body.max_output_tokens,
        prompt_field="input",
        length_field="max_output_tokens",
        new_text=True,
        salt=body.cache_salt or "",
    )
    formatter = ResponseFormatter(body, model.name, service.tokenizer)
    return await reply(request, asked, formatter, streams=body.stream or False)


def _read(body: ResponseRequest) -> tuple[Dialog, ToolRequest]:
    """Return a request's dialog, and its tools."""
    dialog = _dialog(body)
    choice = body.tool_choice if isinstance(body.tool_choice, str | None) else body.tool_choice.to_chat()
    listed = None if body.tools is None else [tool.to_chat() for tool in body.tools]
    return dialog, dialog.tools(listed, choice, body.parallel_tool_calls)


def _dialog(body: ResponseRequest) -> Dialog:
    if not body.input:
        raise ApiError(400, "input is empty; expected a text, or a list of items", param="input")
    dialog = Dialog(NAMES)
    if body.instructions is not None:
        dialog.add("instructions", {"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        dialog.add("input", {"role": "user", "content": body.input})
    else:
        for i, item in enumerate(body.input):
            add_item(dialog, f"input[{i}]", item)
    return dialog


def _options(body: ResponseRequest) -> GenerationOptions:
    has_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not has_logprobs:
        raise ApiError(
            400,
            "top_logprobs is given without log-probabilities; include message.output_text.logprobs",
            param="top_logprobs",
        )
    options = parameters_in(body, "responses")
    if has_logprobs:
        options["logprobs"] = body.top_logprobs or 0
    return options
