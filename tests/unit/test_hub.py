"""`resolve` against disk, and against a stand-in for the hub: a small HTTP server with its API and file endpoints.

huggingface_hub reads its environment at import, so what talks to the stand-in runs in a process of its own: one online,
one offline with the cache that the first has left.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from llamarium.errors import ModelNotFoundError
from llamarium.hub.builtin import BUILTINS
from llamarium.hub.resolve import resolve

CONFIG = json.dumps({"model_type": "llama"})
REPOS = {
    "org/good": {
        "config.json": CONFIG,
        "generation_config.json": "{}",
        "tokenizer.json": "{}",
        "model.safetensors": "weights",
        "consolidated.safetensors": "again",
        "pytorch_model.bin": "pickle",
        "modeling_llama.py": "code",
        "onnx/model.safetensors": "other",
        "original/consolidated.00.pth": "meta",
    },
    "org/meta": {
        "README.md": "hello",
        "original/consolidated.00.pth": "meta",
        "original/params.json": "{}",
        "original/tokenizer.model": "ranks",
        "original/run.py": "code",
    },
    "org/gguf": {"README.md": "hello", "a.Q4_0.gguf": "GGUF a", "sub/b.gguf": "GGUF b"},
    "org/split": {
        "q/x-00001-of-00002.gguf": "GGUF 1",
        "q/x-00002-of-00002.gguf": "GGUF 2",
        "q/x-00001-of-00003.gguf": "GGUF other",
        "y.gguf": "GGUF y",
    },
    "org/pickle": {"config.json": CONFIG, "pytorch_model.bin": "pickle", "added_tokens.json": "{}"},
    "org/onnx": {"config.json": CONFIG, "model.onnx": "graph"},
    "org/never": {"config.json": CONFIG, "model.safetensors": "weights"},
    "org/gated": {"config.json": CONFIG, "model.safetensors": "weights"},
    "org/bert": {"config.json": json.dumps({"model_type": "bert"}), "model.safetensors": "weights"},
}


def sha(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """What `snapshot_download` and `hf_hub_download` ask of the hub."""

    def do_GET(self):
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo = "/".join(parts[2:4])
            if repo == "org/secret":
                return self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            if repo in ("org/expired", "org/forbidden"):
                return self.answer(401 if repo == "org/expired" else 403, b"{}")
            if repo == "org/plain404":
                return self.answer(404, b"{}")
            if repo not in REPOS:
                return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return self.answer(200, json.dumps(self.listing(repo, tree="tree" in parts)).encode())
        repo, name = "/".join(parts[:2]), "/".join(parts[4:])
        if repo == "org/gated":
            return self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        if name not in REPOS.get(repo, {}):
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        self.server.served.append(f"{repo}/{name}")
        data = REPOS[repo][name]
        return self.answer(200, data.encode(), {"ETag": f'"{sha(data)}"', "X-Repo-Commit": sha(repo)})

    do_HEAD = do_GET

    def listing(self, repo, *, tree):
        files = REPOS[repo]
        if tree:
            return [{"type": "file", "path": n, "size": len(d), "oid": sha(d)} for n, d in files.items()]
        return {"id": repo, "sha": sha(repo), "siblings": [{"rfilename": n} for n in files]}

    def answer(self, status, body, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.served = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


ASK = """
import json, sys
from llamarium.errors import LlamariumError
from llamarium.hub.resolve import cached_models, resolve
assert "huggingface_hub" not in sys.modules and "torch" not in sys.modules
answers = {}
for source in json.loads(sys.argv[1]):
    name, _, kind = source.partition("#")
    try:
        answers[source] = ["path", str(resolve(name, kind=kind or "model"))]
    except LlamariumError as error:
        answers[source] = [type(error).__name__, str(error)]
