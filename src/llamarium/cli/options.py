"""Options that several commands share, each declared once, and what is made of them."""

import argparse
import gc
import math
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from llamarium.adapters.model_names import DEFAULT_MODEL, base_model
from llamarium.cli.output import share_done, warn
from llamarium.cli.threads import set_threads
from llamarium.errors import DownloadError, OptionError
from llamarium.extras import need_torch
from llamarium.kv_codes import CacheDtype
from llamarium.tokenizer.chat.named import NAMED_FORMATS

if TYPE_CHECKING:
    from llamarium.api import Llama

Group: TypeAlias = argparse._ActionsContainer  # pyright: ignore[reportPrivateUsage]
"""What options are added to: a parser, or a group of it."""

FALLBACK_MODEL = "shakespeare-char"
_MAX_THREADS = 1024  # more than the cores of any machine; far more, and the system could not start them
_MAX_SECONDS = 1e9  # waiting for more, clocks overflow


class UsageError(Exception):
    """The command line contradicts itself in a way that argparse cannot express; ends as a usage error."""


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
    put_on = "put this LoRA adapter on the model, which is the base that it names unless -m names another"
    if names_adapters:
        parser.set_defaults(adapters={})
        text = f"{put_on}; with a NAME it is put on for those requests only whose model is that (repeatable)"
        group.add_argument("--adapter", action=_AdapterAction, metavar="[NAME=]FOLDER", help=text)
    else:
        group.add_argument("--adapter", type=Path, metavar="FOLDER", help=put_on)
    text = "the same bits alone, in any batch and on any number of threads, or no answer (the C kernels do so)"
    group.add_argument("--deterministic", action="store_true", help=text)
    text = (
        "of packed weights' inputs on a CPU, outliers apart, which have 16 bits in any case; 16 comes nearer to "
        "float32, and reads prompts in 1.7 times the time (default: 8)"
    )
    group.add_argument("--input-bits", type=int, choices=(8, 16), help=text)
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


def add_name(group: Group, more: str) -> None:
    """Add a model that may stand by itself or after `-m`, and may be `more`; `named` reads it."""
    from llamarium.presets import PRESETS

    group.add_argument("name", nargs="?", metavar="NAME", help=f"what -m takes, {more}: {', '.join(PRESETS)}")
    group.add_argument("-m", "--model", metavar="NAME", help=_MODEL_HELP)


def named(args: argparse.Namespace) -> str | None:
    """Return the name that `add_name`'s options give, or None."""
    if args.name is not None and args.model is not None:
        raise UsageError("the model is given twice, by itself and with -m/--model")
    return args.name if args.model is None else args.model


def add_loading(group: Group, dtype_default: str | None = None) -> None:
    """Add how a model is loaded; `dtype_default` as for `add_model`."""
    from llamarium.quant.formats import METHODS

    text = f"compute dtype (default: {dtype_default or 'auto'})"
    default = None if dtype_default else "auto"
    group.add_argument("--dtype", default=default, choices=("auto", "bfloat16", "float32", "float16"), help=text)
    text = "cpu, cuda, cuda:1, … (default: cuda where there is one)"
    group.add_argument("--device", default="auto", metavar="DEVICE", help=text)
    text = "quantize the Linears while loading (what is quantized already: only with --dequantize load)"
    add_type(group, "--quantize", METHODS, help=text)
    text = (
        "a quantized file's weights: dequantize them once while loading, or keep them and do so at each use (smaller, "
        "slower); auto keeps NF4, and of GGUF what CPU kernels multiply (default: %(default)s)"
    )
    group.add_argument("--dequantize", default="auto", choices=("auto", "load", "use"), help=text)
    group.add_argument("--strict", action="store_true", help="refuse a model with NaN weights, instead of warning")
    add_threads(group)


def add_values(group: Group, *options: tuple[str, Any, str, Any, str]) -> None:
    """Add options that take a value, each as (flag, type, metavar, default, help)."""
    for flag, kind, metavar, default, text in options:
        group.add_argument(flag, type=kind, metavar=metavar, default=default, help=text)


def add_repeatable(group: Group, *options: tuple[str, Any, str, str]) -> None:
    """Add options that may be given several times, each as (flag, type, metavar, help)."""
    for flag, kind, metavar, text in options:
        group.add_argument(flag, type=kind, metavar=metavar, action="append", default=[], help=f"{text} (repeatable)")


def add_type(group: Group, flag: str, choices: Sequence[str], **how: Any) -> None:
    """Add an option that takes one of some types of weights, in capital letters or not."""
    from llamarium.quant.formats import chosen_type

    def parse(text: str) -> str:
        try:
            return chosen_type(flag, text, choices)
        except OptionError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(f"{flag} is ")) from None

    listed = f"{{{','.join(choices)}}}"
    group.add_argument(flag, type=parse, metavar=listed if len(listed) < 40 else "TYPE", **how)


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
    text = (
        "the dialog format: one of the model's templates by name (tool_use, rag), a Jinja file, or "
        f"{', '.join(NAMED_FORMATS)} (default: the model's own)"
    )
    parser.add_argument("--chat-template", metavar="NAME|FILE", help=text)


