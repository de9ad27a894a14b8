"""`POST /v1/cache/explain`: compares the prompts of two chat completions, without generating or storing anything."""

import asyncio
from functools import partial
from typing import Any, cast

from fastapi import APIRouter, Request
from pydantic import Field

from llamarium.engine.prefix import root_key
from llamarium.errors import LlamariumError
from llamarium.runtime.intervention import Edit, edits_key
from llamarium.server.answering import AnswerRequest, refusal_of
from llamarium.server.dialogs import renamed
from llamarium.server.errors import ApiError
from llamarium.server.fields import Body
from llamarium.server.http.body import StrictRoute
from llamarium.server.lifecycle.service import Service
from llamarium.server.lifecycle.threads import in_own_thread
from llamarium.server.openai.chat import answer_request
from llamarium.server.openai.requests import ChatRequest
from llamarium.server.prefix.explanation import Prompt, explain
from llamarium.tokenizer.base import Tokenizer

router = APIRouter(route_class=StrictRoute)

_NO_OWNER = b""


class ExplainRequest(Body):
    """`POST /v1/cache/explain`: two requests for chat completions, in their order."""

    earlier: ChatRequest = Field(description="body of the earlier chat completion")
    now: ChatRequest = Field(description="body of the later chat completion")

    @classmethod
    def check_length(cls, value: Any, limit: int) -> None:
        """Refuse a dialog with more messages, parts and calls than `limit`, before reading them."""
        if isinstance(value, dict):
            for name in ("earlier", "now"):
                try:
                    ChatRequest.check_length(cast("dict[str, Any]", value).get(name), limit)
                except ApiError as error:
                    raise _inside(error, name) from None


@router.post("/v1/cache/explain")
async def explain_cache(request: Request, body: ExplainRequest) -> dict[str, Any]:
    """Compare the prompts of two requests, with the texts where they part."""
    service: Service = request.app.state.service
    prompts: list[Prompt] = []
    with service.admit(1, "now"):
        for name, chat_request in (("earlier", body.earlier), ("now", body.now)):
            try:
                generation_request = await answer_request(request, chat_request)
                work = partial(_prompt, generation_request, service)
                # a steering vector may be the difference of two prompts, which takes forward passes
                prompts.append(
                    await (asyncio.to_thread if generation_request.interventions is None else in_own_thread)(work)
                )
            except ApiError as error:
                raise _inside(error, name) from None
        earlier, now = prompts
        return await asyncio.to_thread(_compared, earlier, now, service.tokenizer)


def _inside(error: ApiError, name: str) -> ApiError:
    """Return an error with its path inside one of the two requests."""
    return renamed(error, lambda path: f"{name}.{path}")


def _prompt(request: AnswerRequest, service: Service) -> Prompt:
    model, engine = service.loaded or service.require()
    edits: tuple[Edit, ...] = ()
    try:
        (ids,) = request.prompts.encode(model.tokenizer)
        if request.interventions is not None:
            edits, _ = request.interventions(model, engine, len(ids), service.max_tokens)
    except LlamariumError as error:
        raise refusal_of(error, request, model.tokenizer.source) from None
    parts = request.parts(edits)
    root = root_key(parts.model, parts.salt, *([edits_key(edits)] if edits else ()))
    return Prompt.of(_NO_OWNER, root, ids, engine.prefix_index.pool.block_size, parts)


def _compared(earlier: Prompt, now: Prompt, tokenizer: Tokenizer) -> dict[str, Any]:
    blocks = {
        key: earlier.ids[place * earlier.block_size : (place + 1) * earlier.block_size]
        for place, key in enumerate(earlier.keys)
    }
    explanation = explain(now, earlier.record(), blocks.get, tokenizer, shows_texts=True)
    return {"earlier_tokens": len(earlier.ids), "tokens": len(now.ids), **explanation.to_json()}
