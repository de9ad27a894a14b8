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
from typing import TYPE_CHECKING, get_args

from llamarium.adapters.model_names import public_name
from llamarium.cli.disk_cache import add_disk_cache, check_bound, disk_cache, size
from llamarium.cli.options import (
    Group,
    UsageError,
    a_text,
    add_chat_template,
    add_kv_cache,
    add_model,
    add_repeatable,
    add_values,
    check_adapters,
    count,
    load_llama,
    loaded_with,
    positive,
    seconds,
    whole_number,
)
from llamarium.cli.speculation import add_speculation, check_speculation, load_draft, prompt_lookup
from llamarium.errors import OptionError
from llamarium.extras import optional
from llamarium.hub.resolve import PACKAGED_RUNS, packaged_run
from llamarium.server.http.access_keys import KEY_VARIABLE, access_keys
from llamarium.server.settings import Settings
from llamarium.tokenizer.tools.forms import ToolForm

if TYPE_CHECKING:
    import socket

    from llamarium.generation.text_engine import TextEngine
    from llamarium.page.compare.references import References
    from llamarium.page.compare.runs import Runs
    from llamarium.page.schema.lesson import ClassLesson
    from llamarium.page.ticket import Ticket
    from llamarium.server.lifecycle.loading import Progress
    from llamarium.server.lifecycle.service import ServedModel

_DEFAULTS = Settings()
PORT = whole_number(0, 65535)
"""What parses a port, for argparse; 0 is any that is free."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    _add_place(parser.add_argument_group("network"))
    access = parser.add_argument_group("authentication and access")
    _add_access(access)
    bounds = parser.add_argument_group("limits")
    add_engine(bounds)
    _add_bounds(bounds)
    add_served_names(parser)
    add_tool_form(parser)
    add_chat_template(parser)
    what = "store so many bytes of responses, for previous_response_id (default: none)"
    where = ("--store-file", Path, "FILE", None, "where they are stored, texts and all (default: in memory)")
    add_values(parser, ("--store-responses", size, "SIZE", None, what), where)
    text = "refuse fields that have no effect; else the answer's header x-llamarium-no-effect names them"
    parser.add_argument("--strict-fields", action="store_true", help=text)
    what = "record prompts and answers there, for `llamarium replay` (mode 0600, not those with store: false)"
    most = ("--record-size", size, "SIZE", None, "maximum size of that file; then recording stops (default: 1GiB)")
    add_values(parser, ("--record", Path, "FILE", None, what), most)
    text = "explain in the usage why a prompt's prefix was not cached, with the texts that differ"
    parser.add_argument("--explain-cache", action="store_true", help=text)
    add_page(parser, access)
    text = "of the lines on stderr (default: %(default)s)"
    parser.add_argument("--log-format", choices=("text", "json"), default=_DEFAULTS.log_format, help=text)
    add_kv_cache(parser)
    add_model(parser, names_adapters=True)


def add_served_names(parser: argparse.ArgumentParser) -> None:
    """Add `--served-model-name`; `served_names` reads it."""
    what = "what requests call the model (default: its name)"
    add_repeatable(parser, ("--served-model-name", a_text, "NAME", what))


def served_names(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the names of the model in requests; the first one stands in answers."""
    names = tuple(args.served_model_name) or (public_name(args.model, args.adapter, args.adapters),)
    if both := [name for name in names if name in args.adapters]:
        raise UsageError(f"argument --adapter: {both[0]} is what the model itself is called; choose another name")
    return names


def add_page(parser: argparse.ArgumentParser, access: Group | None = None) -> None:
    """Add what the page shows besides the served model; `serve_page` opens it."""
    text = "show the requests of all clients in the page, to every client with a key"
    (access or parser).add_argument("--inspect-requests", action="store_true", help=text)
    what = "a training run whose checkpoints the page shows; without -m its newest one is the model"
    add_repeatable(parser, ("--checkpoints", Path, "RUN", what))
    what = "weights in 16 or 32 bits, such as -m was quantized from: the page measures fewer bits against them"
    add_repeatable(parser, ("--reference", str, "MODEL", what))


def _check_compared(args: argparse.Namespace) -> None:
    """Check `add_page`'s options before loading; a run's newest checkpoint is the model where none is named."""
    if not args.checkpoints and not args.reference:
        return  # the imports take as long as the server's own modules
    from llamarium.page.compare.references import References
    from llamarium.page.compare.runs import Runs, newest_checkpoint

    References(args.reference)
    Runs(args.checkpoints)
    if args.checkpoints and args.model is None and args.adapter is None and not args.adapters:
        args.model = str(newest_checkpoint(args.checkpoints[0]))


def compared(args: argparse.Namespace) -> "tuple[Runs, References]":
    """Return the training runs that are named and the package's own after them, and the references that are named."""
    from llamarium.page.compare.references import References
    from llamarium.page.compare.runs import Runs

    names = {folder.resolve().name for folder in args.checkpoints}
    runs = [*args.checkpoints, *(packaged_run(name) for name in PACKAGED_RUNS if name not in names)]
    return Runs(runs), References(args.reference)


