"""Options shared by several commands, and loading of models by them."""

import argparse
import math
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarium.adapters.model_names import DEFAULT_MODEL, base_model
from llamarium.cli.errors import UsageError
from llamarium.cli.flags import Group, add_flags, given_options, number
from llamarium.cli.output import share_done, warn
from llamarium.cli.threads import set_threads
from llamarium.collector import collector_paused
from llamarium.errors import DownloadError
from llamarium.extras import need_torch
from llamarium.options.declare import declared
from llamarium.options.loading import LoadOptions
from llamarium.options.serving import EngineOptions

if TYPE_CHECKING:
    from llamarium.api import Llama

FALLBACK_MODEL = "shakespeare-char"
_MAX_THREADS = 1024  # more than the cores of any machine; the system cannot start many more
_MAX_SECONDS = 1e9  # longer timeouts overflow


_MODEL_HELP = (
    "a built-in name, a folder, a .gguf file, org/name or org/name:file.gguf on the Hugging Face hub "
    f"(default: {DEFAULT_MODEL})"
)


def add_model(
    parser: argparse.ArgumentParser, *, names_adapters: bool = False, dtype_default: str | None = None
) -> None:
    """Add what decides which model is loaded, and how; `names_adapters`: requests choose among `args.adapters`.

    With a `dtype_default`, a sentence that says what the command takes, `args.dtype` is None if it is not given.
    """
    group = parser.add_argument_group("model")
    group.add_argument("-m", "--model", metavar="NAME", help=_MODEL_HELP)
    adapter = declared(LoadOptions)["adapter"].help
    if names_adapters:
        parser.set_defaults(adapters={})
        text = f"{adapter}; with a NAME it is applied to the requests whose model is that name (repeatable)"
        group.add_argument("--adapter", action=_AdapterAction, metavar="[NAME=]FOLDER", help=text)
    else:
        add_flags(group, LoadOptions, "adapter", parsers={"adapter": Path})
    add_flags(group, LoadOptions, part="passes")
    add_loading(group, dtype_default)


class _AdapterAction(argparse.Action):
    """Takes an adapter for all requests, or adapters that requests choose by their names."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option_string: str | None = None
    ) -> None:
        assert isinstance(values, str)
        name, is_named, folder = ("", "", values) if Path(values).is_dir() else values.partition("=")
        if not is_named and namespace.adapter is None:
            namespace.adapter = Path(values)
        elif not is_named:
            raise argparse.ArgumentError(self, "one adapter is put on the model; to choose among several: NAME=FOLDER")
        elif not name.strip() or not folder:
            raise argparse.ArgumentError(self, f"expected NAME=FOLDER, found {values!r}")
        elif name in namespace.adapters:
            raise argparse.ArgumentError(self, f"two adapters are called {name}")
        else:
            namespace.adapters = {**namespace.adapters, name: Path(folder)}
        if namespace.adapter is not None and namespace.adapters:
            raise argparse.ArgumentError(
                self, f"{namespace.adapter} is put on the model, so that requests can choose no other; give all a name"
            )


def add_name(group: Group, others: str) -> None:
    """Add a model that may stand by itself or after `-m`, and may be `more`; `named` reads it."""
    from llamarium.presets import PRESETS

    group.add_argument("name", nargs="?", metavar="NAME", help=f"what -m takes, {others}: {', '.join(PRESETS)}")
    group.add_argument("-m", "--model", metavar="NAME", help=_MODEL_HELP)


def named(args: argparse.Namespace) -> str | None:
    """Return the model name from the options of `add_name`, or None."""
    if args.name is not None and args.model is not None:
        raise UsageError("the model is given twice, by itself and with -m/--model")
    return args.name if args.model is None else args.model


def add_loading(group: Group, dtype_default: str | None = None) -> None:
    """Add how a model is loaded; `dtype_default` as for `add_model`."""
    add_flags(group, LoadOptions, part="weights", defaults={"dtype": dtype_default} if dtype_default else None)
    add_threads(group)


def add_values(group: Group, *options: tuple[str, Any, str, Any, str]) -> None:
    """Add options that take a value, each as (flag, type, metavar, default, help)."""
    for flag, kind, metavar, default, text in options:
        group.add_argument(flag, type=kind, metavar=metavar, default=default, help=text)


def add_repeatable(group: Group, *options: tuple[str, Any, str, str]) -> None:
    """Add options that may be given several times, each as (flag, type, metavar, help)."""
    for flag, kind, metavar, text in options:
        group.add_argument(flag, type=kind, metavar=metavar, action="append", default=[], help=f"{text} (repeatable)")


def add_requantize(parser: argparse.ArgumentParser) -> None:
    """Add `--requantize`."""
    text = "take a model that is quantized already; its errors stay, and new ones are added to them"
    parser.add_argument("--requantize", action="store_true", help=text)


def add_threads(group: Group) -> None:
    """Add `--threads`."""
    text = "CPU threads (default: one for each core)"
    group.add_argument("--threads", type=whole_number(1, _MAX_THREADS), metavar="N", help=text)


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the model that a command makes another one of; it has to be named."""
    text = "a built-in name, a folder, a .gguf file, or org/name on the Hugging Face hub"
    parser.add_argument("-m", "--model", required=True, metavar="NAME", help=text)


