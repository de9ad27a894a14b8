"""Compiles native/ when the package is built: one shared library for all Pythons, since ctypes loads it.

The page is built beside it (hatch_page.py); hatch_compiler.py asks the compiler.

Each set of instructions has kernels in six parts; sets that have one in common share it (PARTS, SHARED). At run time
the library takes the best set that the processor has (native/dispatch.c). Without a C compiler, or if it fails, the
build fails and says why: pip hides what a build that succeeds has to say. LLAMARIUM_NO_NATIVE=1 builds without the
library; PyTorch has to do its work then.
To build it in place: `python hatch_build.py`, or `make native`.

Wheels hold every set. In place, for an editable installation and with `--best`, only the set that this processor runs
best is compiled, and the portable one: half of the time, or less.

What was compiled is kept in build/native, under a name made from all that it depends on; nothing is compiled twice.

`python hatch_build.py --wasm` compiles the module of WebAssembly with which the page computes where there is no server.
It needs PyPI's ziglang (the extra `wasm`); wheels that are published hold the module (hatch_wheels.py).
"""

import hashlib
import importlib.util
import inspect
import itertools
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

NATIVE = Path(__file__).with_name("native")
LIBRARY = Path(__file__).with_name("src") / "llamarium" / "kernels" / "_native.so"
KEPT = Path(__file__).with_name("build") / "native"
FLAGS = [  # nothing is thrown through C: tables for that would only take room in the wheels
    *"-O3 -std=gnu11 -fPIC -fopenmp-simd -fno-math-errno -fno-trapping-math -fvisibility=hidden -Wno-psabi".split(),
    *"-fno-asynchronous-unwind-tables -fno-unwind-tables".split(),
    "-ffunction-sections",  # hatch_wheels.py sorts functions
]
WARNINGS = "-Wall -Wextra".split()
AVX2 = "-mavx2 -mfma -mf16c"
AVX512 = f"{AVX2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mprefer-vector-width=512"
SETS = {  # by the processor that is compiled for; beside `portable`, which is for all
    "x86_64": {
        "avx2": AVX2,
        "avx_vnni": f"{AVX2} -mavxvnni",
        "avx512_vnni": AVX512,
        "avx512_bf16": f"{AVX512} -mavx512bf16",
        "amx": f"{AVX512} -mamx-tile -mamx-int8",
    },
    "aarch64": {"neon_dotprod": "-march=armv8.2-a+dotprod", "neon_i8mm": "-march=armv8.2-a+dotprod+i8mm"},
}
PARTS = ("products", "ops", "attention", "row_attention", "pointwise", "floats")  # each is compiled for each set
SHARED = {  # whose part a set takes where its own would be the same
    "avx_vnni": dict.fromkeys(("attention", "row_attention", "pointwise", "floats"), "avx2"),
    "avx512_bf16": dict.fromkeys(("attention", "products"), "avx512_vnni"),
    "amx": dict.fromkeys(("attention", "row_attention", "pointwise", "floats"), "avx512_vnni"),
    "neon_i8mm": dict.fromkeys(("attention", "row_attention", "pointwise", "floats"), "neon_dotprod"),
}
# Parts whose portable form is for room: on x86-64 few processors run it.
_SMALL = ("ops", "attention", "row_attention", "pointwise", "floats")
# gcc's, of `ops`: what it calls takes the time, so that copies of it for constant arguments, and loops written out,
# gain nothing (with AVX2 a prompt is even 13 % faster) and take room.
_PLAIN = ["-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-fno-ipa-cp-clone"]
WASM = LIBRARY.with_suffix(".wasm")
WASM_THREADS = WASM.with_name("_native_threads.wasm")
WASM_PARTS = ("products", "ops", "attention", "floats")  # what answers and inspecting need
WASM_FLAGS = "-msimd128 -fno-pic -mexec-model=reactor -Wno-pass-failed -DLM_WITHOUT_TRAINING -DLM_HAS_SIMD128".split()
WASM_EXPORTS = (
    "lm_run lm_product lm_lookup lm_choose lm_pack lm_tile_of lm_interface lm_kernels aligned_alloc free".split()
)
WASM_SHARED = ["-matomics", "-mbulk-memory"]  # of the module for several threads, whose memory JavaScript makes
WASM_SHARED_LINK = [
    *"--shared-memory --import-memory --initial-memory=4194304 --max-memory=4294901760".split(),
    *(f"--export={name}" for name in "lm_work lm_set_threads __stack_pointer __wasm_init_tls __tls_size".split()),
]


