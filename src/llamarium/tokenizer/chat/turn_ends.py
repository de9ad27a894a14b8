"""Find the control tokens that end an assistant's turn in a chat template.

A file's `eos_token` is often not the token that ends a turn, and an answer that does not stop there continues as the
user. So the template renders small dialogs with an assistant's message; the control token right after the message's
text ends a turn.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from llamarium.errors import ChatFormatError
from llamarium.tokenizer.chat.rendering import TRAINING_DAY, TemplateRenderer
from llamarium.tokenizer.special import split_control

_ANSWER = "Qxz7answer"


@lru_cache(64)
def read_turn_ends(
    template: str, fixed: tuple[tuple[str, Any], ...], control: tuple[tuple[str, int], ...]
) -> tuple[int, ...]:
    """Return the ids of the control tokens that end a turn; empty if the template refuses the dialogs.

    Args:
        template: The template.
        fixed: The standard variables of every dialog.
        control: Spelling and id of each control token that may end a turn.
    """
    renderer = TemplateRenderer(template, "", dict(fixed))
    try:
        answers = renderer.attempt(list(_dialogs()), TRAINING_DAY)
    except ChatFormatError:  # the process cannot be started; rendering a dialog will report it
        return ()
    ends: list[int] = []
    for answer in answers:
        _, answer_text, rest = answer.get("text", "").rpartition(_ANSWER)
        parts = split_control(rest.lstrip(), dict(control)) if answer_text else []
        if parts and not isinstance(parts[0], str):
            ends.append(parts[0])
    return tuple(dict.fromkeys(ends))


def _dialogs() -> Iterator[dict[str, Any]]:
    """Yield dialogs with contents as text and as parts, with and without a turn after the answer."""
    for as_parts in (False, True):
        turns = [
            {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text}
            for role, text in (("user", "x"), ("assistant", _ANSWER), ("user", "x"))
        ]
        for messages in (turns, turns[:2]):
            yield {"messages": messages, "tools": None, "add_generation_prompt": False}
