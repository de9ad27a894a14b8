"""Tokenization and chat templates: vLLM's `/tokenize` and `/detokenize`, and llama.cpp's `/apply-template`."""

from collections.abc import Sequence
from typing import ClassVar

from fastapi import APIRouter, Request
from pydantic import Field

from llamarium.server.answering import with_tokenizer
from llamarium.server.errors import ApiError
from llamarium.server.fields import Body, ModelName
from llamarium.server.http.body import StrictRoute
from llamarium.server.lifecycle.service import Service, chosen_model
from llamarium.server.openai.fields import Message, dialog_ids
from llamarium.server.openai.tools import AnyTool, tool_request
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.tools.definition import ToolDefinition

router = APIRouter(route_class=StrictRoute)


class TokenizeRequest(Body):
    """`POST /tokenize`: a text, or a dialog."""

    dialog: ClassVar[str | None] = "messages"

    model: ModelName = None
    prompt: str | None = Field(None, description="text to encode")
    messages: list[Message] | None = Field(None, min_length=1, description="dialog to encode instead of a text")
    tools: list[AnyTool] | None = Field(None, description="tools of the dialog")
    add_special_tokens: bool | None = Field(None, description="false: do not add BOS to the text")
    add_generation_prompt: bool | None = Field(
        None, description="false: end with the last message, without the header of an answer"
    )
    return_token_strs: bool | None = Field(None, description="true: also return the text of each token")

    def check(self) -> None:
        """Refuse fields without effect."""
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "expected exactly one of prompt and messages", param="prompt")
        if self.prompt is not None:
            for name in ("tools", "add_generation_prompt"):
                if getattr(self, name) is not None:
                    message = f"{name} is only allowed with messages, not with prompt; leave it out"
                    raise ApiError(400, message, param=name)
        elif self.add_special_tokens is not None:
            reason = "is only allowed with prompt; the chat template of messages adds its own; leave it out"
            raise ApiError(400, f"add_special_tokens {reason}", param="add_special_tokens")


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: ModelName = None
    tokens: list[int] = Field(description="token ids to decode")


class TemplateRequest(Body):
    """`POST /apply-template`."""

    dialog: ClassVar[str | None] = "messages"

    model: ModelName = None
    messages: list[Message] = Field(min_length=1, description="dialog, oldest message first")
    tools: list[AnyTool] | None = Field(None, description="tools of the dialog")
    add_generation_prompt: bool = Field(
        True, description="false: end with the last message, without the header of an answer"
    )


def _offered(tools: list[AnyTool] | None) -> Sequence[ToolDefinition]:
    return tool_request(tools, None, None)[0].offered


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, object]:
    """Return the ids of a text or of a dialog."""
    chosen_model(request, body.model)
    body.check()
    prompt, messages = body.prompt, body.messages
    service: Service = request.app.state.service
    max_tokens = service.max_tokens

    def ids_of(tokenizer: Tokenizer) -> list[int]:
        if messages is not None:
            begins = body.add_generation_prompt is not False
            return dialog_ids(service, messages, _offered(body.tools), add_generation_prompt=begins)
        assert prompt is not None
        tokenizer.check_length(prompt, max_tokens)
        return tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens is not False)

    def answer(tokenizer: Tokenizer) -> dict[str, object]:
        ids = ids_of(tokenizer)
        names = [tokenizer.token_text(token_id) for token_id in ids] if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": max_tokens, "tokens": ids, "token_strs": names}

    return await with_tokenizer(request, "prompt" if messages is None else "messages", answer)


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, object]:
    """Return the text of ids, control tokens spelled."""
    chosen_model(request, body.model)

    def answer(tokenizer: Tokenizer) -> dict[str, object]:
        return {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}

    return await with_tokenizer(request, "tokens", answer)


@router.post("/apply-template")
async def apply_template(request: Request, body: TemplateRequest) -> dict[str, object]:
    """Return the text that the model sees of a dialog, control tokens spelled."""
    chosen_model(request, body.model)
    service: Service = request.app.state.service

    def answer(tokenizer: Tokenizer) -> dict[str, object]:
        tools, begins = _offered(body.tools), body.add_generation_prompt
        ids = dialog_ids(service, body.messages, tools, add_generation_prompt=begins)
        return {"prompt": tokenizer.decode(ids, skip_special_tokens=False)}

    return await with_tokenizer(request, "messages", answer)
