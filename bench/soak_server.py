"""The server of `soak.py`: `llamarium serve` with a random model, in a process that tells what it holds."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarium.load_test.client import Target

INSIDE = """
import asyncio, gc, json, os, signal, sys, threading, weakref

def tell(*_):
    gc.collect()
    # sqlite3 keeps up to 200 dead references to its cursors
    things = [it for it in gc.get_objects() if type(it) is not weakref.ref or it() is not None]
    tasks = sum(isinstance(thing, asyncio.Task) and not thing.done() for thing in things)
    pool = sum(thread.name.startswith(("asyncio", "uvloop")) for thread in threading.enumerate())
    held = {"tasks": tasks, "pool": pool, "objects": len(things), "allocations": sys.getallocatedblocks()}
    tables = {}
    for thing in things:
        name = type(thing).__name__
        if name == "PromptMemory":
            tables |= {"earlier prompts": len(thing._records), "earlier prompts, bytes": thing.num_bytes}
        elif name == "PrefixExplainer":
            tables["prefix counts"] = len(thing.counts)
        elif name == "PromptLookup":
            tables["pool of texts, tokens"] = thing.num_pool_tokens
        elif name == "Service":
            count = "select count(*), coalesce(sum(size), 0) from responses"
            found = thing.settings.responses._file.execute(count).fetchone()
            tables["responses"], tables["responses, bytes"] = found
    fields = sys.modules["llamarium.server.fields"]
    tables["names compared with the right ones"] = fields._meant_by.cache_info().currsize
    held["tables"] = tables
    os.write(int(sys.argv[1]), json.dumps(held).encode() + b"\\n")

signal.signal(signal.SIGUSR1, tell)
from llamarium.cli.main import main
sys.exit(main(sys.argv[2:]))
"""
"""`llamarium`, which tells on SIGUSR1 what it holds."""

PAGE = os.sysconf("SC_PAGE_SIZE")
SLOTS = 12  # answers side by side
DISK_BYTES = 2**20  # of the prefix cache on disk: blocks come and go


def write_model(folder: Path) -> Path:
    """Write a random model that costs little."""
    import torch

    import llamarium
    from llamarium.checkpoints.save import save_model
    from llamarium.hub.resolve import resolve
    from llamarium.model import LlamaForCausalLM
    from llamarium.model.init import init_weights
    from llamarium.presets import preset

    config = dataclasses.replace(
        preset("smollm2-135m"),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.2,
        max_position_embeddings=512,
    )
    tokenizer = llamarium.load_tokenizer(resolve("smollm2-135m"))
    model = init_weights(LlamaForCausalLM(config), seed=1)
    save_model(model, folder / "random", tokenizer=tokenizer, dtype=torch.bfloat16)
    return folder / "random"


@dataclass(frozen=True)
class Server:
    """One that runs in a process of its own."""

    process: "subprocess.Popen[bytes]"
    target: Target
    told: int  # a descriptor at which it says what it holds
    cache: Path  # its prefix cache on disk

    @property
    def resident_bytes(self) -> int:
        """Memory that is there, not on a disk."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * PAGE

    @property
    def disk_bytes(self) -> int:
        """What its prefix cache takes on disk, as the system counts it."""
        with suppress(FileNotFoundError):  # it removes a file meanwhile
            return sum(512 * path.stat().st_blocks for path in self.cache.iterdir())
        return self.disk_bytes

    def held(self) -> dict[str, Any]:
        """Return what it holds; `tables` are those that grow with requests."""
        self.process.send_signal(signal.SIGUSR1)
        state, place = json.loads(os.read(self.told, 4096)), Path(f"/proc/{self.process.pid}")
        return {
            "resident_bytes": self.resident_bytes,
            "descriptors": len(list((place / "fd").iterdir())),
            "threads": len(list((place / "task").iterdir())) - state.pop("pool"),
            **state,
        }


@contextmanager
def started(model: str, memory: str, log: Path) -> Generator[Server]:
    """Start a server with so much memory for keys and values, and end it afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    read_end, write_end = os.pipe()
    cache = log.with_name("cache")
    options = f"--port {port} --threads 1 --max-num-seqs {SLOTS} --kv-memory {memory} --served-model-name soaked"
    options += f" --cache-dir {cache} --cache-disk {DISK_BYTES}"
    options += f" --explain-cache --record {log.with_name('record')} --store-responses 1MiB --ngram-pool 1MiB"
    command = [sys.executable, "-c", INSIDE, str(write_end), "serve", "-m", model, *options.split()]
    with log.open("wb") as lines:
        process = subprocess.Popen(command, stderr=lines, pass_fds=[write_end])
        os.close(write_end)
        try:
            yield Server(process, Target(url=f"http://127.0.0.1:{port}", model="soaked"), read_end, cache)
        finally:
            process.kill()
            process.wait()
            os.close(read_end)
