"""Keys and values in C that come back from disk are those of a cold run to the bit, and what decides their name."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from llamarium.engine.engine import Engine
from llamarium.engine.request import Request, TokenEvent
from llamarium.engine.tiers.disk_cache import MARK, DiskCache
from llamarium.errors import OptionError
from llamarium.generation.loop import DialogEngine
from llamarium.kernels import native
from llamarium.kv_codes import CacheDtype
from llamarium.runtime.adapter import LowRank
from llamarium.runtime.intervention import Edit
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.runtime.native.runner import NativeRunner
from llamarium.runtime.runner import Runner
from llamarium.sampling.params import SamplingParams
from native_models import CONFIG, build, native_runner, weights_of

pytestmark = pytest.mark.torch

PROMPT = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 100).tolist()
ALL = SamplingParams(temperature=0.0, max_tokens=4, logprobs=20)


def answer(runner: Runner, disk: DiskCache | None, dtype: CacheDtype = "auto", adapter: int = -1) -> list[TokenEvent]:
    with closing(Engine(runner, 20, kv_cache_dtype=dtype, disk=disk)) as engine:
        engine.add(Request(PROMPT, ALL, adapter=adapter))
        return [event._replace(num_cached=0) for event in engine.run()]


def stored(events: list[TokenEvent]) -> int:
    return events[0].num_disk


@pytest.mark.parametrize("dtype", get_args(CacheDtype))
@pytest.mark.parametrize(
    ("type_name", "kept"),
    [(None, torch.float32), (None, torch.bfloat16), ("Q4_0", torch.bfloat16), ("Q8_0", torch.float32)],
)
def test_answers_have_the_bits_of_a_cold_run(
    tmp_path: Path, type_name: str | None, kept: torch.dtype, dtype: CacheDtype
) -> None:
    runner = native_runner(build(type_name, kept))
    with closing(DiskCache(tmp_path)) as disk:
        cold, first = answer(runner, None, dtype), answer(runner, disk, dtype)
        again = answer(runner, disk, dtype)
        assert cold == first and stored(again) == 96 and stored(first) == 0
        assert [event._replace(num_disk=0) for event in again] == cold, "logprobs of 20 tokens, exactly"
    for path in (path for path in tmp_path.iterdir() if path.name != MARK):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with closing(DiskCache(tmp_path)) as disk:
        assert answer(runner, disk, dtype) == cold


def test_blocks_of_another_kv_cache_dtype_are_a_miss(tmp_path: Path) -> None:
    runner = native_runner(build("Q4_0"))
    for expected in (0, 96):
        with closing(DiskCache(tmp_path)) as disk:
            found = {dtype: answer(runner, disk, dtype) for dtype in get_args(CacheDtype)}
        assert [stored(events) for events in found.values()] == [expected] * 4
        for dtype, events in found.items():
            assert [event._replace(num_disk=0) for event in events] == answer(runner, None, dtype)


def test_what_a_request_edits_is_its_own(tmp_path: Path) -> None:
    runner = native_runner(build("Q4_0"))
    edits = (Edit("mlp", 0, factor=0.5), Edit("residual", 1, add=np.ones(96, np.float32)))
    cold: list[list[float]] = []
    for first in (True, False):
        with closing(DiskCache(tmp_path)) as disk, closing(Engine(runner, 20, disk=disk)) as engine:
            for changed in ((), edits, (edits[0], replace(edits[1], add=2 * edits[1].add))):
                engine.add(Request(PROMPT, ALL, edits=changed))
            events = list(engine.run())
            found = [[event for event in events if event.request == number] for number in range(3)]
            assert [stored(one) for one in found] == [0 if first else 96] * 3
            logprobs = [[event.logprob for event in one] for one in found]
            cold = cold or logprobs
            assert logprobs == cold and len({*map(tuple, cold)}) == 3


def test_what_decides_keys_and_values_decides_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Q4_0")
    runner, low = native_runner(model), LowRank(2.0, np.ones((1, 96), np.float32), np.ones((128, 1), np.float32))
    adapter = {"model.layers.0.self_attn.q_proj": low}
    changed = {"model.layers.0.self_attn.q_proj": LowRank(2.5, low.a, low.b)}
    found = {runner.fingerprint(), NativeRunner(CONFIG, weights_of(model), input_bits=16).fingerprint()}
    model.model.norm.weight[3] += 0.25
    found.add(native_runner(model).fingerprint())
    monkeypatch.setattr(native, "kernels", lambda: "others")
    found.add(runner.fingerprint())
    assert len(found) == 4
    several = runner.with_adapters([adapter, changed])
    assert several.adapter_fingerprint(-1) == "" == runner.adapter_fingerprint(-1)
    assert several.adapter_fingerprint(0) != several.adapter_fingerprint(1)
    assert runner.with_adapters([changed], default=0).adapter_fingerprint(-1) == several.adapter_fingerprint(1)


def test_a_dialog_of_another_process_goes_on_at_once(tmp_path: Path) -> None:
    runner, ran = native_runner(build("Q4_0")), list[int]()
    long = Request(PROMPT * 3, SamplingParams(temperature=0.0, max_tokens=2))

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(runner, name)

        def run(self, batch: Any, *rest: Any) -> Any:
            ran.append(len(batch.token_ids))
            return runner.run(batch, *rest)

    answers: list[list[int]] = []
    for _ in range(2):
        with closing(DiskCache(tmp_path)) as disk:
            dialog = DialogEngine(runner, disk=disk)
            dialog.use(counting := Counting(), "int8")  # pyright: ignore[reportArgumentType]
            answers.append([event.token_id for event in dialog.answer(dialog.engine, long, None)])
            dialog.close()
            assert counting
    assert answers[0] == answers[1] and sum(ran) == (300 + 1) + (300 - 256 + 1)


def test_modules_have_no_cache_on_disk(tmp_path: Path) -> None:
    with closing(DiskCache(tmp_path)) as disk, pytest.raises(OptionError, match="runs on PyTorch in float32 on cpu"):
        answer(ModuleRunner(build(None)), disk)
