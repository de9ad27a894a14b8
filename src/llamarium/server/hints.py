"""Fields without effect: reported in a response header and the log, or rejected with `--strict-fields`.

These are the table's hints (`server/field_table.py`), unknown names, and fields found to have no effect while the
request is read, such as tools that do not run here and schema keywords that cannot be enforced.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from llamarium.errors import show_value
from llamarium.server.arguments import is_whole
from llamarium.server.dialogs import misplaced
from llamarium.server.errors import ApiError
from llamarium.server.faults import Path, spelled, unknown
from llamarium.server.field_table import TABLE
from llamarium.server.fields import Body
from llamarium.server.lifecycle.service import Service
from llamarium.server.other_tools import OtherTool

HEADER = "x-llamarium-no-effect"
"""Response header with the request's fields that had no effect."""

HINT_HEADERS = frozenset(name.encode() for name in TABLE["headers"])
"""Request headers without effect."""

MAX_NAMES = 20
"""Maximum number of reported names that are not in the table; a request may have any number of them."""

MAX_NAME_CHARACTERS = 64
"""Maximum length of a name in the header and the log."""

_MAX_PATH_CHARACTERS = 160

LOGPROBS = "message.output_text.logprobs"
"""The only value of `include` that has an effect."""


class NoEffect:
    """The fields of one request that had no effect, for the response header and the log."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._others: set[int] = set()  # hashes save memory, as there may be many names

    def add(self, path: str) -> None:
        """Add a field by its path as text."""
        self._put(escaped(path, _MAX_PATH_CHARACTERS), is_known=False)

    def add_field(self, path: Path, *, is_known: bool) -> None:
        """Add a field by its path; `is_known` if it is in the table, otherwise its name is the client's."""
        *holder, name = path
        self._put(spelled((*holder, escaped(str(name), MAX_NAME_CHARACTERS)), numbers=False), is_known=is_known)

    def _put(self, name: str, *, is_known: bool) -> None:
        if name not in self._names:
            if not is_known:
                self._others.add(hash(name))
            if is_known or len(self._others) <= MAX_NAMES:
                self._names[name] = None

    def __str__(self) -> str:
        num_more = len(self._others) - MAX_NAMES
        return ",".join([*self._names, *([f"and-{num_more}-more"] if num_more > 0 else [])])


def no_effect_of(scope: MutableMapping[str, Any]) -> NoEffect:
    """Return the fields without effect of the request with this scope."""
    return scope.setdefault("no_effect", NoEffect())


def note_hints(body: Body, scope: MutableMapping[str, Any], service: Service) -> None:
    """Add a request's fields without effect to its scope.

    Raises:
        ApiError: 400 for the first of them, with `strict_fields`.
    """
    noted, is_strict = no_effect_of(scope), service.settings.strict_fields
    headers = {name.decode("latin-1") for name, _ in scope["headers"]}
    for name in TABLE["headers"]:
        if name in headers:
            _note(noted, (name,), is_strict, is_known=True)
    for path, is_known in _idle(body, service, ()):
        _note(noted, path, is_strict, is_known=is_known)


def _note(noted: NoEffect, path: Path, is_strict: bool, *, is_known: bool) -> None:
    if is_strict and not is_known:
        raise unknown(path)
    if is_strict:
        param = spelled(path)
        message = f"{param} has no effect here; leave it out, or start the server without --strict-fields"
        raise ApiError(400, message, code="unsupported_parameter", param=param)
    noted.add_field(path, is_known=is_known)


def _idle(value: Any, service: Service, path: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the path of each field without effect in a validated value, and whether it is in the table."""
    if isinstance(value, list) and value and isinstance(value[0], Body):
        for i, item in enumerate(value):
            yield from _idle(item, service, (*path, i))
    elif isinstance(value, OtherTool):
        if service.settings.strict_fields:
            raise misplaced(spelled((*path, "type")), f"is {show_value(value.label)}; expected a function")
        yield (*path, value.label), False
    elif isinstance(value, Body):
        fields = {name: item for name in type(value).model_fields if (item := getattr(value, name)) is not None}
        for name, item in fields.items():
            if name == "chat_template_kwargs":
                yield from (((*path, name, key), False) for key in _unread_variables(item, service))
            elif name == "arguments" and isinstance(item, str) and not is_whole(item):
                if service.settings.strict_fields:
                    raise misplaced(spelled((*path, name)), "are not JSON; expected the text of an object")
                yield (*path, name), True
            elif name not in value.hints:
                yield from _idle(item, service, (*path, name))
            elif not _has_effect(name, item, service):
                yield (*path, name), True
        for name in value.without_effect:
            yield (*path, name), name in value.hints or name in value.refused


def _unread_variables(variables: Mapping[str, Any], service: Service) -> list[str]:
    """Return the variables that the chat template does not read; with `strict_fields`, `encode_dialog` rejects them."""
    if service.loaded is None or service.settings.strict_fields:
        return []
    form = service.tokenizer.chat_format
    return [name for name in variables if form is None or name not in form.variables]


def _has_effect(name: str, value: Any, service: Service) -> bool:
    """Whether a hint has an effect on this server, e.g. because the chat template reads it."""
    form = None if service.loaded is None else service.tokenizer.chat_format
    match name:
        case "include":
            return {*value} <= {LOGPROBS}
        case "effort" | "reasoning_effort":
            return form is not None and "reasoning_effort" in form.variables
        case "store":
            proposer = None if service.loaded is None else service.loaded[1].proposer
            is_kept = proposer is not None and proposer.keeps_texts  # for n-gram drafts
            is_kept = is_kept or service.settings.recorder is not None
            return service.settings.responses is not None or (value is False and is_kept)
        case "return":
            return True  # a tool's `return` is passed to the chat template
        case "name" | "reasoning_content":
            return form is not None and name in form.message_keys
        case _:
            return False


def escaped(name: str, limit: int) -> str:
    """Return a name in printable ASCII without commas, for a list in a header, shortened to `limit` characters."""
    text = name[: limit + 1].encode("unicode_escape").decode("ascii").replace(",", "\\x2c")
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
