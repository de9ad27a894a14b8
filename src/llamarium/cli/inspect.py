r"""Look inside a model in the browser: a page on the pass that answers.

A server on this machine alone is started, with a key of its own in the link
that is printed. Whoever has the link may ask; Ctrl-C ends it. The browser is
opened with a ticket instead, which lets it in once.

  llamarium inspect "The cat sat on the mat"
  llamarium inspect "The cat sat" -m meta-llama/Llama-3.2-1B
  llamarium inspect --no-browser --port 8765
  llamarium inspect --build my_llama
  llamarium inspect --lesson apple-pie.toml
"""

import argparse
import importlib
import secrets
import socket
import sys
import threading
import webbrowser
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from llamarium.adapters.model_names import DEFAULT_MODEL
from llamarium.cli import serve
from llamarium.cli.flags import add_flags
from llamarium.cli.options import add_model, name_base
from llamarium.cli.output import note
from llamarium.cli.text import add_text, read_text
from llamarium.errors import OptionError
from llamarium.hub.folders import is_learner_folder
from llamarium.server.settings import Settings

if TYPE_CHECKING:
    from llamarium.generation.text_engine import TextEngine
    from llamarium.page.routes.ticket import Ticket
    from llamarium.server.lifecycle.loading import Progress
    from llamarium.server.lifecycle.service import ServedModel

_KEY_BYTES = 24
_FLOAT32_BYTES = 4
_MAX_MEMORY_SHARE = 1 / 2  # of free memory, for weights in float32: the page keeps passes and other models beside them
_MAX_LINK_TEXT = 4096  # characters of a text in a link: browsers and shells take no endless ones


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_text(parser, "TEXT", "what to begin with (or none)")
    add_flags(parser, Settings, "port", defaults={"port": "a free one"})
    parser.add_argument("--no-browser", action="store_true", help="print the link, and open nothing")
    serve.add_page(parser)
    text = "a folder of `llamarium build`: the page checks its functions, and runs them on this machine"
    parser.add_argument("--build", type=Path, metavar="FOLDER", help=text)
    text = "lesson to show: texts and questions for a class (TOML)"
    parser.add_argument("--lesson", type=Path, metavar="FILE", help=text)
    parser.set_defaults(
        prompt_lookup=False, ngram_pool=None, ngram_corpus=None, draft_model=None, kv_memory=None,
        max_num_seqs=Settings().max_num_seqs, kv_cache_dtype="auto", max_context=None, cache_dir=None, cache_disk=None,
        served_model_name=[],
    )  # fmt: skip
    add_model(parser, names_adapters=True, dtype_default="float32; auto if the weights would not fit in memory so")


def run(args: argparse.Namespace) -> int:
    """Serve the page until a signal stops the server."""
    serve.require_packages("llamarium inspect")
    from llamarium.page.bundle import HOW_TO_BUILD, is_built

    if not is_built():
        raise OptionError(f"llamarium was installed without its page; {HOW_TO_BUILD}")
    text = read_text(args)
    if text is not None and len(text) > _MAX_LINK_TEXT:
        raise OptionError(f"the text has {len(text):,} characters; expected {_MAX_LINK_TEXT:,} at most: paste it there")
    folder = None
    if args.build is not None:
        from llamarium.course.outline import course_of

        course_of(args.build)
        folder = args.build.resolve()
    lesson = None
    if args.lesson is not None:
        from llamarium.page.lesson import read_lesson

        lesson = read_lesson(args.lesson)
    settings = Settings(port=args.port or 0, api_keys=(secrets.token_urlsafe(_KEY_BYTES),))
    noted = ExitStack()

    def begin(listener: socket.socket) -> "Ticket | None":
        from llamarium.page.routes.ticket import Ticket

        if folder is not None:
            noted.enter_context(_shown(folder, settings, listener))
        ticket = None if args.no_browser else Ticket(settings.api_keys[0])
        stage = "lesson" if lesson else _view_of(args.checkpoints) or ("build" if folder else None)
        _show(settings, listener, text, ticket, **({"stage": stage} if stage else {}))
        return ticket

    with noted:
        return serve.serve_page(args, settings, lambda report: _load(args, report), begin, folder, lesson)


def _view_of(runs: list[Path]) -> str | None:
    """Return the view that the page opens for training runs; None if there are none."""
    if not runs:
        return None
    from llamarium.page.compare.runs import Runs

    found = Runs(runs)
    return "checkpoints" if any(map(found.steps, found.names)) else "runs"


def _shown(folder: Path, settings: Settings, listener: socket.socket) -> AbstractContextManager[None]:
    """Note the page's address in a learner's folder while it is served, for the links of `build check`."""
    from llamarium.course.folder.page import shown_at
    from llamarium.server.hosts import address

    return shown_at(folder, address(settings, listener))


def _load(args: argparse.Namespace, report: "Progress") -> "tuple[ServedModel, TextEngine]":
    args.dtype = args.dtype or _default_dtype(args)
    loaded = serve.load_engine(args, report)
    importlib.import_module("llamarium.inspect.trace")  # before the first request asks for it
    return loaded


def _default_dtype(args: argparse.Namespace) -> str:
    """Return float32, so that every view shows the same number for the same thing; `auto` where that cannot be.

    Edits, steering and learning compute in float32 in any case. Who asks for few bits gets them, and weights that the
    memory does not hold in float32 are computed as they are stored.
    """
    from llamarium.checkpoints.open import open_model
    from llamarium.cost import count_parameters
    from llamarium.kernels.memory import free_bytes

    name_base(args)
    if args.quantize is not None or args.input_bits is not None or args.dequantize == "use":
        return "auto"
    opened = open_model(args.model or DEFAULT_MODEL, with_tokenizer=False)
    if is_learner_folder(opened.path):
        return "auto"
    num_bytes = _FLOAT32_BYTES * count_parameters(opened.config).total
    if num_bytes <= _MAX_MEMORY_SHARE * free_bytes():
        return "float32"
    note(
        f"float32 would take {num_bytes / 1e9:.1f} GB, more than half of the free memory, so the model computes in its "
        "stored type; edits and steering, which compute in float32, show slightly different numbers (--dtype float32)"
    )
    return "auto"


def _show(settings: Settings, listener: socket.socket, text: str | None, ticket: "Ticket | None", **view: str) -> None:
    """Print the link to a view, and open a browser."""
    from llamarium.server.hosts import address

    url = address(settings, listener)
    print(link_to(url, text, key=settings.api_keys[0], **view), flush=True)
    note("the link has the key in it; Ctrl-C ends the server")
    if ticket is not None:
        threading.Thread(target=_open, args=(link_to(url, text, ticket=ticket.value, **view),), daemon=True).start()


def _open(link: str) -> None:
    """Open a browser; some calls return only when it is closed."""
    if not webbrowser.open(link):
        print("no browser could be opened; open the link by hand", file=sys.stderr)


def link_to(url: str, text: str | None, **fields: str) -> str:
    """Return the link to the page with a key or a ticket, and a view: what stands after the # stays in the browser."""
    fields = fields if text is None else {**fields, "text": text}
    return f"{url}/#" + "&".join(f"{name}={quote(value, safe='')}" for name, value in fields.items())
