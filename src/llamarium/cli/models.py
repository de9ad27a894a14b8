"""List the models and tokenizers that are built in, and those of the Hugging
Face hub's cache that can be loaded without a network.

  llamarium models
  llamarium chat -m org/name
"""

import argparse
from pathlib import Path
from typing import Any

from llamarium.cli.options import add_json
from llamarium.cli.output import emit, note, show, size, table
from llamarium.errors import escape
from llamarium.file_names import ANY_SAFETENSORS, BIN, CONFIG


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List them."""
    from llamarium.hub.resolve import cached_models

    hub = (
        _model(cached.name, "hub", _file_kind(cached.path), cached.num_bytes, cached.path) for cached in cached_models()
    )
    models = [*_builtins(), *hub]
    if args.json:
        for model in models:
            emit(model)
        return 0
    result = table("name", "what", "size", "state", right=("size",))
    for model in models:
        state = "on this machine" if model["path"] else "fetched when it is used"
        result.add_row(escape(model["name"]), model["summary"], size(model["num_bytes"]), state)
    show(result)
    note("\nOthers: a folder, a .gguf file, org/name or org/name:file.gguf on the hub")
    return 0


def _builtins() -> list[dict[str, Any]]:
    from llamarium.hub.builtin import BUILTINS, cached_path, is_cached
    from llamarium.hub.resolve import PACKAGED, packaged_path

    models: list[dict[str, Any]] = []
    for name, item in BUILTINS.items():
        path = cached_path(name) if is_cached(name) else None
        models.append(_model(name, "built-in", item.summary, item.num_bytes, path, item.kind))
    for name, summary in PACKAGED.items():
        path = packaged_path(name)
        models.append(_model(name, "package", summary, sum(file.stat().st_size for file in path.iterdir()), path))
    return models


def _model(
    name: str, where: str, summary: str, num_bytes: int, path: Path | None, kind: str = "model"
) -> dict[str, Any]:
    path_text = None if path is None else str(path)
    return {"name": name, "where": where, "kind": kind, "summary": summary, "num_bytes": num_bytes, "path": path_text}


def _file_kind(path: Path) -> str:
    if path.suffix == ".gguf":
        return "GGUF file"
    if not (path / CONFIG).is_file():
        return "Meta's original files"
    return "safetensors" if any(path.glob(ANY_SAFETENSORS)) else BIN
