"""Merge a LoRA adapter into its base model: a plain model folder remains, which
every tool of the ecosystem reads.

The base is the one that the adapter names, unless -m names another. A quantized
base is unpacked. The merged model's logits are held against the adapter's, and
against those in training, which may have quantized the base (QLoRA).

  llamarium merge --adapter runs/my-adapter --out my-model
  llamarium merge --adapter runs/my-adapter -m ./base --dtype float32 --out my-model
"""

import argparse
import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from llamarium.cli.flags import given_options
from llamarium.cli.options import add_json, add_loading, importing_torch, name_base
from llamarium.cli.output import emit, note, share_done, status, write_text
from llamarium.cli.threads import set_threads
from llamarium.extras import need_torch
from llamarium.hub.resolve import resolve
from llamarium.options.loading import LoadOptions

if TYPE_CHECKING:
    from llamarium.adapters.merge import MergeReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    text = "with adapter_config.json and its safetensors"
    parser.add_argument("--adapter", type=Path, required=True, metavar="FOLDER", help=text)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the merged model goes")
    parser.add_argument("--force", action="store_true", help="replace a model that is there")
    text = "merge even if the adapter was trained on another base of this shape"
    parser.add_argument("--any-base", action="store_true", help=text)
    text = "trained: the base as training held it, quantized if it was; full: as its files have it (default: full)"
    parser.add_argument("--onto", choices=("trained", "full"), default="full", help=text)
    add_json(parser)
    group = parser.add_argument_group("base model")
    group.add_argument("-m", "--model", metavar="NAME", help="the base (default: the one that the adapter names)")
    add_loading(group)


def run(args: argparse.Namespace) -> int:
    """Merge, check and save."""
    need_torch("llamarium merge")
    name_base(args)
    path = resolve(args.model)  # first, as a download shows its own progress
    with status("loading PyTorch"), importing_torch():
        from llamarium.adapters.merge import FULLY_KEPT
        from llamarium.train.merge import merge
    set_threads(args.threads)
    with share_done(f"merging into {args.model}", "loaded; merging, comparing with the adapter") as progress:
        report = merge(
            args.adapter, args.out, model=path, check_base=not args.any_base, force=args.force, progress=progress,
            onto=args.onto, **given_options(args, LoadOptions, part="weights"),
        )  # fmt: skip
    judgement = "and as it should be" if report.kept >= FULLY_KEPT else "with the loss that the warning tells"
    note(
        f"merged, {judgement}: {report.kept:.1%} of the adapter's correction is in the merged weights\n"
        f"the adapter moves the base's logits by {report.effect:.2%}; the merged model's are within "
        f"{report.difference:.2%} of the adapter's\n"
        f"{_trained(report)}\n"
        f"chat with it: llamarium chat -m {shlex.quote(str(args.out))}"
    )
    if args.json:
        emit({"path": str(args.out), "base": args.model, **dataclasses.asdict(report)})
    else:
        write_text(f"{args.out}\n")
    return 0


def _trained(report: "MergeReport") -> str:
    """Say what training held the base in, and how far the merged model is from the one that was trained."""
    if report.trained_over is None or report.from_trained is None:
        return "the adapter does not say in what training held the base, so it is not compared with that"
    words = {"stored": "as its files have it"}
    over, onto = (words.get(name, f"in {name}") for name in (report.trained_over, report.merged_onto))
    if over == onto:
        return f"training held the base {over}, and so does this merge"
    return (
        f"training held the base {over}, and this merge {onto}: its logits are {report.from_trained:.2%} away from "
        "those of the model that was trained (--onto trained: the base as training held it)"
    )