def add_chat_template(parser: argparse.ArgumentParser) -> None:
    """Add `--chat-template`, for commands that write dialogs; `load_llama` reads it."""
    add_flags(parser, LoadOptions, part="dialogs")


def add_kv_cache(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add what keys and values are kept in, for commands that keep them.

    With a `default`, a word for what the command takes, the option is None if it is not given.
    """
    add_flags(parser, EngineOptions, part="cache", defaults={"kv_cache_dtype": default} if default else None)


def load_llama(
    args: argparse.Namespace, *, falls_back: bool = True, report: Callable[[int, int], None] | None = None
) -> "Llama":
    """Load the model that `add_model`'s or `add_loading`'s options describe, with its adapter on.

    Where no model is named and the built-in one cannot be fetched, `falls_back` takes the packaged one. `report` is
    called with (bytes read, bytes in all), instead of showing it.
    """
    values = vars(args)
    name_base(args)
    if values.get("draft_model") is not None:
        args.draft_path = _find(args.draft_model, False)[1]  # refused before the model is read; `load_draft` reads it
    if args.quantize is not None or args.device not in ("auto", "cpu"):
        need_torch("--quantize" if args.quantize is not None else f"--device {args.device}")
    args.model, path = _find(args.model, falls_back)  # first, as a download shows its own progress
    reporting = share_done(f"loading {args.model}") if report is None else nullcontext(report)
    with reporting as progress, _collector_paused():
        with importing_torch():
            from llamarium.api import load

        set_threads(args.threads)
        llama = load(path, progress=progress, **given_options(args, LoadOptions))
    llama.name = args.model
    return llama


def name_base(args: argparse.Namespace) -> None:
    """Set the model to the adapter's base if no model is given."""
    args.model = base_model(args.model, getattr(args, "adapter", None), getattr(args, "adapters", {}))


def check_adapters(args: argparse.Namespace) -> None:
    """Read the configurations of the adapters for requests, so that errors are raised before the model is loaded."""
    from llamarium.adapters.files import read_adapter_config

    for folder in args.adapters.values():
        read_adapter_config(folder)


def loaded_with(args: argparse.Namespace) -> dict[str, str | int | bool]:
    """Return the arguments of `llamarium.load`, except the name, that load the same model."""
    options = declared(LoadOptions)
    changed = {
        name: value for name, value in given_options(args, LoadOptions).items() if value != options[name].default
    }
    return {name: str(value) if isinstance(value, Path) else value for name, value in changed.items()}


def _find(name: str | None, falls_back: bool) -> tuple[str, Path]:
    """Return a model's name and path; if no name is given and none can be downloaded, those of the packaged model."""
    from llamarium.hub.resolve import resolve

    try:
        return name or DEFAULT_MODEL, resolve(name or DEFAULT_MODEL)
    except DownloadError as error:
        if name is not None or not falls_back:
            raise
        warn(f"{FALLBACK_MODEL} is used, which lies in the package: {error}")
        return FALLBACK_MODEL, resolve(FALLBACK_MODEL)


@contextmanager
def importing_torch() -> Generator[None]:
    """Import torch in the body, safely and without delay.

    Ctrl-C is held back, since the import would swallow it or be left half done, and the garbage collector rests.
    """
    with _interrupts_held(), _collector_paused():
        yield


@contextmanager
def _interrupts_held() -> Generator[None]:
    if threading.current_thread() is not threading.main_thread():  # others get no signals, and may set no handlers
        yield
        return
    signals: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if signals:
        raise KeyboardInterrupt


def _collector_paused() -> AbstractContextManager[None]:
    """Pause the garbage collector during torch's first import; do nothing if torch is already imported."""
    return nullcontext() if "torch" in sys.modules else collector_paused(freeze=True)


def add_stats(parser: argparse.ArgumentParser) -> None:
    """Add `--stats` and `--no-stats`; None leaves it to whether stderr is a terminal."""
    text = "print counts and tokens/s to stderr (default: where that is a terminal)"
    parser.add_argument("--stats", action=argparse.BooleanOptionalAction, help=text)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON, one object a line")


def named_folder(text: str) -> Path:
    """Return a folder's path; an empty name (e.g. an unset variable) is an error, not the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a folder; the current one is .")
    return Path(text)


def a_text(text: str) -> str:
    """Parse a non-empty text, for argparse."""
    if not text:
        raise argparse.ArgumentTypeError("expected a text that is not empty")
    return text


def whole_number(low: int, high: float = math.inf) -> Callable[[str], int]:
    """Return an argparse type for an integer from `low` to `high`."""
    expected = f"at least {low}" if high == math.inf else f"{low} to {high}"
    return number(int, expected, lambda value: low <= value <= high)


positive, count = whole_number(1), whole_number(0)
seconds = number(float, f"at least 0, below {_MAX_SECONDS:g}", lambda value: 0 <= value < _MAX_SECONDS)
positive_number = number(float, "above 0", lambda value: 0 < value < math.inf)


def whole_numbers(text: str) -> tuple[int, ...]:
    """Parse "0,1,-1", for argparse."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers with commas, as in 0,1,-1, found {text!r}") from None


def names(text: str) -> tuple[str, ...]:
    """Parse "a,b", for argparse."""
    return tuple(part.strip() for part in text.split(","))
