"""The wheels that are published: their names and parts, and the libraries in them, for Arm and Windows under emulators.

They are built by .venv-wheels, which `make wheels` makes; the objects in build/native are taken.
"""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from importlib.metadata import PathDistribution, distribution
from pathlib import Path
from platform import machine

import pytest
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-wheels/bin/python"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_28_aarch64", "win_amd64")
EMULATOR = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
WINE = next(filter(Path.exists, map(Path, ("/usr/lib/wine/wine64", "/usr/lib64/wine/wine64", "/usr/bin/wine64"))), None)
LARGEST = 8_000_000
LEFT_OUT = r"/page/(site/)?dist/|_native\w*\.wasm"

pytestmark = [
    pytest.mark.timeout(1200),  # compilers beside other work
    pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-wheels, which `make wheels` makes"),
]


def run(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels of Linux and Windows, by platform; what they bring is unpacked beside them."""
    said = run(PYTHON, "hatch_wheels.py", *PLATFORMS)
    assert len([line for line in said.splitlines() if line.startswith("dist/")]) == len(PLATFORMS)
    folder = tmp_path_factory.mktemp("wheels")
    found = {}
    for path in (ROOT / "dist").glob("*.whl"):
        (tag,) = parse_wheel_filename(path.name)[3]
        found[tag.platform] = Path(shutil.copy(path, folder))
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder / tag.platform)
    return found


def library(wheel: Path, platform: str) -> Path:
    name = "_native.dll" if platform.startswith("win") else "_native.so"
    return wheel.parent / platform / "llamarium/kernels" / name


def test_a_wheel_for_each_processor_and_any_python_3(wheels: dict[str, Path]) -> None:
    """hatch_wheels.py has held each to what auditwheel says of the C library that it needs."""
    assert set(wheels) == set(PLATFORMS)
    for platform, wheel in wheels.items():
        assert wheel.name.endswith(f"-py3-none-{platform}.whl")
        assert wheel.stat().st_size <= LARGEST
        inside = wheel.parent / platform / "llamarium"
        assert (inside / "page/dist/index.html").exists() and list((inside / "page/dist/assets").glob("*.js"))
        assert (inside / "py.typed").exists()
        assert [path.name for path in inside.rglob("_native.*") if path.suffix != ".wasm"] == [
            library(wheel, platform).name
        ]


def test_what_is_not_fit_is_named(wheels: dict[str, Path], tmp_path: Path) -> None:
    """A wheel that promises an older C library than it needs, and lacks the page and its kernels for browsers."""
    bad = tmp_path / "llamarium-0.1.0-py3-none-manylinux_2_5_x86_64.whl"
    with zipfile.ZipFile(wheels[PLATFORMS[0]]) as good, zipfile.ZipFile(bad, "w") as archive:
        for name in good.namelist():
            if not re.search(LEFT_OUT, name):
                lines = good.read(name).splitlines(keepends=True) if name.endswith("/RECORD") else [good.read(name)]
                archive.writestr(name, b"".join(line for line in lines if not re.search(LEFT_OUT.encode(), line[:60])))
    code = f"import hatch_wheels; from pathlib import Path; print(hatch_wheels.faults(Path({str(bad)!r})))"
    said = run(PYTHON, "-c", code)
    for part in (
        "page/dist/index.html",
        "page/site/dist/start.js",
        "kernels/_native.wasm",
        "kernels/_native_threads.wasm",
    ):
        assert f"llamarium/{part} is missing" in said
    assert "llamarium/kernels/_native.so is missing" not in said and "auditwheel says" in said


@pytest.mark.skipif(machine() not in ("x86_64", "AMD64"), reason="runs the wheel for x86-64")
def test_an_installed_wheel_writes_the_site(wheels: dict[str, Path], tmp_path: Path) -> None:
    """It needs neither a compiler nor Node.js: no program can be found."""
    inside, out = wheels[PLATFORMS[0]].parent / PLATFORMS[0], tmp_path / "site"
    said = subprocess.run(
        [sys.executable, "-m", "llamarium", "site", "--out", str(out), "--json"],
        env={**os.environ, "PYTHONPATH": str(inside), "PATH": ""},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    files = {path.relative_to(out).as_posix(): path for path in out.rglob("*") if path.is_file()}
    assert json.loads(said)["bytes"] == sum(path.stat().st_size for path in files.values()) <= 9_000_000
    for suffix in ("", "_threads"):
        (kernels,) = out.glob(f"engine-*/kernels{suffix.replace('_', '-')}.wasm")
        assert kernels.read_bytes() == (inside / f"llamarium/kernels/_native{suffix}.wasm").read_bytes()
    assert {"index.html", "offline.js", "models/letters.gguf", "models/shakespeare-char.gguf"} <= set(files)


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs Linux")
def test_the_library_takes_the_best_that_the_processor_has(wheels: dict[str, Path]) -> None:
    cpuinfo = Path("/proc/cpuinfo").read_text()
    if "avx2" not in cpuinfo.split():
        pytest.skip("needs an x86_64 processor with AVX2")
    lib = ctypes.CDLL(str(library(wheels[PLATFORMS[0]], PLATFORMS[0])))
    for flag, name in (("avx2", b"avx2"), ("avx512_vnni", b"avx512_vnni"), ("avx512_bf16", b"avx512_bf16")):
        assert (lib.lm_use_kernels(name) == 0) == (flag in cpuinfo.split()), name


@pytest.mark.skipif(
    not (shutil.which(EMULATOR[0]) and Path(EMULATOR[2]).exists()), reason="needs qemu-user and libc6-arm64-cross"
)
def test_the_library_for_arm_agrees_with_itself_under_an_emulator(wheels: dict[str, Path], tmp_path: Path) -> None:
    """tests/native/check.c holds every set to the portable one."""
    zig = (PYTHON, "hatch_wheels.py", "cc", "aarch64-linux-gnu.2.28")
    flags = ("-std=gnu11", "-O1", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", f"-I{ROOT / 'native'}")
    arm, program = library(wheels[PLATFORMS[1]], PLATFORMS[1]), tmp_path / "check"
    sources = (ROOT / "tests/native/check.c", ROOT / "native/system_posix.c")
    run(*zig, *flags, *sources, arm, "-o", program, "-lpthread", "-ldl", "-lm")
    sets = {"portable", "neon_dotprod", "neon_i8mm"}
    assert {line.split(":")[0] for line in run(*EMULATOR, "-cpu", "max", program, "--no-fork").splitlines()} == sets
    fewer = {"cortex-a53": {"portable"}, "neoverse-n1": {"portable", "neon_dotprod"}}
    for processor, expected in fewer.items():
        assert set(run(*EMULATOR, "-cpu", processor, program, "--list").split()) == expected


def test_the_library_for_windows_needs_nothing_that_windows_10_lacks(wheels: dict[str, Path]) -> None:
    """And exports the functions that llamarium.h declares, which Python calls."""
    said = run("objdump", "-p", library(wheels["win_amd64"], "win_amd64"))
    needed = set(re.findall(r"DLL Name: (\S+)", said))
    assert "KERNEL32.dll" in needed
    assert all(re.fullmatch(r"KERNEL32\.dll|api-ms-win-crt-\w+-l1-1-0\.dll", name) for name in needed), needed
    declared = re.findall(r"^LM_EXPORT [^;(]*?(lm_\w+)\(", (ROOT / "native/llamarium.h").read_text(), re.MULTILINE)
    names = said.partition("[Ordinal/Name Pointer] Table")[2]
    assert set(re.findall(r"\] (?:\+base\[ *\d+\] +\S+ )?(\w+)$", names.partition("\n\n")[0], re.MULTILINE)) == set(
        declared
    )
    called = (path.read_text() for path in (ROOT / "src/llamarium/kernels").glob("*.py"))
    assert set(re.findall(r"\blib(?:rary)?\.(lm_\w+)", "".join(called))) <= set(declared)


@pytest.mark.skipif(WINE is None or machine() != "x86_64", reason="needs wine64")
def test_the_library_for_windows_agrees_with_itself_under_wine(wheels: dict[str, Path], tmp_path: Path) -> None:
    """tests/native/check.c holds every set to the portable one."""
    zig = (PYTHON, "hatch_wheels.py", "cc", "x86_64-windows-gnu")
    flags = ("-std=gnu11", "-O1", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", f"-I{ROOT / 'native'}")
    dll = shutil.copy(library(wheels["win_amd64"], "win_amd64"), tmp_path)
    sources = (ROOT / "tests/native/check.c", ROOT / "native/system_windows.c")
    run(*zig, *flags, *sources, dll, "-o", tmp_path / "check.exe")
    done = subprocess.run(
        [str(WINE), str(tmp_path / "check.exe")],
        env={**os.environ, "WINEPREFIX": str(tmp_path / "wine"), "WINEDEBUG": "-all"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    sets = {line.split(":")[0] for line in done.stdout.splitlines() if " within " in line}
    has = set(Path("/proc/cpuinfo").read_text().split())
    flags_of = {"avx2": "avx2", "avx_vnni": "avx_vnni", "avx512_vnni": "avx512_vnni", "avx512_bf16": "avx512_bf16"}
    assert sets == {"portable", *(name for name, flag in flags_of.items() if flag in has)}


def required(requirements: Iterable[str], seen: dict[str, int]) -> dict[str, int]:
    """Return the bytes of distributions' files, and of all that they require without extras, by name."""
    for text in requirements:
        requirement = Requirement(text)
        name = requirement.name.lower().replace("_", "-")
        if name not in seen and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found = distribution(name)
            seen[name] = sum(path.size or 0 for path in found.files or ())
            required(found.requires or (), seen)
    return seen


def test_what_an_installation_brings_is_light(wheels: dict[str, Path]) -> None:
    """Without byte code, which Python writes where it wants some: then it is a third more."""
    inside = wheels[PLATFORMS[0]].parent / PLATFORMS[0]
    (info,) = inside.glob("*.dist-info")
    sizes = required(PathDistribution(info).requires or (), {})
    own = sum(path.stat().st_size for path in inside.rglob("*") if path.is_file())
    assert {"numpy", "tokenizers", "safetensors", "regex", "jinja2", "rich", "huggingface-hub"} <= set(sizes)
    assert sizes.keys().isdisjoint({"tiktoken", "requests", "urllib3", "charset-normalizer"})
    assert not re.search("torch|transformers|ray|fastapi|pandas", " ".join(sizes))
    assert own <= 15e6
    assert own + sum(sizes.values()) <= 125e6, sorted(sizes.items(), key=lambda item: -item[1])
