"""Builds the wheels that are published, for Linux, macOS and Windows, into dist/: `make wheels`.

PyPI's ziglang links each library against the oldest C library of its platform, and compiles for Arm and for Windows.
For Linux on x86_64 gcc compiles: its objects are the ones that the suite tests (docs/decisions/0032-wheels.md).
"""

import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from platform import machine

import deflate
import hatch_build
import zopfli.zlib
from packaging.utils import parse_wheel_filename

DIST = Path(__file__).with_name("dist")
KEPT = Path(__file__).with_name("build") / "wheels"
LARGEST = 8_000_000
LARGEST_OF_ZOPFLI = 1_000_000  # above, libdeflate makes files smaller
PARTS = (
    *("kernels/_native.wasm", "kernels/_native_threads.wasm"),
    *("page/dist/index.html", "page/site/dist/start.js"),
)


@dataclass(frozen=True)
class Platform:
    """What a wheel is for.

    Attributes:
        tag: Its name in the wheel's.
        target: Zig's name for it.
        left_out: Sets of kernels that the wheel does not have.
        small: Sources that are compiled for size.
    """

    tag: str
    target: str
    left_out: tuple[str, ...] = ()
    small: tuple[str, ...] = ()

    @property
    def library_name(self) -> str:
        """The name of the kernels' library."""
        return "_native.dll" if "windows" in self.target else "_native.so"


PLATFORMS = (
    # 54 kB, for which there is no room yet (docs/decisions/0070-avx-vnni.md)
    Platform("manylinux_2_28_x86_64", "x86_64-linux-gnu.2.28", left_out=("avx_vnni",)),
    Platform("manylinux_2_28_aarch64", "aarch64-linux-gnu.2.28"),
    Platform("macosx_11_0_arm64", "aarch64-macos.11.0"),
    # AMX needs a permission that Linux alone is asked for (native/amx.h). Small sources make room for AVX-VNNI: what
    # `ops` calls takes the time, and quantizing may take longer.
    Platform("win_amd64", "x86_64-windows-gnu", left_out=("amx",), small=("ops.c", "encode.c")),
)


def zig(platform: Platform) -> list[str]:
    """Return the command that is Zig's C compiler for a platform, with gcc's options."""
    return [sys.executable, __file__, "cc", ",".join((platform.target, *platform.small))]


def library(platform: Platform) -> Path:
    """Compile and link a platform's library; it lies in a folder of the platform's name."""
    cc, runtime = zig(platform), []
    if platform.target.startswith("x86_64-linux"):
        cc = hatch_build.compiler() if machine() == "x86_64" else ["x86_64-linux-gnu-gcc"]
        runtime = [_output(*cc, "-print-libgcc-file-name").strip()]
    objects = hatch_build.kept_objects(cc, left_out=platform.left_out)
    made = KEPT / platform.tag / platform.library_name
    made.parent.mkdir(parents=True, exist_ok=True)
    if runtime:
        objects = [_grouped(cc, objects, made.with_suffix(".o"))]
    stripped = [] if "macos" in platform.target else ["-Wl,-s"]
    libraries = [] if "windows" in platform.target else ["-lpthread", "-ldl", "-lm"]
    _output(*zig(platform), "-shared", *map(str, objects), *runtime, *libraries, *stripped, "-o", str(made))
    return made


def _grouped(cc: Sequence[str], objects: Sequence[Path], made: Path) -> Path:
    """Put functions of the same name side by side: those of similar sets are nearly the same, and are packed as one."""
    _output(*cc, "-r", "-nostdlib", *map(str, objects), "-o", str(made))
    return made


def wheel(platform: Platform) -> Path:
    """Build a platform's wheel."""
    environment = {**os.environ, "LLAMARIUM_LIBRARY": str(library(platform))}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(DIST)]
    subprocess.run(command, cwd=DIST.parent, env=environment, check=True, stdout=sys.stderr)
    (made,) = DIST.glob(f"*-py3-none-{platform.tag}.whl")
    _compress(made)
    return made


