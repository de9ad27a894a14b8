"""Merge a LoRA adapter into its base model: a plain model folder remains, which
every tool of the ecosystem reads.

The base is the one that the adapter names, unless -m names another. A quantized
base is unpacked. The merged model's logits are held against the adapter's.

  llamarium merge --adapter runs/my-adapter --out my-model
  llamarium merge --adapter runs/my-adapter -m ./base --dtype float32 --out my-model
"""

import argparse
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from llamarium.cli.options import add_json, add_loading, load_llama
from llamarium.cli.output import emit, note, status, warn, write_text

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.tokenizer.base import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--adapter", type=Path, required=True, metavar="FOLDER", help="with adapter_config.json and its safetensors"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the merged model goes")
    parser.add_argument("--force", action="store_true", help="replace a model that is there")
    parser.add_argument(
        "--any-base", action="store_true", help="merge even if the adapter was trained on another base of this shape"
    )
    add_json(parser)
    group = parser.add_argument_group("base model")
    group.add_argument("-m", "--model", metavar="NAME", help="the base (default: the one that the adapter names)")
    add_loading(group)


def run(args: argparse.Namespace) -> int:
    """Merge, check and save."""
    from llamarium.errors import OptionError, escape
    from llamarium.train.adapters import CONFIG, read_adapter_config

    config = read_adapter_config(args.adapter)
    args.model = args.model or config.get("base_model_name_or_path")
    if args.model is None:
        raise OptionError(f"{escape(args.adapter / CONFIG)}: names no base model; name it with -m")
    _check_apart(args.out, args.adapter, args.model)
    with replaced_folder(args.out, force=args.force) as folder:
        llama = load_llama(args)
        with status(f"merging into {args.model}"):
            from llamarium.train.merge import merge_adapter
            from llamarium.weights.save import save_model

            report = merge_adapter(llama.model, args.adapter, check_base=not args.any_base)
            save_model(llama.model, folder, tokenizer=_tokenizer(llama), generation_config=llama.generation_config)
    note(
        f"{report.kept:.1%} of the correction is in the merged weights; the adapter moves the logits by "
        f"{report.effect:.2%}, and the merged model's are {report.difference:.2%} off the adapter's"
    )
    if args.json:
        emit({"path": str(args.out), "base": args.model, **dataclasses.asdict(report)})
    else:
        write_text(f"{args.out}\n")
    return 0


def _check_apart(out: Path, adapter: Path, base: str) -> None:
    from llamarium.errors import OutputError, escape

    for what, path in (("the adapter", adapter), ("the base model", Path(base))):
        if out.resolve() == path.resolve():
            raise OutputError(f"{escape(out)}: is {what}; choose another folder for the merged model")


def _tokenizer(llama: "Llama") -> "Tokenizer | None":
    from llamarium.errors import TokenizerError

    try:
        return llama.tokenizer
    except TokenizerError as error:
        warn(f"the merged model is saved without a tokenizer: {error}")
        return None


@contextmanager
def replaced_folder(target: Path, *, force: bool) -> Generator[Path]:
    """Give a new folder to fill, which becomes `target` when the body ends well, and is removed if it does not.

    Args:
        target: Absent, empty or, with `force`, a model's folder, which is kept until the new one is complete.
        force: Replace what is there.

    Raises:
        OutputError: If `target` exists and may not be replaced, holds other files than a model's, or cannot be
            written.
    """
    target = target.resolve()
    _check_replaceable(target, force=force)
    new = _folder_beside(target, ".part")
    try:
        yield new
        _put(new, target)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _check_replaceable(target: Path, *, force: bool) -> None:
    from llamarium.errors import OutputError, escape
    from llamarium.weights.save import MODEL_FILES

    if target.exists() and not target.is_dir():
        raise OutputError(f"{escape(target)}: is a file; choose a folder")
    names = sorted(path.name for path in target.iterdir()) if target.exists() else []
    if names and not force:
        raise OutputError(f"{escape(target)}: holds {escape(names[0])} already; choose another folder, or use --force")
    if others := [name for name in names if not any(fnmatch(name, pattern) for pattern in MODEL_FILES)]:
        raise OutputError(
            f"{escape(target)}: holds {escape(others[0])}, which is no file of a model, so it is not replaced; choose "
            "another folder"
        )


def _folder_beside(target: Path, suffix: str) -> Path:
    """Make an empty folder on the same disk, from where a folder can be renamed to `target` at once."""
    from llamarium.weights.save import unwritable

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=suffix, dir=target.parent))
        umask = os.umask(0)
        os.umask(umask)
        folder.chmod(0o777 & ~umask)  # mkdtemp's 0700 is for secrets
    except OSError as error:
        raise unwritable(target, error) from None
    return folder


def _put(new: Path, target: Path) -> None:
    """Rename a complete folder to `target`; what was there is kept until then."""
    from llamarium.weights.save import sync, unwritable

    old = _folder_beside(target, ".old")
    try:
        if target.exists():
            target.rename(old)
        new.rename(target)
        sync(target.parent)
    except OSError as error:
        raise unwritable(target, error) from None
    finally:
        if not target.exists() and any(old.iterdir()):
            old.rename(target)
        else:
            shutil.rmtree(old, ignore_errors=True)
