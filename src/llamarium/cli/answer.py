"""Saying something in a dialog, and the answer as it grows: where it is written, and why it ended."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llamarium.cli.output import Stopwatch, note
from llamarium.cli.speculation import SPECULATION, speculation_details
from llamarium.cli.text import check_fits
from llamarium.cli.wrap import writer

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.generation.conversation import Conversation

_MIN_REPEATED, _MIN_TIMES, _MAX_PERIOD = 64, 4, 128


def say(
    conversation: "Conversation[Llama]",
    text: str,
    options: dict[str, Any],
    stats: bool | None,
    *,
    may_repeat: bool = False,
) -> None:
    """Say something and write the answer as it grows; interrupted, what there is of it stays in the dialog."""
    check_fits(conversation.llama, text)
    watch, out = Stopwatch(stats), writer()
    pieces = conversation.say(text, **options)
    ids: list[int] = []
    reason, period = None, None
    try:
        for piece in pieces:
            watch.count(len(piece.token_ids))
            out.write(piece.text)
            ids += piece.token_ids
            reason = piece.finish_reason
            period = None if may_repeat or reason else repeated(ids)
            if period is not None:
                break
    finally:
        pieces.close()  # puts the answer into the dialog, if it was interrupted while it was being written
        out.finish()
    out.write("\n")
    out.finish()
    if period is not None:
        note(
            f"[stopped: the last {_needed(period)} tokens are the same {period} again and again. --repetition-penalty "
            "1.1 makes that rarer, --allow-repetition lets it go on]"
        )
    elif reason == "length":
        _explain_length(conversation, len(ids), options)
    watch.report(*speculation_details(options))


def repeated(ids: Sequence[int]) -> int | None:
    """Return how many tokens the end of an answer repeats, or None if it does not: four times, and 64 tokens in all."""
    for period in range(1, _MAX_PERIOD + 1):
        needed = _needed(period)
        if len(ids) >= needed and all(ids[-i] == ids[-i - period] for i in range(1, needed - period + 1)):
            return period
    return None


def _needed(period: int) -> int:
    """Return how many tokens have to be repetition."""
    times = max(_MIN_TIMES, -(-_MIN_REPEATED // period))
    return times * period


def _explain_length(conversation: "Conversation[Llama]", num_tokens: int, options: dict[str, Any]) -> None:
    """Say why an answer was cut, unless it was where the person wanted it."""
    llama = conversation.llama
    if num_tokens < llama.chat_params(**sampling_only(options)).max_tokens:
        context = llama.config.max_position_embeddings
        note(f"[cut: the context of {context:,} tokens is full; /reset begins a new dialog]")
    elif "max_new_tokens" not in options:
        note(f"[cut at {num_tokens:,} tokens; -n allows more]")


def sampling_only(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in (*SPECULATION, "kv_cache_dtype")}
