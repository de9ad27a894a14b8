"""The C kernels as they are built: their instructions, memory and threads, other processors, and packaging.

tests/native/check.c holds every set of kernels to the portable one; here it is compiled with sanitizers, and in
test_wheels.py for Arm.
"""

import ctypes
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parents[2]
CHECKS = ROOT / "tests" / "native"
STRICT = ("-Wall", "-Wextra", "-Werror")

pytestmark = pytest.mark.timeout(1200)  # compilers beside other work


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    """hatch_build.py, by which everything is compiled as it is for users."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*command: str | Path, cwd: Path | None = None, **env: str) -> str:
    """Return stdout and stderr together; the command must succeed."""
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**os.environ, **env}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


# --- instructions -----------------------------------------------------------------------------------------------------

INSTRUCTIONS = {  # what a set's code must contain, and what it must not
    "portable": ([r"\bret"], r"[yz]mm|\bsdot\b"),
    "avx2": ([r"vpmaddubsw .*%ymm"], r"zmm|vpdpbusd"),
    "avx_vnni": ([r"\{vex\} vpdpbusd .*%ymm"], r"zmm|\} *vpmaddubsw"),
    "avx512_vnni": ([r"vpdpbusd .*%zmm"], r"tmm"),
    "avx512_bf16": ([r"vdpbf16ps .*%zmm", r"vpdpbusd .*%zmm"], r"tmm"),
    "amx": ([r"tdpbssd .*%tmm", r"ldtilecfg", r"tilerelease", r"vpdpbusd .*%zmm"], None),
    "neon_dotprod": ([r"\bsdot\b.*v\d+\.4s"], r"\bsmmla\b"),
    "neon_i8mm": ([r"\bsmmla\b.*v\d+\.4s", r"\bsdot\b.*v\d+\.4s"], None),
}


def check_instructions(hook: ModuleType, objdump: str, objects: list[Path]) -> set[str]:
    """Look at the parts that each set is made of; return which sets there were."""
    paths = {path.stem: path for path in objects}
    sets = {name.removeprefix("ops_") for name in paths if name.startswith("ops_")}
    for name in sets:
        wanted, forbidden = INSTRUCTIONS[name]
        parts = [paths[f"{part}_{hook.SHARED.get(name, {}).get(part, name)}"] for part in hook.PARTS]
        code = run(objdump, "-d", "--no-show-raw-insn", *parts).replace("\t", " ")
        for pattern in wanted:
            assert re.search(pattern, code), f"{name}: no {pattern}"
        assert forbidden is None or not re.search(forbidden, code), f"{name}: {forbidden}"
    return sets


def test_each_set_has_its_instructions_and_no_warnings(hook: ModuleType) -> None:
    """Of the objects that the library is linked from."""
    cc = hook.compiler()
    processor = run(*cc, "-dumpmachine").split("-")[0].replace("arm64", "aarch64")
    objects = hook.kept_objects(cc)
    found = check_instructions(hook, "objdump", objects)
    assert found == {"portable", *hook.SETS.get(processor, {})}  # or else the compiler is ten years old
    assert [path.with_suffix(".warnings").read_text() for path in objects] == [""] * len(objects)


def test_any_set_can_be_the_only_one_beside_the_portable(hook: ModuleType) -> None:
    """An installation in place compiles the best set of its processor alone."""
    cc = hook.compiler()
    strict = ("-Werror=implicit-function-declaration", "-fsyntax-only", "-DLM_HAS_PORTABLE")
    for name in hook.SETS.get(run(*cc, "-dumpmachine").split("-")[0].replace("arm64", "aarch64"), {}):
        run(*cc, *hook.FLAGS, *strict, f"-DLM_HAS_{name.upper()}", hook.NATIVE / "dispatch.c")


# --- memory and threads -----------------------------------------------------------------------------------------------

AVX2 = {"avx2", "fma", "f16c"}
VNNI = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}
NEEDED = {  # the kernel's names of what the sets need
    "portable": set(),
    "avx2": AVX2,
    "avx_vnni": {*AVX2, "avx_vnni"},
    "avx512_vnni": VNNI,
    "avx512_bf16": {*VNNI, "avx512_bf16"},
    "amx": {*VNNI, "amx_tile", "amx_int8"},
    "neon_dotprod": {"asimddp"},
    "neon_i8mm": {"asimddp", "i8mm"},
}
# Of what is undefined, three are left out that take a third of the compiling: they look at pointers before an access,
# and -fsanitize=address, or the processor for NULL, at the access itself.
SANITIZERS = (
    "-g", "-fsanitize=address,undefined", "-fno-sanitize=object-size,pointer-overflow,null",
    "-fno-sanitize-recover=all",
)  # fmt: skip
SILENT = "-fsanitize-undefined-trap-on-error"  # what is undefined ends the program without a word


def build_check(
    hook: ModuleType, cc: list[str], folder: Path, *flags: str, with_sources: tuple[Path, ...] = ()
) -> tuple[Path, list[Path]]:
    """Compile check.c and the kernels with `flags`; return the program and the kernels' objects."""
    objects, program = hook.compile_objects(cc, folder, *STRICT, *flags), folder / "check"
    sources = (CHECKS / "check.c", *with_sources)
    how = (*hook.FLAGS, *STRICT, *flags, "-O1", f"-I{hook.NATIVE}")
    run(*cc, *how, *sources, *objects, "-o", program, "-lpthread", "-ldl", "-lm")
    return program, objects


