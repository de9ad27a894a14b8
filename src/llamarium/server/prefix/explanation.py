"""Compares a prompt with an earlier one, to explain why its prefix was not cached."""

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
"""Number of tokens shown before the first difference, and after it."""

_KEY_BYTES = 16
_OVERHEAD_BYTES = 400  # of a record besides its arrays: the object, its dictionary entries, and the arrays' headers
_BESIDE = 4  # maximum tokens between a text and the first difference: role markers, end of turn
_VERBATIM = re.compile(r"\.(id|name|tool_call_id|content(\[\d+\])?)$")  # templates write these verbatim or not at all
_ROOT_REASONS = ("model", "cache_salt", "interventions")
_DATE = re.compile(
    r"\d{1,4}(?:[-/.:]\d{1,2})+|\d{1,2}\s+(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
    r"|(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\w*\s+\d{1,2}|\d{10}",
)


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts around the first different token: the common text before it, and each prompt's text from it on."""

    before: str
    now: str
    earlier: str | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """The common prefix of a prompt and the nearest earlier one of the same API key, and their first difference.

    Attributes:
        reason: How the prompts differ.
        num_tokens: Length of the prompt in tokens.
        matched_tokens: Length of the common prefix in tokens.
        is_exact: False if the earlier prompt's next block is no longer in memory, so that the common prefix may be up
            to a block longer.
        path: Path of the first field that differs, None if none does.
        in_earlier: Whether the path is in the earlier request.
        is_time: Whether the texts that differ look like a date, a time or a time stamp.
        others: Paths of further fields that differ; may be incomplete.
        token: Position of the first different token, None if there is none.
        texts: The texts around that token, if texts are shown.
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
        """Return the explanation as a clause in English, without prompt text."""
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
        """Return the explanation as a header value, without prompt text."""
        parts = [f"matched={self.matched_tokens}", f"of={self.num_tokens}", f"reason={self.reason}"]
        if self.path is not None:
            parts.append(f"field={self.path}")
        if self.is_time:
            parts.append("time")
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as a JSON object."""
        members: dict[str, Any] = {
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
            members |= {"text_before": self.texts.before, "text": self.texts.now, "earlier_text": self.texts.earlier}
        return members


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """An earlier prompt and its answer.

    Attributes:
        owner: Digest of the API key.
        root: Prefix key before the first block.
        keys: Concatenated prefix keys of the full blocks.
        tail: Token ids after the last full block.
        num_prompt: Number of prompt tokens.
        packed: Packed fields, the prompt's before the answer's.
        num_prompt_fields: Number of the prompt's fields.
        exact: Distinct exact digests of the fields.
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
        """The unpacked fields."""
        return unpack(self.packed)

    @property
    def num_blocks(self) -> int:
        """Number of full blocks."""
        return len(self.keys) // _KEY_BYTES

    def key(self, block: int) -> Key:
        """Return the prefix key of a full block."""
        return self.keys[block * _KEY_BYTES : (block + 1) * _KEY_BYTES]

    def num_common_blocks(self, keys: bytes) -> int:
        """Return the number of blocks shared with a prompt; `keys` are its concatenated prefix keys."""
        low, high = 0, min(len(keys), len(self.keys)) // _KEY_BYTES
        # binary search: a key is a hash of all tokens up to its block's end, so one equal key means an equal prefix
        while low < high:
            middle = (low + high + 1) // 2
            end = middle * _KEY_BYTES
            if self.keys[end - _KEY_BYTES : end] == keys[end - _KEY_BYTES : end]:
                low = middle
            else:
                high = middle - 1
        return low

    def is_beginning_of(self, other: "PromptRecord") -> bool:
        """Whether another record contains all blocks and fields of this one, which makes this one redundant."""
        return (
            (self.owner, self.root) == (other.owner, other.root)
            and other.packed.startswith(self.packed)
            and other.keys.startswith(self.keys)
            and (self.num_blocks < other.num_blocks or other.tail[: len(self.tail)] == self.tail)
        )

    @property
    def num_bytes(self) -> int:
        """Memory used, in bytes."""
        parts = (self.keys, self.tail, self.packed, self.exact)
        return _OVERHEAD_BYTES + sum(map(sys.getsizeof, parts))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to compare with earlier ones: token ids, prefix keys of full blocks, and fields, also packed."""

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
        """Return a prompt.

        Args:
            owner: Digest of the API key.
            root: Prefix key before the first block.
            ids: Token ids.
            block_size: Tokens per block of the KV cache.
            parts: The prompt's parts.
        """
        values = list(islice(parts.values(), MAX_FIELDS))
        fields, keys = digest_fields(values, owner.hex()), block_keys(root, ids, block_size)
        return cls(owner, root, tuple(ids), block_size, values, fields, pack(fields), keys)

    def record(self, answer_ids: Sequence[int] = (), answer: Sequence[Value] = ()) -> PromptRecord:
        """Return the record of the prompt and an answer, without the answer's last token, which is never cached."""
        size, start = self.block_size, len(self.keys) * self.block_size
        rest = (*self.ids[start:], *answer_ids[:-1])  # after the prompt's last full block
        new = block_keys(self.keys[-1] if self.keys else self.root, rest, size)
        packed = self.packed + pack(digest_fields(answer, self.owner.hex()))
        tail, exact = array("i", rest[len(new) * size :]), array("Q", {row[0] for row in PACKED.iter_unpack(packed)})
        keys, num_fields = b"".join((*self.keys, *new)), len(self.fields)
        return PromptRecord(self.owner, self.root, keys, tail, len(self.ids), packed, num_fields, exact)


def nearest(prompt: Prompt, records: Sequence[PromptRecord]) -> PromptRecord | None:
    """Return the earlier prompt with the most equal fields; ties are broken by the number of shared blocks."""
    if not records:
        return None
    exact, keys = {item.exact for item in prompt.fields}, b"".join(prompt.keys)
    common = [(len(exact.intersection(item.exact)), item.num_common_blocks(keys)) for item in records]
    return records[common.index(max(common))]


@dataclass(frozen=True, slots=True)
class Shared:
    """The common prefix of a prompt and an earlier one.

    Attributes:
        num_tokens: Length in tokens.
        is_exact: False if the earlier prompt's next block is no longer in memory, so that less than a block more may
            be shared.
        ends: Which of the two prompts ends with the common prefix.
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
    """Return the common prefix of a prompt and an earlier one.

    Args:
        record: The earlier prompt.
        ids: The prompt's token ids.
        keys: Concatenated prefix keys of the prompt's full blocks.
        block_size: Tokens per block.
        ids_of: Returns the token ids of the block with a prefix key, or None if it is no longer in memory.
    """
    block = record.num_common_blocks(keys)
    start = block * block_size
    ours = ids[start : start + block_size]
    is_tail = block == record.num_blocks
    theirs = record.tail if is_tail else ids_of(record.key(block))
    if theirs is None:
        return Shared(start, is_exact=False, ends="neither" if ours else "now")
    pairs = enumerate(zip(ours, theirs, strict=False))
    num_equal = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    count = start + num_equal
    if count == len(ids):
        return Shared(count, ends="now")
    if is_tail and num_equal == len(theirs):
        return Shared(count, ends="earlier")
    after = [] if is_tail else record.tail if block + 1 == record.num_blocks else ids_of(record.key(block + 1))
    return Shared(count, earlier_ids=(*theirs[num_equal:], *(after or ())))


def explain(
    prompt: Prompt,
    record: PromptRecord | None,
    ids_of: Callable[[Key], Sequence[int] | None],
    tokenizer: Tokenizer,
    *,
    shows_texts: bool = False,
) -> Explanation:
    """Compare a prompt with an earlier one.

    Args:
        prompt: The prompt.
        record: The nearest earlier prompt, or None if there is none.
        ids_of: Returns the token ids of the block with a prefix key, or None if it is no longer in memory.
        tokenizer: The model's tokenizer.
        shows_texts: Whether the explanation contains texts.
    """
    count = len(prompt.ids)
    if record is None:
        return Explanation("first", count)
    shared = Shared(0)  # prompts with different roots share no blocks of the KV cache
    if record.root == prompt.root:
        shared = shared_tokens(record, prompt.ids, b"".join(prompt.keys), prompt.block_size, ids_of)
    extended = Explanation("extended", count, shared.num_tokens, shared.is_exact)
    if record.root == prompt.root and shared.ends != "neither":
        return extended if shared.ends == "earlier" else replace(extended, reason="contained")
    listed = differences(record.fields, prompt.fields)
    first = _first(prompt, shared, listed, tokenizer)
    others = tuple(difference.path for difference in listed if difference is not first)
    texts = _texts(prompt, shared, tokenizer)
    if first is None:
        first = _without_field(prompt, record, shared, texts)
    return replace(
        extended, reason=first.reason, path=first.path or None, in_earlier=first.is_earlier, others=others,
        is_time=first.reason in ("changed", "template") and _is_time(texts), token=shared.num_tokens,
        texts=texts if shows_texts else None,
    )  # fmt: skip


def _first(prompt: Prompt, shared: Shared, listed: list[Difference], tokenizer: Tokenizer) -> Difference | None:
    """Return the first difference in a field that may explain the first different token, or None.

    Not every field is part of the prompt, e.g. few templates write a tool call's id.
    """
    texts = {difference.path: value[-1] for difference, value in zip(prompt.fields, prompt.values, strict=True)}
    for difference in listed:
        verbatim = (
            difference.reason not in _ROOT_REASONS and not difference.is_earlier and _VERBATIM.search(difference.path)
        )
        if not verbatim or _is_at(prompt.ids, shared.num_tokens, texts.get(difference.path, "").strip(), tokenizer):
            return difference
    return None


def _is_at(ids: Sequence[int], place: int, text: str, tokenizer: Tokenizer) -> bool:
    """Whether a text occurs in a prompt at a token's position or right beside it."""
    reach = len(text.encode()) + _BESIDE  # a token has at least one byte
    return text in tokenizer.decode(ids[max(0, place - reach) : place + reach], skip_special_tokens=False)


def _without_field(prompt: Prompt, record: PromptRecord, shared: Shared, texts: Texts) -> Difference:
    """Return the difference of two prompts that no field explains."""
    if shared.num_tokens < record.num_prompt - 1:
        return Difference("changed", "prompt") if not _is_dialog(prompt) else Difference("template", "")
    answers = [item for item in record.fields[record.num_prompt_fields :] if item in prompt.fields]
    is_same = texts.earlier is not None and _same_beginning(texts.now, texts.earlier)
    if answers and is_same:
        return Difference("retokenized", answers[-1].path)
    return Difference("template", "") if _is_dialog(prompt) else Difference("changed", "prompt")


def _is_dialog(prompt: Prompt) -> bool:
    return any(item.is_message for item in prompt.fields)


def _same_beginning(a: str, b: str) -> bool:
    length = min(len(a), len(b))
    return length > 0 and a[:length] == b[:length]


def _texts(prompt: Prompt, shared: Shared, tokenizer: Tokenizer) -> Texts:
    place = shared.num_tokens

    def decode(ids: Sequence[int]) -> str:
        return b"".join(tokenizer.visible_bytes(i, False) for i in ids).decode("utf-8", "replace")

    before = decode(prompt.ids[max(0, place - SHOWN_TOKENS) : place])
    earlier = decode(shared.earlier_ids[:SHOWN_TOKENS]) if shared.earlier_ids else None
    return Texts(before, decode(prompt.ids[place : place + SHOWN_TOKENS]), earlier)


def _is_time(texts: Texts) -> bool:
    """Whether both texts have a date or a time at the first difference."""
    if texts.earlier is None:
        return False
    line = texts.before.rpartition("\n")[2]
    return all(_crosses(line + after.partition("\n")[0], len(line)) for after in (texts.now, texts.earlier))


def _crosses(text: str, place: int) -> bool:
    return any(match.start() - 8 <= place <= match.end() for match in _DATE.finditer(text))
