"""The passes that the page looks at: their names, their numbers to the bit, and the bounds on what is kept."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarium.api import Llama
from llamarium.errors import QuestionError
from llamarium.inspect.interventions.experiments import Experiment, trace_experiment
from llamarium.page import passes as module
from llamarium.page.executor import Executor, Pass
from llamarium.page.passes import Passes
from llamarium.page.schema.passes import ActivationQuery, ExperimentFields
from llamarium.page.selection import select
from llamarium.runtime.taps import ACTIVATIONS
from llamarium.server.errors import of_library
from serving import small_llama

pytestmark = pytest.mark.torch

IDS = (504, 2644, 2643, 335, 260, 4, 17, 9000)


@pytest.fixture(scope="module")
def llama(smollm2_path: Path) -> Llama:
    return small_llama(smollm2_path)


def asked(kept: Passes, llama: Llama, name: str, one: Pass | None = None, **query: Any) -> Any:
    return select(
        kept, Executor(llama.runner, lambda: llama.model), one or Pass.of(IDS), name, ActivationQuery(**query)
    )


def expected(llama: Llama, key: str) -> np.ndarray:
    return llama.trace(IDS)[key].float().numpy()


def test_a_pass_is_named_by_what_it_is() -> None:
    assert Pass.of(IDS) == Pass.of(list(IDS))
    mask = ExperimentFields(bidirectional=True)
    others = [Pass.of(IDS[:-1]), Pass.of(IDS, "a", 0), Pass.of((*IDS[:-1], 1)), Pass.of(IDS, experiment=mask)]
    assert len({one.id for one in (Pass.of(IDS), *others)}) == 5


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("ahead", [module._AHEAD_BYTES, 2000, 0])
def test_numbers_are_those_of_the_trace_to_the_bit(
    llama: Llama, name: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether all is traced at once, a layer, or only what is asked for."""
    monkeypatch.setattr(module, "_AHEAD_BYTES", ahead)
    kept, activation = Passes(), ACTIVATIONS[name]
    if not activation.in_layer:
        found = asked(kept, llama, name)
        assert np.array_equal(found.values, expected(llama, name))
        assert found.axes == activation.axes
        return
    per_layer = [expected(llama, f"layers.{i}.{name}") for i in range(2)]
    found = asked(kept, llama, name)
    assert (found.axes, found.values.dtype) == (f"L{activation.axes}", np.float32)
    assert np.array_equal(found.values, np.stack(per_layer))
    assert np.array_equal(asked(Passes(), llama, name, layer=1).values, per_layer[1])


@pytest.mark.parametrize(
    "experiment",
    [{"bidirectional": True}, {"rotation": False}, {"hidden": (0, 3)}, {"bidirectional": True, "rotation": False}],
)
def test_an_experiments_numbers_are_the_librarys_and_the_model_feels_nothing(
    llama: Llama, experiment: dict[str, Any]
) -> None:
    kept, before = Passes(), expected(llama, "layers.1.resid")
    one = Pass.of(IDS, experiment=ExperimentFields(**experiment))
    found = {name: asked(kept, llama, name, one, layer=1).values for name in ("resid", "pattern", "scores")}
    with llama.inspect.edited(experiment=Experiment(**experiment)) as other:
        seen = trace_experiment(other.model, IDS, Experiment(**experiment))
    for name, values in found.items():
        assert np.array_equal(values, seen[f"layers.1.{name}"].numpy())
        assert not np.allclose(values, expected(llama, f"layers.1.{name}"), atol=1e-3)
    assert np.array_equal(asked(kept, llama, "resid", layer=1).values, before)


