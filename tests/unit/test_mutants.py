"""The list of faults that `make mutants` puts into the sources still fits them."""

import ast
import shutil
from pathlib import Path

import pytest

from mutants.run import ROOT, Fault, faults

FAULTS = faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_its_place_and_leaves_python(fault: Fault, tmp_path: Path) -> None:
    target = tmp_path / fault.file
    target.parent.mkdir(parents=True)
    shutil.copyfile(ROOT / fault.file, target)
    fault.put_into(tmp_path)
    changed = target.read_text()
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse((ROOT / fault.file).read_text()))
    assert all((ROOT / test).is_file() for test in fault.tests) and fault.tests


def test_names_are_different() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 60
