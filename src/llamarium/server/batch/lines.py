"""Reads the lines of a batch within limits of size, and parses their requests.

A line is `{"custom_id": ..., "method": "POST", "url": "/v1/...", "body": {...}}`. Source: OpenAI's batch API.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar, Literal, cast

from pydantic import Field

from llamarium.server.errors import ApiError
from llamarium.server.fields import validated
from llamarium.server.http.body import MAX_LEVELS, MAX_VALUES
from llamarium.server.openai.fields import Body
from llamarium.server.settings import Settings
from llamarium.strict_json import NotJson, parse_json

MAX_CUSTOM_ID_CHARACTERS = 512
"""Maximum length of a custom_id."""

MAX_LINE_BYTES = Settings().max_body_bytes + 2**16
"""Maximum size of a line: a request body and the line's other fields."""

_PART_BYTES = 2**20  # an overlong line is read in parts of this size


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a batch.

    Attributes:
        number: Line number, from 1.
        text: Content; empty if the line is too long.
        digest: Digest of the whole content.
        custom_id: The request's custom_id; None if it is missing or cannot be read.
    """

    number: int
    text: bytes
    digest: str
    custom_id: str | None

    @property
    def id(self) -> str:
        """Id of the line's answer: a hash of the content, and without custom_id of the number, to detect changes."""
        place = "" if self.custom_id is not None else f"{self.number} "
        return f"batch_req_{hashlib.sha256(f'{place}{self.digest}'.encode()).hexdigest()[:24]}"


class BatchRequest(Body):
    """The request of a line."""

    is_closed: ClassVar[bool] = True

    custom_id: str = Field(min_length=1, max_length=MAX_CUSTOM_ID_CHARACTERS)
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


def read_lines(file: BinaryIO, most_bytes: int = MAX_LINE_BYTES) -> Iterator[Line]:
    """Yield the lines of a seekable file, except blank ones.

    Lines longer than `most_bytes` are yielded with an empty text and their digest.
    """
    file.seek(0)
    number = 0
    while text := file.readline(most_bytes + 1):
        number += 1
        if len(text) > most_bytes and not text.endswith(b"\n"):
            yield Line(number, b"", _digest_of_rest(file, text), None)
        elif text := text.strip():
            yield Line(number, text, hashlib.sha256(text).hexdigest(), _name_of(text))


def noted(lines: Iterable[Line], note: Callable[[bytes], object]) -> Iterator[Line]:
    """Yield lines, and call `note` (e.g. a hash's `update`) with each line's id."""
    for line in lines:
        note(line.id.encode())
        yield line


def _digest_of_rest(file: BinaryIO, begin: bytes) -> str:
    """Read the rest of a line in parts, and return the digest of the whole line."""
    digest = hashlib.sha256(begin)
    while part := file.readline(_PART_BYTES):
        digest.update(part)
        if part.endswith(b"\n"):
            break
    return digest.hexdigest()


def _name_of(text: bytes) -> str | None:
    """Return a line's custom_id, even if the line is otherwise invalid."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = cast(dict[str, Any], value).get("custom_id") if isinstance(value, dict) else None
    if not isinstance(name, str) or not 0 < len(name) <= MAX_CUSTOM_ID_CHARACTERS:
        return None
    return name if name.isascii() or not any("\ud800" <= character <= "\udfff" for character in name) else None


def parse(line: Line) -> BatchRequest:
    """Return a line's request; ApiError if it is too large or invalid."""
    if not line.text:
        raise ApiError(413, "the line exceeds the maximum size of a request", code="request_too_large")
    try:
        value = parse_json(line.text, max_values=MAX_VALUES, max_levels=MAX_LEVELS + 1, portable=True)
    except NotJson as error:
        raise ApiError(400, f"the line is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "expected a JSON object with custom_id, method, url and body", code="invalid_json")
    return validated(BatchRequest, value)
