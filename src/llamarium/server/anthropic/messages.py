"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

import asyncio

from fastapi import APIRouter, Request, Response

from llamarium.sampling.grammar.description import Grammar
from llamarium.sampling.keywords import SamplingKeywords
from llamarium.server.answering import (
    AnswerOptions,
    AnswerRequest,
    Constraint,
    FieldNames,
    Form,
    Prompts,
    variables_of,
    wanted_forms,
    with_tokenizer,
)
from llamarium.server.anthropic.dialog import read_prompt
from llamarium.server.anthropic.formatter import MessageFormatter
from llamarium.server.anthropic.requests import CountRequest, MessagesRequest
from llamarium.server.fields import parameters_in
from llamarium.server.http.body import StrictRoute
from llamarium.server.http.stream import STREAMED
from llamarium.server.lifecycle.service import Service, chosen_model
from llamarium.server.replying import reply
from llamarium.tokenizer.base import Tokenizer

router = APIRouter(route_class=StrictRoute)


@router.post("/v1/messages", responses=STREAMED)
async def messages(request: Request, body: MessagesRequest) -> Response:
    """Answer a dialog."""
    model = chosen_model(request, body.model)
    service: Service = request.app.state.service
    prompt = await asyncio.to_thread(read_prompt, body)
    dialog = prompt.dialog
    generation_request = AnswerRequest(
        model=model,
        prompts=Prompts(
            encode=lambda _: [prompt.ids(service)],
            messages=dialog.messages,
            variables=variables_of(effort=prompt.effort),
            answer_start=prompt.answer_start,
        ),
        options=AnswerOptions(sampler=_options(body), max_tokens=body.max_tokens, new_text=prompt.answer_start is None),
        names=FieldNames("messages", "max_tokens", dialog.path_of),
        constraint=Constraint.of(_form(body), prompt.tools),
        salt=body.cache_salt or "",
    )
    formatter = MessageFormatter(model.name, request.scope["request_id"])
    return await reply(request, generation_request, formatter, streams=body.stream or False)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, body: CountRequest) -> dict[str, int]:
    """Count a prompt's tokens; refused as the message would be, but for grammars that cannot be compiled."""
    chosen_model(request, body.model)
    service: Service = request.app.state.service
    prompt = await asyncio.to_thread(read_prompt, body)
    form = _form(body)

    def count(tokenizer: Tokenizer) -> int:
        ids = prompt.ids(service)
        wanted_forms(tokenizer, form, prompt.tools, service.settings)
        return len(ids)

    return {"input_tokens": await with_tokenizer(request, "messages", count, prompt.dialog.path_of)}


def _options(body: MessagesRequest) -> SamplingKeywords:
    options = parameters_in(body, "anthropic")
    options["stop"] = body.stop_sequences
    return options


def _form(body: CountRequest) -> Form | None:
    output_format = None if body.output_config is None else body.output_config.format
    if output_format is None:
        return None
    return "output_config.format.schema", lambda is_open: Grammar.json_schema(
        output_format.schema_, open_objects=is_open
    )
