"""Compiles native/ when the package is built: one shared library for all Pythons, since ctypes loads it.

native/ops.c is compiled once for each set of instructions; at run time the library takes the best one that the
processor has (native/dispatch.c). Without a C compiler, or if it fails, the package is built without the library, and
PyTorch does its work. To build it in place: `python hatch_build.py`, or `make native`.
"""

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
FLAGS = "-O3 -std=gnu11 -fPIC -fopenmp-simd -fno-math-errno -fno-trapping-math -fvisibility=hidden -Wno-psabi".split()
AVX2 = "-mavx2 -mfma -mf16c"
AVX512 = f"{AVX2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mprefer-vector-width=512"
SETS = {  # by the processor that is compiled for; beside `portable`, which is for all
    "x86_64": {"avx2": AVX2, "avx512_vnni": AVX512, "amx": f"{AVX512} -mamx-tile -mamx-int8"},
    "aarch64": {"neon_dotprod": "-march=armv8.2-a+dotprod", "neon_i8mm": "-march=armv8.2-a+dotprod+i8mm"},
}


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
    """Compile everything with `flags` added; sets of instructions that the compiler does not know are left out."""
    processor = _run(*cc, "-dumpmachine").split("-")[0].replace("arm64", "aarch64")
    sets = {"portable": [], **{name: own.split() for name, own in SETS.get(processor, {}).items()}}
    sets = {name: own for name, own in sets.items() if _knows(cc, own)}
    jobs = {name: ["ops.c", f"-DLM_ISA={name}", f'-DLM_PRODUCTS="products_{name}.h"', *sets[name]] for name in sets}
    jobs |= {name: [f"{name}.c"] for name in ("pool", "bandwidth", "pack")}
    jobs["dispatch"] = ["dispatch.c", *(f"-DLM_HAS_{name.upper()}" for name in sets)]

    def run(name: str) -> Path:
        made, (source, *own) = folder / f"{name}.o", jobs[name]
        _run(*cc, *FLAGS, *own, *flags, "-c", str(NATIVE / source), "-o", str(made))
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(run, jobs))


def build() -> None:
    """Make the library, or raise BuildError; an older one is gone in any case."""
    LIBRARY.unlink(missing_ok=True)  # never written over: a running program may have it open
    if os.environ.get("LLAMARIUM_NO_NATIVE") == "1":
        raise BuildError("LLAMARIUM_NO_NATIVE is 1")
    cc = compiler()
    with tempfile.TemporaryDirectory() as folder:
        objects = compile_objects(cc, Path(folder))
        _run(*cc, "-shared", *map(str, objects), "-o", str(LIBRARY), "-lpthread", "-lm")


def _knows(cc: Sequence[str], flags: Sequence[str]) -> bool:
    command = [*cc, *flags, "-Werror", "-fsyntax-only", "-x", "c", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        said = done.stderr.strip().splitlines()
        why = next((line for line in said if "error" in line), said[-1] if said else f"exit code {done.returncode}")
        raise BuildError(f"{command[0]} failed: {why}")
    return done.stdout


class NativeBuildHook(BuildHookInterface):
    """Puts the library into wheels, and beside the sources for editable installs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the library and say so in the wheel's tag; leave the wheel pure without it."""
        try:
            build()
        except (BuildError, OSError) as error:
            self.app.display_warning(f"llamarium is built without its native kernels, PyTorch does their work: {error}")
            return
        platform = next(tag for tag in platform_tags() if not tag.startswith(("manylinux", "musllinux")))
        build_data["artifacts"].append(str(LIBRARY.relative_to(self.root)))
        build_data["tag"] = f"py3-none-{platform}"
        build_data["pure_python"] = False


if __name__ == "__main__":
    build()