def test_a_head_a_token_and_every_other_token(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = expected(llama, "layers.1.pattern")
    keys = expected(llama, "layers.1.k")
    for ahead in (module._AHEAD_BYTES, 0):
        monkeypatch.setattr(module, "_AHEAD_BYTES", ahead)
        kept = Passes()
        one_head = asked(kept, llama, "pattern", layer=1, head=1)
        assert one_head.axes == "TS" and np.array_equal(one_head.values, pattern[1])
        row = asked(kept, llama, "pattern", layer=1, head=0, position=5)
        assert row.axes == "S" and np.array_equal(row.values, pattern[0, 5])
        coarse = asked(kept, llama, "pattern", layer=1, stride=3)
        assert (coarse.axes, coarse.stride) == ("NTS", 3)
        assert np.array_equal(coarse.values, pattern[:, ::3, ::3])
        key = asked(kept, llama, "k", layer=1, head=0, position=2)
        assert key.axes == "H" and np.array_equal(key.values, keys[2, 0])
        logits = asked(kept, llama, "logits", position=7)
        assert np.array_equal(logits.values, llama.trace(IDS, positions=[7])["logits"][0].numpy())


@pytest.mark.parametrize(
    ("name", "query", "status", "param"),
    [
        ("nothing", {}, 404, "name"),
        ("q", {"layer": 2}, 400, "layer"),
        ("q", {"head": 2}, 400, "head"),
        ("k", {"head": 1}, 400, "head"),
        ("resid", {"head": 0}, 400, "head"),
        ("embed", {"layer": 0}, 400, "layer"),
        ("q", {"position": 8}, 400, "position"),
        ("q", {"position": 1, "stride": 2}, 400, "stride"),
    ],
)
def test_what_there_is_not_is_refused(llama: Llama, name: str, query: dict[str, int], status: int, param: str) -> None:
    with pytest.raises(QuestionError) as refused:
        asked(Passes(), llama, name, **query)
    assert (of_library(refused.value).status_code, refused.value.param) == (status, param)


def test_a_trace_over_its_budget_says_what_to_restrict(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AHEAD_BYTES", 0)
    monkeypatch.setattr(module, "BUDGET_MB", 0.001)
    with pytest.raises(QuestionError, match=r"the budget is 0.0 MB.*Ask for one layer") as refused:
        asked(Passes(), llama, "gate")
    assert (of_library(refused.value).status_code, refused.value.code) == (400, "trace_too_large")
    assert "budget_mb" not in str(refused.value)


def test_only_so_many_passes_are_known() -> None:
    kept = Passes(max_passes=2)
    first, second, third = (kept.add(Pass.of([number])) for number in (1, 2, 3))
    with pytest.raises(QuestionError) as refused:
        kept.find(first.id)
    assert (of_library(refused.value).status_code, refused.value.code) == (404, "unknown_pass")
    assert kept.find(second.id) == second  # and is the last used now
    kept.add(first)
    assert kept.find(second.id) == second
    with pytest.raises(QuestionError):
        kept.find(third.id)


def test_what_is_kept_is_bounded_and_comes_back_with_the_same_bits(llama: Llama) -> None:
    kept = Passes(max_bytes=200_000)
    texts = [Pass.of([number, *IDS]) for number in range(6)]
    before = [asked(kept, llama, "resid", one, layer=1).values for one in texts]
    one_trace = sum(tensor.nbytes for key, tensor in llama.trace((0, *IDS)).items() if key != "logits")
    assert one_trace < 200_000 < 3 * one_trace
    assert kept.num_bytes <= 200_000
    assert kept.num_bytes == sum(values.nbytes for values in kept._values.values())
    again = [asked(kept, llama, "resid", one, layer=1).values for one in texts]
    assert all(map(np.array_equal, before, again))


def test_a_text_runs_once_and_then_only_the_tokens_in_question(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AHEAD_BYTES", 0)
    run, positions = type(llama.runner).run, list[list[int]]()

    def noted(self: Any, batch: Any, *args: Any) -> Any:
        positions.append(batch.positions.tolist())
        return run(self, batch, *args)

    monkeypatch.setattr(type(llama.runner), "run", noted)
    every = list(range(len(IDS)))
    again = [[5], [2], [0, 3, 6]]
    for max_past_bytes, expected_positions in (
        (2**20, [every, *again]),
        (10, [every, again[0], every, again[1], every, again[2]]),
    ):
        kept = Passes(max_past_bytes=max_past_bytes)
        positions.clear()
        asked(kept, llama, "resid", layer=1, position=5)
        asked(kept, llama, "resid", layer=0, position=2)
        asked(kept, llama, "resid", layer=1, stride=3)
        assert positions == expected_positions
    other = Pass.of([*IDS, 9])
    asked(kept, llama, "resid", other, layer=1, position=5)
    assert positions[-2:] == [[*every, len(IDS)], [5]]


def test_one_token_more_runs_alone_and_shows_the_numbers_of_a_cold_pass(
    llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, positions = type(llama.runner).run, list[list[int]]()
    monkeypatch.setattr(
        type(llama.runner),
        "run",
        lambda self, batch, *args: (positions.append(batch.positions.tolist()), run(self, batch, *args))[1],
    )
    kept, grown = Passes(), list(IDS)
    asked(kept, llama, "resid", kept.add(Pass.of(grown)), layer=0)
    for token_id in (9, 8, 7):
        grown.append(token_id)
        one, last = kept.add(Pass.of(grown)), len(grown) - 1
        positions.clear()
        found = {name: asked(kept, llama, name, one).values for name in ACTIVATIONS if name != "logits"}
        assert positions == [[last]]
        logits = asked(kept, llama, "logits", one, position=last).values  # by which the next token is chosen
        cold = Passes()
        assert np.array_equal(logits, asked(cold, llama, "logits", one, position=last).values)
        for name, values in found.items():
            assert np.array_equal(values, asked(cold, llama, name, one).values), name
    positions.clear()
    asked(kept, llama, "resid", Pass.of([*grown, 6], experiment=ExperimentFields(rotation=False)))  # runs as a whole
    assert positions == []


@pytest.mark.parametrize(
    ("layers", "most", "expected"),
    [
        ([4], 1, [4]),
        ([4], 3, [3, 4, 5]),
        ([4], 4, [3, 4, 5, 6]),
        ([0], 3, [0, 1, 2]),
        ([9], 3, [7, 8, 9]),
        ([4], 99, list(range(10))),
        ([2, 5], 5, [2, 3, 4, 5, 6]),
        ([2, 5], 3, [2, 5]),
        ([2, 5], 1, None),
        ([4], 0, None),
        (list(range(10)), 10, list(range(10))),
        (list(range(10)), 9, None),
    ],
)
def test_layers_beside_those_asked_for_are_computed_too(
    layers: list[int], most: int, expected: list[int] | None
) -> None:
    assert module._around(layers, 10, most) == expected


def test_threads_that_ask_for_the_same_have_it_computed_once(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, runs = Passes(), list[str]()
    compute = Passes._compute
    monkeypatch.setattr(Passes, "_compute", lambda self, *args: (runs.extend(args[2]), compute(self, *args)))
    found = dict[int, Any]()

    def ask(number: int) -> None:
        found[number] = asked(kept, llama, "resid", layer=number % 2).values

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runs == ["resid"]
    assert all(np.array_equal(found[i], expected(llama, f"layers.{i % 2}.resid")) for i in range(8))
