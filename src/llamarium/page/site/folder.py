"""The folder that `llamarium site` writes.

| path                       | what it is                                                                   |
|----------------------------|------------------------------------------------------------------------------|
| `index.html`, `assets/`    | the page as the local server has it, behind a script: `engine-*/start.js`    |
| `engine-*/`                | that script, the worker that computes, and its kernels, named by their hash  |
| `models/`, `models.json`   | GGUF files, and the list of them; the first one is opened                    |
| `offline.js`, `files.json` | the service worker that keeps the site for later, and all files of the site  |

All addresses are relative: the folder works under any path.
"""

import hashlib
import html
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarium.checkpoints.export import export
from llamarium.checkpoints.open import open_model
from llamarium.errors import OptionError, escape
from llamarium.io import atomic_folder
from llamarium.kernels import native
from llamarium.page import bundle
from llamarium.page.lesson import read_lesson

SCRIPTS = Path(__file__).with_name("dist")
"""Output folder of `web/vite.site.config.ts`."""

KERNELS = Path(native.__file__).with_name("_native.wasm")
"""Output of `hatch_build.py --wasm` for one thread; the multithreaded build is next to it."""

SHIPPED = ("shakespeare-char", "letters")
"""Models in every site."""

HOW_TO_BUILD = "in a checkout with Node.js 20 or newer, run `make site`"

_MOST_KEPT = 16 * 2**20  # maximum bytes of a file that a browser caches for offline use


@dataclass(frozen=True, slots=True)
class SiteModel:
    """A model of a site, as in `models.json`.

    Attributes:
        file: GGUF file, relative to the site.
        command: Command that opens the model on a local server.
    """

    name: str
    file: str
    bytes: int
    command: str


@dataclass(frozen=True, slots=True)
class Site:
    """A site that was written; `num_bytes` is the total size of its files."""

    path: Path
    models: tuple[SiteModel, ...]
    num_bytes: int


def write_site(
    out: Path,
    model: str | None = None,
    origins: Sequence[str] = (),
    lesson: Path | None = None,
    *,
    force: bool = False,
) -> Site:
    """Write the page and its models as a folder for any static host.

    Args:
        out: The folder.
        model: A model besides `SHIPPED`, which the page opens first: a GGUF file is copied, others are exported.
        origins: Of other hosts, such as "https://files.example", from which `?model=ADDRESS` may open a GGUF file.
        lesson: A lesson file (TOML), which the page opens with.
        force: Replace a site that is there.

    Raises:
        LlamariumError: If this installation has no page for browsers alone, the model or the lesson cannot be read, or
            the folder cannot be written.
    """
    _check_built()
    taught = None if lesson is None else read_lesson(lesson).model_dump(mode="json")
    with atomic_folder(out, replace=force, others=_other_files, whose="a site's") as folder:
        shutil.copytree(bundle.DIST, folder, dirs_exist_ok=True)
        scripts = _add_engine(folder)
        names = dict.fromkeys((model, *SHIPPED) if model else SHIPPED)
        models = tuple(_add_model(folder, name) for name in names)
        listed = [_as_json(one) for one in models]
        _write_json(folder / "models.json", {"models": listed, "origins": list(origins), "lesson": taught})
        (folder / ".nojekyll").touch()  # GitHub Pages leaves out no file then
        index = folder / "index.html"
        index.write_text(_index(index.read_text("utf-8"), scripts, origins, "lesson" if taught else ""), "utf-8")
        _write_list(folder)
        num_bytes = sum(path.stat().st_size for path in _files(folder))
    return Site(out, models, num_bytes)


def _check_built() -> None:
    if not bundle.is_built():
        raise OptionError(f"llamarium was installed without its page; {bundle.HOW_TO_BUILD}")
    if not KERNELS.is_file() or not _shared_kernels().is_file() or not (SCRIPTS / "start.js").is_file():
        raise OptionError(f"llamarium was installed without the kernels for browsers; {HOW_TO_BUILD}")


