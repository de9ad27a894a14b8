"""Error responses: message, status and code, in the format of the path's protocol.

Paths at or below `/v1/messages` use Anthropic's format, all others OpenAI's.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from llamarium import errors
from llamarium.sampling.keywords import SamplingKeywords

_SAMPLING = frozenset(SamplingKeywords.__annotations__)
_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_KINDS = {
    **_KINDS,
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}
_NO_MEMORY = "memory ran out for all running requests and this one was aborted; try again later"
_FAILURES: tuple[tuple[type[errors.LlamariumError], int, str, str], ...] = (
    (errors.RequestTimeoutError, 408, "request_timeout", ""),
    (errors.EngineStoppedError, 503, "unavailable", "the server stopped before the answer was complete"),
    (errors.OverloadedError, 503, "overloaded", _NO_MEMORY),
    (errors.SlowReaderError, 408, "slow_reader", ""),
    (errors.AnswerError, 500, "model_error", ""),
    (errors.FunctionError, 500, "model_error", ""),
    (errors.MissingPackageError, 501, "missing_package", ""),
    (errors.NoModulesError, 501, "no_modules", ""),
)
"""Errors while an answer is generated: status, code, and a message that replaces the error's own unless empty."""


class Detail(BaseModel):
    """An error in OpenAI's form."""

    message: str = Field(description="what is wrong, and what to do")
    type: str = Field(description="class of the error")
    param: str | None = Field(description="path of the invalid field")
    code: str | None = Field(description="name of the error, for programs")


class ErrorBody(BaseModel):
    """The body of an error response, in OpenAI's form."""

    error: Detail = Field(description="the error")


class AnthropicCause(BaseModel):
    """OpenAI's `code` of an error, and the path of the field that is at fault."""

    error_code: str | None = Field(description="name of the error, for programs")
    param: str | None = Field(description="path of the invalid field")


class AnthropicDetail(BaseModel):
    """An error in Anthropic's form."""

    type: str = Field(description="class of the error")
    message: str = Field(description="what is wrong, and what to do")
    details: AnthropicCause | None = Field(None, description="cause of the error")


class AnthropicErrorBody(BaseModel):
    """The body of an error response, in Anthropic's form."""

    type: Literal["error"] = Field(description="kind of the body")
    error: AnthropicDetail = Field(description="the error")
    request_id: str | None = Field(description="id of the request, as in the response header")


def documented(body: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return a route's error responses, for the OpenAPI description."""
    return {
        "4XX": {"model": body, "description": "The request is invalid or was rejected."},
        "5XX": {"model": body, "description": "The server failed or is not ready."},
    }


class ApiError(HTTPException):
    """A request that was rejected or failed.

    Any code that reads or answers requests may raise it, so not every docstring lists it.

    Attributes:
        message: What is wrong, what was expected and what to do.
        code: Machine-readable error code, or None.
        param: Path of the invalid field, e.g. `messages[0].content`, or None.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, None if headers is None else dict(headers))
        self.message, self.code, self.param = message, code, param

    @property
    def body(self) -> dict[str, Any]:
        """The error in OpenAI's format."""
        kind = "server_error" if self.status_code >= 500 else _KINDS.get(self.status_code, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self, request_id: str | None) -> dict[str, Any]:
        """Return the error in Anthropic's format."""
        kind = _ANTHROPIC_KINDS.get(self.status_code, "invalid_request_error")
        detail: dict[str, Any] = {"type": kind, "message": self.message}
        if self.code or self.param:
            detail["details"] = {"error_code": self.code, "param": self.param}
        return {"type": "error", "error": detail, "request_id": request_id}

    def body_at(self, path: str, request_id: str | None) -> dict[str, Any]:
        """Return the error in the format of a path's protocol; `request_id` is None if the request has no id yet."""
        return self.anthropic_body(request_id) if is_anthropic(path) else self.body

    def response(self, path: str, request_id: str | None) -> Response:
        """Return the error as a response; arguments as for `body_at`."""
        return JSON(self.body_at(path, request_id), self.status_code, self.headers)


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's protocol."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def internal_error() -> ApiError:
    """Return the error for a bug in the server."""
    return ApiError(500, "internal server error; see the server's log", code="internal_error")


class JSON(Response):
    """A JSON response in ASCII, as some line readers split lines at U+2028."""

    media_type = "application/json"

    def __init__(self, value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(json.dumps(value, allow_nan=False, separators=(",", ":")), status, headers)


def of_library(error: errors.LlamariumError, *, field: str | None = None, source: str = "") -> ApiError:
    """Translate a library error to an API error.

    Args:
        error: The error.
        field: Field with the prompt or text, for errors about it.
        source: The tokenizer's path, which is removed from the message.
    """
    message = str(error).removeprefix(f"{source}: ")
    message = message.replace(source, "the tokenizer") if source else message
    if isinstance(error, errors.ContextLengthError | errors.MemoryBudgetError):
        return ApiError(400, message, code="context_length_exceeded", param=field)
    if isinstance(error, errors.SamplingError):
        name = message.replace("[", " ").replace(":", " ").split(" ", 1)[0]
        return ApiError(400, message, param=name if name in _SAMPLING else None)
    if isinstance(error, errors.QuestionError):
        status = 404 if isinstance(error, errors.UnknownNameError) else 400
        return ApiError(status, message, code=error.code, param=error.param)
    if isinstance(error, errors.ToolError):
        return ApiError(400, message, param=error.param)
    if isinstance(error, errors.TokenizerError | errors.InputError):
        return ApiError(400, message, param=field)
    for kind, status, code, text in _FAILURES:
        if isinstance(error, kind):
            headers = {"retry-after": "1"} if kind is errors.OverloadedError else None
            return ApiError(status, text or message, code=code, headers=headers)
    return internal_error()  # e.g. errors of the model's files, as clients must not see their paths
