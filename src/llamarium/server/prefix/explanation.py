"""Why a prompt's prefix was not cached: found when it is submitted, completed when the first token is there."""

import re
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from llamarium.engine.prefix import Key, block_keys
from llamarium.errors import counted
from llamarium.server.prefix.compare import Difference, Reason, differences
from llamarium.server.prefix.fields import MAX_FIELDS, PACKED, Field, PromptParts, Value, digest_fields, pack, unpack
from llamarium.tokenizer.base import Tokenizer

SHOWN_TOKENS = 24
"""Tokens of a text before and after the first one that differs."""

_KEY_BYTES = 16
_OVERHEAD_BYTES = 400  # of a record besides its arrays: the object, its place in two dictionaries, and their headers
_BESIDE = 4  # tokens between a text and the first one that differs: a role's mark, the end of a turn
_VERBATIM = re.compile(r"\.(id|name|tool_call_id|content(\[\d+\])?)$")  # fields that are written as they are, or not
_ROOT_REASONS = ("model", "cache_salt", "interventions")
_DATE = re.compile(
    r"\d{1,4}(?:[-/.:]\d{1,2})+|\d{1,2}\s+(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
    r"|(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\w*\s+\d{1,2}|\d{10}",
)


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts around the first token that differs: what both prompts have before it, and what each has from it on."""

    before: str
    now: str
    earlier: str | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a prompt shares with the nearest earlier one of the same key, and where they part.

    Attributes:
        matched_tokens: Tokens that both begin with.
        is_exact: False if the earlier prompt's next block is not in memory any more: they may share the rest of one.
        path: The field with the first difference, None if none differs.
        in_earlier: The path is in the earlier request.
        is_time: What differs looks like a date, a time or a time stamp.
        others: Further fields that differ, some of them.
        token: The place of the first token that differs, None if none does.
    """

    reason: Reason
    num_tokens: int
    matched_tokens: int = 0
    is_exact: bool = True
    path: str | None = None
    in_earlier: bool = False
    is_time: bool = False
    others: tuple[str, ...] = ()
    token: int | None = None
    texts: Texts | None = None

    def sentence(self) -> str:
        """Return it in words, without any text of a prompt."""
        where = self.path or "the prompt"
        after = f" after {self.matched_tokens} of {counted(self.num_tokens, 'token')}"
        if self.is_time and self.reason == "changed":
            return f"a date or time in {where} changed{after}"
        if self.is_time:
            return f"a date or time written by the chat template changed{after}"
        match self.reason:
            case "first":
                return "there is no earlier prompt with this API key"
            case "extended":
                return f"it continues an earlier prompt and shares {counted(self.matched_tokens, 'token')}"
            case "contained":
                return "it is a prefix of an earlier prompt"
            case "model" | "cache_salt" | "interventions":
                return f"{self.path} changed, which invalidates the whole prefix"
            case "whitespace":
                return f"white space in {where} changed{after}"
            case "rendering":
                return f"{where} has the same JSON values, written differently{after}"
            case "reasoning_dropped":
                return f"the reasoning in {where} was dropped{after}"
            case "retokenized":
                return f"{where} has the same text, but other tokens{after}"
            case "template":
                return f"the chat template wrote different text{after}"
            case "changed" | "added" | "removed" | "reordered":
                verb = "was " if self.reason != "changed" else ""
                return f"{where} {verb}{self.reason}{after}"

    def header(self) -> str:
        """Return it as a header's value, without any text of a prompt."""
        parts = [f"matched={self.matched_tokens}", f"of={self.num_tokens}", f"reason={self.reason}"]
        if self.path is not None:
            parts.append(f"field={self.path}")
        if self.is_time:
            parts.append("time")
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        found: dict[str, Any] = {
            "reason": self.reason,
            "field": self.path,
            "other_fields": list(self.others),
            "is_date_or_time": self.is_time,
            "matched_tokens": self.matched_tokens,
            "first_different_token": self.token,
            "is_exact": self.is_exact,
            "message": self.sentence(),
        }
        if self.texts is not None:
            found |= {"text_before": self.texts.before, "text": self.texts.now, "earlier_text": self.texts.earlier}
        return found


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """An earlier prompt and its answer.

    Attributes:
        owner: A digest of the API key.
        root: The prefix key before its first block.
        keys: The prefix keys of its whole blocks, one after the other.
        tail: The ids of its tokens after these.
        num_prompt: How many of its tokens were the prompt's.
        packed: Its fields, the answer's after the prompt's.
        num_prompt_fields: How many of them were the prompt's.
        exact: The exact digests of its fields, each once.
    """

    owner: Key
    root: Key
    keys: bytes
    tail: "array[int]"
    num_prompt: int
    packed: bytes
    num_prompt_fields: int
    exact: "array[int]" = field(repr=False, compare=False)

    @property
    def fields(self) -> list[Field]:
        """Its fields."""
        return unpack(self.packed)

    @property
    def num_blocks(self) -> int:
        """Whole blocks."""
        return len(self.keys) // _KEY_BYTES

    def key(self, block: int) -> Key:
        """Return the prefix key of a whole block."""
        return self.keys[block * _KEY_BYTES : (block + 1) * _KEY_BYTES]

    def num_common_blocks(self, keys: bytes) -> int:
        """Return how many blocks it shares with a prompt whose keys are given one after the other."""
        low, high = 0, min(len(keys), len(self.keys)) // _KEY_BYTES
        while low < high:  # a key is a hash of all tokens up to its block's end
            middle = (low + high + 1) // 2
            end = middle * _KEY_BYTES
            if self.keys[end - _KEY_BYTES : end] == keys[end - _KEY_BYTES : end]:
                low = middle
            else:
                high = middle - 1
        return low

    def is_beginning_of(self, other: "PromptRecord") -> bool:
        """Whether another record has all of its blocks and fields, so that it tells nothing more."""
        return (
            (self.owner, self.root) == (other.owner, other.root)
            and other.packed.startswith(self.packed)
            and other.keys.startswith(self.keys)
            and (self.num_blocks < other.num_blocks or other.tail[: len(self.tail)] == self.tail)
        )

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        parts = (self.keys, self.tail, self.packed, self.exact)
        return _OVERHEAD_BYTES + sum(map(sys.getsizeof, parts))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that is compared with earlier ones: its ids, their prefix keys, and its fields, also packed."""

    owner: Key
    root: Key
    ids: tuple[int, ...]
    block_size: int
    values: list[Value]
    fields: list[Field]
    packed: bytes
    keys: list[Key] = field(default_factory=list[Key])

    @classmethod
    def of(cls, owner: Key, root: Key, ids: Sequence[int], block_size: int, parts: PromptParts) -> "Prompt":
        """Return a prompt of an owner, whose first block goes on from the key `root`."""
        values = list(islice(parts.values(), MAX_FIELDS))
        fields, keys = digest_fields(values, owner.hex()), block_keys(root, ids, block_size)
        return cls(owner, root, tuple(ids), block_size, values, fields, pack(fields), keys)

    def record(self, answer_ids: Sequence[int] = (), answer: Sequence[Value] = ()) -> PromptRecord:
        """Return what is kept of it, with an answer; its last token is never in the cache."""
        size, start = self.block_size, len(self.keys) * self.block_size
        rest = (*self.ids[start:], *answer_ids[:-1])  # after the prompt's last whole block
        new = block_keys(self.keys[-1] if self.keys else self.root, rest, size)
        packed = self.packed + pack(digest_fields(answer, self.owner.hex()))
        tail, exact = array("i", rest[len(new) * size :]), array("Q", {one[0] for one in PACKED.iter_unpack(packed)})
        keys, num_fields = b"".join((*self.keys, *new)), len(self.fields)
        return PromptRecord(self.owner, self.root, keys, tail, len(self.ids), packed, num_fields, exact)


def nearest(prompt: Prompt, records: Sequence[PromptRecord]) -> PromptRecord | None:
    """Return the earlier prompt with the most values in common, and of those the one with the most blocks."""
    if not records:
        return None
    exact, keys = {one.exact for one in prompt.fields}, b"".join(prompt.keys)
    common = [(len(exact.intersection(one.exact)), one.num_common_blocks(keys)) for one in records]
    return records[common.index(max(common))]


@dataclass(frozen=True, slots=True)
class Shared:
    """The tokens that a prompt shares with an earlier one.

    Attributes:
        num_tokens: How many, from the first on.
        is_exact: False if the earlier prompt's next block is not in memory any more: there are less than a block more.
        ends: Which of the two ends there, or neither.
        earlier_ids: The earlier prompt's next tokens, as far as they are known.
    """

    num_tokens: int
    is_exact: bool = True
    ends: Literal["now", "earlier", "neither"] = "neither"
    earlier_ids: tuple[int, ...] = ()


def shared_tokens(
    record: PromptRecord,
    ids: Sequence[int],
    keys: bytes,
    block_size: int,
    ids_of: Callable[[Key], Sequence[int] | None],
) -> Shared:
    """Return what a prompt shares with an earlier one, whose blocks `ids_of` returns."""
    block = record.num_common_blocks(keys)
    start = block * block_size
    ours = ids[start : start + block_size]
    is_tail = block == record.num_blocks
    theirs = record.tail if is_tail else ids_of(record.key(block))
    if theirs is None:
        return Shared(start, is_exact=False, ends="neither" if ours else "now")
    pairs = enumerate(zip(ours, theirs, strict=False))
    same = next((i for i, (one, other) in pairs if one != other), min(len(ours), len(theirs)))
    count = start + same
    if count == len(ids):
        return Shared(count, ends="now")
    if is_tail and same == len(theirs):
        return Shared(count, ends="earlier")
    after = [] if is_tail else record.tail if block + 1 == record.num_blocks else ids_of(record.key(block + 1))
    return Shared(count, earlier_ids=(*theirs[same:], *(after or ())))


def explain(
    prompt: Prompt,
    record: PromptRecord | None,
    ids_of: Callable[[Key], Sequence[int] | None],
    tokenizer: Tokenizer,
    *,
    shows_texts: bool = False,
) -> Explanation:
    """Compare a prompt with an earlier one, whose blocks `ids_of` returns; texts only if they are shown."""
    count = len(prompt.ids)
    if record is None:
        return Explanation("first", count)
    shared = Shared(0)  # with another root no key or value is the same
    if record.root == prompt.root:
        shared = shared_tokens(record, prompt.ids, b"".join(prompt.keys), prompt.block_size, ids_of)
    found = Explanation("extended", count, shared.num_tokens, shared.is_exact)
    if record.root == prompt.root and shared.ends != "neither":
        return found if shared.ends == "earlier" else replace(found, reason="contained")
    listed = differences(record.fields, prompt.fields)
    first = _first(prompt, shared, listed, tokenizer)
    others = tuple(one.path for one in listed if one is not first)
    texts = _texts(prompt, shared, tokenizer)
    if first is None:
        first = _without_field(prompt, record, shared, texts)
    return replace(
        found, reason=first.reason, path=first.path or None, in_earlier=first.is_earlier, others=others,
        is_time=first.reason in ("changed", "template") and _is_time(texts), token=shared.num_tokens,
        texts=texts if shows_texts else None,
    )  # fmt: skip


def _first(prompt: Prompt, shared: Shared, listed: list[Difference], tokenizer: Tokenizer) -> Difference | None:
    """Return the first field that differs and whose text may stand where the tokens differ, or None.

    Not every field is part of the prompt: few templates write a call's id, say.
    """
    texts = {one.path: value[-1] for one, value in zip(prompt.fields, prompt.values, strict=True)}
    for one in listed:
        verbatim = one.reason not in _ROOT_REASONS and not one.is_earlier and _VERBATIM.search(one.path)
        if not verbatim or _is_at(prompt.ids, shared.num_tokens, texts.get(one.path, "").strip(), tokenizer):
            return one
    return None


def _is_at(ids: Sequence[int], place: int, text: str, tokenizer: Tokenizer) -> bool:
    """Whether a text stands in a prompt where a token is, or right beside it."""
    reach = len(text.encode()) + _BESIDE  # a token is a byte at least
    return text in tokenizer.decode(ids[max(0, place - reach) : place + reach], skip_special_tokens=False)


def _without_field(prompt: Prompt, record: PromptRecord, shared: Shared, texts: Texts) -> Difference:
    """Return the difference of two prompts whose fields are equal as far as both have them."""
    if shared.num_tokens < record.num_prompt - 1:
        return Difference("changed", "prompt") if not _is_dialog(prompt) else Difference("template", "")
    answers = [one for one in record.fields[record.num_prompt_fields :] if one in prompt.fields]
    is_same = texts.earlier is not None and _same_beginning(texts.now, texts.earlier)
    if answers and is_same:
        return Difference("retokenized", answers[-1].path)
    return Difference("template", "") if _is_dialog(prompt) else Difference("changed", "prompt")


def _is_dialog(prompt: Prompt) -> bool:
    return any(one.is_message for one in prompt.fields)


def _same_beginning(one: str, other: str) -> bool:
    length = min(len(one), len(other))
    return length > 0 and one[:length] == other[:length]


def _texts(prompt: Prompt, shared: Shared, tokenizer: Tokenizer) -> Texts:
    place = shared.num_tokens

    def decode(ids: Sequence[int]) -> str:
        return b"".join(tokenizer.visible_bytes(i, False) for i in ids).decode("utf-8", "replace")

    before = decode(prompt.ids[max(0, place - SHOWN_TOKENS) : place])
    earlier = decode(shared.earlier_ids[:SHOWN_TOKENS]) if shared.earlier_ids else None
    return Texts(before, decode(prompt.ids[place : place + SHOWN_TOKENS]), earlier)


def _is_time(texts: Texts) -> bool:
    """Whether both texts have a date or a time where they part."""
    if texts.earlier is None:
        return False
    line = texts.before.rpartition("\n")[2]
    return all(_crosses(line + after.partition("\n")[0], len(line)) for after in (texts.now, texts.earlier))


def _crosses(text: str, place: int) -> bool:
    return any(found.start() - 8 <= place <= found.end() for found in _DATE.finditer(text))
