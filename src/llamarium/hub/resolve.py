"""From the name of a model or tokenizer to a path on disk.

| typed                            | meaning                                                                       |
|----------------------------------|-------------------------------------------------------------------------------|
| `smollm2-135m`                   | a built-in, fetched when it is missing                                         |
| `./folder`, `model.gguf`, ...    | what lies on disk                                                              |
| `org/name`                       | a hub repository: safetensors, else pytorch_model.bin, else Meta's originals   |
| `org/name:file.gguf`             | one GGUF file of a hub repository, or `org/name:folder/file.gguf`; all its parts |

The first that fits wins, so `org/name` is the folder of that name where there is one. Of a repository only config,
tokenizer and weight files are downloaded, never code.
"""

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from llamarium.config import read_json_object
from llamarium.errors import ConfigError, ModelNotFoundError, escape
from llamarium.file_names import (
    ANY_BIN,
    ANY_SAFETENSORS,
    BIN_INDEX,
    CONFIG,
    CONFIGS,
    META_FILES,
    META_SHARDS,
    TOKENIZER_FILES,
    TOKENIZER_MODEL,
    VOCABULARIES,
)
from llamarium.hub import client as hub_client
from llamarium.hub.builtin import BUILTINS, fetch
from llamarium.hub.folders import what_to_name
from llamarium.hub.gguf_names import gguf_models, part_name
from llamarium.presets import PRESETS

PACKAGED: Mapping[str, str] = {
    "shakespeare-char": "2.4M parameters; writes like Shakespeare, by characters",
    "letters": "78,000 parameters; the same at a thirtieth of the size",
}
"""Models that lie in the package itself, small enough to ship, and what they are in a line. Each is a Hugging Face
folder below `llamarium/models/`, with a card (README.md) that says how it was trained."""

PACKAGED_RUNS = ("letters",)
"""Those that are training runs, whose checkpoints the page shows; the last one is the model."""

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_REPO_FILE = re.compile(rf"(?P<repo>{_REPO.pattern}):(?P<file>[^:\\]+\.gguf)", re.ASCII)
_FILE_SUFFIXES = (".gguf", ".safetensors", ".json", ".model", ".pth", ".bin", ".pt")

_WEIGHT_FILES = (ANY_SAFETENSORS, "*.safetensors.index.json")
_BIN_FILES = (ANY_BIN, BIN_INDEX)
_NOT_WANTED = ("*/*.safetensors*", "*/*.bin*", "consolidated*.safetensors")  # folders; a copy under other names
_META_FILES = (*META_FILES, TOKENIZER_MODEL)


class CachedModel(NamedTuple):
    """A model in the hub's cache, by the name that `resolve` takes."""

    name: str
    path: Path
    num_bytes: int


def packaged_run(name: str) -> Path:
    """Return the folder of a packaged training run."""
    return Path(__file__).parents[1] / "models" / name


def packaged_path(name: str) -> Path:
    """Return the folder of a packaged model: of a run its last checkpoint."""
    folder = packaged_run(name)
    return max(folder.glob("step-*")) if name in PACKAGED_RUNS else folder


def resolve(source: str | Path, *, kind: Literal["model", "tokenizer"] = "model") -> Path:
    """Return the file or folder that `source` names, downloading it when needed.

    Args:
        source: One of the forms of the table above.
        kind: "tokenizer" downloads a repository's tokenizer files alone.

    Raises:
        ModelNotFoundError: If nothing fits, with near names.
        GatedModelError: If the hub requires an accepted licence or a token.
        DownloadError: If the network or the disk failed.
    """
    text = str(source)
    if isinstance(source, str) and text in BUILTINS:
        if kind not in ("tokenizer", BUILTINS[text].kind):  # a model's file holds a tokenizer too
            models = ", ".join([*(n for n, item in BUILTINS.items() if item.kind == "model"), *PACKAGED])
            raise ModelNotFoundError(f"{text} is a built-in tokenizer, not a model; built-in models: {models}")
        return fetch(text)
    if isinstance(source, str) and text in PACKAGED:
        return packaged_path(text)
    path = os.path.expanduser(text)  # noqa: PTH111 - Path's raises on odd names
    if kind == "model" and text and (advice := what_to_name(Path(path))) is not None:
        raise ModelNotFoundError(advice)
    if text and os.path.exists(path):  # noqa: PTH110 - Path's raises on odd names
        return Path(path)
    if isinstance(source, str):
        if match := _REPO_FILE.fullmatch(text):
            if not all(part not in ("", ".", "..") for part in match["file"].split("/")):
                raise ModelNotFoundError(
                    f"{escape(text)} names a file outside of its repository; expected org/name:file.gguf, or "
                    "org/name:folder/file.gguf"
                )
            return hub_client.download_file(match["repo"], match["file"])
        if _REPO.fullmatch(text) and not text.endswith(_FILE_SUFFIXES):
            return _download(text, kind)
    raise ModelNotFoundError(_not_found(text, kind))


