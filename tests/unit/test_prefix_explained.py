"""What is kept of earlier prompts: within its bytes, without text, and cheap beside a request's own work."""

import json
import os
import secrets
import time
import tracemalloc
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from llamarium.checkpoints.tokenizers import load_tokenizer
from llamarium.engine.prefix import block_key, block_keys, root_key
from llamarium.server.prefix.explainer import BYTES_PER_BLOCK, PromptMemory
from llamarium.server.prefix.explanation import Explanation, Prompt, PromptRecord, explain, nearest
from llamarium.server.prefix.fields import PromptParts, digest_fields, pack, unpack
from llamarium.tokenizer.base import Tokenizer

pytestmark = pytest.mark.quick

SIZE = 32
DIALOG = [
    {"role": "system", "content": "You help in a garden. " * 8},
    {"role": "user", "content": "Which flowers bloom in March? " * 6},
]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


def prompt_of(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]] = DIALOG, **parts: Any) -> Prompt:
    found = PromptParts(messages=messages, **parts)
    root = root_key(found.model, found.salt, found.interventions)
    return Prompt.of(b"owner", root, tokenizer.chat(messages), SIZE, found)


def compared(tokenizer: Tokenizer, earlier: Prompt, now: Prompt, kept: bool = True) -> Explanation:
    blocks = {key: earlier.ids[i * SIZE : (i + 1) * SIZE] for i, key in enumerate(earlier.keys)} if kept else {}
    return explain(now, earlier.record(), blocks.get, tokenizer, shows_texts=True)


def test_keys_of_all_blocks_are_those_of_each() -> None:
    ids, root = [secrets.randbelow(2**20) for _ in range(3 * SIZE + 5)], root_key("a")
    expected, parent = [], root
    for start in range(0, 3 * SIZE, SIZE):
        parent = block_key(parent, ids[start : start + SIZE])
        expected.append(parent)
    assert block_keys(root, ids, SIZE) == expected


@pytest.mark.parametrize(
    ("parts", "reason", "field"),
    [
        ({"model": "gardener"}, "model", "model"),
        ({"salt": "b"}, "cache_salt", "cache_salt"),
        ({"interventions": "c0ffee"}, "interventions", "interventions"),
    ],
)
def test_what_all_keys_and_values_depend_on_is_named_first(
    tokenizer: Tokenizer, parts: dict[str, str], reason: str, field: str
) -> None:
    found = compared(tokenizer, prompt_of(tokenizer), prompt_of(tokenizer, **parts))
    assert (found.reason, found.path, found.matched_tokens) == (reason, field, 0)


def test_a_block_that_was_dropped_leaves_less_than_a_block_open(tokenizer: Tokenizer) -> None:
    changed = [DIALOG[0], {"role": "user", "content": DIALOG[1]["content"].replace("March", "May", 1)}]
    exact = compared(tokenizer, prompt_of(tokenizer), prompt_of(tokenizer, changed))
    coarse = compared(tokenizer, prompt_of(tokenizer), prompt_of(tokenizer, changed), kept=False)
    assert exact.is_exact and not coarse.is_exact
    assert 0 <= exact.matched_tokens - coarse.matched_tokens < SIZE and coarse.matched_tokens % SIZE == 0
    assert exact.path == coarse.path == "messages[1].content"


def test_the_most_similar_prompt_is_the_nearest(tokenizer: Tokenizer) -> None:
    other = [DIALOG[0], {"role": "user", "content": "Quite another question."}]
    now = prompt_of(tokenizer, [*DIALOG, {"role": "user", "content": "And in May?"}])
    records = [prompt_of(tokenizer, messages).record() for messages in (other, DIALOG, other)]
    assert nearest(now, records) is records[1]


def test_what_is_kept_has_no_text_and_survives_packing(tokenizer: Tokenizer) -> None:
    record = prompt_of(tokenizer).record()
    whole = record.keys + record.packed
    assert b"garden" not in whole and b"flowers" not in whole
    fields = digest_fields(PromptParts(messages=DIALOG).values(), "one")
    assert unpack(pack(fields)) == fields
    others = digest_fields(PromptParts(messages=DIALOG).values(), "two")
    assert not {one.exact for one in fields} & {one.exact for one in others}


def test_the_memory_holds_its_bound_and_forgets_the_oldest_and_what_is_continued() -> None:
    memory = PromptMemory(BYTES_PER_BLOCK * 512)

    def record(owner: bytes, number: int, blocks: int) -> PromptRecord:
        keys = [bytes([number % 256, i % 256]) * 8 for i in range(blocks)]
        fields = digest_fields(PromptParts().values())
        exact = array("Q", {field.exact for field in fields})
        return PromptRecord(owner, b"root", b"".join(keys), array("i", [number]), 10, pack(fields), 4, exact)

    for number in range(200):
        memory.add(record(b"a", number, 8))
    assert memory.num_bytes == sum(one.num_bytes for one in memory.newest(b"a")) <= BYTES_PER_BLOCK * 512
    assert memory.newest(b"a")[0].tail == array("i", [199])
    size = len(memory.newest(b"a"))
    memory.add(record(b"a", 199, 9))  # continues the newest one
    assert len(memory.newest(b"a")) <= size and memory.newest(b"a")[0].num_blocks == 9
    memory.add(record(b"b", 1, 10**5))  # larger than all of it
    assert memory.newest(b"b") == [] and memory.num_bytes <= BYTES_PER_BLOCK * 512


def test_many_duplicates_and_odd_fields_are_compared_at_once(tokenizer: Tokenizer) -> None:
    """Twenty thousand equal messages, and JSON that is none, take no time that grows with their square."""
    many = [{"role": "user", "content": "ok"}] * 20_000
    odd = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "", "function": {"name": "f", "arguments": "["}}]},
        {"role": "tool", "tool_call_id": "\ud800", "content": "\x00" * 1000},
    ]
    begin = time.process_time()
    for messages in (many, [*odd, *many]):
        values = PromptParts(messages=messages).values()
        json.dumps([one.path for one in digest_fields(values)])
    earlier = Prompt.of(b"o", b"r", range(100), SIZE, PromptParts(messages=many))
    now = Prompt.of(b"o", b"r", range(1, 101), SIZE, PromptParts(messages=[*odd, *many]))
    assert compared(tokenizer, earlier, now).path is not None
    assert time.process_time() - begin < 8  # one second; all pairs would take minutes


def test_the_memory_takes_no_more_of_the_process_than_it_says() -> None:
    """64 bytes for each cached block, as Python's allocator counts them."""
    blocks = 4096

    def record(number: int) -> PromptRecord:
        keys = os.urandom(16 * 8)
        fields = digest_fields(PromptParts(messages=[{"role": "user", "content": f"{number}"}]).values())
        exact = array("Q", [field.exact for field in fields])
        return PromptRecord(f"{number % 7}".encode(), b"root", keys, array("i", range(9)), 10, pack(fields), 4, exact)

    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        memory = PromptMemory(BYTES_PER_BLOCK * blocks)
        for number in range(2000):  # many times what it has room for
            memory.add(record(number))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert BYTES_PER_BLOCK * blocks / 2 < taken <= BYTES_PER_BLOCK * blocks