def _beside(name: str) -> Any:
    """Return a module that lies beside this one; builders do not look for modules here."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_COMPILERS = _beside("hatch_compiler")
BuildError, compiler, _run, _knows = _COMPILERS.BuildError, _COMPILERS.compiler, _COMPILERS.run, _COMPILERS.knows
_machine, _processor, _system = _COMPILERS.machine, _COMPILERS.processor, _COMPILERS.system_source
_instructions = _COMPILERS.instructions
REMEDY = "Install a C compiler (gcc or clang), or set LLAMARIUM_NO_NATIVE=1 and install llamarium[torch]"


def compile_objects(cc: Sequence[str], folder: Path, *flags: str) -> list[Path]:
    """Compile everything with `flags` added; sets of instructions that the compiler does not know are left out.

    Beside each object NAME.o stands NAME.warnings, what the compiler had to say.
    """
    folder.mkdir(exist_ok=True)
    sets = _sets(cc)
    return _compile(cc, _jobs(cc, sets, list(sets)), folder, flags, lambda name: None)


def kept_objects(cc: Sequence[str], *, only_best: bool = False, left_out: Sequence[str] = ()) -> list[Path]:
    """Return what the library is linked from; objects of these sources and flags are not compiled again.

    With `only_best`, these are the best set of instructions that this processor has, and the portable one; `left_out`
    names sets that are not compiled.
    """
    folder, sets = _make_kept_folder(cc), _sets(cc)
    names = _best_of(cc, sets) if only_best else [name for name in sets if name not in left_out]
    jobs = _jobs(cc, sets, names)
    missing = {name: job for name, job in jobs.items() if not (folder / f"{name}.o").exists()}
    if missing:
        print(f"Compiling the CPU kernels: {len(missing)} files ...", flush=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as unfinished:
            for made in _compile(cc, missing, Path(unfinished), WARNINGS, _progress(len(missing))):
                made.with_suffix(".warnings").rename(folder / f"{made.stem}.warnings")
                made.rename(folder / made.name)
    return sorted(folder / f"{name}.o" for name in jobs)


def _kept_folder(cc: Sequence[str]) -> Path:
    return KEPT / f"{_machine(cc)}-{_fingerprint(cc)}"


def _make_kept_folder(cc: Sequence[str]) -> Path:
    """Make the folder of these sources; those of earlier sources go."""
    folder = _kept_folder(cc)
    folder.mkdir(parents=True, exist_ok=True)
    for old in KEPT.glob(f"{folder.name.rpartition('-')[0]}-*"):
        if old != folder:
            shutil.rmtree(old)
    return folder


def _sets(cc: Sequence[str]) -> dict[str, list[str]]:
    """Return the flags of each set of instructions that the compiler knows, `portable` first and the best last."""
    processor = _processor(cc)
    # Room in every wheel: on x86-64 `portable` is for processors before 2013, and unrolled twice as large.
    portable = ["-O2"] if processor == "x86_64" else []
    sets = {"portable": portable, **{name: own.split() for name, own in SETS.get(processor, {}).items()}}
    return {name: own for name, own in sets.items() if _knows(cc, own)}


def _best_of(cc: Sequence[str], sets: Mapping[str, list[str]]) -> list[str]:
    """Return the names of the portable set and of the best one that this processor has.

    A set is there if what the compiler calls the native processor has all its instructions. A compiler that knows no
    native processor gets all sets.
    """
    here = _instructions(cc, ["-march=native"])
    if here is None:
        return list(sets)
    found = [name for name, own in sets.items() if (_instructions(cc, own) or set()) <= here]
    best = found[-2:] if found[-1] == "amx" else found[-1:]  # a system may refuse AMX
    return [*dict.fromkeys(("portable", *best))]


def _jobs(cc: Sequence[str], sets: Mapping[str, list[str]], names: Sequence[str]) -> dict[str, list[str]]:
    """Return what is compiled for some of the sets: each object's name, with its source and its flags.

    What takes longest is first, so that no core waits at the end.
    """
    is_old = _processor(cc) == "x86_64"
    flags_of = {"ops": _PLAIN} if _knows(cc, _PLAIN) else {}
    parts = dict.fromkeys((part, SHARED.get(name, {}).get(part, name)) for part in PARTS for name in reversed(names))
    return {
        "encode": ["encode.c", "-ffp-contract=off"],  # its bytes are those of every processor
        **{f"{part}_{name}": [*_part(part, name), *sets[name], *flags_of.get(part, [])] for part, name in parts},
        **({f"{part}_portable": [*_part(part, "portable"), "-Os"] for part in _SMALL} if is_old else {}),
        **{name: [f"{name}.c"] for name in ("pool", "bandwidth", "pack", _system(cc))},
        **{name: [f"{name}.c", "-O2"] for name in ("merge", "best_cut")},
        **{name: [f"{name}.c", "-Os"] for name in ("segment", "ranks")},  # they run once for each vocabulary
        f"dispatch_{'_'.join(names)}": ["dispatch.c", *(f"-DLM_HAS_{name.upper()}" for name in names)],
    }


def _compile(
    cc: Sequence[str], jobs: Mapping[str, list[str]], folder: Path, flags: Sequence[str], tell: Callable[[str], None]
) -> list[Path]:
    """Compile side by side, one file for each processor at a time."""

    def run(name: str) -> Path:
        made, (source, *own) = folder / f"{name}.o", jobs[name]
        done = _run(*cc, *FLAGS, *own, *flags, "-c", str(NATIVE / source), "-o", str(made))
        made.with_suffix(".warnings").write_text(done.stdout + done.stderr)
        tell(name)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(run, jobs))


def _progress(count: int) -> Callable[[str], None]:
    """Return what prints a line for each file that is compiled."""
    begin, numbers, one_at_a_time = time.monotonic(), itertools.count(1), threading.Lock()

    def tell(name: str) -> None:
        with one_at_a_time:
            print(f"  {next(numbers)} of {count} compiled after {time.monotonic() - begin:.0f} s: {name}", flush=True)

    return tell


def build(*, only_best: bool = False) -> None:
    """Make the library, or raise BuildError; one that is not of these sources is gone in any case.

    With `only_best`, of the sets that `kept_objects` says; a library of all sets that is there already stays.
    """
    if os.environ.get("LLAMARIUM_NO_NATIVE") == "1":
        LIBRARY.unlink(missing_ok=True)
        raise BuildError("LLAMARIUM_NO_NATIVE is 1")
    try:
        linked = _linked(compiler(), only_best)
    except (BuildError, OSError):
        LIBRARY.unlink(missing_ok=True)
        raise
    if not LIBRARY.exists() or LIBRARY.read_bytes() != linked.read_bytes():
        new = shutil.copy(linked, LIBRARY.with_suffix(".new.so"))
        new.replace(LIBRARY)  # not written over: a running program may have the old one open


def _linked(cc: Sequence[str], only_best: bool) -> Path:
    """Return the library of all sets, or one that is named after those that it has."""
    linked = _kept_folder(cc) / "_native.so"
    if only_best and not linked.exists():
        linked = linked.with_name(f"_native_{'_'.join(_best_of(cc, _sets(cc)))}.so")
    if not linked.exists():
        objects = kept_objects(cc, only_best=only_best)
        with tempfile.TemporaryDirectory(dir=KEPT) as unfinished:  # a killed linker leaves a part of its output
            made = Path(unfinished) / linked.name
            _run(*cc, "-shared", *map(str, objects), "-o", str(made), "-lpthread", "-ldl", "-lm")
            made.rename(linked)
    return linked


def build_wasm() -> None:
    """Make the modules of WebAssembly, of one set of kernels: for one thread, and for several.

    BuildError where ziglang is missing or fails; modules that are not of these sources are gone then.
    """
    if importlib.util.find_spec("ziglang") is None:
        raise BuildError("ziglang is not installed: pip install -c constraints.txt ziglang")
    try:
        for target, linked in _linked_wasm().items():
            shutil.copyfile(linked, target)
    except (BuildError, OSError):
        for target in (WASM, WASM_THREADS):
            target.unlink(missing_ok=True)
        raise


def _linked_wasm() -> dict[Path, Path]:
    """Return where each module is kept, by where it belongs."""
    cc = [sys.executable, "-m", "ziglang", "cc", "-target", "wasm32-wasi"]
    folder = _make_kept_folder(cc)
    linked = {target: folder / target.name for target in (WASM, WASM_THREADS)}
    for target, shared, link in ((WASM, [], []), (WASM_THREADS, WASM_SHARED, WASM_SHARED_LINK)):
        if linked[target].exists():
            continue
        with tempfile.TemporaryDirectory(dir=KEPT) as unfinished:
            made = _made_wasm(cc, Path(unfinished), [*WASM_FLAGS, *shared], link)
            made.rename(linked[target])
    return linked


def _made_wasm(cc: Sequence[str], folder: Path, flags: Sequence[str], link: Sequence[str]) -> Path:
    """Compile and link one module."""
    jobs = {f"{part}_simd128": _part(part, "simd128") for part in WASM_PARTS}
    jobs |= {name: [f"{name}.c"] for name in ("dispatch", "pack", "pool_wasm", "system_posix")}
    objects = _compile(cc, jobs, folder, [*WARNINGS, *flags], _progress(len(jobs)))
    exports = [f"--export={name}" for name in WASM_EXPORTS]
    options = [f"-Wl,{one}" for one in (*exports, *link, "-s", "-z,stack-size=1048576")]
    made = folder / WASM.name
    _run(*cc, *flags, *map(str, objects), *options, "-o", str(made))
    return made


def _fingerprint(cc: Sequence[str]) -> str:
    """Name all that the objects depend on: sources, flags and compiler."""
    how = "".join(map(inspect.getsource, (_jobs, _sets, _system, _part, _linked_wasm, _made_wasm)))
    of_wasm = (WASM_PARTS, WASM_FLAGS, WASM_EXPORTS, WASM_SHARED, WASM_SHARED_LINK)
    flags = (FLAGS, WARNINGS, SETS, SHARED, _SMALL, _PLAIN, *of_wasm)
    found = hashlib.sha256(repr((cc, _run(*cc, "--version").stdout, flags, how)).encode())
    for path in sorted(NATIVE.iterdir()):
        found.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _part(part: str, name: str) -> list[str]:
    """Return how a part of a set is compiled: it knows the set's name, and of which sets it takes the other parts."""
    takes = {f"LM_{other.upper()}": SHARED.get(name, {}).get(other, name) for other in PARTS if other != "ops"}
    defined = {"LM_ISA": name, "LM_OF_THE_SET": f'"products_{name}.h"', **takes}
    return [f"{part}.c", *(f"-D{key}={value}" for key, value in defined.items())]