def cached_models() -> list[CachedModel]:
    """Return the Llamas in the hub's cache, by name."""
    return sorted(model for repo, folder in hub_client.cached_snapshots() for model in _models_in(repo, folder))


def _download(repo: str, kind: Literal["model", "tokenizer"]) -> Path:
    """Download a repository's tokenizer; or its safetensors, else pytorch_model.bin, else Meta's original files."""
    if kind == "tokenizer":
        folder = hub_client.download_snapshot(repo, (*TOKENIZER_FILES, *CONFIGS))
        if not _holds(folder, *VOCABULARIES):
            raise ModelNotFoundError(f"{repo} holds no tokenizer.json or tokenizer.model")
        return folder
    names = (*CONFIGS, *TOKENIZER_FILES, *_WEIGHT_FILES)
    folder = hub_client.download_snapshot(repo, names, _NOT_WANTED)
    if _holds(folder, ANY_SAFETENSORS):
        return folder
    folder = hub_client.download_snapshot(repo, (*names, *_BIN_FILES), _NOT_WANTED)
    if _holds(folder, ANY_BIN):
        return folder
    folder = hub_client.download_snapshot(repo, (*_META_FILES, *(f"original/{name}" for name in _META_FILES)))
    for candidate in (folder / "original", folder):
        if _holds(candidate, META_SHARDS):
            return candidate
    files = hub_client.list_files(repo)
    if ggufs := gguf_models(files):
        listed = ", ".join(escape(name, 80) for name in ggufs[:10]) + (", …" if len(ggufs) > 10 else "")
        raise ModelNotFoundError(
            f"{repo} holds GGUF files: name one, as {repo}:{escape(ggufs[0], 80)}. There are: {listed}"
        )
    weights = [name for name in files if name.endswith((".pt", ".onnx", ".h5", ".msgpack"))]
    contents = f"; it holds {', '.join(escape(name, 80) for name in weights[:3])}" if weights else ""
    raise ModelNotFoundError(
        f"{repo} holds no safetensors, pytorch_model.bin, GGUF or consolidated.*.pth file{contents}"
    )


def _holds(folder: Path, *patterns: str) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def _not_found(text: str, kind: Literal["model", "tokenizer"]) -> str:
    quoted = escape(text) or "an empty name"
    if text.endswith(_FILE_SUFFIXES) or text.startswith((".", "/", "~")) or "\\" in text:
        hint = f"; for a GGUF file on the hub write {escape(text.rpartition('/')[0])}:FILE.gguf"
        return f"no file or folder {quoted}" + (hint if text.endswith(".gguf") and text.count("/") == 2 else "")
    if text in PRESETS:
        return (
            f"{quoted} is a preset: a shape without weights (for `llamarium tree` and `info`); give a folder, a .gguf "
            "file, or the model's org/name on the Hugging Face hub"
        )
    names = [*(name for name, item in BUILTINS.items() if kind in ("tokenizer", item.kind)), *PACKAGED]
    similar = difflib.get_close_matches(text.lower(), names, n=1, cutoff=0.5)
    guess = f" Did you mean {similar[0]}?" if similar else ""
    return (
        f"no built-in {kind}, file or folder {quoted}.{guess} Built-in: {', '.join(names)}; "
        "from the Hugging Face hub: org/name, or org/name:file.gguf"
    )


def _models_in(repo: str, folder: Path) -> Iterator[CachedModel]:
    """Yield what `resolve` would take from one snapshot of the hub's cache."""
    sizes = {f.relative_to(folder).as_posix(): f.stat().st_size for f in folder.rglob("*.gguf") if f.is_file()}
    for name in gguf_models(sizes):
        part = part_name(name)
        files = [name] if part is None else [part.of(number) for number in range(1, part.total + 1)]
        if all(file in sizes for file in files):
            yield CachedModel(f"{repo}:{name}", folder / name, sum(sizes[file] for file in files))
    meta = next((f for f in (folder / "original", folder) if _holds(f, META_SHARDS)), None)
    if _holds(folder, ANY_SAFETENSORS, ANY_BIN) and _is_llama(folder / CONFIG):
        yield CachedModel(repo, folder, _bytes_in(folder))
    elif meta is not None:
        yield CachedModel(repo, meta, _bytes_in(meta))


def _is_llama(config: Path) -> bool:
    try:
        return read_json_object(config).get("model_type") in ("llama", "mistral")
    except ConfigError:
        return False


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
