"""What a client is told of an error of the library: whose fault it was, and whether asking again helps."""

import pytest

from llamarium.errors import (
    AnswerError,
    CheckpointError,
    ContextLengthError,
    EngineStoppedError,
    LlamariumError,
    MemoryBudgetError,
    OverloadedError,
    QuestionError,
    RequestTimeoutError,
    SlowReaderError,
    UnknownNameError,
)
from llamarium.server.errors import of_library

TOLD: list[tuple[LlamariumError, int, str, str | None]] = [
    (ContextLengthError("too long"), 400, "context_length_exceeded", "messages"),
    (MemoryBudgetError("no cache is that large"), 400, "context_length_exceeded", "messages"),
    (RequestTimeoutError("late"), 408, "request_timeout", None),
    (SlowReaderError("not read"), 408, "slow_reader", None),
    (QuestionError("too many", code="too_many_numbers", param="ids"), 400, "too_many_numbers", "ids"),
    (UnknownNameError("no such pass", code="unknown_pass", param="id"), 404, "unknown_pass", "id"),
    (AnswerError("NaN"), 500, "model_error", None),
    (CheckpointError("/secret/path"), 500, "internal_error", None),
    (LlamariumError("/secret/path"), 500, "internal_error", None),
    (OverloadedError("no memory: at 0x123"), 503, "overloaded", None),
    (EngineStoppedError("on fire"), 503, "unavailable", None),
]


@pytest.mark.parametrize(("error", "status", "code", "param"), TOLD, ids=lambda value: repr(value)[:30])
def test_each_error_has_its_status(error: LlamariumError, status: int, code: str, param: str | None) -> None:
    told = of_library(error, field="messages")
    assert (told.status_code, told.code, told.param) == (status, code, param)
    assert not any(hidden in told.message for hidden in ("/secret", "0x", "fire"))


def test_who_gave_way_is_told_when_to_come_again() -> None:
    assert of_library(OverloadedError("no memory")).headers == {"retry-after": "1"}
