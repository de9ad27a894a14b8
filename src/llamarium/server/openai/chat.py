"""`POST /v1/chat/completions`."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from llamarium.generation.completion import Generation, Piece
from llamarium.sampling.keywords import SamplingKeywords
from llamarium.server.answering import AnswerOptions, AnswerRequest, Constraint, FieldNames, Prompts, variables_of
from llamarium.server.dialogs import check_answer_start, encode_dialog, misplaced
from llamarium.server.errors import ApiError
from llamarium.server.http.body import StrictRoute
from llamarium.server.http.stream import STREAMED, encode
from llamarium.server.lifecycle.service import Service, chosen_model
from llamarium.server.openai.choices import ChoicesFormatter
from llamarium.server.openai.fields import sampler_options
from llamarium.server.openai.forms import FORM_FIELDS, form_of
from llamarium.server.openai.interventions import INTERVENTION_FIELDS, interventions_of
from llamarium.server.openai.logprobs import check_reported, for_chat
from llamarium.server.openai.requests import ChatRequest
from llamarium.server.openai.tools import tool_request
from llamarium.server.replying import reply
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.chat.content import joined
from llamarium.tokenizer.tools.deltas import CallArguments, CallBegin, CallEnd, ContentDelta, Delta

router = APIRouter(route_class=StrictRoute)


class ChatFormatter(ChoicesFormatter):
    """Formats a chat completion; where tools are offered, an answer without text has null as content."""

    prefix, whole_name, chunk_name, nothing = "chatcmpl", "chat.completion", "chat.completion.chunk", '"delta":{}'

    no_content: str | None = ""
    """Content of an answer without text: None if tools are offered."""

    def _choice(self, generation: Generation, prompt: int, row: int) -> dict[str, Any]:
        answer = generation.completions[row]
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or self.no_content, "refusal": None}
        if answer.tool_calls:
            message["tool_calls"] = [call.to_openai() for call in answer.tool_calls]
        return {
            "message": message,
            "logprobs": None if answer.logprobs is None else for_chat(self._tokenizer, answer.logprobs),
            "finish_reason": answer.finish_reason,
            **({"token_ids": answer.token_ids} if self._shows_ids else {}),
        }

    def _beside(self, generation: Generation) -> dict[str, Any]:
        ids = {"prompt_token_ids": generation.prompt_ids} if self._shows_ids else {}
        return ids | self._of_prompts(generation)

    def _first(self, index: int, prompt: int, ids: str) -> str:
        return self._chunk(index, f'"delta":{{"role":"assistant","content":{encode(self.no_content)}}}', members=ids)

    def _piece(self, index: int, prompt: int, piece: Piece) -> str:
        logprobs = encode(for_chat(self._tokenizer, piece.logprobs)) if piece.logprobs else "null"
        ids = f',"token_ids":{encode(piece.token_ids)}' if self._shows_ids and piece.token_ids else ""
        events = ""
        for delta in piece.deltas:
            if member := _delta_json(delta):
                events += self._chunk(index, f'"delta":{{{member}}}{ids}', logprobs)
                ids, logprobs = "", "null"
        if not events and (piece.logprobs or ids):
            events = self._chunk(index, f'"delta":{{"content":""}}{ids}', logprobs)
        if piece.finish_reason is not None:
            events += self._chunk(index, '"delta":{}', reason=f'"{piece.finish_reason}"')
        return events


def _delta_json(delta: Delta) -> str:
    """Return a member of a chunk's `delta` as JSON, or "" for the end of a tool call."""
    if isinstance(delta, ContentDelta):  # the most frequent case
        return f'"content":{encode(delta.text)}'
    match delta:
        case CallBegin(index, call_id, name):
            function = {"name": name, "arguments": ""}
            called = {"index": index, "id": call_id, "type": "function", "function": function}
        case CallArguments(index, fragment):
            called = {"index": index, "function": {"arguments": fragment}}
        case CallEnd():
            return ""
    return f'"tool_calls":[{encode(called)}]'


