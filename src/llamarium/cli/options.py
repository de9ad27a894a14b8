"""Options that several commands share, each declared once, and what is made of them."""

import argparse
import gc
import signal
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarium.cli.output import percent, warn
from llamarium.cli.threads import set_threads
from llamarium.errors import DownloadError, OptionError
from llamarium.presets import PRESETS
from llamarium.quant.formats import chosen_type

if TYPE_CHECKING:
    from llamarium.api import Llama

DEFAULT_MODEL = "smollm2-135m"
FALLBACK_MODEL = "shakespeare-char"
QUANTIZATIONS = ("NF4", "Q8_0", "Q4_1")
_MAX_THREADS = 1024  # more than the cores of any machine; far more, and the system could not start them


class UsageError(Exception):
    """The command line contradicts itself in a way that argparse cannot express; ends as a usage error."""


OLD_OPTIONS: Mapping[str, str] = {
    "--n": "--num-answers",
}
"""Spellings that an earlier version had, and what they are called now; they are refused with the new name."""

_MODEL_HELP = (
    "a built-in name, a folder, a .gguf file, org/name or org/name:file.gguf on the Hugging Face hub "
    f"(default: {DEFAULT_MODEL})"
)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add what decides which model is loaded, and how."""
    group = parser.add_argument_group("model")
    group.add_argument("-m", "--model", metavar="NAME", help=_MODEL_HELP)
    group.add_argument(
        "--adapter",
        type=Path,
        metavar="FOLDER",
        help="put this LoRA adapter on the model, which is the base that it names unless -m names another",
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        help="the same bits alone, in any batch and on any number of threads (CPU; bfloat16's prompts take longer)",
    )
    group.add_argument(
        "--input-bits",
        type=int,
        choices=(8, 16),
        help="what packed weights' inputs are rounded to: 16 answers as float32 does, 8 reads prompts faster (CPU; "
        "default: 16)",
    )
    add_loading(group)


def add_name(group: "argparse._ActionsContainer", more: str) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add a model that may stand by itself or after `-m`; `named` reads it.

    Args:
        group: A parser or a group of one.
        more: What the command takes besides; the presets' names follow.
    """
    group.add_argument("name", nargs="?", metavar="NAME", help=f"what -m takes, {more}: {', '.join(PRESETS)}")
    group.add_argument("-m", "--model", metavar="NAME", help=_MODEL_HELP)


def named(args: argparse.Namespace) -> str | None:
    """Return the name that `add_name`'s options give, or None.

    Raises:
        UsageError: If it was given twice.
    """
    if args.name is not None and args.model is not None:
        raise UsageError("the model is given twice, by itself and with -m/--model")
    return args.name if args.model is None else args.model


def add_loading(group: "argparse._ActionsContainer") -> None:  # pyright: ignore[reportPrivateUsage] - parser or group
    """Add how a model is loaded."""
    group.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "bfloat16", "float32", "float16"),
        help="what is computed in (default: %(default)s)",
    )
    group.add_argument(
        "--device", default="auto", metavar="DEVICE", help="cpu, cuda, cuda:1, … (default: cuda where there is one)"
    )
    add_type(group, "--quantize", QUANTIZATIONS, help="quantize the Linears while loading")
    group.add_argument(
        "--dequantize",
        default="auto",
        choices=("auto", "load", "use"),
        help="a quantized file's weights: dequantize them once while loading, or keep them and dequantize them at each "
        "use (smaller, slower); auto keeps NF4, and of GGUF what CPU kernels multiply (default: %(default)s)",
    )
    group.add_argument("--strict", action="store_true", help="refuse a model with NaN weights, instead of warning")
    add_threads(group)


def add_type(
    group: "argparse._ActionsContainer",  # pyright: ignore[reportPrivateUsage] - parser or group
    flag: str,
    choices: Sequence[str],
    **how: Any,
) -> None:
    """Add an option that takes one of some types of weights, in capital letters or not."""

    def parse(text: str) -> str:
        try:
            return chosen_type(flag, text, choices)
        except OptionError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(f"{flag} is ")) from None

    group.add_argument(flag, type=parse, metavar=f"{{{','.join(choices)}}}", **how)