def add_kv_cache(parser: argparse.ArgumentParser, default: str = "auto") -> None:
    """Add what keys and values are kept in, for commands that keep them.

    With a `default` that is no dtype, but says where it comes from, the option is None if it is not given.
    """
    text = (
        "KV cache dtype: auto (same as the model), int8 (half the memory of bfloat16), int8-k/int4-v (two fifths), or "
        f"int4 (under a third) (default: {default})"
    )
    dtypes = get_args(CacheDtype)
    parser.add_argument("--kv-cache-dtype", default=default if default in dtypes else None, choices=dtypes, help=text)


def load_llama(
    args: argparse.Namespace, *, falls_back: bool = True, report: Callable[[int, int], None] | None = None
) -> "Llama":
    """Load the model that `add_model`'s or `add_loading`'s options describe, with its adapter on.

    Where no model is named and the built-in one cannot be fetched, `falls_back` takes the packaged one. `report` is
    called with (bytes read, bytes in all), instead of showing it.
    """
    given = vars(args)
    name_base(args)
    if given.get("draft_model") is not None:
        args.draft_path = _find(args.draft_model, False)[1]  # refused before the model is read; `load_draft` reads it
    if args.quantize is not None or args.device not in ("auto", "cpu"):
        need_torch("--quantize" if args.quantize is not None else f"--device {args.device}")
    args.model, path = _find(args.model, falls_back)  # first, as a download shows its own progress
    shown = share_done(f"loading {args.model}") if report is None else nullcontext(report)
    with shown as progress, _collector_resting():
        with importing_torch():
            from llamarium.api import load

        set_threads(args.threads)
        llama = load(
            path, dtype=args.dtype, device=args.device, quantize=args.quantize, dequantize=args.dequantize,
            deterministic=given.get("deterministic", False), input_bits=given.get("input_bits"),  # of passes alone
            adapter=given.get("adapter"), strict=args.strict, chat_template=given.get("chat_template"),
            progress=progress,
        )  # fmt: skip
    llama.name = args.model
    return llama


def name_base(args: argparse.Namespace) -> None:
    """Make the base that an adapter names the model, where no model is named."""
    args.model = base_model(args.model, getattr(args, "adapter", None), getattr(args, "adapters", {}))


def check_adapters(args: argparse.Namespace) -> None:
    """Read the configs of the adapters that requests choose, before a model is loaded that they cannot be put on."""
    from llamarium.adapters.files import read_adapter_config

    for folder in args.adapters.values():
        read_adapter_config(folder)


_LOADING = {
    "dtype": "auto", "device": "auto", "quantize": None, "dequantize": "auto", "deterministic": False,
    "input_bits": None, "adapter": None, "chat_template": None,
}  # fmt: skip
"""Arguments of `llamarium.load` that are options here too, and what they are where they are left out."""


def loaded_with(args: argparse.Namespace) -> dict[str, str | int | bool]:
    """Return the arguments of `llamarium.load`, besides the name, that load the same."""
    values: dict[str, Any] = {
        name: getattr(args, name, usual) for name, usual in _LOADING.items()
    }  # no command has all of them
    given = {name: value for name, value in values.items() if value != _LOADING[name]}
    return {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}


def _find(name: str | None, falls_back: bool) -> tuple[str, Path]:
    """Return a model's name and where it lies; where none is named and none can be fetched, the packaged one's."""
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
    with _interrupts_held(), _collector_resting():
        yield


@contextmanager
def _interrupts_held() -> Generator[None]:
    if threading.current_thread() is not threading.main_thread():  # others get no signals, and may set no handlers
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


@contextmanager
def _collector_resting() -> Generator[None]:
    """Keep the garbage collector from what is made in the body, then and later (`gc.freeze`).

    An import of torch makes a quarter of a million objects, Llama 3's tokenizer.json half a million. The collector
    would look through them again and again, a tenth of the time, and find few to free.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def add_stats(parser: argparse.ArgumentParser) -> None:
    """Add `--stats` and `--no-stats`; None leaves it to whether stderr is a terminal."""
    text = "print counts and tokens/s to stderr (default: where that is a terminal)"
    parser.add_argument("--stats", action=argparse.BooleanOptionalAction, help=text)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON, one object a line")


def named_folder(text: str) -> Path:
    """Return a folder's path; an empty name, of a shell variable that is not set, would be the current one."""
    if not text:
        raise argparse.ArgumentTypeError("expected a folder; the current one is .")
    return Path(text)


def a_text(text: str) -> str:
    """Parse a text that is not empty, for argparse."""
    if not text:
        raise argparse.ArgumentTypeError("expected a text that is not empty")
    return text


def number(kind: type[int] | type[float], expected: str, accepts: Callable[[Any], bool]) -> Callable[[str], Any]:
    """Return what parses a number that `accepts` takes, for argparse; `expected` is the range in words."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            if accepts(value := kind(text)):
                return value
        what = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"expected {what}, {expected}, found {text!r}")

    return parse


def whole_number(low: int, high: float = math.inf) -> Callable[[str], int]:
    """Return what parses a whole number from `low` to `high`, for argparse."""
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
