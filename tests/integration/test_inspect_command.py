"""`llamarium inspect`: a link with a key of its own, the page behind it, and what is said where there is none."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import fastapi
import httpx
import pytest

import llamarium
from llamarium.cli.inspect import _show, link_to
from llamarium.cli.main import main
from llamarium.course import start
from llamarium.course.folder.page import link_to_section
from llamarium.page.extension import page
from llamarium.page.routes.ticket import Ticket
from llamarium.server.hosts import listen
from llamarium.server.settings import Settings
from page_bundle import built_page
from serving import save_small_model, serving, small_llama
from tiny_run import tiny_run

pytestmark = pytest.mark.torch

TEXT = "a+b & c#d é🙂"


@pytest.fixture
def with_page(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = built_page()
    monkeypatch.setattr("llamarium.page.bundle.is_built.__defaults__", (bundle,))


def test_a_link_holds_key_and_text_after_the_fragment() -> None:
    link = link_to("http://127.0.0.1:1", TEXT, key="k-_")
    assert urlsplit(link).query == ""
    assert parse_qs(urlsplit(link).fragment) == {"key": ["k-_"], "text": [TEXT]}


@pytest.mark.usefixtures("own_folders_list")
def test_the_command_serves_the_page_for_who_has_the_link(tmp_path: Path, smollm2_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from llamarium.page import assets, bundle\n"
        "from llamarium.cli.main import main\n"
        "assets.read_assets.__defaults__ = bundle.is_built.__defaults__ = (Path(sys.argv.pop(1)),)\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    model = save_small_model(tmp_path / "model", smollm2_path)
    start(tmp_path / "my_llama")
    words = [
        "inspect",
        TEXT,
        "-m",
        str(model),
        "--no-browser",
        "--inspect-requests",
        "--build",
        str(tmp_path / "my_llama"),
    ]
    command = [sys.executable, "-c", program, str(built_page()), *words]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    try:
        link = urlsplit(running.stdout.readline().strip())
        named = parse_qs(link.fragment)
        assert named["text"] == [TEXT] and named["stage"] == ["build"]
        assert len(named["key"][0]) >= 32
        url, headers = f"http://{link.netloc}", {"authorization": f"Bearer {named['key'][0]}"}
        end = time.monotonic() + 120
        with httpx.Client(base_url=url, timeout=60) as client:
            assert client.get("/health").status_code in (200, 503), "it holds as soon as it is printed"
            while client.get("/health").status_code != 200:
                assert time.monotonic() < end
                time.sleep(0.05)
            assert client.get("/").text.startswith("<!doctype html>")
            assert client.get("/inspect/model").status_code == 401
            assert client.get("/inspect/model", headers=headers).json()["shape"]["D"] == 64
            assert client.get("/inspect/requests", headers=headers).json()["requests"] == []
            assert client.get("/inspect/build", headers=headers).json()["folder"] == str(tmp_path / "my_llama")
        section = link_to_section(tmp_path / "my_llama", "3-where-order-comes-from#A position is a rotation")
        assert section == f"{url}/#stage=where-order-comes-from&section=a-position-is-a-rotation"
    finally:
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=120)
    assert running.returncode == 130
    assert link_to_section(tmp_path / "my_llama", "3-where-order-comes-from#A position is a rotation") is None
    assert named["key"][0] not in said, "the key is in no line of the log"


def test_the_browser_is_opened_without_the_key_and_let_in_once(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, done = list[str](), threading.Event()
    monkeypatch.setattr("webbrowser.open", lambda link: opened.append(link) or done.set() or True)
    ticket = Ticket("the-key")
    with listen(Settings(port=0, api_keys=("the-key",))) as listener:
        _show(Settings(port=0, api_keys=("the-key",)), listener, TEXT, ticket)
        assert done.wait(10)
    assert parse_qs(urlsplit(opened[0]).fragment) == {"ticket": [ticket.value], "text": [TEXT]}
    llama = small_llama(smollm2_path)
    with serving(llama, extensions=[page(ticket)], api_keys=("the-key",)) as running:
        ask = lambda value: httpx.post(f"{running.url}/inspect/ticket", json={"ticket": value})  # noqa: E731
        assert ask("the-key").json()["error"]["code"] == "invalid_ticket"
        assert ask(ticket.value).json() == {"key": "the-key"}
        again = ask(ticket.value)
        assert (again.status_code, again.json()["error"]["code"]) == (401, "invalid_ticket")
    with serving(llama, extensions=[page()], api_keys=("the-key",)) as running:
        assert httpx.post(f"{running.url}/inspect/ticket", json={"ticket": "x"}).status_code == 401


def test_a_ticket_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ticket, late = Ticket("key"), time.monotonic() + 301
    monkeypatch.setattr("time.monotonic", lambda: late)
    assert ticket.redeem(ticket.value) is None


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command serves, once it is loaded: the model, and the view in the link that is printed."""
    found, printed = dict[str, Any](), list[str]()

    def serve(service: Any, names: Any, listener: Any, extensions: Any) -> int:
        while service.loaded is None:
            time.sleep(0.01)
        found.update(model=service.loaded[0], stage=parse_qs(urlsplit(printed[0]).fragment)["stage"])
        service.close()
        return 0

    monkeypatch.setattr("llamarium.server.lifecycle.run.run", serve)
    monkeypatch.setattr("builtins.print", lambda *said, **_: printed.extend(said))
    return found


