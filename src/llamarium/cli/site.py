"""Write the page as a folder for any static host.

The models are computed in the browser: readers need a link, and install
nothing. The folder has two small models that write like Shakespeare, and one
of yours with -m.

  llamarium site --out site
  llamarium site --out site -m smollm2-135m
  llamarium site --out site -m model.gguf --force
  llamarium site --out site --lesson apple-pie.toml
  python -m http.server --directory site
"""

import argparse
import re
from pathlib import Path

from llamarium.cli.options import add_json
from llamarium.cli.output import emit, note


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="the folder")
    text = "a further model, which the page opens first: a name, a folder, or a .gguf file"
    parser.add_argument("-m", "--model", metavar="NAME", help=text)
    text = "origin from which the page may open GGUF files, as in https://files.example (repeatable)"
    parser.add_argument("--allow-origin", action="append", default=[], type=_origin, metavar="URL", help=text)
    text = "lesson that the page opens with: texts and questions for a class (TOML)"
    parser.add_argument("--lesson", type=Path, metavar="FILE", help=text)
    parser.add_argument("--force", action="store_true", help="replace a site in DIR")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write it."""
    from llamarium.page.site.folder import write_site

    site = write_site(args.out, args.model, args.allow_origin, args.lesson, force=args.force)
    if args.json:
        models = [{"name": model.name, "file": model.file, "bytes": model.bytes} for model in site.models]
        emit({"path": str(site.path), "bytes": site.num_bytes, "models": models})
        return 0
    names = ", ".join(model.name for model in site.models)
    note(f"wrote {site.path} ({site.num_bytes / 1e6:.1f} MB; {names})")
    note(f"to look at it: python -m http.server --directory {site.path}")
    return 0


def _origin(text: str) -> str:
    if not re.fullmatch(r"https?://[A-Za-z0-9.-]+(:\d{1,5})?", text):
        raise argparse.ArgumentTypeError(f"expected an origin as in https://files.example, found {text!r}")
    return text