def add_tool_form(parser: argparse.ArgumentParser) -> None:
    """Add `--tool-form` and `--open-objects`."""
    text = "how tools are described and called (default: as the chat template does it, or the dialog format)"
    parser.add_argument("--tool-form", choices=get_args(ToolForm), help=text)
    text = "without strict, let objects have properties that their schema does not list, unless it forbids them"
    parser.add_argument("--open-objects", action="store_true", help=text)


def add_engine(group: Group) -> None:
    """Add what an engine is made with, and the context of its requests; `load_engine` makes it."""
    default_memory = "(default: a quarter of what is free, 4GiB at most)"
    add_values(
        group,
        (
            "--max-num-seqs",
            positive,
            "N",
            _DEFAULTS.max_num_seqs,
            "maximum number of concurrent sequences (default: %(default)s)",
        ),
        ("--max-context", positive, "N", None, "tokens of a request, prompt and answer (default: the model's)"),
        ("--kv-memory", size, "SIZE", None, f"for keys and values, as in 2GiB {default_memory}"),
    )
    add_disk_cache(group)
    add_speculation(group)


def _add_place(group: Group) -> None:
    add_values(
        group,
        ("--host", str, "ADDRESS", None, f"0.0.0.0 is all (default: {_DEFAULTS.host})"),
        ("--port", PORT, "N", None, f"0 is any free one (default: {_DEFAULTS.port})"),
        ("--uds", _path, "PATH", None, "a Unix socket instead, for its owner alone"),
    )


def _add_access(group: Group) -> None:
    unlike = f"visible in the process list; prefer {KEY_VARIABLE}"
    add_repeatable(
        group,
        ("--api-key", str, "KEY", f"API key; {unlike}"),
        ("--allowed-host", _host, "NAME", "answer to this host name too"),
        ("--cors-origin", _origin, "ORIGIN", "allowed CORS origin, such as https://chat.example, or *"),
    )
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="keys, one a line")
    text = "listen for other machines without a key: every machine that reaches it may send requests"
    group.add_argument("--allow-anyone", action="store_true", help=text)
    text = "let requests steer and ablate the model for themselves, and see its hidden states (steer, ablate, lens ...)"
    group.add_argument("--allow-interventions", action="store_true", help=text)
    text = "let requests load and unload adapters from folders below it (POST /v1/load_lora_adapter)"
    group.add_argument("--adapter-dir", type=_folder, metavar="DIR", help=text)


def _add_bounds(group: Group) -> None:
    request, drain = _DEFAULTS.request_timeout_s, _DEFAULTS.drain_timeout_s
    limit = "seconds that a request has, its wait included; 0 is no limit (default: %(default)g)"
    after = "seconds that answers have after SIGTERM or Ctrl-C; a second one ends them (default: %(default)g)"
    add_values(
        group,
        ("--max-queue", count, "N", _DEFAULTS.max_queue, "answers that may wait (default: %(default)s)"),
        ("--request-timeout", seconds, "S", request, limit),
        ("--drain-timeout", seconds, "S", drain, after),
    )


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
        adapters=args.adapters, prompt_lookup=prompt_lookup(args, llama) or False, draft_model=draft,
        kv_memory=args.kv_memory, max_num_seqs=args.max_num_seqs, kv_cache_dtype=args.kv_cache_dtype, disk_cache=disk,
    )  # fmt: skip
    check_context(engine, args.max_context)
    return llama, engine


def _settings(args: argparse.Namespace) -> Settings:
    from llamarium.server.openai.responses.store import ResponseStore
    from llamarium.server.recorder import MAX_BYTES, Recorder

    given = [name for name in ("host", "port") if getattr(args, name) is not None]
    if args.uds is not None and given:
        raise UsageError(f"argument --{given[0]}: not allowed with argument --uds; a Unix socket is its path alone")
    host = _DEFAULTS.host if args.host is None else args.host
    port = _DEFAULTS.port if args.port is None else args.port
    keys = _keys(args, host)
    if args.store_file is not None and args.store_responses is None:
        raise UsageError("argument --store-file: say how large it may become, by --store-responses")
    if args.record_size is not None and args.record is None:
        raise UsageError("argument --record-size: say which file, by --record")
    responses = None if args.store_responses is None else ResponseStore(args.store_responses, args.store_file)
    return Settings.of(
        args, host=host, port=port, uds=args.uds, api_keys=keys, responses=responses, adapter_dir=args.adapter_dir,
        allow_interventions=args.allow_interventions, explain_cache=args.explain_cache,
        recorder=None if args.record is None else Recorder(args.record, args.record_size or MAX_BYTES),
    )  # fmt: skip


def _keys(args: argparse.Namespace, host: str) -> tuple[str, ...]:
    """Return the keys that let in, of all places where they may stand."""
    from llamarium.server.hosts import LOCAL_NAMES

    try:
        keys = access_keys(args.api_key_file, args.api_key)
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