@router.post("/v1/chat/completions", responses=STREAMED)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answer a dialog."""
    generation_request = await answer_request(request, body)
    formatter = ChatFormatter(request, body, generation_request.model)
    if generation_request.constraint is not None and generation_request.constraint.tools.offered:
        formatter.no_content = None
    return await reply(request, generation_request, formatter, streams=body.stream or False)


async def answer_request(request: Request, body: ChatRequest) -> AnswerRequest:
    """Return the generation request of a chat completion; everything but the encoding of the dialog is validated.

    Raises:
        ApiError: If the request is invalid.
    """
    model = chosen_model(request, body.model)
    lengths = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(lengths) > 1:
        message = "max_tokens and max_completion_tokens differ; set only one"
        raise ApiError(400, message, param="max_tokens")
    service: Service = request.app.state.service
    tools, path_of = None, str
    if body.tools is not None or body.tool_choice is not None:
        about_tools = body.tools, body.tool_choice, body.parallel_tool_calls
        tools, path_of = await asyncio.to_thread(tool_request, *about_tools)
    set_fields = body.model_fields_set
    form = None if set_fields.isdisjoint(FORM_FIELDS) else form_of(body)
    constraint = None if form is None and tools is None else Constraint.of(form, tools)
    prompts = await asyncio.to_thread(_prompts, service, body, constraint)
    return AnswerRequest(
        model=model,
        prompts=prompts,
        options=AnswerOptions(
            sampler=_options(body),
            max_tokens=next(iter(lengths - {-1}), None),  # -1 is the rest of the context, as on other servers
            ignore_eos=body.ignore_eos or False,
            new_text=body.add_generation_prompt is not False and prompts.answer_start is None,
        ),
        names=FieldNames(
            prompt="messages",
            length="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
            path_of=path_of,
        ),
        constraint=constraint,
        salt=body.cache_salt or "",
        is_kept=getattr(body, "store", None) is not False,
        interventions=None
        if set_fields.isdisjoint(INTERVENTION_FIELDS)
        else interventions_of(service, body, model, body.n or 1),
    )


def _prompts(service: Service, body: ChatRequest, constraint: Constraint | None) -> Prompts:
    """Return the dialog as a prompt."""
    answer_start = _answer_start(body, constraint) if body.continue_final_message else None
    dialog = body.messages[: -1 if body.continue_final_message else None]
    messages = [message.plain(f"messages[{i}]") for i, message in enumerate(dialog)]
    options: Any = {
        "add_generation_prompt": body.add_generation_prompt is not False or answer_start is not None,
        "documents": body.documents,
        "variables": body.chat_template_kwargs,
        "effort": body.reasoning_effort,
        "answer_start": answer_start,
    }
    offered = () if constraint is None else constraint.tools.offered

    def encode(_: Tokenizer) -> list[list[int]]:
        ids = encode_dialog(service, messages, offered, **options)
        if body.prompt_logprobs is not None:
            check_reported(len(ids), body.prompt_logprobs, 1, "prompt_logprobs")
        return [ids]

    hints = body.chat_template_kwargs, body.reasoning_effort, body.documents
    variables = {} if hints == (None, None, None) else variables_of(*hints)
    return Prompts(encode=encode, messages=messages, variables=variables, answer_start=answer_start)


def _answer_start(body: ChatRequest, constraint: Constraint | None) -> str:
    """Return the text of the last message, which the answer continues."""
    if body.add_generation_prompt:
        raise misplaced("continue_final_message", "and add_generation_prompt are both true; set only one")
    place, last = len(body.messages) - 1, body.messages[-1]
    text = joined(last.plain(f"messages[{place}]")["content"])
    if last.role != "assistant" or last.tool_calls:
        raise misplaced("continue_final_message", "is true, but the last message is not text of the assistant")
    form, tools = (None, None) if constraint is None else (constraint.form, constraint.tools)
    check_answer_start(f"messages[{place}]", form and form[0], tools, is_alone=place == 0)
    return text


def _options(body: ChatRequest) -> SamplingKeywords:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs requires logprobs; set logprobs to true", param="top_logprobs")
    options = sampler_options(body)
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    return options