class BuildHook(BuildHookInterface):
    """Puts the library and the page into wheels, and beside the sources for editable installs."""

    def dependencies(self) -> list[str]:
        """Return what a build needs that pyproject.toml does not name."""
        return _beside("hatch_page").requirements()

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build both side by side: the page mostly waits for npm. The page may be missing, with a warning."""
        with ThreadPoolExecutor(1) as pool:
            page = pool.submit(self._build_page, build_data)
            self._build_library(build_data, only_best=version == "editable")
            if version != "editable":
                self._build_wasm(build_data)
            page.result()

    def _build_page(self, build_data: dict[str, Any]) -> None:
        page = _beside("hatch_page")
        try:
            page.build()
        except (page.BuildError, OSError) as error:
            self.app.display_warning(f"llamarium is built without its page: {error}")
            return
        for folder in (page.BUNDLE, page.SCRIPTS):
            build_data["artifacts"].append(f"{folder.relative_to(self.root).as_posix()}/**")

    def _build_wasm(self, build_data: dict[str, Any]) -> None:
        """Build the kernels for browsers where ziglang is installed, as it is for the wheels of hatch_wheels.py."""
        if importlib.util.find_spec("ziglang") is None:
            return
        try:
            build_wasm()
        except (BuildError, OSError) as error:
            self.app.display_warning(f"llamarium is built without its kernels for browsers: {error}")
            return
        build_data["artifacts"] += [path.relative_to(self.root).as_posix() for path in (WASM, WASM_THREADS)]

    def _build_library(self, build_data: dict[str, Any], *, only_best: bool) -> None:
        """Build the library and name its platform in the wheel's tag; stop the build where that fails.

        LLAMARIUM_LIBRARY is one that is there already, in a folder that is named as its platform (hatch_wheels.py).
        """
        made = os.environ.get("LLAMARIUM_LIBRARY")
        if made:
            inside = LIBRARY.with_name(Path(made).name)
            build_data["force_include"][made] = inside.relative_to(Path(self.root) / "src").as_posix()
            build_data["tag"] = f"py3-none-{Path(made).parent.name}"
            build_data["pure_python"] = False
            return
        try:
            build(only_best=only_best)
        except (BuildError, OSError) as error:
            if os.environ.get("LLAMARIUM_NO_NATIVE") != "1":
                self.app.abort(f"llamarium's kernels cannot be compiled: {error}. {REMEDY}")
            self.app.display_warning(f"llamarium is built without its native kernels: {error}")
            return
        platform = next(tag for tag in platform_tags() if not tag.startswith(("manylinux", "musllinux")))
        build_data["artifacts"].append(str(LIBRARY.relative_to(self.root)))
        build_data["tag"] = f"py3-none-{platform}"
        build_data["pure_python"] = False


if __name__ == "__main__":
    if "--wasm" in sys.argv[1:]:
        build_wasm()
    else:
        build(only_best="--best" in sys.argv[1:])
