"""A server in a thread of the test's process: a small model behind real sockets."""

import dataclasses
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn

import llamarium
from llamarium.api import Llama
from llamarium.checkpoints.save import save_model
from llamarium.generation.text_engine import TextEngine
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.runtime.loaded_model import LoadedModel
from llamarium.server.app import Extension, create_app
from llamarium.server.hosts import listen
from llamarium.server.http.access import Log
from llamarium.server.http.protocol import connection_class
from llamarium.server.lifecycle.loading import ModelLoader
from llamarium.server.lifecycle.run import Server
from llamarium.server.lifecycle.service import Service
from llamarium.server.settings import Settings
from native_models import native_runner

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}], "temperature": 0, "max_tokens": 8}
NEVER_TORCH = (
    "import sys; from llamarium.cli.main import main; code = main(sys.argv[1:]); "
    "assert 'torch' not in sys.modules, 'torch was imported'; sys.exit(code)"
)
"""A program that is `llamarium`, and fails if torch was imported."""


def small_llama(tokenizer_path: Path, **changes: Any) -> Llama:
    """A random model in C with SmolLM2's vocabulary and dialogs; it hardly ever ends an answer by itself."""
    model = small_model(**changes)
    return Llama("small", LoadedModel(native_runner(model), lambda: model), llamarium.load_tokenizer(tokenizer_path))


def save_small_model(folder: Path, tokenizer_path: Path, **changes: Any) -> Path:
    """Write the model of `small_llama` into a folder in bfloat16, which C multiplies, and return that."""
    tokenizer = llamarium.load_tokenizer(tokenizer_path)
    save_model(small_model(**changes), folder, tokenizer=tokenizer, dtype=torch.bfloat16)
    return folder


def small_model(**changes: Any) -> LlamaForCausalLM:
    """Random modules in float32, always the same; `changes` are of their config."""
    small = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "initializer_range": 0.2,
        "max_position_embeddings": 512,
    }
    config = dataclasses.replace(preset("smollm2-135m"), **{**small, **changes})
    return init_weights(LlamaForCausalLM(config), seed=1).requires_grad_(False)


def small_engine(llama: Llama, settings: Settings, **options: Any) -> TextEngine:
    return llama.engine(**{"kv_memory": 2**24, "max_num_seqs": settings.max_num_seqs, **options})


def free_port() -> int:
    """A port where nothing listens; below those that systems give to whatever asks for any, so that it stays free."""
    while True:
        port = random.SystemRandom().randrange(30_100, 32_700)
        with suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port


def wait(is_so: Callable[[], object], limit_s: float = 10) -> None:
    """Wait until something is so. `limit_s` counts looks every 5 ms: where this process is stopped, no time passes."""
    for _ in range(round(limit_s / 0.005)):
        if is_so():
            return
        time.sleep(0.005)
    assert is_so(), "it did not come to that"


class Running:
    """A server that runs in a thread.

    Attributes:
        service: Its model.
        url: Where it is.
    """

    def __init__(self, load: Callable[[Any], Any], settings: Settings, extensions: Sequence[Extension] = ()) -> None:
        self.service = Service(ModelLoader(load), settings)
        listener = listen(settings)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        log = Log(settings.log_format)
        config = uvicorn.Config(
            create_app(self.service, ("small", "alias"), log, extensions),
            http=connection_class(settings),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=2,
        )
        self.server = Server(config, self.service, log)
        self._thread = threading.Thread(target=self.server.run, args=([listener],), daemon=True)
        self._thread.start()

    @property
    def engine(self) -> TextEngine:
        assert self.service.loaded is not None
        return self.service.loaded[1]

    wait = staticmethod(wait)

    def is_idle(self) -> bool:
        seen = self.engine.snapshot
        return seen.running == seen.waiting == seen.used_blocks == self.service.in_flight == 0

    def post(self, path: str = CHAT, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=30)

    def begin(self, path: str, **body: Any) -> socket.socket:
        """Ask, and read nothing; what closes the socket leaves. A question without a body is a GET."""
        sent = json.dumps(body).encode() if body else b""
        kind = f"content-type: application/json\r\ncontent-length: {len(sent)}\r\n"
        head = f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\nhost: localhost\r\n{kind if body else ''}\r\n"
        made = socket.create_connection(("127.0.0.1", self.port))
        made.sendall(head.encode() + sent)
        return made

    def stop(self) -> None:
        self.service.is_draining = True
        self._thread.join(20)
        assert not self._thread.is_alive()


@contextmanager
def serving(
    llama: Llama, *, engine: Mapping[str, Any] | None = None, extensions: Sequence[Extension] = (), **settings: Any
) -> Iterator[Running]:
    """Run a server with a model until the body ends; `engine` are options of `Llama.engine`."""
    how = Settings(**{"port": 0, "drain_timeout_s": 0, **settings})
    running = Running(lambda _: (llama, small_engine(llama, how, **(engine or {}))), how, extensions)
    try:
        running.wait(lambda: running.service.state != "loading" and running.server.started)
        yield running
    finally:
        running.stop()
