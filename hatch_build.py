"""Compiles native/ when the package is built: one shared library for all Pythons, since ctypes loads it.

The page is built beside it (hatch_page.py).

Each set of instructions has kernels in five parts; sets that have one in common share it (PARTS, SHARED). At run time
the library takes the best set that the processor has (native/dispatch.c). Without a C compiler, or if it fails, the
build fails and says why: pip hides what a build that succeeds has to say. LLAMARIUM_NO_NATIVE=1 builds without the
library; PyTorch has to do its work then.
To build it in place: `python hatch_build.py`, or `make native`.

What was compiled is kept in build/native, under a name made from all that it depends on; nothing is compiled twice.
"""

import hashlib
import importlib.util
import inspect
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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
]
WARNINGS = "-Wall -Wextra".split()
AVX2 = "-mavx2 -mfma -mf16c"
AVX512 = f"{AVX2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mprefer-vector-width=512"
SETS = {  # by the processor that is compiled for; beside `portable`, which is for all
    "x86_64": {
        "avx2": AVX2,
        "avx512_vnni": AVX512,
        "avx512_bf16": f"{AVX512} -mavx512bf16",
        "amx": f"{AVX512} -mamx-tile -mamx-int8",
    },
    "aarch64": {"neon_dotprod": "-march=armv8.2-a+dotprod", "neon_i8mm": "-march=armv8.2-a+dotprod+i8mm"},
}
PARTS = ("products", "ops", "attention", "row_attention", "pointwise", "floats")  # each is compiled for each set
SHARED = {  # whose part a set takes where its own would be the same
    "avx512_bf16": dict.fromkeys(("attention", "products"), "avx512_vnni"),
    "amx": dict.fromkeys(("attention", "row_attention", "pointwise", "floats"), "avx512_vnni"),
    "neon_i8mm": dict.fromkeys(("attention", "row_attention", "pointwise", "floats"), "neon_dotprod"),
}
_NO_COPIES = "-fno-ipa-cp-clone"  # gcc's
REMEDY = "Install a C compiler (gcc or clang), or set LLAMARIUM_NO_NATIVE=1 and install llamarium[torch]"


class BuildError(Exception):
    """Why there is no library, in one line."""


def compiler() -> list[str]:
    """Return $CC, or the first C compiler that is found."""
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in [chosen] if chosen else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"{chosen[0]}, which CC names, is not there" if chosen else "there is no C compiler")


def compile_objects(cc: Sequence[str], folder: Path, *flags: str) -> list[Path]:
    """Compile everything with `flags` added; sets of instructions that the compiler does not know are left out.

    Beside each object NAME.o stands NAME.warnings, what the compiler had to say.
    """
    folder.mkdir(exist_ok=True)
    processor = _run(*cc, "-dumpmachine").split("-")[0].replace("arm64", "aarch64")
    # Room in every wheel: on x86-64 `portable` is for processors before 2013, and unrolled twice as large; what `ops`
    # calls takes the time, so that copies of it for constant arguments gain nothing.
    is_old = processor == "x86_64"
    portable = ["-O2"] if is_old else []
    sets = {"portable": portable, **{name: own.split() for name, own in SETS.get(processor, {}).items()}}
    sets = {name: own for name, own in sets.items() if _knows(cc, own)}
    flags_of = {"ops": [_NO_COPIES]} if _knows(cc, [_NO_COPIES]) else {}
    parts = [(part, name) for part in PARTS for name in reversed(sets) if part not in SHARED.get(name, {})]
    jobs = {  # what takes longest begins, so that no core waits at the end
        "encode": ["encode.c", "-ffp-contract=off"],  # its bytes are those of every processor
        **{f"{part}_{name}": [*_part(part, name), *sets[name], *flags_of.get(part, [])] for part, name in parts},
        **({"ops_portable": [*_part("ops", "portable"), "-Os"]} if is_old else {}),
        **{name: [f"{name}.c"] for name in ("pool", "bandwidth", "pack")},
        **{name: [f"{name}.c", "-O2"] for name in ("merge", "best_cut")},
        "segment": ["segment.c", "-Os"],  # it runs once for each vocabulary
        "dispatch": ["dispatch.c", *(f"-DLM_HAS_{name.upper()}" for name in sets)],
    }

    def run(name: str) -> Path:
        made, (source, *own) = folder / f"{name}.o", jobs[name]
        said = _run(*cc, *FLAGS, *own, *flags, "-c", str(NATIVE / source), "-o", str(made))
        made.with_suffix(".warnings").write_text(said)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(run, jobs))


