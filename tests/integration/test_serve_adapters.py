"""Adapters over HTTP: chosen by a request's `model`, in every protocol; what one has run is not taken for another."""

import argparse
import asyncio
import copy
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

import llamarium
from llamarium.adapters.config import LoRAConfig
from llamarium.adapters.lora import apply_lora
from llamarium.adapters.save import save_adapter
from llamarium.api import Llama
from llamarium.cli import batch, serve
from llamarium.cli.main import main
from llamarium.cli.options import UsageError
from llamarium.server.lifecycle.service import Service
from serving import CHAT, HELLO, Running, serving
from strong_adapters import strengthen

pytestmark = pytest.mark.torch

NAMES = ("one", "two")
COMPLETION: dict[str, Any] = {"prompt": "The sky over the sea is " * 8, "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def folders(llama: Llama, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of the small model, of which each changes what it says."""
    found = {}
    for seed, name in enumerate(NAMES):
        model = copy.deepcopy(llama.model)
        apply_lora(model, LoRAConfig(r=4))
        strengthen(model, 0.3, seed=seed)
        found[name] = tmp_path_factory.mktemp(name)
        save_adapter(model, found[name], base_model="small")
    return found


@pytest.fixture(scope="module")
def running(llama: Llama, folders: dict[str, Path]) -> Iterator[Running]:
    with serving(llama, engine={"adapters": folders}) as found:
        yield found


@pytest.fixture(scope="module")
def expected(llama: Llama, folders: dict[str, Path]) -> dict[str | None, str]:
    """What the library answers, each in an engine of its own."""
    found = {}
    for name in (None, *NAMES):
        with llama.engine(adapters=folders, kv_memory=2**24) as engine:
            options = {"temperature": 0.0, "max_tokens": 12}
            found[name] = engine.stream(COMPLETION["prompt"], adapter=name, **options).result().text
    assert len(set(found.values())) == 3, "the adapters matter"
    return found


def ask(running: Running, model: str | None, **more: Any) -> dict[str, Any]:
    named = {} if model is None else {"model": model}
    answer = running.post("/v1/completions", **COMPLETION | named | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_name_chooses_and_the_answer_says_it(running: Running, expected: dict[str | None, str]) -> None:
    for model, adapter, told in ((None, None, "small"), ("alias", None, "alias"), ("one", "one", "one"), ("two",) * 3):
        answer = ask(running, model)
        assert (answer["model"], answer["choices"][0]["text"]) == (told, expected[adapter])


def test_what_one_has_run_is_not_taken_for_another(llama: Llama, folders: dict[str, Path], expected: Any) -> None:
    with serving(llama, engine={"adapters": folders}) as running:
        for cached in (False, True):
            for model, adapter in (("small", None), ("one", "one"), ("two", "two")):
                answer = ask(running, model)
                assert answer["choices"][0]["text"] == expected[adapter]
                num_cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert num_cached == (answer["usage"]["prompt_tokens"] - 1 if cached else 0)


def test_side_by_side_each_gets_its_own(running: Running, expected: dict[str | None, str]) -> None:
    models = ["small", "one", "two"] * 6

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
            answers = [client.completions.create(model=model, **COMPLETION) for model in models]
            return [answer.choices[0].text for answer in await asyncio.gather(*answers)]

    assert asyncio.run(together()) == [expected[None if model == "small" else model] for model in models]


def test_models_are_listed_with_what_they_are_adapters_of(running: Running) -> None:
    listed = httpx.get(f"{running.url}/v1/models").json()["data"]
    assert [(one["id"], one["root"], one["parent"]) for one in listed] == [
        ("small", "small", None),
        ("alias", "small", None),
        ("one", "one", "small"),
        ("two", "two", "small"),
    ]
    assert httpx.get(f"{running.url}/v1/models/two").json() == listed[-1]
    assert httpx.get(f"{running.url}/props").json()["models"] == ["small", "alias", "one", "two"]


def said(answer: dict[str, Any]) -> Any:
    match answer:
        case {"choices": [{"message": {"content": text}}]} | {"choices": [{"text": text}]}:
            return text
        case {"output": [{"content": [{"text": text}]}]} | {"content": [{"text": text}]}:
            return text
    return answer["data"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HELLO),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/messages", {"messages": HELLO["messages"], "max_tokens": 8}),
        ("/v1/messages/count_tokens", {"messages": HELLO["messages"]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
        ("/apply-template", {"messages": HELLO["messages"]}),
    ],
)
def test_every_route_knows_the_names(running: Running, path: str, body: dict[str, Any]) -> None:
    told = [running.post(path, **body | {"model": model}) for model in ("small", "one", "two")]
    assert [answer.status_code for answer in told] == [200] * 3
    if "model" in told[0].json():
        assert [answer.json()["model"] for answer in told] == ["small", "one", "two"]
        assert len({str(said(answer.json())) for answer in told}) == 3
    refused = running.post(path, **body | {"model": "three"})
    assert refused.status_code == 404
    error = refused.json()["error"]
    assert error["message"] == "model 'three' does not exist; available: small, alias, one, two"
    if "messages" not in path:
        assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_the_clients_stream_from_an_adapter(running: Running) -> None:
    whole = running.post(CHAT, **HELLO, model="two").json()["choices"][0]["message"]["content"]
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        chunks = list(client.chat.completions.create(**HELLO | {"model": "two"}, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert {chunk.model for chunk in chunks} == {"two"}
    with (
        anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as client,
        client.messages.stream(
            model="two", messages=HELLO["messages"], max_tokens=8, extra_body={"temperature": 0}
        ) as stream,
    ):
        assert "".join(stream.text_stream) == whole
        assert stream.get_final_message().model == "two"


def test_metrics_and_the_log_say_which(
    llama: Llama, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(llama, engine={"adapters": folders}) as running:
        for model in ("small", "one", "one"):
            ask(running, model)
        running.post("/v1/embeddings", input="a", model="two")
        told = httpx.get(f"{running.url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in told.splitlines() if not line.startswith("#"))
    for name in ("time_to_first_token", "e2e_request_latency"):
        counts = [values.get(f'llamarium:{name}_seconds_count{{model_name="{model}"}}') for model in ("small", "one")]
        assert counts == ["1.0", "2.0"]
    assert values['llamarium:request_success_total{finished_reason="length",model_name="one"}'] == "2.0"
    assert values['llamarium:request_success_total{finished_reason="stop",model_name="two"}'] == "1.0"
    assert values['llamarium:generation_tokens_total{model_name="small"}'] == "36.0"
    lines = [line for line in capsys.readouterr().err.splitlines() if "POST" in line]
    assert ["adapter=one" in line for line in lines] == [False, True, True, False]


@pytest.mark.parametrize("command", [serve, batch])
def test_the_command_takes_one_for_all_or_several_by_name(command: Any, tmp_path: Path) -> None:
    def parse(*words: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser(exit_on_error=False)
        command.add_arguments(parser)
        return parser.parse_args(["in", "out", *words] if command is batch else list(words))

    assert (parse().adapter, parse().adapters) == (None, {})
    assert (parse("--adapter", "x/y").adapter, parse("--adapter", "x/y").adapters) == (Path("x/y"), {})
    both = parse("--adapter", "a=x", "--adapter", "b=y=z")
    assert (both.adapter, both.adapters) == (None, {"a": Path("x"), "b": Path("y=z")})
    for words, message in (
        (("x", "y"), "one adapter is put on the model"),
        (("x", "a=y"), "x is put on the model, so that requests can choose no other"),
        (("a=x", "y"), "y is put on the model, so that requests can choose no other"),
        (("a=x", "a=y"), "two adapters are called a"),
        (("=x",), "expected NAME=FOLDER, found '=x'"),
        (("a=",), "expected NAME=FOLDER, found 'a='"),
    ):
        with pytest.raises(argparse.ArgumentError, match=message):
            parse(*(part for word in words for part in ("--adapter", word)))
    (tmp_path / "lr=3e-4").mkdir()
    assert parse("--adapter", str(tmp_path / "lr=3e-4")).adapter == tmp_path / "lr=3e-4", "a folder, not a name"
    for named in ("--served-model-name", "-m"):
        with pytest.raises(UsageError, match="argument --adapter: base is what the model itself is called"):
            serve.served_names(parse("--adapter", "base=x", named, "base"))


@pytest.fixture(scope="module")
def of_tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of the packaged model."""
    found = {}
    for seed, name in enumerate(NAMES):
        model = llamarium.load("shakespeare-char").model
        apply_lora(model, LoRAConfig(r=4))
        strengthen(model, 0.3, seed=seed)
        found[name] = tmp_path_factory.mktemp(f"tiny-{name}")
        save_adapter(model, found[name], base_model="shakespeare-char")
    return found


def test_a_file_of_requests_names_them(of_tiny: dict[str, Path], tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    body = {"prompt": "ROMEO:", "temperature": 0, "max_tokens": 20}
    lines = [
        {"custom_id": model, "method": "POST", "url": "/v1/completions", "body": body | {"model": model}}
        for model in ("shakespeare-char", "one", "two", "three")
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [word for name, folder in of_tiny.items() for word in ("--adapter", f"{name}={folder}")]
    assert main(["batch", str(source), str(out), "--threads", "1", *words]) == 1, "there is no third"
    found = {answer["custom_id"]: answer["response"] for answer in map(json.loads, out.read_text().splitlines())}
    assert found.pop("three")["status_code"] == 404
    assert all(answer["body"]["model"] == name for name, answer in found.items())
    texts = {name: answer["body"]["choices"][0]["text"] for name, answer in found.items()}
    assert len(set(texts.values())) == 3
    for name, folder in of_tiny.items():
        alone = llamarium.load(adapter=folder).generate("ROMEO:", temperature=0.0, max_tokens=20)
        assert texts[name] == alone.text
    assert main(["batch", str(source), str(out), "--threads", "1", *words, "--resume"]) == 1
    assert len(out.read_text().splitlines()) == 4, "its own answers are known again"


@pytest.mark.parametrize("command", ["serve", "batch"])
def test_a_folder_that_is_none_is_told_before_anything_is_loaded(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "load_engine", pytest.fail)
    words = ["in", "out"] if command == "batch" else ["--port", "0"]
    for folder in ("missing", str(tmp_path)):
        assert main([command, *words, "-m", "shakespeare-char", "--adapter", f"a={folder}"]) == 1
        told = capsys.readouterr().err
        assert folder in told and told.count("\n") == 1


def test_an_adapter_of_another_shape_fails_the_loading(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--port", "0", "--threads", "1", "-m", "shakespeare-char", "--adapter", f"a={folders['one']}"]
    assert main(["serve", *words]) == 1
    told = capsys.readouterr().err
    assert told.count("llamarium: error:") == 1 and "this base" in told and "Traceback" not in told


# --- while the server runs --------------------------------------------------------------------------------------------


@pytest.fixture
def place(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A folder below which adapters may be loaded; beside it lies one that may not."""
    for name, folder in folders.items():
        shutil.copytree(folder, tmp_path / "allowed" / name)
    shutil.copytree(folders["two"], tmp_path / "secret")
    return tmp_path / "allowed"


def load(running: Running, name: str, path: object, **more: Any) -> httpx.Response:
    return running.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(path), **more)


def unload(running: Running, name: str) -> httpx.Response:
    return running.post("/v1/unload_lora_adapter", lora_name=name)


def test_adapters_come_and_go_while_the_server_runs(llama: Llama, place: Path, expected: Any) -> None:
    steer, steered = {"layer": 0, "toward": "Love and joy", "away": "Hate", "strength": 3.0}, dict[str, str]()
    with serving(llama, adapter_dir=place, allow_interventions=True) as running:
        assert ask(running, None)["choices"][0]["text"] == expected[None]
        for name, path in (("first", "one"), ("second", place / "two"), ("first", "two"), ("first", "./one/../one")):
            assert load(running, name, path, load_inplace=True).text.startswith("Success"), name
            assert ask(running, name)["choices"][0]["text"] == expected[Path(path).name], "nothing of another's is used"
            found = ask(running, name, steer=steer)["choices"][0]["text"]
            assert steered.setdefault(Path(path).name, found) == found, "nor is its direction"
        listed = httpx.get(f"{running.url}/v1/models").json()["data"]
        assert [one["id"] for one in listed if one["parent"]] == ["second", "first"]
        again = load(running, "first", "two")
        assert again.status_code == 400 and "has already been loaded" in again.json()["error"]["message"]
        assert unload(running, "first").text.startswith("Success")
        gone = running.post("/v1/completions", model="first", **COMPLETION)
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
        assert unload(running, "first").status_code == 404
        for answer in (unload(running, "x" * 3000), running.post("/v1/completions", model="x" * 3000, **COMPLETION)):
            assert answer.status_code == 404 and len(answer.text) < 400
        adapters = running.engine.runner.adapters
        assert adapters is not None and [bool(one) for one in adapters] == [False, True, False, False]
        assert ask(running, "second")["choices"][0]["text"] == expected["two"]
        assert ask(running, None)["choices"][0]["text"] == expected[None]
        with ThreadPoolExecutor(4) as pool:
            at_once = pool.map(lambda _: load(running, "third", "one").status_code, range(4))
            assert sorted(at_once) == [200, 400, 400, 400], "one of them loads it"


def test_a_request_whose_adapter_has_just_gone_finds_none(
    llama: Llama, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(llama, adapter_dir=place) as running:
        monkeypatch.setattr(Service, "adapters", ("gone",))  # as it was when the request was read
        for path, body in (("completions", COMPLETION), ("embeddings", {"input": "The sea"})):
            answer = running.post(f"/v1/{path}", model="gone", **body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model"), path


def test_a_running_request_keeps_the_adapter_that_it_began_with(llama: Llama, place: Path, expected: Any) -> None:
    with serving(llama, adapter_dir=place) as running:
        load(running, "one", "one")
        whole = ask(running, "one", max_tokens=300)["choices"][0]["text"]
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
            chunks = client.completions.create(model="one", stream=True, **COMPLETION | {"max_tokens": 300})
            found = next(chunks).choices[0].text
            assert unload(running, "one").status_code == 200 and load(running, "one", "two").status_code == 200
            assert ask(running, "one")["choices"][0]["text"] == expected["two"]
            found += "".join(chunk.choices[0].text for chunk in chunks)
        assert found == whole


def test_what_may_not_be_loaded_is_refused_by_name_and_the_server_goes_on(
    llama: Llama, place: Path, expected: Any
) -> None:
    secret, linked, outside = place.parent / "secret", place / "linked", place / "outside"
    outside.symlink_to(secret)
    (place / "loop").symlink_to(place / "loop")
    shutil.copytree(place / "one", linked)
    (linked / "adapter_model.safetensors").unlink()
    (linked / "adapter_model.safetensors").symlink_to(secret / "adapter_model.safetensors")
    (place / "empty").mkdir()
    shutil.copytree(place / "one", place / "damaged")
    (place / "damaged" / "adapter_model.safetensors").write_bytes(b"no")
    paths = {
        "..": 400, "../secret": 400, secret: 400, "outside": 400, "linked": 400, "loop": 400, ".": 400, "/": 400,
        "x" * 4000: 400, "a\0b": 400, "missing": 404, "empty": 400, "damaged": 400, "": 400,
    }  # fmt: skip
    with serving(llama, adapter_dir=place) as running:
        for path, status in paths.items():
            error = load(running, "new", path)
            assert (error.status_code, error.json()["error"]["param"]) == (status, "lora_path"), (path, error.text)
            assert str(place) not in error.text
        for name in ("small", "", "a b", "a\nb", "x" * 200, "../x"):
            error = load(running, name, "one")
            assert (error.status_code, error.json()["error"]["param"]) == (400, "lora_name"), error.text
        assert running.post("/v1/load_lora_adapter", lora_name="one").json()["error"]["param"] == "lora_path"
        assert running.engine.adapters == {} and ask(running, None)["choices"][0]["text"] == expected[None]
    with serving(llama) as off:
        for answer in (load(off, "one", "one"), unload(off, "one")):
            assert answer.status_code == 400 and "--adapter-dir" in answer.json()["error"]["message"]
