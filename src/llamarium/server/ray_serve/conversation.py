"""What a conversation begins with: the same for each of its turns, and so the replica that has its keys and values."""

import hashlib
import json
from typing import Any, cast

MAX_CHARACTERS = 256
"""Of a prompt without turns that are looked at: who shares them is brought together."""

_MAX_IDS = 64  # of a prompt in ids
_WHOLE = ("model", "cache_salt", "system", "instructions", "tools")  # each decides on all keys and values after it


def conversation_of(path: str, body: object) -> str | None:
    """Return a name of the conversation that a request goes on with, or None if it has none.

    A `prompt_cache_key` is the client's own word for it. Without one, turns are looked at up to the first of the
    user's, texts to their first `MAX_CHARACTERS`. What is no request has a name or none: whoever answers it says what
    is wrong.

    Args:
        path: Where it is asked.
        body: The request's.
    """
    if not isinstance(body, dict):
        return None
    fields = cast(dict[str, Any], body)
    begin = fields.get("prompt_cache_key") or _begin(_prompt(path, fields))
    if not begin:
        return None
    named = json.dumps([begin, *(_plain(fields.get(name)) for name in _WHOLE)], sort_keys=True)
    return hashlib.blake2b(named.encode(), digest_size=16).hexdigest()


def _prompt(path: str, fields: dict[str, Any]) -> Any:
    prompt = next((fields[name] for name in ("messages", "input", "prompt") if fields.get(name)), None)
    if path == "/v1/responses" and isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]  # as which it stands before the next turn
    return prompt


def _begin(prompt: object) -> object:
    if isinstance(prompt, str):
        return prompt[:MAX_CHARACTERS]
    if not isinstance(prompt, list) or not prompt:
        return None
    parts = cast(list[Any], prompt)
    if isinstance(parts[0], dict):
        roles = [one.get("role") if isinstance(one, dict) else None for one in parts]
        turns = parts[: roles.index("user") + 1] if "user" in roles else parts
        return [[_role(turn), _plain(turn)] for turn in turns]
    return parts[:_MAX_IDS] if isinstance(parts[0], int) else _begin(parts[0])


def _role(turn: Any) -> object:
    return turn.get("role") if isinstance(turn, dict) else None


def _plain(value: Any) -> object:
    """Return what a field says: clients write one text also as a part of a list, and with marks for caches."""
    if isinstance(value, list):
        said = [_plain(one) for one in cast(list[Any], value)]
        return "".join(cast(list[str], said)) if all(isinstance(one, str) for one in said) else said
    if not isinstance(value, dict):
        return value
    fields = cast(dict[str, Any], value)
    text = fields.get("content", fields.get("text"))
    if text is not None:
        return _plain(text)
    return {name: item for name, item in fields.items() if name != "cache_control"}
