r"""OpenAI- and Anthropic-compatible HTTP server.

Only programs on this machine are answered, unless --host says otherwise; then
a key is needed. docs/reference/server.md lists routes, fields and errors. In a
browser the server shows the model from the inside (`llamarium inspect`).

  llamarium serve -m meta-llama/Llama-3.2-1B-Instruct
  curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \
    -d '{"messages": [{"role": "user", "content": "Hello!"}]}'
"""

import argparse
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarium.adapters.model_names import public_name
from llamarium.cli.disk_cache import add_disk_cache, check_bound, disk_cache, size
from llamarium.cli.errors import UsageError
from llamarium.cli.flags import Group, add_flags, given_options
from llamarium.cli.options import (
    a_text,
    add_chat_template,
    add_kv_cache,
    add_model,
    add_repeatable,
    add_values,
    check_adapters,
    load_llama,
    loaded_with,
)
from llamarium.cli.speculation import add_speculation, check_speculation, load_draft, prompt_lookup
from llamarium.errors import OptionError
from llamarium.extras import optional
from llamarium.hub.folders import is_adapter
from llamarium.hub.resolve import PACKAGED_RUNS, packaged_run
from llamarium.options.serving import AccessOptions, EngineOptions
from llamarium.server.http.access_keys import KEY_VARIABLE, access_keys
from llamarium.server.settings import Settings

if TYPE_CHECKING:
    import socket

    from llamarium.generation.text_engine import TextEngine
    from llamarium.page.compare.references import References
    from llamarium.page.compare.runs import Runs
    from llamarium.page.routes.ticket import Ticket
    from llamarium.page.schema.lesson import ClassLesson
    from llamarium.server.lifecycle.loading import Progress
    from llamarium.server.lifecycle.service import ServedModel

_DEFAULTS = Settings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    place = {"host": _DEFAULTS.host, "port": _DEFAULTS.port}  # None, so that it can be refused beside --uds
    add_flags(parser.add_argument_group("network"), Settings, part="network", parsers={"uds": _path}, defaults=place)
    access = parser.add_argument_group("authentication and access")
    _add_access(access)
    bounds = parser.add_argument_group("limits")
    add_engine(bounds)
    add_flags(bounds, Settings, part="limits")
    add_served_names(parser)
    add_tool_form(parser)
    add_chat_template(parser)
    text = "store so many bytes of responses, for previous_response_id (default: none)"
    where = ("--store-file", Path, "FILE", None, "where they are stored, texts and all (default: in memory)")
    add_values(parser, ("--store-responses", size, "SIZE", None, text), where)
    text = "record prompts and answers there, for `llamarium replay` (mode 0600, not those with store: false)"
    record_size = (
        "--record-size",
        size,
        "SIZE",
        None,
        "maximum size of that file; then recording stops (default: 1GiB)",
    )
    add_values(parser, ("--record", Path, "FILE", None, text), record_size)
    add_page(parser, access)
    add_flags(parser, Settings, part="answers")
    add_kv_cache(parser)
    add_model(parser, names_adapters=True)


def add_served_names(parser: argparse.ArgumentParser) -> None:
    """Add `--served-model-name`; `served_names` reads it."""
    add_flags(parser, AccessOptions, part="name", parsers={"served_model_name": a_text})


