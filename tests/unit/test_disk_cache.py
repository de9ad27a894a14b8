"""The prefix cache on disk: what comes back is what was written, in a folder within its bound; all else is a miss."""

import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from hash_runner import SLOTS, HashRunner, alone, answers, request_of
from llamarium.engine.engine import Engine
from llamarium.engine.request import Request, TokenEvent
from llamarium.engine.tiers import disk_tier
from llamarium.engine.tiers.disk_cache import MARK, DiskCache
from llamarium.errors import OptionError
from llamarium.runtime.batch import BlockTable
from llamarium.sampling.params import SamplingParams

BYTES = b"keys and values"
PAGE = 4096


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def write(disk: DiskCache, number: int, parent: int = 0, content: bytes = BYTES) -> bool:
    return disk.write(key(number), key(parent), b"head", [memoryview(content)], lambda: True)


def read(disk: DiskCache, number: int, head: bytes = b"head") -> bytes | None:
    found = bytearray(len(BYTES))
    parts = [memoryview(found)[:5], memoryview(found)[5:]]
    return bytes(found) if disk.read(key(number), head, parts) else None


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name != MARK)


def taken(folder: Path) -> int:
    return sum(-(-path.stat().st_size // PAGE) * PAGE for path in folder.iterdir())


# --- the folder -------------------------------------------------------------------------------------------------------


def test_what_was_written_is_read_also_by_the_next_process(tmp_path: Path) -> None:
    with closing(DiskCache(tmp_path / "a" / "b")) as disk:
        assert read(disk, 1) is None and key(1) not in disk
        assert write(disk, 1) and key(1) in disk and read(disk, 1) == BYTES
        assert write(disk, 1) and disk.num_bytes == PAGE, "counted once"
    with closing(DiskCache(tmp_path / "a" / "b")) as disk:
        assert read(disk, 1) == BYTES and disk.num_bytes == PAGE
        assert read(disk, 1, b"hend") is None, "another block under this name"
        assert key(1) not in disk and not files(tmp_path / "a" / "b") and disk.num_bytes == 0


def test_a_byte_that_changed_anywhere_is_a_miss(tmp_path: Path) -> None:
    with closing(DiskCache(tmp_path)) as disk:
        for place in range(len(b"head" + BYTES) + 4):
            assert write(disk, 1)
            (path,) = files(tmp_path)
            content = bytearray(path.read_bytes())
            content[place] ^= 1 << place % 8
            path.write_bytes(content)
            assert read(disk, 1) is None and not files(tmp_path), place


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "harm", [_cut, _lengthen, lambda path: path.write_bytes(b""), _link, _pipe, _folder, Path.unlink]
)
@pytest.mark.parametrize("restarts", [False, True])
def test_files_that_were_changed_underneath_are_misses(tmp_path: Path, harm: Any, restarts: bool) -> None:
    folder = tmp_path / "cache"
    disk = DiskCache(folder)
    assert write(disk, 1)
    harm(*files(folder))
    if restarts:
        disk.close()
        disk = DiskCache(folder)
    with closing(disk):
        assert read(disk, 1) is None and key(1) not in disk and disk.num_bytes == 0
        if harm is not _folder:
            assert write(disk, 1) and read(disk, 1) == BYTES
        else:  # it stays, and costs hits alone
            with pytest.raises(OSError):
                write(disk, 1)
    assert (tmp_path / "elsewhere").exists() == (harm is _link), "nothing outside was touched"


def test_what_a_killed_writer_left_is_removed_and_other_files_stay(tmp_path: Path) -> None:
    DiskCache(tmp_path).close()
    (tmp_path / "block.part").write_bytes(b"half a bl")
    (tmp_path / "lost+found").mkdir()
    with closing(DiskCache(tmp_path)) as disk:
        assert [path.name for path in files(tmp_path)] == ["lost+found"] and disk.num_bytes == 0


def test_names_that_follow_each_other_in_a_circle_are_no_blocks(tmp_path: Path) -> None:
    DiskCache(tmp_path).close()
    for number, parent in ((1, 1), (2, 3), (3, 2), (4, 3)):
        (tmp_path / f"{key(number).hex()}-{key(parent).hex()}.kv").touch()
    with closing(DiskCache(tmp_path)) as disk:
        assert write(disk, 5, parent=4) and write(disk, 1) and read(disk, 1) == BYTES
        assert disk.num_bytes == taken(tmp_path)


def test_the_bound_is_kept_and_the_least_recently_used_go_first(tmp_path: Path) -> None:
    with closing(DiskCache(tmp_path, 4 * PAGE)) as disk:
        for number in (1, 2, 3, 4):
            assert write(disk, number, parent=2 if number == 4 else 0)  # 4 follows 2
            assert taken(tmp_path) <= 4 * PAGE
        assert read(disk, 1) == BYTES
        disk.touch(key(1))
        assert write(disk, 5)
        assert [number for number in range(1, 6) if key(number) in disk] == [1, 2, 4, 5]
        assert write(disk, 6)
        assert [number for number in range(1, 7) if key(number) in disk] == [1, 2, 5, 6], "a child before its parent"
        assert taken(tmp_path) == disk.num_bytes == 4 * PAGE
        assert not write(disk, 7, content=bytes(4 * PAGE)), "it would not fit alone"
        assert disk.num_bytes == 4 * PAGE


def test_the_next_process_knows_what_was_used_last_and_keeps_a_lower_bound(tmp_path: Path) -> None:
    with closing(DiskCache(tmp_path)) as disk:
        for number in (1, 2, 3):
            write(disk, number, parent=1 if number == 3 else 0)  # 3 follows 1
        disk.touch(key(3))
    for number, path in zip((1, 2, 3), files(tmp_path), strict=True):
        os.utime(path, (number, number))
    with closing(DiskCache(tmp_path)) as disk:
        disk.touch(key(2))
    with closing(DiskCache(tmp_path, 2 * PAGE)) as disk:
        assert [number for number in (1, 2, 3) if key(number) in disk] == [1, 2]
        assert len(files(tmp_path)) == 2


def test_a_folder_is_opened_in_a_time_that_grows_with_its_blocks_and_names_in_a_circle_end(tmp_path: Path) -> None:
    DiskCache(tmp_path).close()
    for number in range(2000):  # one text, of which each block follows the one before it; the first follows the last
        (tmp_path / f"{key(number).hex()}-{key((number or 2000) - 1).hex()}.kv").touch()
    began = time.process_time()
    DiskCache(tmp_path).close()
    assert time.process_time() - began < 1


def test_a_block_that_is_another_one_by_the_time_it_is_written_is_dropped(tmp_path: Path) -> None:
    with closing(DiskCache(tmp_path)) as disk:
        said = iter([True, False])
        assert not disk.write(key(1), key(0), b"head", [memoryview(BYTES)], lambda: next(said))
        assert key(1) not in disk and not files(tmp_path)


def test_a_full_disk_costs_hits_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with closing(DiskCache(tmp_path)) as disk:
        assert write(disk, 1)
        writev = os.writev
        monkeypatch.setattr(os, "writev", lambda file, parts: writev(file, parts[:-1]))  # some of it had room
        with pytest.raises(OSError):
            write(disk, 2)
        monkeypatch.setattr(os, "writev", full)
        with pytest.raises(OSError):
            write(disk, 3)
        assert len(files(tmp_path)) == 1 and disk.num_bytes == PAGE and read(disk, 1) == BYTES


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with closing(DiskCache(folder)) as disk:
        assert write(disk, 1)
        shutil.rmtree(folder)
        assert write(disk, 2) and read(disk, 2) == BYTES and key(1) not in disk and disk.num_bytes == PAGE
        with pytest.raises(OptionError, match="is used by another process"):
            DiskCache(folder)
        shutil.rmtree(folder)
        with closing(DiskCache(folder)) as other:
            for _ in range(2):
                with pytest.raises(OptionError, match="is used by another process"):
                    write(disk, 3)
            assert not files(folder) and write(other, 4)
        assert write(disk, 3) and key(3) in disk and key(4) in disk, "what the other has left"
    DiskCache(folder).close()


def test_a_folder_that_was_moved_away_is_made_again_and_anothers_in_its_place_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with closing(DiskCache(folder)) as disk:
        assert write(disk, 1)
        folder.rename(tmp_path / "old")
        with closing(DiskCache(folder)) as other:
            with pytest.raises(OptionError, match="is used by another process"):
                write(disk, 2)
            assert not files(folder) and write(other, 3)
        folder.rename(tmp_path / "older")
        assert write(disk, 2) and read(disk, 2) == BYTES and disk.num_bytes == PAGE
        assert len(files(tmp_path / "old")) == len(files(tmp_path / "older")) == len(files(folder)) == 1


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with closing(DiskCache(tmp_path)), pytest.raises(OptionError, match="is used by another process; choose another"):
        DiskCache(tmp_path)
    DiskCache(tmp_path).close()


def test_a_folder_that_cannot_be_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "thesis.doc").write_bytes(b"")
    with pytest.raises(OptionError, match=r"contains thesis.doc and is not a prefix cache"):
        DiskCache(tmp_path)
    with pytest.raises(OptionError, match=r"thesis.doc: cannot be used for a prefix cache: File exists"):
        DiskCache(tmp_path / "thesis.doc")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / MARK).symlink_to(tmp_path / "thesis.doc")
    with pytest.raises(OptionError, match="cannot be used for a prefix cache"):
        DiskCache(tmp_path / "new")
    for number in (0, -1, 1.5, True, "4GB"):
        with pytest.raises(OptionError, match="expected at least 1 byte"):
            DiskCache(tmp_path / "other", number)  # pyright: ignore[reportArgumentType]
    DiskCache(tmp_path / "other").close()
    opened = os.open

    def read_only(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_EXCL:
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(OptionError, match="other: cannot be used for a prefix cache: Read-only file system; choose a"):
        DiskCache(tmp_path / "other")
    monkeypatch.undo()
    DiskCache(tmp_path / "other").close()  # what was refused has let go of it


# --- the engine -------------------------------------------------------------------------------------------------------

PROMPT = list(range(4, 44))  # ten blocks
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@contextmanager
def engine_over(folder: Path, num_blocks: int = 400, **options: Any) -> Iterator[Engine]:
    runner = options.pop("runner", None) or HashRunner()
    with (
        closing(DiskCache(folder, options.pop("most_bytes", 2**30))) as disk,
        closing(Engine(runner, num_blocks, **{"block_size": SLOTS, "disk": disk, **options})) as engine,
    ):
        yield engine


def run(engine: Engine, *requests: Request) -> list[TokenEvent]:
    for request in requests:
        engine.add(request)
    return list(engine.run())


def ran(engine: Engine) -> int:
    runner = engine.runner
    assert isinstance(runner, HashRunner)
    return sum(len(batch.token_ids) for batch in runner.batches)


def test_a_dialog_goes_on_in_the_next_process(tmp_path: Path) -> None:
    with engine_over(tmp_path) as engine:
        said = [event.token_id for event in run(engine, Request(PROMPT, GREEDY))]
    dialog = [*PROMPT, *said, 5, 6, 7]
    request = Request(dialog, GREEDY)
    with engine_over(tmp_path) as engine:
        events = run(engine, request)
        assert answers(events, [0]) == [alone(request)]
        assert (
            events[0].num_cached == events[0].num_disk == 44 == engine.counts.disk_tokens == engine.counts.cached_tokens
        )
        assert ran(engine) == len(dialog) - 44 + 5
        again = run(engine, request)
        assert (again[0].num_cached, again[0].num_disk) == (len(dialog) - 1, 0), "from memory"
        assert engine.disk is not None and engine.disk.use().num_dropped == 0


def test_several_answers_and_several_requests_share_what_comes_from_disk(tmp_path: Path) -> None:
    with engine_over(tmp_path) as engine:
        run(engine, Request(PROMPT, GREEDY))
    requests = [Request([*PROMPT, 9, 9, i], GREEDY.derived(n=n)) for i, n in ((7, 3), (8, 1))]
    with engine_over(tmp_path, chunk=4) as engine:
        events = run(engine, *requests)
        assert answers(events, [0, 1]) == [alone(request) for request in requests]
        assert {event.num_disk for event in events if event.request == 0} == {40}
        assert {(event.num_cached, event.num_disk) for event in events if event.request == 1} == {(40, 0)}


@pytest.mark.parametrize("num_blocks", [400, 30])
def test_everybody_gets_the_tokens_of_a_cold_run(tmp_path: Path, num_blocks: int) -> None:
    """In little memory blocks are taken for something else while they are being written."""
    rng = random.Random(num_blocks)
    requests = [request_of(rng, n=rng.choice((1, 1, 3))) for _ in range(40)]
    expected = [alone(request) for request in requests]
    num_found = 0
    for rest in (requests, requests[::-1], requests):
        with engine_over(tmp_path, num_blocks, most_bytes=300 * PAGE) as engine:
            events = run(engine, *rest)
            found = answers(events, range(40))
            assert found == [expected[requests.index(request)] for request in rest]
            assert engine.snapshot().used_blocks == 0
            num_found += engine.counts.disk_tokens
        assert taken(tmp_path) <= 300 * PAGE
    assert num_found > 0


@pytest.mark.parametrize("other", ["model", "adapter", "dtype", "block", "version", "salt", "tokens"])
def test_what_is_of_something_else_is_a_miss(tmp_path: Path, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(PROMPT, GREEDY, adapter=0)
    with engine_over(tmp_path) as engine:
        run(engine, request)
    prompt, options, runner = list(PROMPT), dict[str, Any](), HashRunner()
    if other == "model":
        monkeypatch.setattr(runner, "fingerprint", lambda: "another")
    elif other == "adapter":
        monkeypatch.setattr(runner, "adapter_fingerprint", lambda adapter: "of another")
    elif other == "dtype":
        options["kv_cache_dtype"] = "int8"
    elif other == "block":
        options["block_size"] = 2 * SLOTS
    elif other == "version":
        monkeypatch.setattr(disk_tier, "_FORMAT", "llamarium block 0")
    elif other == "tokens":
        prompt[0] = 3
    asked = Request(prompt, GREEDY, adapter=0, salt="mine" if other == "salt" else "")
    with engine_over(tmp_path, runner=runner, **options) as engine:
        events = run(engine, asked)
        assert answers(events, [0]) == [alone(asked)] and events[0].num_cached == engine.counts.disk_tokens == 0


def test_an_adapter_is_known_by_its_content_wherever_it_stands(tmp_path: Path) -> None:
    class Swapped(HashRunner):
        def adapter_fingerprint(self, adapter: int) -> str:
            return f"content of {1 - adapter}"

    with engine_over(tmp_path) as engine:
        run(engine, Request(PROMPT, GREEDY, adapter=0))
    with engine_over(tmp_path, runner=Swapped()) as engine:
        assert run(engine, Request(PROMPT, GREEDY, adapter=0))[0].num_disk == 0
        assert run(engine, Request([*PROMPT, 4], GREEDY, adapter=1))[0].num_disk == 40


def test_damage_is_never_an_answer(tmp_path: Path) -> None:
    request = Request([*PROMPT, 9], GREEDY)
    expected, rng = [alone(request)], random.Random(0)
    for _ in range(30):
        with engine_over(tmp_path) as engine:
            assert answers(run(engine, request), [0]) == expected
        for path in rng.sample(files(tmp_path), 3):
            content = bytearray(path.read_bytes())
            content[rng.randrange(len(content))] ^= rng.randrange(1, 256)
            path.write_bytes(content)


def test_a_damaged_block_takes_the_part_that_memory_had_with_it(tmp_path: Path) -> None:
    with engine_over(tmp_path) as engine:
        run(engine, Request(PROMPT, GREEDY))
        name = engine.prefix_index.find(engine.root_of(Request(PROMPT, GREEDY)), PROMPT).keys[-1].hex()
    (path,) = tmp_path.glob(f"{name}-*")
    content = bytearray(path.read_bytes())
    content[-60] ^= 1  # in its first slot
    path.write_bytes(content)
    request = Request([*PROMPT, 9], GREEDY)
    with engine_over(tmp_path) as engine:
        run(engine, Request([*PROMPT[:38], 1, 1, 1], GREEDY))
        events = run(engine, request)
        assert answers(events, [1]) == [alone(request)]
        assert (events[0].num_cached, events[0].num_disk) == (36, 0)


def test_a_folder_that_is_gone_costs_hits_alone(tmp_path: Path) -> None:
    request = Request([*PROMPT, 9], GREEDY)
    with engine_over(tmp_path / "cache") as engine:
        run(engine, request)
    with engine_over(tmp_path / "cache") as engine:
        shutil.rmtree(tmp_path / "cache")
        events = run(engine, request)
        assert answers(events, [0]) == [alone(request)] and events[0].num_disk == 0
        engine.close()
        assert engine.disk is not None and engine.disk.use().failure == ""
        assert len(files(tmp_path / "cache")) == engine.disk.use().num_written > 0


def test_a_block_that_the_index_does_not_hold_any_more_is_not_written(tmp_path: Path) -> None:
    class Slow(DiskCache):
        may_go = threading.Event()

        def write(self, *what: Any) -> bool:
            assert self.may_go.wait(10)
            return super().write(*what)

    with closing(Slow(tmp_path)) as disk, closing(Engine(HashRunner(), 11, block_size=SLOTS, disk=disk)) as engine:
        run(engine, Request(PROMPT, SamplingParams(max_tokens=1)))
        run(engine, Request(PROMPT[::-1], SamplingParams(max_tokens=1)))  # takes the blocks of the first
        disk.may_go.set()
        engine.close()
        assert engine.disk is not None and engine.disk.use().num_dropped >= 9
    request = Request([*PROMPT[::-1], 9], GREEDY)
    with engine_over(tmp_path) as engine:
        events = run(engine, request)
        assert answers(events, [0]) == [alone(request)] and events[0].num_disk == 40
        assert run(engine, Request(PROMPT, GREEDY))[0].num_disk <= SLOTS


def test_streams_wait_for_few_blocks_in_a_step(tmp_path: Path) -> None:
    with engine_over(tmp_path) as engine:
        run(engine, Request(PROMPT, GREEDY))
    with engine_over(tmp_path) as engine:
        stream = engine.add(Request([1, 2], SamplingParams(max_tokens=40)))
        engine.step()
        number = engine.add(Request([*PROMPT, 9], GREEDY))
        came = [engine.step() for _ in range(4)]
        assert all(stream in [event.request for event in events] for events in came), "a token in every step"
        assert [number in [event.request for event in events] for events in came] == [False, False, False, True]
        engine.abort(stream)
        assert engine.snapshot().running == 1


def test_what_waits_for_the_disk_can_be_aborted_and_preempted(tmp_path: Path) -> None:
    with engine_over(tmp_path) as engine:
        run(engine, Request(PROMPT, GREEDY))
    with engine_over(tmp_path) as engine:
        engine.add(Request([1, 2], SamplingParams(max_tokens=40)))
        engine.step()
        number = engine.add(Request([*PROMPT, 9], GREEDY))
        engine.step()
        sequence = engine.sequences[1]
        assert sequence.is_on_disk and sequence.num_computed == 16
        loaded = sequence.table.blocks[: len(sequence.keys)]
        engine._scheduler._preempt(sequence)
        assert not sequence.is_on_disk and sequence.num_computed == 0
        other = BlockTable(engine.prefix_index.pool)
        other.share(loaded)
        for block in loaded:  # they are taken for something else meanwhile
            engine.prefix_index.take_out(block)
        engine.step()
        assert sequence.num_disk == sequence.num_cached == 16, "a block that is loaded twice counts once"
        engine.abort(number)
        assert engine.snapshot().running == 1 and not engine._scheduler._promised


def test_scores_and_means_of_a_prompt_are_computed_though_it_is_on_disk(tmp_path: Path) -> None:
    with engine_over(tmp_path) as engine:
        run(engine, Request(PROMPT, GREEDY))
    with engine_over(tmp_path) as engine:
        events = run(engine, Request(PROMPT, GREEDY.derived(prompt_logprobs=1)))
        assert events[0].num_disk == 0 and events[0].prompt_scores is not None


def test_a_runner_whose_bits_depend_on_company_is_refused(tmp_path: Path) -> None:
    class Plain(HashRunner):
        name = "PyTorch"
        fingerprint = None  # pyright: ignore[reportAssignmentType]

    refused = pytest.raises(OptionError, match=r"but this model runs on PyTorch; leave out --cache-dir")
    with refused, engine_over(tmp_path, runner=Plain()):
        pass


def test_a_hung_disk_holds_no_step_up_and_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "_CLOSING_S", 0.05)
    monkeypatch.setattr(disk_tier, "_MOST_JOBS", 5)
    may_go = threading.Event()

    class Hung(DiskCache):
        def write(self, *what: Any) -> bool:
            may_go.wait(10)
            return False

    def tokens(events: Sequence[TokenEvent]) -> list[int]:
        return [event.token_id for event in events]

    with closing(Hung(tmp_path)) as disk:
        engine = Engine(HashRunner(), 400, block_size=SLOTS, disk=disk)
        request = Request(PROMPT, GREEDY)
        assert [tokens(run(engine, request))] == alone(request)
        assert engine.disk is not None and engine.disk.use().num_dropped >= 5
        engine.close()
        may_go.set()
