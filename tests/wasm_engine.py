"""The kernels as WebAssembly and the page's engine in Node.js, and small GGUF files for both."""

import base64
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llamarium.checkpoints.gguf.file import write_gguf
from llamarium.quant.formats import FORMATS

ROOT = Path(__file__).parents[1]
WEB = ROOT / "web"
Floats = NDArray[np.float32]

PACKED = ("Q4_0", "Q8_0", "Q4_1", "IQ4_NL", "Q5_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "BF16")
"""What the layers of a quantized model are, the first one of a type that makes its dtype bfloat16."""

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 256, 4, 2, 64, 512

# Of a block's float16 numbers, where they lie and how large they are, so that weights are small.
_HALVES = {
    "Q8_0": ((0, 5e-4),),
    "Q4_0": ((0, 8e-3),),
    "Q4_1": ((0, 8e-3), (2, -0.06)),
    "Q5_0": ((0, 4e-3),),
    "IQ4_NL": ((0, 5e-4),),
    "Q4_K": ((0, 1e-4), (2, 5e-5)),
    "Q5_K": ((0, 5e-5), (2, 5e-5)),
    "Q6_K": ((208, 2e-5),),
    "IQ4_XS": ((0, 2e-5),),
}


@dataclass(frozen=True)
class Engine:
    """The kernels, for one thread and for several, and the engine with its driver as one file.

    Beside the driver lies `thread.mjs`, which a further thread runs.
    """

    kernels: Path
    shared_kernels: Path
    driver: Path

    def ask(self, **job: Any) -> Any:
        """Run a job of web/tests/engine/driver.ts."""
        done = subprocess.run(
            ["node", self.driver],
            input=json.dumps({**self._files, **job}, default=_encode),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout, object_hook=_decode)

    def call(self, model: Path, *calls: tuple[Any, ...], threads: int = 1) -> list[Any]:
        """Open a model and call its methods: their names, then their arguments."""
        named = [{"name": name, "args": args} for name, *args in calls]
        return self.ask(model=str(model), calls=named, **({"threads": threads} if threads > 1 else {}))

    @property
    def _files(self) -> dict[str, str]:
        files = {"kernels": self.kernels, "sharedKernels": self.shared_kernels}
        return {name: str(path) for name, path in {**files, "thread": self.driver.with_name("thread.mjs")}.items()}


def _encode(value: Any) -> Any:
    assert isinstance(value, np.ndarray), type(value)
    return {"base64": base64.b64encode(value.astype(np.float32).tobytes()).decode()}


def _decode(value: dict[str, Any]) -> Any:
    return np.frombuffer(base64.b64decode(value["base64"]), np.float32) if value.keys() == {"base64"} else value


def hook() -> Any:
    """hatch_build.py, which compiles the kernels."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_engine(folder: Path) -> Engine:
    """Compile the kernels, which are kept, and bundle the engine."""
    pytest.importorskip("ziglang")
    if shutil.which("node") is None:
        pytest.skip("there is no Node.js here")
    from page_bundle import installed_web

    build = hook()
    build.build_wasm()
    sources = installed_web() / "tests/engine"
    for name in ("driver", "thread"):
        files = [sources / f"{name}.ts", "--file", folder / f"{name}.mjs"]
        command = ["node_modules/.bin/rolldown", *files, "--format", "esm", "--platform", "node"]
        subprocess.run(list(map(str, command)), cwd=WEB, check=True, capture_output=True)
    return Engine(build.WASM, build.WASM_THREADS, folder / "driver.mjs")


def zig(*arguments: str | Path) -> None:
    """Compile C for WebAssembly; it must succeed."""
    command = [sys.executable, "-m", "ziglang", "cc", "-target", "wasm32-wasi", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _blocks(random: np.random.Generator, type_name: str, shape: tuple[int, ...]) -> bytes:
    """Weights of a type: any codes, and small scales."""
    if type_name in ("F32", "F16", "BF16"):
        values = random.normal(0, 0.06, shape).astype(np.float32)
        if type_name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        return values.astype(np.float16 if type_name == "F16" else np.float32).tobytes()
    form = FORMATS[type_name]
    blocks = random.integers(0, 256, (int(np.prod(shape)) // form.block_size, form.block_bytes), dtype=np.uint8)
    for place, size in _HALVES[type_name]:
        halves = (random.uniform(0.5, 1.5, len(blocks)) * size).astype(np.float16)
        blocks[:, place : place + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks.tobytes()


def write_model(
    path: Path, types: Sequence[str], metadata: Mapping[str, Any], vocab_size: int, *, biases: bool = False
) -> None:
    """Write a Llama of one layer for each type, its table of the first one that is no K type.

    Args:
        path: The GGUF file.
        types: Of each layer's matrices.
        metadata: The tokenizer's.
        vocab_size: Rows of the table.
        biases: Whether q, k and v have some.
    """
    random = np.random.default_rng(7)
    shape = {
        "attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "ffn_gate": (HIDDEN, HIDDEN),
        "ffn_up": (HIDDEN, HIDDEN),
        "ffn_down": (HIDDEN, HIDDEN),
    }
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}

    def add(name: str, type_name: str, size: tuple[int, ...]) -> None:
        tensors[name] = (type_name, size, _blocks(random, type_name, size))

    def add_norm(name: str) -> None:
        tensors[name] = ("F32", (HIDDEN,), random.uniform(0.5, 1.5, HIDDEN).astype(np.float32).tobytes())

    add("token_embd.weight", types[0], (vocab_size, HIDDEN))
    for layer, type_name in enumerate(types):
        add_norm(f"blk.{layer}.attn_norm.weight")
        for name, size in shape.items():
            add(f"blk.{layer}.{name}.weight", type_name, size)
            if biases and name in ("attn_q", "attn_k", "attn_v"):
                add(f"blk.{layer}.{name}.bias", "F32", size[:1])
        add_norm(f"blk.{layer}.ffn_norm.weight")
    add_norm("output_norm.weight")
    own = {
        "general.architecture": "llama",
        "general.name": "small",
        "llama.context_length": CONTEXT,
        "llama.embedding_length": HIDDEN,
        "llama.block_count": len(types),
        "llama.feed_forward_length": HIDDEN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
    }
    write_gguf(path, {**own, **metadata}, tensors)


def byte_level_vocabulary(text: str, size: int, pre: str = "smollm") -> dict[str, Any]:
    """Train a byte-level BPE on a text; its metadata in GGUF, with control tokens and one that is defined."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(inner.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    added = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "defined token"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *added],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 3, 3, 4, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": len(tokens) + 2,
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.add_bos_token": False,
    }