def test_a_training_run_is_opened_with_its_newest_checkpoint(
    tmp_path: Path, served: dict[str, Any], with_page: None
) -> None:
    run = tiny_run(tmp_path / "story", steps=4, save_every=2)
    assert main(["inspect", "a cat", "--no-browser", "--checkpoints", str(run)]) == 0
    assert served["model"].name == str(run / "step-00000004") and served["stage"] == ["checkpoints"]


def test_a_run_of_adapters_is_opened_with_the_newest_on_its_base(
    tmp_path: Path, served: dict[str, Any], with_page: None
) -> None:
    rows = [{"text": f"The king is here, my lord {name}."} for name in ("Ned", "Tom", "Sam", "Ben")]
    llamarium.finetune(
        tmp_path / "run", model="letters", data=rows, steps=1, context=32, batch_rows=1, validation=0.0, sample_every=0
    )
    assert main(["inspect", "a cat", "--no-browser", "--checkpoints", str(tmp_path / "run")]) == 0
    assert served["stage"] == ["runs"]
    assert served["model"].name == "letters"
    base = llamarium.load("letters", dtype="float32")
    probabilities = [one.next_tokens("my lord")[0].chosen.probability for one in (base, served["model"])]
    assert probabilities[0] != probabilities[1]


def test_without_a_page_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("llamarium.page.bundle.is_built.__defaults__", (tmp_path,))
    assert main(["inspect"]) == 1
    assert "installed without its page; install Node.js 20 or newer and run `make page`" in capsys.readouterr().err


@pytest.mark.usefixtures("with_page")
@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["x" * 5000], 1, "5,000 characters; expected 4,096 at most"),
        (["a", "-p", "b"], 2, "given twice"),
        (["--port", "70000"], 2, "0 to 65535, found '70000'"),
        (["--build", "/nowhere"], 1, "/nowhere is no folder of `llamarium build`"),
        (["--checkpoints", "/nowhere"], 1, "/nowhere: holds no training run"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(
    words: list[str], code: int, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", *words]) == code
    assert why in capsys.readouterr().err


def test_without_its_packages_it_names_the_extra(tmp_path: Path) -> None:
    """Before anything that imports one of them is touched."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['fastapi'] = None\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "llamarium", "inspect", "--no-browser"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 1
    assert "needs the package fastapi: pip install 'llamarium[serve]'" in done.stderr


@pytest.mark.parametrize(
    ("words", "free", "dtype"),
    [
        ([], None, "F32"),
        (["--dtype", "bfloat16"], None, "BF16"),
        ([], 1_000_000, "BF16"),  # as it is stored: what is free does not hold the weights in float32
    ],
)
def test_the_page_computes_in_float32_where_that_fits(
    words: list[str],
    free: int | None,
    dtype: str,
    with_page: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = list[tuple[str, dict[str, Any]]]()

    def serve(service: Any, names: Any, listener: Any, extensions: Any) -> int:
        while service.loaded is None:
            time.sleep(0.01)
        llama = service.loaded[0]
        app = fastapi.FastAPI()
        app.state.service = service
        extensions[0].add(app)
        seen.append(
            (llama.runner.weights["model.layers.0.mlp.up_proj.weight"].type_name, dict(app.state.loaded_with()))
        )
        service.close()
        return 0

    monkeypatch.setattr("llamarium.server.lifecycle.run.run", serve)
    if free is not None:
        monkeypatch.setattr("llamarium.kernels.memory.free_bytes", lambda: free)
    assert main(["inspect", "--no-browser", "-m", "shakespeare-char", *words]) == 0
    (found,) = seen
    is_auto = free is not None
    assert found == (dtype, {} if is_auto else {"dtype": {"F32": "float32", "BF16": "bfloat16"}[dtype]})
    assert ("float32 would take 0.0 GB" in capsys.readouterr().err) == is_auto
