"""Looking at a pass needs no PyTorch: processes in which it cannot be imported run every view and the page's routes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """
import sys
sys.modules["torch"] = None
import json
import llamarium
from llamarium.errors import OptionError

llama = llamarium.load(sys.argv[1], device="cpu")
text, look = "The capital of France is", llama.inspect
"""

VIEWS = (
    HEAD
    + """
trace = llama.trace(text)
assert trace.arrays["pattern", 3].shape == (9, 5, 5) and "layers.3.pattern" in trace
views = {
    "lens": lambda: look.lens(text, "Paris", layers=[-1], positions=[-1]).layers[-1].chosen[0].rank,
    "heads": lambda: look.heads(text, 3).to_dict()["layer"],
    "head_kinds": lambda: look.head_kinds().by("induction")[0].layer,
    "attribution": lambda: look.attribution(text, "Paris").target_id,
    "neurons": lambda: look.neurons(text, 3).neurons[0].index,
    "score": lambda: llama.score(text).tokens[4].rank,
    "neighbors": lambda: llama.neighbors("king", minus=["man"], plus=["woman"], k=1).neighbors[0].text,
    "perplexity": lambda: llama.perplexity(text, context=4).num_tokens,
    "divergence": lambda: llama.divergence(text, against=llama).kl,
    "next": lambda: llama.next_tokens(text)[0].chosen.text,
    "steps": lambda: next(llama.trace_steps(text, 1, names=["resid"])).positions,
    "compare": lambda: look.compare(text, llama).kl,
    "sampler": lambda: look.sampler_steps(text, temperature=0.0).text,
    "variant": lambda: look.compare(text, look.variant("float32")).kl,
    "cost": lambda: look.token_cost(text).num_tokens,
    "trace": lambda: trace.to_dict()["positions"],
}
refused = {
    "model": lambda: llama.model,
    "tensor": lambda: trace["embed"],
    "learn": lambda: look.learn(text),
    "effect": lambda: look.effect(text),
    "edited": lambda: look.edited().__enter__(),
    "steer": lambda: look.steer(text, text, 3),
    "patch_grid": lambda: look.patch_grid(text, text, "Paris"),
    "trace_experiment": lambda: look.trace_experiment(text, None),
}
found = {name: view() for name, view in views.items()}
for name, view in refused.items():
    try:
        view()
    except OptionError as error:
        found[name] = str(error)
print(json.dumps(found))
"""
)

ROUTES = (
    HEAD
    + """
import threading, time
import httpx, uvicorn
from llamarium.page.extension import page
from llamarium.server.app import create_app
from llamarium.server.hosts import listen
from llamarium.server.http.access import Log
from llamarium.server.lifecycle.loading import ModelLoader
from llamarium.server.lifecycle.run import Server
from llamarium.server.lifecycle.service import Service
from llamarium.server.settings import Settings

settings = Settings(port=0, drain_timeout_s=0)
service = Service(ModelLoader(lambda _: (llama, llama.engine(kv_memory=2**24))), settings)
listener, log = listen(settings), Log("text")
config = uvicorn.Config(create_app(service, ("m",), log, [page()]), lifespan="off", ws="none", log_config=None)
server = Server(config, service, log)
threading.Thread(target=server.run, args=([listener],), daemon=True).start()
while service.state == "loading" or not server.started:
    time.sleep(0.01)
with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=60) as client:
    one = client.post("/inspect/passes", json={"text": text}).json()["id"]
    root = f"/inspect/passes/{one}"
    found = {
        path: client.get(root + path).status_code
        for path in (
            "", "/activations/pattern?layer=3&head=2", "/next", "/heads?layer=3", "/heads/added?layer=3", "/head_kinds",
            "/neurons?layer=3", "/attribution?token_id=9", "/lens", "/lens/grid?token_id=9", "/score", "/cost",
            "/distances?layer=1&head=0&key=1&stop=9", "/errors?quantize=Q4_1",
            "/inputs?layer=1&linear=up_proj", "/matrix?layer=1&linear=up_proj", "/matrix?linear=lm_head", "/picture",
        )
    }
    found["sampler"] = client.post(f"{root}/sampler", json={"temperature": 0.8, "top_p": 0.9}).status_code
    found["neighbors"] = client.post("/inspect/neighbors", json={"word": "king"}).status_code
    codes = "/inspect/codes?layer=1&linear=up_proj&row=1"
    found |= {kind: client.get(codes + kind).status_code for kind in ("", "&quantize=NF4", "&quantize=Q8_0")}
    found["rows"] = client.get("/inspect/rows?ids=1,2").status_code
    found["norm"] = client.get("/inspect/weights?key=model.norm.weight").status_code
    found["model"] = client.get("/inspect/model").status_code
    edits = {"edits": [{"part": "mlp", "layer": 0, "factor": 0}]}
    sides = {one["id"]: one["num_bytes"] for one in client.get("/inspect/compare").json()["sides"]}
    compared = {
        f"compare {side}": client.get(f"{root}/compare", params={"side": side, "against": "model", "k": 3})
        for side in sides
    }
    found |= {name: answer.status_code for name, answer in compared.items()}
    found |= {f"kl {name}": answer.json()["kl"] for name, answer in compared.items()} | {"sides": sides}
    refused = [
        client.post(f"{root}/lesson", json={}),
        client.post(f"{root}/edited", json=edits),
    ]
print(json.dumps([found, [[one.status_code, one.json()["error"]["message"]] for one in refused]]), flush=True)
"""
)


def run(program: str, model: Path) -> str:
    here = Path(__file__).parents[1]
    places = os.pathsep.join((str(here), *filter(None, sys.path)))
    command = [sys.executable, "-c", program, str(model)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": places}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_views_are_there_and_what_computes_gradients_names_the_command(smollm2_path: Path) -> None:
    found = json.loads(run(VIEWS, smollm2_path))
    assert found["next"] == " Paris" and found["sampler"] == " Paris" and found["lens"] == 1
    assert found["divergence"] == found["compare"] == 0 and found["neighbors"]
    for name in ("model", "tensor", "learn", "effect", "edited", "steer", "patch_grid", "trace_experiment"):
        assert found[name].endswith("needs PyTorch: pip install 'llamarium[torch]'"), name


def test_the_pages_routes_answer(smollm2_path: Path) -> None:
    pytest.importorskip("fastapi")
    found, refused = json.loads(run(ROUTES, smollm2_path))
    sides = found.pop("sides")
    kl = {side: found.pop(f"kl compare {side}") for side in sides}
    assert set(found.values()) == {200}, found
    assert list(sides) == ["model", "float32", "random-head"]  # packed weights are not quantized a second time
    assert sides["model"] == 0 and sides["float32"] == 4 * 134_515_008
    assert kl["model"] == 0 < kl["float32"] < kl["random-head"]
    for status, message in refused:
        assert status == 501 and message.endswith("needs PyTorch: pip install 'llamarium[torch]'")