def served_names(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the names of the model in requests; the first one stands in answers."""
    names = tuple(args.served_model_name) or (public_name(args.model, args.adapter, args.adapters),)
    if ambiguous := [name for name in names if name in args.adapters]:
        raise UsageError(f"argument --adapter: {ambiguous[0]} is what the model itself is called; choose another name")
    return names


def add_page(parser: argparse.ArgumentParser, access: Group | None = None) -> None:
    """Add what the page shows besides the served model; `serve_page` opens it."""
    text = "show the requests of all clients in the page, to every client with a key"
    (access or parser).add_argument("--inspect-requests", action="store_true", help=text)
    text = "a training run, or a folder of runs, which the page shows; without -m its newest checkpoint is the model"
    add_repeatable(parser, ("--checkpoints", Path, "RUN", text))
    text = "weights in 16 or 32 bits, such as -m was quantized from: the page measures fewer bits against them"
    add_repeatable(parser, ("--reference", str, "MODEL", text))


def _check_compared(args: argparse.Namespace) -> None:
    """Check `add_page`'s options before loading; a run's newest checkpoint is the model where none is named."""
    if not args.checkpoints and not args.reference:
        return  # the imports take as long as the server's own modules
    from llamarium.page.compare.references import References
    from llamarium.page.compare.runs import Runs

    References(args.reference)
    newest = Runs(args.checkpoints).newest
    if newest is None or args.model is not None or args.adapter is not None or args.adapters:
        return
    if is_adapter(newest):
        args.adapter = newest
    else:
        args.model = str(newest)


def compared(args: argparse.Namespace) -> "tuple[Runs, References]":
    """Return the training runs that are named and the package's own after them, and the references that are named."""
    from llamarium.page.compare.references import References
    from llamarium.page.compare.runs import Runs

    names = Runs(args.checkpoints).names
    runs = [*args.checkpoints, *(packaged_run(name) for name in PACKAGED_RUNS if name not in names)]
    return Runs(runs), References(args.reference)


def add_tool_form(parser: argparse.ArgumentParser) -> None:
    """Add `--tool-form` and `--open-objects`."""
    add_flags(parser, Settings, part="tools")


def add_engine(group: Group) -> None:
    """Add what an engine is made with, and the context of its requests; `load_engine` makes it."""
    add_flags(group, Settings, part="engine", parsers={"kv_memory": size})
    add_disk_cache(group)
    add_speculation(group)


def _add_access(group: Group) -> None:
    readers = {"allowed_hosts": _host, "cors_origins": _origin, "adapter_dir": _folder}
    add_flags(group, Settings, part="keys")
    add_flags(group, AccessOptions, part="keys")
    add_flags(group, Settings, part="access", parsers=readers)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal stops the server."""
    settings = _settings(args)
    check_bound(args)
    require_packages("llamarium serve")
    return serve_page(args, settings, lambda report: load_engine(args, report))


def serve_page(
    args: argparse.Namespace,
    settings: Settings,
    load: "Callable[[Progress], tuple[ServedModel, TextEngine]]",
    begin: "Callable[[socket.socket], Ticket | None]" = lambda _: None,
    build_folder: Path | None = None,
    lesson: "ClassLesson | None" = None,
) -> int:
    """Serve what `load` loads, and the page on it, until a signal stops the server.

    `begin` is called once the server listens and loads; it may return what lets a browser in. `build_folder` is a
    learner's folder, which the page checks, and `lesson` a teacher's, which it shows.
    """
    from llamarium.server.hosts import listen
    from llamarium.server.lifecycle.loading import ModelLoader

    check_adapters(args)
    _check_compared(args)
    names = served_names(args)
    with listen(settings) as listener:
        loading = ModelLoader(load)
        from llamarium.page.extension import page  # while the model is being loaded: this takes half a second
        from llamarium.server.lifecycle.run import run
        from llamarium.server.lifecycle.service import Service

        extension = page(
            begin(listener),
            inspects_requests=args.inspect_requests,
            loaded_with=lambda: loaded_with(args),
            prepares=True,
            compared=compared(args),
            build_folder=build_folder,
            shown_lesson=lesson,
        )
        return run(Service(loading, settings), names, listener, [extension])


def require_packages(command: str) -> None:
    """Refuse to begin without the packages that serve."""
    for module in ("fastapi", "uvicorn", "httptools", "prometheus_client"):
        if importlib.util.find_spec(module) is None:
            optional(module, "serve", command, module.replace("_", "-"))


def load_engine(args: argparse.Namespace, report: "Progress | None" = None) -> "tuple[ServedModel, TextEngine]":
    """Load the model and make its engine; `report` as for `load_llama`."""
    from llamarium.server.lifecycle.service import check_context

    disk = disk_cache(args)  # refused before the model is read
    check_speculation(args)
    llama = load_llama(args, falls_back=False, report=report)  # another one would answer under its name
    draft = None if args.draft_model is None else load_draft(args, report)
    engine = llama.engine(
        adapters=args.adapters, prompt_lookup=prompt_lookup(args, llama) or False, draft_model=draft, disk_cache=disk,
        **given_options(args, EngineOptions),
    )  # fmt: skip
    check_context(engine, args.max_context)
    return llama, engine


def _settings(args: argparse.Namespace) -> Settings:
    from llamarium.server.openai.responses.store import ResponseStore
    from llamarium.server.recorder import MAX_BYTES, Recorder

    tcp_flags = [name for name in ("host", "port") if getattr(args, name) is not None]
    if args.uds is not None and tcp_flags:
        raise UsageError(f"argument --{tcp_flags[0]}: not allowed with argument --uds")
    keys = _keys(args, args.host or _DEFAULTS.host)
    if args.store_file is not None and args.store_responses is None:
        raise UsageError("argument --store-file: say how large it may become, by --store-responses")
    if args.record_size is not None and args.record is None:
        raise UsageError("argument --record-size: say which file, by --record")
    responses = None if args.store_responses is None else ResponseStore(args.store_responses, args.store_file)
    recorder = None if args.record is None else Recorder(args.record, args.record_size or MAX_BYTES)
    options: dict[str, Any] = {**given_options(args, Settings), "api_keys": keys}
    return Settings(**options, responses=responses, recorder=recorder)


def _keys(args: argparse.Namespace, host: str) -> tuple[str, ...]:
    """Return the keys that let in, of all places where they may stand."""
    from llamarium.server.hosts import LOCAL_NAMES

    try:
        keys = access_keys(args.api_key_file, args.api_keys)
    except OptionError as error:
        raise UsageError(str(error)) from None
    if not keys and args.uds is None and host.lower() not in LOCAL_NAMES and not args.allow_anyone:
        raise UsageError(
            f"argument --host: {host} is reachable for other machines; give --api-key, --api-key-file or the "
            f"variable {KEY_VARIABLE}, or --allow-anyone"
        )
    if args.inspect_requests and not keys and args.uds is None:
        raise UsageError(
            "argument --inspect-requests: without a key, whoever reaches the server could read what others ask; give "
            f"--api-key, --api-key-file or the variable {KEY_VARIABLE}"
        )
    return keys


def _host(text: str) -> str:
    from llamarium.server.hosts import is_address

    if not re.fullmatch(r"[\w.-]+", text) and not is_address(text):
        raise argparse.ArgumentTypeError(f"expected a name without a port, as in chat.example, found {text!r}")
    return text


def _origin(text: str) -> str:
    if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s*]+", text):
        raise argparse.ArgumentTypeError(f"expected an origin as in https://chat.example, or *, found {text!r}")
    return text


def _path(text: str) -> str:
    if not text:  # Linux would make an abstract socket of it, which every user may open
        raise argparse.ArgumentTypeError("expected a path, found ''")
    return text


def _folder(text: str) -> Path:
    if not text or not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder that is there, found {text!r}")
    return Path(text)
