"""Identifies conversations by their beginning, so that each turn goes to the replica that has cached the prefix."""

import hashlib
import json
from typing import Any, cast

MAX_CHARACTERS = 256
"""Length of the prefix that identifies a prompt without turns: prompts with the same prefix go to the same replica."""

_MAX_IDS = 64  # length of that prefix for a prompt of token ids
_WHOLE = ("model", "cache_salt", "system", "instructions", "tools")  # the whole KV cache of a prompt depends on these


def conversation_of(path: str, body: object) -> str | None:
    """Return the name of a request's conversation, or None if it has none or the request is invalid.

    The name is a hash of the `prompt_cache_key`, or of the turns up to the first one of the user, or of the first
    `MAX_CHARACTERS` of a text. Invalid requests are rejected by the replica.

    Args:
        path: The request's path.
        body: The request's body as JSON.
    """
    if not isinstance(body, dict):
        return None
    fields = cast(dict[str, Any], body)
    begin = fields.get("prompt_cache_key") or _begin(_prompt(path, fields))
    if not begin:
        return None
    identity = json.dumps([begin, *(_plain(fields.get(name)) for name in _WHOLE)], sort_keys=True)
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


def _prompt(path: str, fields: dict[str, Any]) -> Any:
    prompt = next((fields[name] for name in ("messages", "input", "prompt") if fields.get(name)), None)
    if path == "/v1/responses" and isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]  # the next turn has this form
    return prompt


def _begin(prompt: object) -> object:
    if isinstance(prompt, str):
        return prompt[:MAX_CHARACTERS]
    if not isinstance(prompt, list) or not prompt:
        return None
    parts = cast(list[Any], prompt)
    if isinstance(parts[0], dict):
        roles = [part.get("role") if isinstance(part, dict) else None for part in parts]
        turns = parts[: roles.index("user") + 1] if "user" in roles else parts
        return [[role, _plain(turn)] for role, turn in zip(roles, turns, strict=False)]
    return parts[:_MAX_IDS] if isinstance(parts[0], int) else _begin(parts[0])


def _plain(value: Any) -> object:
    """Return a field's normalized value: lists of text parts become one text, and cache markers are dropped."""
    if isinstance(value, list):
        parts = [_plain(part) for part in cast(list[Any], value)]
        return "".join(cast(list[str], parts)) if all(isinstance(part, str) for part in parts) else parts
    if not isinstance(value, dict):
        return value
    fields = cast(dict[str, Any], value)
    text = fields.get("content", fields.get("text"))
    if text is not None:
        return _plain(text)
    return {name: item for name, item in fields.items() if name != "cache_control"}