def _shared_kernels() -> Path:
    return KERNELS.with_name(f"{KERNELS.stem}_threads.wasm")


def _add_engine(folder: Path) -> str:
    """Copy what computes in the browser, and return the name of its folder."""
    files = {path.name: path for path in sorted(SCRIPTS.iterdir()) if path.is_file()}
    files |= {"kernels.wasm": KERNELS, "kernels-threads.wasm": _shared_kernels()}
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files.values())).hexdigest()[:8]
    engine = folder / f"engine-{digest}"
    engine.mkdir()
    for name, path in files.items():
        shutil.copyfile(path, engine / name)
    (engine / "offline.js").rename(folder / "offline.js")  # it serves what is below its own folder
    return engine.name


def _add_model(folder: Path, name: str) -> SiteModel:
    """Write a model as a GGUF file."""
    models = folder / "models"
    models.mkdir(exist_ok=True)
    source = Path(name)
    shown = (
        re.sub(r"[^A-Za-z0-9._-]+", "-", source.stem if source.suffix == ".gguf" else source.name).strip("-.")
        or "model"
    )
    file = models / f"{shown}.gguf"
    if file.exists():
        raise OptionError(
            f"{escape(name)}: a model of this name, {shown}, is part of every site; give the file another name"
        )
    if source.suffix == ".gguf" and source.is_file():
        open_model(source)  # refused here, and not in the browser
        shutil.copyfile(source, file)
    else:
        export(name, file, format="gguf")
    shipped = name if name in SHIPPED else source.name
    return SiteModel(shown, f"models/{file.name}", file.stat().st_size, f"llamarium inspect -m {shipped}")


def _index(page: str, scripts: str, origins: Sequence[str], stage: str) -> str:
    """Return the page's index with its content security policy, and with the script that runs before the page.

    That script opens `stage` where the address names no view; empty is the first screen.
    """
    policy = f"{bundle.POLICY}; script-src 'self' 'wasm-unsafe-eval'"
    if origins:
        policy += f"; connect-src 'self' {' '.join(origins)}"
    query = f"?stage={stage}" if stage else ""
    head = (
        f'    <meta http-equiv="content-security-policy" content="{html.escape(policy)}" />\n'
        f'    <link rel="stylesheet" href="./{scripts}/site.css" />\n'
        f'    <link rel="modulepreload" href="./{scripts}/threads.js" />\n'
        f'    <script type="module" src="./{scripts}/start.js{query}"></script>\n'
    )
    before, charset, after = page.partition('    <meta charset="utf-8" />\n')
    assert charset, "the page's index names no encoding"
    return before + charset + head + after


def _write_list(folder: Path) -> None:
    """List the site's files: those that a browser keeps, and those that are too large; the version is a hash of all."""
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in _files(folder)}
    digest = hashlib.sha256()
    for name in sizes:
        digest.update(f"{name}\0".encode() + hashlib.sha256((folder / name).read_bytes()).digest())
    kept = [name for name, size in sizes.items() if size <= _MOST_KEPT and not name.startswith(".")]
    listed = {
        "version": digest.hexdigest()[:16],
        "files": ["./", *kept],
        "others": [name for name in sizes if name not in kept],
    }
    _write_json(folder / "files.json", listed)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _other_files(folder: Path) -> Iterator[Path]:
    """Yield what a folder holds besides a site that was written into it."""
    try:
        listed = json.loads((folder / "files.json").read_bytes())
        listed_names = {"files.json", *map(str, listed["files"]), *map(str, listed["others"])}
    except (OSError, ValueError, KeyError, TypeError):
        listed_names = set[str]()
    return (path for path in _files(folder) if path.relative_to(folder).as_posix() not in listed_names)


def _as_json(model: SiteModel) -> dict[str, Any]:
    return {"name": model.name, "file": model.file, "bytes": model.bytes, "command": model.command}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", "utf-8")
