"""Models besides the one that answers: one at a time, within a bound, each text read once."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llamarium.errors import OptionError, QuestionError, UnknownNameError
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.page.compare.others import Others, Side, Wanted
from llamarium.page.compare.runs import MAX_MOMENTS, Runs, newest_checkpoint
from llamarium.presets import preset
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.runtime.runner import Runner
from llamarium.server.errors import of_library

pytestmark = pytest.mark.torch

WANTED = Wanted((1, 2, 3), ("resid", "logits"))


def side(name: str, num_bytes: int, build: Callable[[], Runner]) -> Side:
    return Side(name, name.upper(), "words", num_bytes, build)


class Building:
    """Counts how often it builds."""

    def __init__(self) -> None:
        self.built: list[str] = []

    def side(self, name: str, num_bytes: int = 100) -> Side:
        def build() -> Runner:
            self.built.append(name)
            config = replace(preset("tiny"), num_hidden_layers=1, vocab_size=50)
            return ModuleRunner(init_weights(LlamaForCausalLM(config), seed=len(name)).requires_grad_(False))

        return side(name, num_bytes, build)


def test_one_model_is_there_at_a_time_and_each_text_is_read_once() -> None:
    building, others = Building(), Others(max_bytes=1000)
    a, b = building.side("a"), building.side("bb")
    assert others.seconds(a) is None
    first = others.trace(a, WANTED, field="side")
    assert others.trace(a, replace(WANTED, ids=(4,)), field="side").token_ids == (4,)
    assert building.built == ["a"] and (others.seconds(a) or 0) > 0
    other = others.trace(b, WANTED, field="side")
    assert building.built == ["a", "bb"] and not other["logits"].equal(first["logits"])
    assert others.trace(a, WANTED, field="side") is first and building.built == ["a", "bb"]
    others.trace(a, replace(WANTED, layers=(0,)), field="side")
    assert building.built == ["a", "bb", "a"]


def test_a_model_beyond_the_bound_is_refused_before_it_is_built() -> None:
    building, others = Building(), Others(max_bytes=1000)
    kept = others.trace(building.side("a", 1000), WANTED, field="side")
    with pytest.raises(QuestionError, match="half of the memory that is free") as refused:
        others.trace(building.side("bb", 1001), WANTED, field="against")
    assert (of_library(refused.value).status_code, refused.value.code, refused.value.param) == (
        400,
        "side_too_large",
        "against",
    )
    assert building.built == ["a"] and others.trace(building.side("a", 1000), WANTED, field="side") is kept


def test_what_is_there_anyway_takes_no_place() -> None:
    building, others = Building(), Others(max_bytes=0)
    others.trace(building.side("a", 0), WANTED, field="side")
    assert others.seconds(building.side("a", 0)) is None


def test_passes_are_kept_within_a_bound() -> None:
    building, others = Building(), Others(max_bytes=1000, max_kept_bytes=1)
    first = others.trace(building.side("a"), WANTED, field="side")
    others.trace(building.side("a"), replace(WANTED, ids=(4,)), field="side")
    assert others.trace(building.side("a"), WANTED, field="side") is not first


def checkpoint(run: Path, step: int) -> None:
    (run / f"step-{step:08d}").mkdir(parents=True)


def test_runs_are_folders_with_checkpoints(tmp_path: Path) -> None:
    for step in (20, 5, 100):
        checkpoint(tmp_path / "run", step)
    (tmp_path / "run" / ".old-00000003").mkdir()
    runs = Runs([tmp_path / "run"])
    assert runs.names == ("run",) and runs.steps("run") == [5, 20, 100]
    assert newest_checkpoint(tmp_path / "run") == tmp_path / "run" / "step-00000100"
    checkpoint(tmp_path / "run", 120)
    assert runs.steps("run")[-1] == 120, "a run that goes on has more of them"
    for name in ("other", "..", "../run", "run/step-00000005", ""):
        with pytest.raises(QuestionError, match="there is: run") as refused:
            runs.steps(name)
        assert (of_library(refused.value).status_code, refused.value.param) == (404, "run")


def test_of_many_checkpoints_some_are_shown(tmp_path: Path) -> None:
    for step in range(1, 2 * MAX_MOMENTS):
        checkpoint(tmp_path, step)
    steps = Runs([tmp_path]).steps(tmp_path.name)
    assert len(set(steps)) == MAX_MOMENTS and (steps[0], steps[-1]) == (1, 2 * MAX_MOMENTS - 1)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="holds no training run"):
        Runs([tmp_path / "nowhere"])
    checkpoint(tmp_path / "a" / "run", 1)
    checkpoint(tmp_path / "b" / "run", 1)
    with pytest.raises(OptionError, match="two runs are called run"):
        Runs([tmp_path / "a" / "run", tmp_path / "b" / "run"])


def test_a_run_without_whole_models_has_no_steps(tmp_path: Path) -> None:
    for name, file in (("adapter", "adapter_config.json"), ("variant", "variant.json")):
        checkpoint(tmp_path / name, 1)
        (tmp_path / name / "step-00000001" / file).write_text("{}")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").write_text('{"event": "start", "step": 0}\n')
    (tmp_path / "data").mkdir()
    runs = Runs([tmp_path])
    assert runs.names == ("adapter", "begun", "variant"), "a folder of runs stands for all of them"
    assert [runs.steps(name) for name in runs.names] == [[], [], []] and runs.readable == ()
    assert [runs.has_history(name) for name in runs.names] == [False, True, False]
    assert runs.newest == tmp_path / "adapter" / "step-00000001", "it is put on its base"
    assert runs.history("begun").state == "open"
    with pytest.raises(UnknownNameError):
        runs.history("adapter")