def _compress(path: Path) -> None:
    """Write a wheel again, with smaller files: zlib, which zipfile has, leaves some 2 % more."""
    smaller, directory = path.with_suffix(".part"), list[bytes]()
    with zipfile.ZipFile(path) as old:
        files = [(entry, old.read(entry)) for entry in old.infolist()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        deflated = pool.map(_deflate, [data for _, data in files])
    with smaller.open("wb") as new:
        for (entry, data), packed in zip(files, deflated, strict=True):
            name, begin = entry.filename.encode("ascii"), new.tell()
            year, month, day, hour, minute, second = entry.date_time
            day_of_1980, time = (year - 1980) << 9 | month << 5 | day, hour << 11 | minute << 5 | second // 2
            sizes = entry.CRC, len(packed), len(data), len(name), 0
            header = struct.pack("<5H3I2H", 20, 0, zipfile.ZIP_DEFLATED, time, day_of_1980, *sizes)
            new.write(b"PK\3\4" + header + name + packed)
            made_by, places = struct.pack("<H", 3 << 8 | 20), struct.pack("<3H2I", 0, 0, 0, entry.external_attr, begin)
            directory.append(b"PK\1\2" + made_by + header + places + name)
        count, begin = len(directory), new.tell()
        new.write(b"".join(directory))
        new.write(b"PK\5\6" + struct.pack("<4H2IH", 0, 0, count, count, new.tell() - begin, begin, 0))
    smaller.replace(path)


def _deflate(data: bytes) -> bytes:
    """Compress a file as small as libdeflate or Zopfli makes it. All take a minute, so results are kept."""
    kept = KEPT / "deflated" / hashlib.sha256(data).hexdigest()
    if not kept.exists():
        packed = deflate.deflate_compress(data, 12)
        if 0 < len(data) <= LARGEST_OF_ZOPFLI:
            packed = min(packed, zopfli.zlib.compress(data, numiterations=5)[2:-4], key=len)  # without zlib's frame
        kept.parent.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        unfinished.write_bytes(packed)
        unfinished.replace(kept)
    return kept.read_bytes()


def faults(path: Path) -> list[str]:
    """Return what is wrong with a wheel: its size, its parts, or the C library that it needs."""
    found = [f"{path.stat().st_size:,} bytes"] if path.stat().st_size > LARGEST else []
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
    libraries = {platform.tag: f"kernels/{platform.library_name}" for platform in PLATFORMS}
    (tag,) = parse_wheel_filename(path.name)[3]
    parts = (libraries.get(tag.platform, "kernels/_native.so"), *PARTS)
    found += [f"llamarium/{part} is missing" for part in parts if f"llamarium/{part}" not in names]
    wanted = re.search(r"manylinux_(\d+)_(\d+)_(\w+)", path.name)
    if wanted is None:
        return found
    said = " ".join(_output(sys.executable, "-m", "auditwheel", "show", str(path)).split())
    real = re.search(r'platform tag: "manylinux_(\d+)_(\d+)_(\w+)"', said)
    if real is None or real[3] != wanted[3] or (int(real[1]), int(real[2])) > (int(wanted[1]), int(wanted[2])):
        found.append(f"auditwheel says: {said}")
    return found


def main(*chosen: str) -> int:
    """Build and check the wheels of these platforms; of all, if none is named."""
    shutil.rmtree(DIST, ignore_errors=True)
    failed = 0
    for platform in PLATFORMS:
        if chosen and platform.tag not in chosen:
            continue
        made = wheel(platform)
        wrong = faults(made)
        failed += bool(wrong)
        print(f"{made.relative_to(DIST.parent)}: {made.stat().st_size / 1e6:.1f} MB{''.join(f', {w}' for w in wrong)}")
    return 1 if failed else 0


def _compile(target: str, small: Sequence[str], arguments: list[str]) -> int:
    """Be a C compiler that takes gcc's options and absolute paths and hands them to Zig, which names some otherwise."""
    if "-dumpmachine" in arguments:
        print(target)
        return 0
    if "--version" in arguments:  # with other flags beside it, Zig compiles nothing into a file
        return subprocess.call([sys.executable, "-m", "ziglang", "cc", "--version"])
    march = "-march=armv8.2-a"
    zigs = [f"-mcpu=generic+v8_2a{a.removeprefix(march)}" if a.startswith(march) else a for a in arguments]
    if "windows" in target:  # where all code can be moved
        zigs = [a for a in zigs if a != "-fPIC"]
    if any(Path(argument).name in small for argument in arguments):
        zigs.append("-Os")
    quiet = ["-g0", "-Wno-pass-failed"]  # clang tells of each loop that it does not vectorize
    with tempfile.TemporaryDirectory() as folder:
        if "-fsyntax-only" in zigs:  # it does not know it
            zigs = [a for a in zigs if a != "-fsyntax-only"] + ["-c", "-o", str(Path(folder) / "made.o")]
        # Zig writes what it makes without being asked into its folder: it works in one that goes.
        return subprocess.call([sys.executable, "-m", "ziglang", "cc", "-target", target, *zigs, *quiet], cwd=folder)


def _target(text: str) -> tuple[str, list[str]]:
    """Return the target and the sources to compile for size that `zig` has written as one argument."""
    target, *small = text.split(",")
    return target, small


def _output(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(_compile(*_target(sys.argv[2]), sys.argv[3:]) if sys.argv[1:2] == ["cc"] else main(*sys.argv[1:]))