models = [[m.name, str(m.path), m.num_bytes] for m in cached_models()]
print(json.dumps([answers, models]))
"""


def ask(sources, folder, endpoint, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "XDG_"))}
    environment = {"HF_HOME": str(folder / "hf"), "HF_ENDPOINT": endpoint, **environment}
    environment |= {"LLAMARIUM_CACHE": str(folder / "cache"), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(sources)],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


ONLINE = "org/good org/meta org/gguf org/gguf:a.Q4_0.gguf org/gguf:sub/b.gguf org/gguf:none.gguf org/pickle "
ONLINE += "org/onnx org/gated org/split org/split:q/x-00002-of-00002.gguf "
ONLINE += "org/absent org/plain404 org/secret org/expired org/forbidden org/never#tokenizer org/good#tokenizer org/bert"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def online(hub, folder):
    return ask(ONLINE.split(), folder, f"http://127.0.0.1:{hub.server_port}")


def names(folder):
    return sorted(p.relative_to(folder).as_posix() for p in Path(folder).rglob("*") if p.is_file())


def test_a_repository_gives_config_tokenizer_and_safetensors_alone(online, hub):
    kind, path = online[0]["org/good"]
    assert kind == "path"
    assert names(path) == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert (Path(path) / "model.safetensors").read_text() == "weights"
    assert not [name for name in hub.served if name.endswith(".py") or name == "org/good/pytorch_model.bin"]


def test_a_repository_without_safetensors_gives_pytorch_model_bin_and_added_tokens(online):
    kind, path = online[0]["org/pickle"]
    assert kind == "path" and names(path) == ["added_tokens.json", "config.json", "pytorch_model.bin"]


def test_a_repository_without_safetensors_gives_metas_folder(online):
    kind, path = online[0]["org/meta"]
    assert kind == "path" and path.endswith("/original")
    assert names(path) == ["consolidated.00.pth", "params.json", "tokenizer.model"]


@pytest.mark.parametrize(("source", "text"), [("org/gguf:a.Q4_0.gguf", "GGUF a"), ("org/gguf:sub/b.gguf", "GGUF b")])
def test_one_gguf_file(online, source, text):
    kind, path = online[0][source]
    assert kind == "path" and Path(path).read_text() == text


def test_a_part_of_a_split_gguf_file_brings_all_others(online):
    kind, path = online[0]["org/split:q/x-00002-of-00002.gguf"]
    assert kind == "path" and Path(path).read_text() == "GGUF 2"
    assert names(Path(path).parent) == ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"]
    assert [size for name, _, size in online[1] if name == "org/split:q/x-00001-of-00002.gguf"] == [12]


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("org/split", "ModelNotFoundError", "There are: q/x-00001-of-00002.gguf, q/x-00001-of-00003.gguf, y.gguf"),
        ("org/gguf", "ModelNotFoundError", "name one, as org/gguf:a.Q4_0.gguf. There are: a.Q4_0.gguf, sub/b.gguf"),
        ("org/gguf:none.gguf", "ModelNotFoundError", "org/gguf holds no none.gguf"),
        ("org/onnx", "ModelNotFoundError", "it holds model.onnx"),
        ("org/gated", "GatedModelError", "accept its licence at https://huggingface.co/org/gated"),
        ("org/gated", "GatedModelError", "HF_TOKEN"),
        ("org/absent", "ModelNotFoundError", "no repository org/absent"),
        ("org/plain404", "ModelNotFoundError", "no repository org/plain404"),
        ("org/secret", "ModelNotFoundError", "if it is private, set HF_TOKEN"),
        ("org/expired", "GatedModelError", "HTTP 401"),
        ("org/forbidden", "GatedModelError", "HTTP 403"),
        ("org/never#tokenizer", "ModelNotFoundError", "holds no tokenizer.json"),
    ],
)
def test_what_the_hub_refuses_is_explained_in_one_line(online, source, error, said):
    kind, message = online[0][source]
    assert kind == error and said in message and "\n" not in message


def test_a_tokenizer_costs_no_weights(online, hub):
    assert online[0]["org/good#tokenizer"][0] == "path"
    assert "org/never/config.json" in hub.served and "org/never/model.safetensors" not in hub.served


def test_cached_models_lists_llamas_as_they_are_typed(online):
    listed = {name: (Path(path), size) for name, path, size in online[1]}
    ggufs = {"org/gguf:a.Q4_0.gguf", "org/gguf:sub/b.gguf", "org/split:q/x-00001-of-00002.gguf"}
    assert set(listed) == {"org/good", "org/meta", "org/pickle", *ggufs}
    path, size = listed["org/good"]
    assert path == Path(online[0]["org/good"][1])
    assert size == sum(len(REPOS["org/good"][name]) for name in names(path))


def test_offline_the_cache_answers_and_a_miss_is_explained(online, folder):
    sources = ["org/good", "org/meta", "org/gguf:a.Q4_0.gguf", "org/absent", "org/absent:x.gguf"]
    answers, _ = ask(sources, folder, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    for source in sources[:3]:
        assert answers[source] == online[0][source]
    for source in sources[3:]:
        kind, message = answers[source]
        assert kind == "DownloadError" and "HF_HUB_OFFLINE is set" in message and "\n" not in message


def test_without_a_network_the_cache_answers_and_a_miss_is_explained(online, folder):
    answers, _ = ask(["org/good", "org/absent", "org/absent:x.gguf"], folder, "http://127.0.0.1:9")
    assert answers["org/good"] == online[0]["org/good"]
    for source in ("org/absent", "org/absent:x.gguf"):
        kind, message = answers[source]
        assert kind == "DownloadError" and "could not be fetched from the hub" in message and "\n" not in message


def test_what_lies_on_disk_is_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("org/name") == Path("org/name")  # a folder wins over a hub repository of that name
    assert resolve("m.gguf") == Path("m.gguf")
    assert resolve(tmp_path / "m.gguf") == tmp_path / "m.gguf"
    assert resolve("~/m.gguf") == tmp_path / "m.gguf"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("smollm2", "Did you mean smollm2-135m?"),
        ("SmolLM2-135M", "Did you mean smollm2-135m?"),
        ("nothing-like-it", "Built-in: smollm2-135m, shakespeare-char, letters;"),
        ("models/x.gguf", "no file or folder models/x.gguf"),
        ("org/name/x.gguf", "write org/name:FILE.gguf"),
        ("./missing", "no file or folder ./missing"),
        ("a/b/c", "no built-in model, file or folder a/b/c"),
        ("org/name:../../x.gguf", "names a file outside of its repository"),
        ("org/name:a/../../x.gguf", "names a file outside of its repository"),
        ("org/name:/etc/x.gguf", "names a file outside of its repository"),
        ("org/name:./x.gguf", "names a file outside of its repository"),
        ("", "an empty name"),
        ("bad\x1b[2J\0name", r"bad\x1b[2J\x00name"),
        ("x" * 5000, "xxx"),
        (Path("org/good"), "org/good"),
        ("llama3", "a built-in tokenizer, not a model; built-in models: smollm2-135m"),
    ],
)
def test_what_is_nowhere_is_explained_without_a_network(source, said, monkeypatch):
    monkeypatch.setattr("llamarium.hub.resolve.hub_client", None)
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(source)
    assert said in str(caught.value) and len(str(caught.value)) < 600


def test_a_built_in_name_is_fetched(monkeypatch, tmp_path):
    monkeypatch.setattr("llamarium.hub.resolve.fetch", lambda name: tmp_path / name)
    assert resolve("smollm2-135m") == tmp_path / "smollm2-135m"
    assert resolve("llama3", kind="tokenizer") == tmp_path / "llama3"
    assert resolve("smollm2-135m", kind="tokenizer") == tmp_path / "smollm2-135m"  # its tokenizer is inside
    assert {item.kind for item in BUILTINS.values()} == {"model", "tokenizer"}


def test_a_preset_is_no_model() -> None:
    with pytest.raises(ModelNotFoundError, match=r"llama-3\.2-1b is a preset: a shape without weights"):
        resolve("llama-3.2-1b")
