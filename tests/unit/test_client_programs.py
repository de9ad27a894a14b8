"""The table of programs that `make test-clients` runs, and what the reference says of them."""

import re
import sys
from pathlib import Path

import pytest

from clients.run import Package, read_packages

ROOT = Path(__file__).parents[2]
PACKAGES = {package.name: package for package in read_packages().values()}


def pins(package: Package) -> dict[str, str]:
    """The packages that a table installs, and their versions."""
    found = [
        re.fullmatch(r"(@?[^@=\[]+)(?:\[[\w,-]+\])?(?:==|@)(\d[\w.]*)", pin) for pin in [*package.npm, *package.pip]
    ]
    assert all(found), f"{package.name} has a version that is not pinned"
    return {match[1]: match[2] for match in found if match}


@pytest.mark.parametrize("package", PACKAGES.values(), ids=lambda package: package.name)
def test_a_table_is_of_one_installer_and_runs_scripts_that_are_there(package: Package) -> None:
    assert bool(package.npm) != bool(package.pip)
    assert package.run
    for command in package.run.values():
        for script, name in re.findall(r"\{here\}/(\S+) (\S+)", command):
            text = (ROOT / "tests/clients" / script).read_text(encoding="utf-8")
            assert (f"def {name}() -> None:" if script.endswith(".py") else name) in text


def test_the_reference_has_the_versions_of_the_table() -> None:
    text = (ROOT / "docs/reference/clients.md").read_text(encoding="utf-8")
    section = text.partition("## Programs that were run\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if re.match(r"\| .* \| \d", line)]
    versions = {re.findall(r"`(@?[\w/.-]+)`\)?$", program)[0]: version for program, version, *_ in rows}
    pinned = {name: version for package in PACKAGES.values() for name, version in pins(package).items()}
    assert versions.items() <= pinned.items()
    assert [name for name, package in PACKAGES.items() if not pins(package).keys() & versions.keys()] == []


def test_a_program_runs_in_its_home_with_the_places_put_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("clients.run.CLIENTS_DIR", tmp_path)
    code = "import os; print(open('a.json').read(), os.environ['OPENAI_BASE_URL'], os.environ['MINE'], os.getcwd())"
    package = Package(
        "made", {"print": f'{sys.executable} -c "{code}"'}, {"MINE": "{home}/x"}, {"a.json": '{"at": "{url}"}'}
    )
    ended = package.start("print", "http://127.0.0.1:1")
    assert (ended.returncode, ended.stderr) == (0, "")
    text, address, mine, home = ended.stdout.rsplit(maxsplit=3)
    assert (text, address, mine) == ('{"at": "http://127.0.0.1:1"}', "http://127.0.0.1:1/v1", f"{home}/x")
    assert not Path(home).exists()
    assert not package.is_installed


def test_a_package_is_installed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr("clients.run.CLIENTS_DIR", tmp_path)
    monkeypatch.setattr("clients.run._must", commands.append)
    for version in ("1.0", "1.0", "1.1"):
        Package("made", {}, npm=[f"made@{version}"]).install()
    assert [command[-1] for command in commands] == ["made@1.0", "made@1.1"]
