"""Finds a C compiler and asks it what it compiles for, and which flags it knows (hatch_build.py)."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


class BuildError(Exception):
    """Why there is no library, in one line."""


def compiler() -> list[str]:
    """Return $CC, or the first C compiler that is found."""
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in [chosen] if chosen else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"{chosen[0]}, which CC names, is not there" if chosen else "there is no C compiler")


def instructions(cc: Sequence[str], flags: Sequence[str]) -> set[str] | None:
    """Return the macros that say which instructions code may use; None if the compiler does not know the flags."""
    command = [*cc, *(flag for flag in flags if flag.startswith("-m")), "-dM", "-E", "-x", "c", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    macros = {line.split()[1] for line in done.stdout.splitlines()}
    return {name for name in macros if name.startswith(("__AVX", "__FMA__", "__F16C__", "__AMX", "__ARM_FEATURE_"))}


def machine(cc: Sequence[str]) -> str:
    """Return what the compiler compiles for, such as x86_64-linux-gnu."""
    return run(*cc, "-dumpmachine").stdout.strip()


def processor(cc: Sequence[str]) -> str:
    """Return the processor that is compiled for, such as x86_64 or aarch64."""
    return machine(cc).split("-")[0].replace("arm64", "aarch64")


def system_source(cc: Sequence[str]) -> str:
    """Return which source of native/ calls the system."""
    name = machine(cc)
    return "system_windows" if "windows" in name or "mingw" in name else "system_posix"


def knows(cc: Sequence[str], flags: Sequence[str]) -> bool:
    """Return whether the compiler accepts these flags."""
    command = [*cc, *flags, "-Werror", "-fsyntax-only", "-x", "c", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command, which must succeed. Warnings are in its stderr: compilers answer questions in stdout alone."""
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stdout + done.stderr
        sys.stderr.write(said)
        lines = said.strip().splitlines() or [f"exit code {done.returncode}"]
        why = next((line for line in lines if "error" in line), lines[-1])
        raise BuildError(f"{command[0]} failed: {why}")
    return done


def _environment() -> dict[str, str]:
    """Return a command's environment: with a cache for Zig, which finds none of its own where no home is known.

    The process's own environment stays as it is, since the page is built by another thread.
    """
    if any(os.environ.get(name) for name in ("HOME", "XDG_CACHE_HOME", "LOCALAPPDATA")):
        return dict(os.environ)
    return {"ZIG_GLOBAL_CACHE_DIR": str(Path(__file__).with_name("build") / "zig"), **os.environ}
