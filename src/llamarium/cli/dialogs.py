"""Dialogs on disk: what `/save` writes and `/load` reads."""

import json
from pathlib import Path
from typing import Any, cast

from llamarium.errors import InputError, OutputError, escape, show_value

_ROLES = ("system", "user", "assistant")
_MAX_BYTES = 2**26


def save_dialog(path: Path, model: str, messages: list[dict[str, Any]], *, force: bool) -> None:
    """Write a dialog as JSON, complete or not at all."""
    from llamarium.io import atomic_file

    try:
        if path.exists() and not force:
            raise OutputError(f"{escape(path)} exists; /save --force {escape(path)} replaces it")
        with atomic_file(path) as file:
            file.write(json.dumps({"model": model, "messages": messages}, indent=2).encode())
    except (OSError, ValueError) as error:  # ValueError: a NUL or half a surrogate pair in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise OutputError(f"{escape(path)}: cannot be written: {reason}") from None


def load_dialog(path: Path) -> list[dict[str, Any]]:
    """Read the messages of a dialog."""
    from llamarium.config import read_json_object

    messages = read_json_object(path, _MAX_BYTES).get("messages")
    if not isinstance(messages, list):
        raise InputError(f'{escape(path)}: "messages" is {show_value(messages)}; expected a dialog, as /save writes it')
    return [_message(item, i, path) for i, item in enumerate(cast(list[Any], messages))]


def _message(item: Any, i: int, path: Path) -> dict[str, Any]:
    where = f"{escape(path)}: messages[{i}]"
    if not isinstance(item, dict):
        raise InputError(f"{where} is {show_value(item)}; expected an object with role and content")
    message = cast(dict[str, Any], item)
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES or (role == "system" and i > 0):
        expected = "system at the beginning alone, user and assistant"
        raise InputError(f"{where}.role is {show_value(role)}; expected {expected}")
    if not isinstance(content, str):
        raise InputError(f"{where}.content is {show_value(content)}; expected text")
    if more := sorted(set(message) - {"role", "content"}):
        raise InputError(f"{where} has {escape(', '.join(more))} besides role and content, which would be lost")
    return {"role": role, "content": content}
