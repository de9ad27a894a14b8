"""`llamarium models`, `download` and `doctor`: what is on this machine."""

import json
import shutil
from pathlib import Path
from urllib.error import URLError

import pytest

from llamarium.cli import doctor
from llamarium.cli.main import main
from llamarium.errors import DownloadError
from llamarium.hub.resolve import CachedModel
from llamarium.kernels import native
from llamarium.kernels.processor import INSTRUCTIONS, better_kernels


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLAMARIUM_CACHE", str(tmp_path))
    monkeypatch.setattr("llamarium.hub.resolve.cached_models", list)
    return tmp_path


def hub_models(tmp_path: Path) -> list[CachedModel]:
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    return [
        CachedModel(name="org/one", path=tmp_path, num_bytes=2_471_645_608),
        CachedModel(name="org/two:\x1b.gguf", path=tmp_path / "x.gguf", num_bytes=1),
        CachedModel(name="org/meta", path=tmp_path / "original", num_bytes=1),
    ]


def test_models_lists_built_ins_and_the_hubs_cache(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("llamarium.hub.resolve.cached_models", lambda: hub_models(empty_cache))
    assert main(["models"]) == 0
    out, err = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= 80
    rows = {line.split()[0]: line for line in out.splitlines()[2:] if not line.startswith(" ")}
    assert "fetched" in rows["smollm2-135m"]
    assert "2.5 GB" in rows["org/one"] and "safetensors" in rows["org/one"]
    assert "Meta's original files" in rows["org/meta"]
    assert "org/two:\\x1b.gguf" in rows and "\x1b" not in out
    assert "org/name:file.gguf" in err


def test_models_as_json(empty_cache: Path, llama3_tokenizer_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    out, err = capsys.readouterr()
    models = {model["name"]: model for model in map(json.loads, out.splitlines())}
    assert models["smollm2-135m"]["path"] is None
    assert models["llama3"]["kind"] == "tokenizer"
    assert not err
    (empty_cache / "llama3").mkdir()
    shutil.copy(llama3_tokenizer_path, empty_cache / "llama3")
    main(["models", "--json"])
    models = {model["name"]: model for model in map(json.loads, capsys.readouterr().out.splitlines())}
    assert models["llama3"]["path"] == str(empty_cache / "llama3" / "tokenizer.model")


def test_download_prints_the_path(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["smollm2-135m"], ["smollm2-135m", "--force"]):
        assert main(["download", *words]) == 0
        assert capsys.readouterr() == (f"{smollm2_path}\n", "")
    assert main(["download", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "smollm2-135m", "path": str(smollm2_path)}


def test_download_force_reaches_fetch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forced: list[bool] = []

    def fetch(name: str, *, force: bool) -> Path:
        forced.append(force)
        return tmp_path

    monkeypatch.setattr("llamarium.hub.builtin.fetch", fetch)
    assert main(["download", "llama3"]) == main(["download", "llama3", "--force"]) == 0
    assert forced == [False, True]


def test_download_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("llamarium.hub.resolve.resolve", lambda name: tmp_path / name)
    assert main(["download", "org/name"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'org/name'}\n"
    assert main(["download", "org/name", "--force"]) == 1
    assert "--force is for built-ins" in capsys.readouterr().err


def test_download_fails_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fetch(name: str, *, force: bool) -> Path:
        raise DownloadError("no network")

    monkeypatch.setattr("llamarium.hub.builtin.fetch", fetch)
    assert main(["download", "smollm2-135m"]) == 1
    assert capsys.readouterr() == ("", "llamarium: error: no network\n")


def test_doctor_finds_everything_in_place(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for found in ("python", "torch", "processor", "OMP_NUM_THREADS is 1", "not fetched yet"):
        assert found in out
    assert out.endswith("Nothing needs attention.\n")


@pytest.mark.parametrize("is_built", [True, False])
def test_doctor_says_whether_the_page_is_there(
    is_built: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if is_built:
        (tmp_path / "index.html").write_bytes(b"x" * 2000)
    monkeypatch.setattr("llamarium.page.bundle.DIST", tmp_path)
    monkeypatch.setattr("llamarium.page.bundle.is_built.__defaults__", (tmp_path,))
    main(["doctor", "--json"])
    (check,) = json.loads(capsys.readouterr().out)["page"]
    assert ("there, 2.0 kB" in check["found"]) == is_built
    assert ("make page" in check["found"]) != is_built


def test_doctor_names_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_folder = tmp_path / "file"
    no_folder.touch()
    monkeypatch.setenv("LLAMARIUM_CACHE", str(no_folder / "cache"))
    monkeypatch.setattr("llamarium.cli.doctor._PACKAGES", ("numpy", "no-such-package"))
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    wrong = {check["name"]: check["found"] for topic in report.values() if topic for check in topic if not check["ok"]}
    assert report["ok"] is False
    assert set(wrong) == {"no-such-package", "folder"}
    assert "pip install no-such-package" in wrong["no-such-package"]
    assert "set LLAMARIUM_CACHE" in wrong["folder"]
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith("Needs attention: no-such-package, folder\n")


@pytest.mark.parametrize("setting", ["", "none"])
def test_doctor_without_kernels_and_torch_says_what_to_install(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarium.kernels.native.kernels", lambda: None)
    monkeypatch.setenv("LLAMARIUM_KERNELS", setting)
    monkeypatch.setattr("llamarium.cli.doctor.find_spec", lambda _: "found")
    (check, *_) = doctor._kernels()  # pyright: ignore[reportPrivateUsage]
    assert "PyTorch does their work" in check.found and check.ok == (setting == "none")
    monkeypatch.setattr("llamarium.cli.doctor.find_spec", lambda _: None)
    (check, *_) = doctor._kernels()  # pyright: ignore[reportPrivateUsage]
    assert not check.ok and "llamarium[torch]" in check.found
    assert ("unset LLAMARIUM_KERNELS" if setting else "install a C compiler") in check.found


def test_doctor_without_a_home(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("LLAMARIUM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert main(["doctor"]) == 1
    assert "there is no home folder" in capsys.readouterr().out


def test_doctor_asks_the_network_only_when_told_to(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def urlopen(request: object, timeout: float) -> object:
        asked.append(request.full_url)  # pyright: ignore[reportAttributeAccessIssue]
        raise URLError("no route")

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/")
    assert main(["doctor", "--json"]) == 0
    assert asked == []
    assert main(["doctor", "--json", "--hub"]) == 1
    assert asked == ["https://mirror.example"]
    assert "no route" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("load", "stolen", "busy"), [(0.1, 0.0, False), (9.0, 0.0, True), (0.1, 0.2, True), (0.1, None, False)]
)
def test_doctor_says_when_the_machine_is_busy(
    load: float, stolen: float | None, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("llamarium.system.usable_cpus", lambda: 2)
    monkeypatch.setattr(doctor, "_stolen", lambda: stolen)
    check = doctor._load()
    assert check is not None and check.ok
    assert f"{load:.1f} tasks on 2 processors" in check.found and ("busy" in check.found) is busy


def test_stolen_time_is_of_this_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([[100, 0, 0, 900, 0, 0, 0, 50, 7], [130, 0, 0, 950, 0, 0, 0, 70, 9]])
    monkeypatch.setattr(doctor, "_cpu_times", lambda: next(times))
    assert doctor._stolen() == 20 / 100


@pytest.mark.skipif(native.kernels() is None, reason="needs the C kernels")
@pytest.mark.parametrize(
    ("flags", "ok", "named"),
    [
        ("avx2 fma", True, "outliers 16"),
        ("avx2 fma f16c avx_vnni", True, "avx_vnni"),
        ("avx2 fma f16c avx_vnni avx512f avx512bw avx512vl avx512dq avx512_vnni", False, "avx512_vnni"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16", False, "avx512_bf16"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni amx_tile amx_int8", True, "amx"),
    ],
)
def test_doctor_says_which_kernels_the_processor_could_run(
    flags: str, ok: bool, named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(native.VARIABLE, raising=False)
    monkeypatch.setattr(native, "kernels", lambda: "avx2")
    monkeypatch.setattr(doctor, "_proc_value", lambda file, name: flags if name == "flags" else None)
    main(["doctor", "--json"])
    (check,) = (one for one in json.loads(capsys.readouterr().out)["kernels"] if one["name"] == "C kernels")
    assert check["ok"] == ok and named in check["found"]
    monkeypatch.setenv(native.VARIABLE, "avx2")  # chosen by the user
    main(["doctor", "--json"])
    (check,) = (one for one in json.loads(capsys.readouterr().out)["kernels"] if one["name"] == "C kernels")
    assert check["ok"] and "could run" not in check["found"]


def test_every_set_is_better_than_those_below_it() -> None:
    everything = frozenset[str]().union(*INSTRUCTIONS.values())
    assert list(INSTRUCTIONS) == [name for name in native.KERNELS if name != "portable"]
    assert better_kernels("amx", everything) is None and better_kernels("portable", ()) is None
    assert better_kernels("portable", ["asimddp", "fp"]) == "neon_dotprod"
    assert better_kernels("neon_dotprod", ["asimddp", "i8mm"]) == "neon_i8mm"
