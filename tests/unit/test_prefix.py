"""The prefix index: what is found of a block in part, and that finding it takes no longer the more there is."""

from typing import Any

import pytest

from llamarium.engine.prefix import PrefixIndex, block_key, block_keys, root_key

pytestmark = pytest.mark.quick

ROOT = root_key(-1, "")


class Looked(dict[int, Any]):
    """Counts how often something is looked up."""

    number = 0

    def __getitem__(self, key: int) -> Any:
        self.number += 1
        return super().__getitem__(key)


def filled(contents: list[list[int]]) -> PrefixIndex:
    """An index with one block for each of these, all at the beginning."""
    index = PrefixIndex(len(contents), 4)
    for ids in contents:
        (block,) = index.pool.take(1)
        index.enter(ROOT, block, ids)
        index.pool.release([block])
    return index


def test_the_longest_is_found_and_of_equals_the_newest() -> None:
    index = filled([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7], [2, 2, 3, 8], [1, 2]])
    for ids, block, count in (([1, 2, 3, 9], 1, 3), ([1, 2, 8], 4, 2), ([2, 9], 3, 1), ([3, 2, 3], None, 0)):
        found = index.find(ROOT, ids)
        assert (found.partial, found.num_partial) == (block, count)
    assert index.find(ROOT, [1, 2, 8]).is_all and not index.find(ROOT, [2, 9]).is_all


def test_one_among_thousands_is_found_without_looking_at_them() -> None:
    index = filled([[7, 7, 7, 7], *([1, i, i, i] for i in range(4000)), [1, 5, 5, 6]])
    index._contents = looked = Looked(index._contents)
    found = index.find(ROOT, [7, 7, 7])
    assert (found.partial, found.num_partial) == (0, 3)
    found = index.find(ROOT, [1, 5, 5, 9])
    assert (found.partial, found.num_partial) == (4001, 3)
    assert looked.number < 80


def test_what_is_taken_for_something_else_is_forgotten() -> None:
    index = filled([[1, 2, 3, 4], [1, 2, 3, 5]])
    index.pool.take(2)
    assert index.find(ROOT, [1, 2, 3]).partial is None
    assert not index._children and not index._contents


def test_a_key_depends_on_everything_before_its_block() -> None:
    ids = list(range(12))
    keys = block_keys(ROOT, ids, 4)
    assert keys == [
        first := block_key(ROOT, ids[:4]),
        second := block_key(first, ids[4:8]),
        block_key(second, ids[8:]),
    ]
    assert block_key(first, [1, 2, 3, 4]) != block_key(second, [1, 2, 3, 4])
    assert block_keys(ROOT, [9, *ids[1:]], 4)[2] != keys[2]


def test_tokens_after_another_beginning_are_no_hit() -> None:
    index = filled([[1, 2, 3, 4]])
    assert index.find(ROOT, [1, 2, 3, 4]).blocks == [0]
    other = index.find(root_key(-1, "another"), [1, 2, 3, 4])
    assert (other.blocks, other.partial) == ([], None)


def test_a_hash_collision_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarium.engine.prefix.block_key", lambda parent, _: parent)
    index = filled([[1, 2, 3, 4]])
    assert index.find(ROOT, [1, 2, 3, 4]).blocks == [0]
    found = index.find(ROOT, [1, 2, 3, 5])
    assert (found.blocks, found.partial, found.num_partial) == ([], 0, 3)
