"""List the models and tokenizers that are built in, and those of the Hugging
Face hub's cache that can be loaded without a network.

  llamarium models
  llamarium chat -m org/name
"""

import argparse
from pathlib import Path
from typing import Any

from llamarium.cli.options import add_json
from llamarium.cli.output import emit, note, show
from llamarium.cli.tables import size, table
from llamarium.errors import escape


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List them."""
    models = [*_builtins(), *_from_hub()]
    if args.json:
        for model in models:
            emit(model)
        return 0
    shown = table("name", "what", "size", "state", right=("size",))
    for model in models:
        state = "on this machine" if model["path"] else "fetched when it is used"
        shown.add_row(escape(model["name"]), model["summary"], size(model["num_bytes"]), state)
    show(shown)
    note("\nOthers: a folder, a .gguf file, org/name or org/name:file.gguf on the hub")
    return 0


def _builtins() -> list[dict[str, Any]]:
    from llamarium.hub.builtin import BUILTINS, cached_path, is_cached
    from llamarium.hub.packaged import PACKAGED, packaged_path

    return [
        {
            "name": name,
            "where": "built-in",
            "kind": item.kind,
            "summary": item.summary,
            "num_bytes": item.num_bytes,
            "path": str(cached_path(name)) if is_cached(name) else None,
        }
        for name, item in BUILTINS.items()
    ] + [
        {
            "name": name,
            "where": "package",
            "kind": "model",
            "summary": summary,
            "num_bytes": sum(file.stat().st_size for file in packaged_path(name).iterdir()),
            "path": str(packaged_path(name)),
        }
        for name, summary in PACKAGED.items()
    ]


def _from_hub() -> list[dict[str, Any]]:
    from llamarium.hub.resolve import cached_models

    return [
        {
            "name": model.name,
            "where": "hub",
            "kind": "model",
            "summary": "GGUF file" if model.path.suffix == ".gguf" else _folder_kind(model.path),
            "num_bytes": model.num_bytes,
            "path": str(model.path),
        }
        for model in cached_models()
        if model.where == "hub"
    ]


def _folder_kind(folder: Path) -> str:
    return "safetensors" if (folder / "config.json").is_file() else "Meta's original files"
