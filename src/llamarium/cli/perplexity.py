"""Measure how well a model predicts a text file of any length.

The file is read in windows of --context tokens, each beginning --stride tokens
after the one before, so that every token is scored once, with at least
context - stride tokens before it. Compare perplexities of the same context,
stride and tokenizer only; bits per byte compare across tokenizers.

With --against the model is also compared with another one, token by token: the
mean KL(P_against || P_model) in nats, and how often both would choose the same
token. That shows what quantizing costs, which perplexity alone may hide. The
other model is computed unpacked, in float32 unless --against-dtype says less.

  llamarium perplexity story.txt
  llamarium perplexity story.txt -m runs/pretrain/best --context 256
  cat story.txt | llamarium perplexity - --json
  llamarium perplexity story.txt -m quantized --against original
"""

import argparse
from typing import TYPE_CHECKING

from llamarium.cli.options import UsageError, add_json, add_model, add_values, load_llama, positive, whole_number
from llamarium.cli.output import emit, share_done, show, size, table
from llamarium.cli.text import read_file

if TYPE_CHECKING:
    from rich.table import Table

    from llamarium.api import Llama
    from llamarium.inspect.measures.divergence import Divergence
    from llamarium.inspect.measures.perplexity import Perplexity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("file", metavar="FILE", help="a text file in UTF-8; - is standard input")
    add_values(
        parser,
        ("--context", whole_number(2), "N", None, "tokens of a window (default: 2048, or what the model can hold)"),
        ("--stride", positive, "N", None, "tokens between windows, up to --context (default: half of it)"),
        ("--against", str, "NAME", None, "compare with this model, which has the same vocabulary; named as for -m"),
    )
    dtypes, text = ("float32", "bfloat16", "float16"), "what --against computes in (default: float32)"
    parser.add_argument("--against-dtype", choices=dtypes, help=text)
    add_json(parser)
    add_model(parser)


def run(args: argparse.Namespace) -> int:
    """Measure the file and print what was found."""
    if args.against_dtype is not None and args.against is None:
        raise UsageError("--against-dtype is for --against, which is not given")
    text = read_file(args.file)
    llama = load_llama(args)
    if args.against is not None:
        return _compare(args, llama, text)
    with share_done("reading the text") as progress:
        measured = llama.perplexity(text, context=args.context, stride=args.stride, progress=progress)
    if args.json:
        emit({"file": args.file, "model": args.model, **measured.to_dict()})
    else:
        show(_view(measured))
    return 0


def _compare(args: argparse.Namespace, llama: "Llama", text: str) -> int:
    from llamarium.api import load

    with share_done(f"loading {args.against}") as progress:
        against = load(args.against, dtype=args.against_dtype or "float32", device=args.device, progress=progress)
    with share_done("reading the text") as progress:
        measured = llama.divergence(text, against=against, context=args.context, stride=args.stride, progress=progress)
    if args.json:
        emit({"file": args.file, "model": args.model, "against": args.against, **measured.to_dict()})
    else:
        show(_view(measured.model, measured))
    return 0


def _view(measured: "Perplexity", compared: "Divergence | None" = None) -> "Table":
    begins = "after BOS, which is not scored" if measured.bos else "without BOS, so all but the first"
    rows = {"perplexity, e^(nats / token)": f"{measured.perplexity:,.4f}"}
    if compared is not None:
        other_perplexity = compared.against.perplexity
        share = measured.perplexity / other_perplexity - 1
        difference = f"{abs(share):.2%} {'above' if share > 0 else 'below'}"
        rows |= {
            "the other model's": f"{other_perplexity:,.4f} (this one's is {difference})",
            "KL(other || this), nats / token": f"{compared.kl:.6f} ± {compared.kl_error:.6f}",
            "99 % of tokens are below": f"{compared.kl_percentile:.6f}",
            "same token most probable": f"{compared.same_top:.2%} of tokens",
        }
    rows |= {
        "bits per byte": f"{measured.bits_per_byte:.4f}",
        "nats per token": f"{measured.nats / measured.num_tokens:.4f}",
        "tokens scored": f"{measured.num_tokens:,} ({begins})",
        "text": size(measured.num_bytes),
        "windows": f"{measured.num_windows:,} of {measured.context:,} tokens, one every {measured.stride:,}",
    }
    return table("", "", rows=rows.items())
