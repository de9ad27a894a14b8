"""Folders that are taken for a model: what there is to name instead."""

import json
from pathlib import Path

import pytest

from llamarium.errors import ModelNotFoundError
from llamarium.hub.folders import what_to_name
from llamarium.hub.resolve import resolve


def make_run(folder: Path, *, steps: int, best: int | None, adapter: bool) -> Path:
    for step in range(1, steps + 1):
        checkpoint = folder / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / ("adapter_config.json" if adapter else "config.json")).write_text(json.dumps({}))
    if best is not None:
        (folder / "best").symlink_to(f"step-{best:08d}", target_is_directory=True)
    return folder


def test_a_run_s_folder_names_its_best_model(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x", steps=3, best=2, adapter=False)
    with pytest.raises(ModelNotFoundError, match=r"x: is the folder of a training run; name its model, .*/x/best \("):
        resolve(str(run))
    assert resolve(str(run / "best")) == run / "best"


def test_a_run_of_adapters_names_the_option(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x", steps=3, best=2, adapter=True)
    with pytest.raises(ModelNotFoundError, match=r"a training run; name its adapter with --adapter .*/x/best \("):
        resolve(str(run))
    with pytest.raises(ModelNotFoundError, match=r"is a LoRA adapter, not a model; name it with --adapter .*/x/best$"):
        resolve(str(run / "best"))
    assert resolve(str(run / "best"), kind="tokenizer") == run / "best"
    assert what_to_name(run / "best", adapter=True) is None


@pytest.mark.parametrize("adapter", [True, False])
def test_a_run_that_has_validated_nothing_yet(adapter: bool, tmp_path: Path) -> None:
    run = make_run(tmp_path / "x", steps=2, best=None, adapter=adapter)
    for path, why in ((run, "nothing was validated yet"), (run / "best", "the run ended before its first validation")):
        said = what_to_name(path, adapter=adapter)
        assert said is not None and why in said and str(run / "step-00000002") in said


@pytest.mark.parametrize("name", ["", "nothing", "a\0b", "x" * 5000, "best"])
def test_other_names_are_none_of_its_business(name: str, tmp_path: Path) -> None:
    assert what_to_name(tmp_path / name) is None