def add_threads(group: "argparse._ActionsContainer") -> None:  # pyright: ignore[reportPrivateUsage] - parser or group
    """Add `--threads`."""
    group.add_argument("--threads", type=_threads, metavar="N", help="CPU threads (default: torch's choice)")


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the model that a command makes another one of; it has to be named."""
    parser.add_argument(
        "-m",
        "--model",
        required=True,
        metavar="NAME",
        help="a built-in name, a folder, a .gguf file, or org/name on the Hugging Face hub",
    )


def add_kv_cache(parser: argparse.ArgumentParser) -> None:
    """Add what keys and values are kept in, for commands that keep them."""
    parser.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=("auto", "int8"),
        help="what keys and values are kept in: auto is what the model computes in; int8 takes half of bfloat16's "
        "memory (default: %(default)s)",
    )


def load_llama(args: argparse.Namespace, *, falls_back: bool = True) -> "Llama":
    """Load the model that `add_model`'s options describe, with its adapter on.

    Args:
        args: Of the command line.
        falls_back: Where no model is named and the built-in one cannot be fetched, the packaged one will do.

    Raises:
        LlamariumError: Whatever `llamarium.load` raises.
    """
    if args.adapter is not None:
        name_base(args)
    return _load(args, falls_back=falls_back, adapter=args.adapter)


def name_base(args: argparse.Namespace) -> None:
    """Make the base that an adapter names the model, where no model is named.

    Raises:
        LlamariumError: If the adapter's config cannot be read, or names no base.
    """
    from llamarium.adapters.files import base_of

    args.model = args.model or base_of(args.adapter)


def load_base(args: argparse.Namespace, *, falls_back: bool = True) -> "Llama":
    """Load the model that `add_loading`'s options describe; `falls_back` as for `load_llama`.

    Raises:
        LlamariumError: Whatever `llamarium.load` raises.
    """
    return _load(args, falls_back=falls_back, adapter=None)


def _load(args: argparse.Namespace, *, falls_back: bool, adapter: Path | None) -> "Llama":
    args.model, path = _find(args.model, falls_back)  # first, as a download shows its own progress
    with percent(f"loading {args.model}") as progress:
        with importing_torch():
            from llamarium.api import load

        set_threads(args.threads)
        llama = load(
            path,
            adapter=adapter,
            dtype=args.dtype,
            device=args.device,
            quantize=args.quantize,
            dequantize=args.dequantize,
            deterministic=getattr(args, "deterministic", False),  # only where passes are run
            input_bits=getattr(args, "input_bits", None),
            strict=args.strict,
            progress=progress,
        )
    llama.name = args.model
    return llama


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

    Ctrl-C is held back, since the import would swallow it or be left half done. The garbage collector rests: it would
    look through the quarter of a million objects that the import makes again and again, a tenth of its time, and find
    few to free. Nor does it look at them later (`gc.freeze`).

    Raises:
        KeyboardInterrupt: At the end, if it came.
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
    parser.add_argument(
        "--stats",
        action=argparse.BooleanOptionalAction,
        help="print counts and tokens/s to stderr (default: where that is a terminal)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON, one object a line")


def positive(text: str) -> int:
    """Parse a whole number of at least 1, for argparse."""
    value = _whole_number(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _threads(text: str) -> int:
    value = _whole_number(text)
    if not 1 <= value <= _MAX_THREADS:
        raise argparse.ArgumentTypeError(f"{text} is not in 1 to {_MAX_THREADS}")
    return value


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, found {text!r}") from None


def whole_numbers(text: str) -> tuple[int, ...]:
    """Parse "0,1,-1", for argparse."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers with commas, as in 0,1,-1, found {text!r}") from None


def names(text: str) -> tuple[str, ...]:
    """Parse "a,b", for argparse."""
    return tuple(part.strip() for part in text.split(","))
