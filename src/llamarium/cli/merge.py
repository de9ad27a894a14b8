"""Merge a LoRA adapter into its base model: a plain model folder remains, which
every tool of the ecosystem reads.

The base is the one that the adapter names, unless -m names another. A quantized
base is unpacked. The merged model's logits are held against the adapter's.

  llamarium merge --adapter runs/my-adapter --out my-model
  llamarium merge --adapter runs/my-adapter -m ./base --dtype float32 --out my-model
"""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from llamarium.cli.options import add_json, add_loading, importing_torch, load_base, name_base
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
    with importing_torch():
        from llamarium.checkpoints.save import save_model
        from llamarium.io import atomic_folder
        from llamarium.train.adapters.merge import merge_adapter
        from llamarium.train.adapters.peft_files import with_tokenizer_of

    name_base(args)
    _check_apart(args.out, args.adapter, args.model)
    with atomic_folder(args.out, replace=args.force) as folder:
        llama = load_base(args)
        with status(f"merging into {args.model}"):
            report = merge_adapter(llama.model, args.adapter, check_base=not args.any_base)
            llama = with_tokenizer_of(llama, args.adapter)
            save_model(llama.model, folder, tokenizer=_tokenizer(llama), generation_config=llama.generation_config)
    note(
        f"merged, and as it should be: the model's logits are {report.difference:.2%} off the adapter's, where "
        f"rounding to this dtype alone may make {report.tolerance:.1%}; the adapter moves them by {report.effect:.2%}, "
        f"and {report.kept:.1%} of its correction is in the merged weights"
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