def sanitized(hook: ModuleType, folder: Path, *flags: str, **more: tuple[Path, ...]) -> tuple[str, list[Path]]:
    """Run the check under sanitizers; return what it says, and the kernels' objects.

    Without the messages of what is undefined it is compiled a fourth faster; only if there is something it is compiled
    again with them, to name the line.
    """
    program, objects = build_check(hook, hook.compiler(), folder / "silent", *SANITIZERS, SILENT, *flags, **more)
    done = subprocess.run([program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode in (-signal.SIGILL, -signal.SIGTRAP):
        run(build_check(hook, hook.compiler(), folder / "told", *SANITIZERS, *flags, **more)[0])
    assert done.returncode == 0, done.stdout or f"signal {-done.returncode}"
    return done.stdout, objects


def sets_in(output: str) -> set[str]:
    return {line.split(":")[0] for line in output.splitlines()}


def processor_has() -> set[str]:
    cpuinfo = Path("/proc/cpuinfo")
    return set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()


def test_kernels_agree_and_are_clean_under_sanitizers(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMX and AVX-VNNI are emulated in the same program where the processor lacks them alone.

    Sets that cannot run here are not compiled.
    """
    has = processor_has()
    emulable = {"amx_tile", "amx_int8", "avx_vnni"}
    runnable = {name for name, needed in NEEDED.items() if not has or needed - emulable <= has}
    sets = {
        processor: {name: flag for name, flag in flags.items() if name in runnable}
        for processor, flags in hook.SETS.items()
    }
    flags = []
    if has >= AVX2 and "avx_vnni" not in has:
        sets["x86_64"]["avx_vnni"] = hook.AVX2
        evex = ["-DLM_EMULATE_BY_EVEX"] if has >= VNNI else []
        flags += ["-DLM_EMULATE_AVX_VNNI", f"-I{CHECKS}", *evex]
        has = {*has, "avx_vnni"}
    monkeypatch.setattr(hook, "SETS", sets)
    # What is not optimized is compiled soonest, but for what the sets are held to most, and which is small.
    part, optimized = hook._part, {("products", "portable"): ["-O1"]}
    monkeypatch.setattr(hook, "FLAGS", [*hook.FLAGS, "-O0"])
    monkeypatch.setattr(hook, "_part", lambda *which: [*part(*which), *optimized.get(which, [])])
    emulated = has >= VNNI and not has >= NEEDED["amx"]
    more = {"with_sources": (CHECKS / "emulated_amx.c",)} if emulated else {}
    flags += ["-DLM_EMULATE_AMX", f"-I{CHECKS}"] if emulated else []
    said, objects = sanitized(hook, tmp_path, *flags, **more)
    *lines, counted = said.splitlines() if emulated else [*said.splitlines(), ""]
    found, expected = sets_in("\n".join(lines)), {name for name, needed in NEEDED.items() if needed <= has}
    assert "portable" in found
    if emulated:
        assert found == {*expected, "amx"}
        assert "tdpb" not in run("objdump", "-d", *(path for path in objects if path.stem == "products_amx"))
        assert counted.endswith("products of tiles were emulated") and int(counted.split()[0]) > 1000
    elif has:
        assert found - {"amx"} == expected - {"amx"}
        assert found <= expected, "AMX can be refused by the system, and not be granted without the processor"


def test_threads_do_not_race(hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "SETS", {})  # the sets share everything that threads do
    program, _ = build_check(hook, hook.compiler(), tmp_path, "-O1", "-g", "-fsanitize=thread")
    # Compilers of 2023 and before cannot live with as much randomness in addresses as newer Linuxes have.
    fixed = ["setarch", "-R"] if "unexpected memory mapping" in _said(program, "--list") else []
    assert sets_in(run(*fixed, program, "--races", TSAN_OPTIONS="die_after_fork=0")) == {"portable"}


def _said(*command: str | Path) -> str:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False).stderr


# --- packaging --------------------------------------------------------------------------------------------------------

LIBRARY = "llamarium/kernels/_native.so"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what is packaged; the library of this environment stays as it is."""
    copy = tmp_path / "project"
    for name in ("src", "native", "examples"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    modules = ("hatch_build.py", "hatch_compiler.py", "hatch_page.py")
    for name in (*modules, "pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def write_compiler(hook: ModuleType, path: Path, unknown: str) -> str:
    """Write a compiler that refuses the flags `unknown`; the kernels' objects it takes from those that are kept.

    What it compiles itself, dispatch.c, it does not optimize, which saves time.
    """
    cc = hook.compiler()
    kept = hook.kept_objects(cc)[0].parent
    path.write_text(
        "#!/bin/sh\n"
        f'for last; do case "$last" in {unknown}) echo "error: what is $last?" >&2; exit 1; esac; done\n'
        f'kept={shlex.quote(str(kept))}/"${{last##*/}}"\n'
        'case "$last" in */dispatch_*.o) ;; *.o) exec cp "$kept" "$last" ;; esac\n'
        f'exec {shlex.join(cc)} "$@" -O0\n'
    )
    path.chmod(0o755)
    return str(path)


def test_a_wheel_brings_the_library_for_any_python_3(hook: ModuleType, project: Path, tmp_path: Path) -> None:
    cc = write_compiler(hook, tmp_path / "cc", unknown="-mavx2|-march=*")  # portable kernels alone
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", tmp_path, project, CC=cc)
    (wheel,) = tmp_path.glob("*.whl")
    *_, tags = parse_wheel_filename(wheel.name)
    (tag,) = tags
    assert (tag.interpreter, tag.abi) == ("py3", "none")
    assert tag in set(sys_tags())  # or pip would not install it here
    assert not re.match("any|manylinux|musllinux", tag.platform)  # it promises nothing of other machines

    with zipfile.ZipFile(wheel) as archive:
        (about,) = (name for name in archive.namelist() if name.endswith("/WHEEL"))
        assert b"Root-Is-Purelib: false" in archive.read(about)
        library = ctypes.CDLL(archive.extract(LIBRARY, tmp_path))
    library.lm_kernels.restype = ctypes.c_char_p
    assert library.lm_use_kernels(b"portable") == 0
    assert library.lm_kernels() == b"portable"
    assert not hasattr(library, "lm_parallel"), "only what llamarium.h declares is exported"


WARNING_COMPILER = """#!/bin/sh
echo "warning: an option is deprecated" >&2
case "$*" in
    *-dumpmachine*) echo wasm32-unknown-wasi ;;
    *--version*) echo 1.0 ;;
    *) for last; do :; done; : > "$last" ;;
esac
"""


def test_what_a_compiler_warns_of_is_kept_beside_objects_and_is_no_part_of_their_folders_name(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "KEPT", tmp_path / "kept")
    (tmp_path / "cc").write_text(WARNING_COMPILER)
    (tmp_path / "cc").chmod(0o755)
    made = hook.kept_objects([str(tmp_path / "cc")])[0]
    assert re.fullmatch(r"wasm32-unknown-wasi-[0-9a-f]{16}", made.parent.name)
    assert made.with_suffix(".warnings").read_text() == "warning: an option is deprecated\n"


NO_LIBRARY = [
    ({"CC": "/nonexistent/cc"}, "/nonexistent/cc, which CC names, is not there"),
    ({"CC": "", "PATH": ""}, "there is no C compiler"),
    ({"CC": "false"}, "false failed: exit code 1"),
]


@pytest.mark.parametrize(("env", "why"), NO_LIBRARY)
def test_where_the_library_cannot_be_made_the_build_fails_and_says_why(
    project: Path, tmp_path: Path, env: dict[str, str], why: str
) -> None:
    old = project / "src" / LIBRARY
    old.write_text("of another version")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=project,
        env={**os.environ, "COLUMNS": "400", **env}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and not list(tmp_path.glob("*.whl")) and not old.exists()
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if "kernels cannot be compiled" in line]
    assert f"{why}. Install a C compiler" in line and "LLAMARIUM_NO_NATIVE=1" in line


def test_without_a_library_on_request_the_wheel_is_pure(project: Path, tmp_path: Path) -> None:
    old = project / "src" / LIBRARY
    old.write_text("of another version")
    env = {"LLAMARIUM_NO_NATIVE": "1"}
    output = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=project, **env)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert LIBRARY not in archive.namelist()
    assert not old.exists()
    (line,) = [line for line in output.splitlines() if "kernels" in line]
    assert line.endswith("without its native kernels: LLAMARIUM_NO_NATIVE is 1")


OLD = [
    (
        "-mavx512vnni|-mavxvnni|-march=armv8.2-a+dotprod*",
        {"amx", "avx_vnni", "avx512_vnni", "avx512_bf16", "neon_i8mm", "neon_dotprod"},
    ),
    ("-mamx-int8|-march=*+i8mm", {"amx", "neon_i8mm"}),
]


@pytest.mark.parametrize(("unknown", "left_out"), OLD)
def test_an_old_compiler_builds_fewer_sets(
    hook: ModuleType, project: Path, tmp_path: Path, unknown: str, left_out: set[str]
) -> None:
    cc = write_compiler(hook, tmp_path / "cc", unknown=unknown)
    said = run(sys.executable, project / "hatch_build.py", CC=cc).splitlines()
    count = int(re.fullmatch(r"Compiling the CPU kernels: (\d+) files \.\.\.", said[0])[1])
    assert [line.split()[:3] for line in said[1:]] == [[str(i + 1), "of", str(count)] for i in range(count)]
    library = ctypes.CDLL(str(project / "src" / LIBRARY))
    has = processor_has()
    for name, needed in NEEDED.items():
        if name in left_out:
            assert library.lm_use_kernels(name.encode()) == 1, name
        elif name != "amx" and needed <= has:
            assert library.lm_use_kernels(name.encode()) == 0, name


def test_for_this_processor_alone_the_best_set_is_compiled(
    hook: ModuleType, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the portable one; all sets that are asked for afterwards are added, and stay."""
    for path in (project / "native").glob("*.c"):
        path.write_text("static int nothing;\n")  # quickly compiled
    cc, has = hook.compiler(), processor_has()
    sets = hook._sets(cc)
    runnable = [name for name in sets if NEEDED[name] <= has] if has else list(sets)
    names = hook._best_of(cc, sets)
    assert names[0] == "portable" and names[-1] == runnable[-1] and len(names) <= 3
    monkeypatch.setattr(hook, "_instructions", lambda cc, flags: None)  # a compiler that knows no native processor
    assert hook._best_of(cc, sets) == list(sets)

    kept = project / "build" / "native"
    run(sys.executable, project / "hatch_build.py", "--best")
    first = {path.name for path in kept.glob("*/*.o")}
    assert {name.removeprefix("ops_").removesuffix(".o") for name in first if name.startswith("ops_")} == set(names)
    run(sys.executable, project / "hatch_build.py")
    assert {path.name for path in kept.glob("*/*.o")} > first or set(names) == set(sets)
    made = {path: path.stat().st_mtime_ns for path in kept.rglob("*")}
    assert run(sys.executable, project / "hatch_build.py", "--best") == ""
    assert {path: path.stat().st_mtime_ns for path in kept.rglob("*")} == made


def test_zig_has_a_cache_without_a_home_and_the_environment_stays_as_it_is(
    hook: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread starts Node.js meanwhile, and a program may not start while its environment is changed."""
    for name in ("HOME", "XDG_CACHE_HOME", "LOCALAPPDATA", "ZIG_GLOBAL_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    environment = dict(os.environ)
    code = "import os; print(os.environ['ZIG_GLOBAL_CACHE_DIR'])"
    assert Path(hook._run(sys.executable, "-c", code).stdout.strip()) == ROOT / "build" / "zig"
    assert dict(os.environ) == environment


def test_a_killed_linker_leaves_no_library_that_later_builds_would_take(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*command: str) -> None:
        Path(command[command.index("-o") + 1]).write_bytes(b"a part")
        raise KeyboardInterrupt

    monkeypatch.setattr(hook, "KEPT", tmp_path)
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr(hook, "_kept_folder", lambda cc: tmp_path / "kept")
    monkeypatch.setattr(hook, "kept_objects", lambda cc, **options: [tmp_path / "dispatch.o"])
    monkeypatch.setattr(hook, "_run", link)
    with pytest.raises(KeyboardInterrupt):
        hook._linked(["cc"], only_best=False)
    assert not list(tmp_path.rglob("*.so"))


def test_what_has_not_changed_is_not_compiled_again(project: Path) -> None:
    """A file that was only touched is the same; what has changed, or is gone, is made again."""
    for path in (project / "native").glob("*.c"):
        path.write_text("static int nothing;\n")  # quickly compiled
    compiles = [sys.executable, project / "hatch_build.py"]
    library = project / "src" / LIBRARY
    assert "Compiling" in run(*compiles)
    made = library.read_bytes()
    (project / "native" / "pack.c").touch()
    assert run(*compiles) == "" and library.read_bytes() == made
    library.write_text("of another version")
    assert run(*compiles) == "" and library.read_bytes() == made
    (project / "native" / "dispatch.c").write_text("int something;\n")
    assert "Compiling" in run(*compiles) and library.read_bytes() != made
    assert len(list((project / "build" / "native").iterdir())) == 1, "what is older is gone"


def test_the_source_distribution_can_be_compiled(project: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=project)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"hatch_build.py", *(f"native/{path.name}" for path in (ROOT / "native").iterdir())} <= names
    assert {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")} <= names