def kept_objects(cc: Sequence[str]) -> list[Path]:
    """Return what the library is linked from, compiled if there is none of these sources, flags and compiler."""
    machine = _run(*cc, "-dumpmachine").strip()
    folder = KEPT / f"{machine}-{_fingerprint(cc)}"
    if not folder.exists():
        print("Compiling the CPU kernels (about a minute) ...", flush=True)
        KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as unfinished:
            compile_objects(cc, made := Path(unfinished) / "objects", *WARNINGS)
            for old in KEPT.glob(f"{machine}-*"):
                shutil.rmtree(old)
            made.rename(folder)
    return sorted(folder.glob("*.o"))


def build() -> None:
    """Make the library, or raise BuildError; one that is not of these sources is gone in any case."""
    if os.environ.get("LLAMARIUM_NO_NATIVE") == "1":
        LIBRARY.unlink(missing_ok=True)
        raise BuildError("LLAMARIUM_NO_NATIVE is 1")
    try:
        cc = compiler()
        objects = kept_objects(cc)
        linked = objects[0].with_name("_native.so")
        if not linked.exists():
            _run(*cc, "-shared", *map(str, objects), "-o", str(linked), "-lpthread", "-ldl", "-lm")
    except (BuildError, OSError):
        LIBRARY.unlink(missing_ok=True)
        raise
    if not LIBRARY.exists() or LIBRARY.read_bytes() != linked.read_bytes():
        new = shutil.copy(linked, LIBRARY.with_suffix(".new.so"))
        new.replace(LIBRARY)  # not written over: a running program may have the old one open


def _fingerprint(cc: Sequence[str]) -> str:
    """Name all that the objects depend on: sources, flags and compiler."""
    how = inspect.getsource(compile_objects) + inspect.getsource(_part)
    found = hashlib.sha256(repr((cc, _run(*cc, "--version"), FLAGS, WARNINGS, SETS, SHARED, how)).encode())
    for path in sorted(NATIVE.iterdir()):
        found.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _part(part: str, name: str) -> list[str]:
    """Return how a part of a set is compiled: it knows the set's name, and of which sets it takes the other parts."""
    takes = {f"LM_{other.upper()}": SHARED.get(name, {}).get(other, name) for other in PARTS if other != "ops"}
    defined = {"LM_ISA": name, "LM_OF_THE_SET": f'"products_{name}.h"', **takes}
    return [f"{part}.c", *(f"-D{key}={value}" for key, value in defined.items())]


def _knows(cc: Sequence[str], flags: Sequence[str]) -> bool:
    command = [*cc, *flags, "-Werror", "-fsyntax-only", "-x", "c", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(*command: str) -> str:
    """Run a command and return its output and messages together."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stdout)
        said = done.stdout.strip().splitlines()
        why = next((line for line in said if "error" in line), said[-1] if said else f"exit code {done.returncode}")
        raise BuildError(f"{command[0]} failed: {why}")
    return done.stdout


def _page() -> Any:
    """Return hatch_page.py, which builds the page; builders do not look for modules here."""
    spec = importlib.util.spec_from_file_location("hatch_page", Path(__file__).with_name("hatch_page.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildHook(BuildHookInterface):
    """Puts the library and the page into wheels, and beside the sources for editable installs."""

    def dependencies(self) -> list[str]:
        """Return what a build needs that pyproject.toml does not name."""
        return _page().requirements()

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build both side by side: the page mostly waits for npm. The page may be missing, with a warning."""
        with ThreadPoolExecutor(1) as pool:
            page = pool.submit(self._build_page, build_data)
            self._build_library(build_data)
            page.result()

    def _build_page(self, build_data: dict[str, Any]) -> None:
        page = _page()
        try:
            page.build()
        except (page.BuildError, OSError) as error:
            self.app.display_warning(f"llamarium is built without its page: {error}")
            return
        build_data["artifacts"].append(f"{page.BUNDLE.relative_to(self.root).as_posix()}/**")

    def _build_library(self, build_data: dict[str, Any]) -> None:
        """Build the library and name its platform in the wheel's tag; stop the build where that fails.

        LLAMARIUM_LIBRARY is one that is there already, in a folder that is named as its platform (hatch_wheels.py).
        """
        made = os.environ.get("LLAMARIUM_LIBRARY")
        if made:
            build_data["force_include"][made] = LIBRARY.relative_to(Path(self.root) / "src").as_posix()
            build_data["tag"] = f"py3-none-{Path(made).parent.name}"
            build_data["pure_python"] = False
            return
        try:
            build()
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
    build()
