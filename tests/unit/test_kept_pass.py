"""A pass of which more is asked later: only the tokens in question run again, with the bits of a trace of its own."""

from typing import Any

import pytest
import torch

from llamarium.adapters.config import LoRAConfig
from llamarium.errors import MemoryBudgetError
from llamarium.inspect.trace import KeptPass, Trace, trace
from llamarium.runtime.batch import Batch
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.runtime.native.runner import NativeRunner
from llamarium.runtime.runner import Cache, CacheDtype, Logits, Runner
from llamarium.runtime.taps import Taps
from native_models import build, native_runner, weights_of
from strong_adapters import UNTIED, adapted, low_rank_of

pytestmark = pytest.mark.torch

IDS = [(7 * i) % 200 for i in range(700)]  # more than two chunks of the cache, and than two batches
EVERY_SO_MANY = list(range(0, 700, 9))
RUNS = [3, 4, 5, 300, 255, 256, 257, 699]  # some side by side, in no order


class Counted:
    """A runner that notes the positions which it runs."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self.positions = runner, list[list[int]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, batch: Batch, cache: Cache, taps: Taps | None = None) -> Logits:
        self.positions.append(batch.positions.tolist())
        return self._runner.run(batch, cache, taps)


def assert_same(found: Trace, expected: Trace) -> None:
    assert list(found) == list(expected) and found.positions == expected.positions
    for key, values in expected.items():
        assert torch.equal(found[key], values), key


@pytest.mark.parametrize(("type_name", "kv_cache_dtype"), [("Q4_0", "auto"), ("Q8_0", "int8")])
def test_what_is_asked_later_has_the_bits_of_a_trace_of_its_own(type_name: str, kv_cache_dtype: CacheDtype) -> None:
    runner = native_runner(build(type_name))
    kept = KeptPass(runner, IDS, kv_cache_dtype=kv_cache_dtype)
    questions: list[dict[str, Any]] = [{"names": ["resid"], "positions": EVERY_SO_MANY}]  # the whole text runs
    questions += [{"names": [name], "positions": RUNS, "layers": [1]} for name in ("k", "k_rot", "pattern", "embed")]
    questions += [{"names": names, "positions": RUNS} for names in (["logits"], ["scores", "v"], None)]
    questions += [{"names": ["mlp_out", "k_rot"]}, {"positions": EVERY_SO_MANY}]
    for question in questions:
        assert_same(kept.trace(**question), trace(runner, IDS, kv_cache_dtype=kv_cache_dtype, **question))


@pytest.mark.parametrize(("type_name", "kv_cache_dtype"), [("Q4_0", "auto"), ("Q8_0", "int8")])
def test_a_text_that_begins_like_another_runs_its_own_tokens_and_has_the_bits_of_a_cold_run(
    type_name: str, kv_cache_dtype: CacheDtype
) -> None:
    counted = Counted(native_runner(build(type_name)))
    text = IDS[:300]  # its cache has to grow for some of these
    longer, forked, shorter, far = [*text, 5], [*text[:290], 1, 2, 3], text[:260], [*text, *IDS]
    kept, known = KeptPass(counted, text, kv_cache_dtype=kv_cache_dtype), list[Trace]()
    known.append(kept.trace())
    for ids, begin in ((longer, 300), (forked, 290), (shorter, 259), (far, 260)):
        kept = KeptPass(counted, ids, kv_cache_dtype=kv_cache_dtype, after=kept)
        counted.positions.clear()
        found = kept.trace(known=known)
        assert [position for batch in counted.positions for position in batch] == list(range(begin, len(ids)))
        assert_same(found, trace(counted, ids, kv_cache_dtype=kv_cache_dtype))
        known.append(found)
    assert_same(
        kept.trace(names=["resid", "pattern"], known=known),
        trace(counted, far, names=["resid", "pattern"], kv_cache_dtype=kv_cache_dtype),
    )


def test_only_a_pass_of_the_same_kind_gives_its_keys_and_values() -> None:
    runner = native_runner(build("Q4_0"))
    kept = KeptPass(runner, IDS)
    kept.trace(names=["logits"], positions=[-1])
    others = native_runner(build("Q8_0")), KeptPass(runner, IDS, kv_cache_dtype="int8", after=kept)
    for other in (KeptPass(others[0], IDS, after=kept), others[1]):
        assert other.num_bytes == 0 < kept.num_bytes
    assert KeptPass(runner, [*IDS[:9], 1], after=kept).num_bytes > 0
    assert kept.num_bytes == 0  # it begins anew
    assert_same(kept.trace(names=["resid"]), trace(runner, IDS, names=["resid"]))


def test_an_adapters_pass_is_its_own() -> None:
    adapter_of_it = low_rank_of(adapted(LoRAConfig(r=3), seed=3))
    runner = NativeRunner(UNTIED, weights_of(build(None, config=UNTIED)), [adapter_of_it])
    for adapter in (0, -1):
        kept = KeptPass(runner, IDS, adapter=adapter)
        for positions in ([0], EVERY_SO_MANY, RUNS):
            question = {"names": ["pattern", "resid"], "positions": positions}
            assert_same(kept.trace(**question), trace(runner, IDS, adapter=adapter, **question))


def test_only_the_tokens_in_question_run_again() -> None:
    counted = Counted(native_runner(build("Q4_0")))
    kept = KeptPass(counted, IDS)
    assert kept.num_bytes == 0

    def ran(**question: Any) -> list[list[int]]:
        counted.positions.clear()
        kept.trace(**question)
        return counted.positions

    every = [list(range(begin, min(700, begin + 256))) for begin in (0, 256, 512)]
    assert ran(names=["resid"], positions=[5]) == [*every, [5]]
    assert kept.num_bytes > 0
    assert ran(names=["pattern"], positions=EVERY_SO_MANY) == [EVERY_SO_MANY]
    assert ran(names=["logits"], positions=[-1]) == [[699]]
    assert ran(names=["k_rot"]) == []
    assert ran(names=["v"], positions=[5]) == every  # has all tokens, whichever are asked for
    assert ran(names=["gate"]) == every


def test_what_some_tokens_need_is_theirs_and_not_the_batchs() -> None:
    kept = KeptPass(native_runner(build("Q4_0")), IDS)
    names = ["gate", "up", "resid"]
    of_one = sum(tensor.nbytes for tensor in kept.trace(names=names, positions=[5], budget_mb=0.005).values())
    assert 0.004 < of_one / 1e6 < 0.005
    with pytest.raises(MemoryBudgetError):  # keys of all tokens, and with them all of a batch
        kept.trace(names=[*names, "k"], positions=[5], budget_mb=1)


def test_a_pass_that_was_stopped_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = native_runner(build("Q4_0"))
    kept, run, calls = KeptPass(runner, IDS), NativeRunner.run, list[int]()

    def stopped(self: NativeRunner, *args: Any) -> Logits:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(NativeRunner, "run", stopped)
        with pytest.raises(KeyboardInterrupt):
            kept.trace(names=["resid"], positions=[5])
    assert kept.num_bytes == 0
    assert_same(kept.trace(names=["resid"]), trace(runner, IDS, names=["resid"]))


def test_where_bits_hang_on_company_the_whole_text_runs() -> None:
    counted = Counted(ModuleRunner(build(None)))
    kept = KeptPass(counted, IDS)
    for positions in ([5], [6]):
        counted.positions.clear()
        found = kept.trace(names=["resid"], positions=positions)
        assert counted.positions == [list(range(700))] and kept.num_bytes == 0
        assert_same(found, trace(counted, IDS, names=["resid"], positions=positions))
