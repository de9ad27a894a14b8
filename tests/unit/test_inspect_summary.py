"""What `info` says: costs from the config, bytes from what was loaded, origins grouped."""

import json
from pathlib import Path

import pytest
import torch

from llamarium.checkpoints.options import TensorSource
from llamarium.inspect.summary import group_sources, summarize
from llamarium.model import LlamaForCausalLM
from llamarium.presets import preset
from llamarium.runtime.loaded_model import LoadedModel

pytestmark = pytest.mark.torch


def source(key: str, name: str, *, file: str = "a.gguf", held: str = "Q4_1", num_bytes: int = 10) -> TensorSource:
    return TensorSource(
        key, (8, 8), Path(file), name, "Q4_1", held, permuted="attn_q" in name, tied_to=None, num_bytes=num_bytes
    )


def q_of(layer: int, file: str = "a.gguf", held: str = "Q4_1") -> TensorSource:
    return source(f"model.layers.{layer}.self_attn.q_proj.weight", f"blk.{layer}.attn_q.weight", file=file, held=held)


HEAD = TensorSource(
    "lm_head.weight", (8, 8), Path("a.gguf"), "token_embd.weight", "Q8_0", "Q8_0",
    permuted=False, tied_to="model.embed_tokens.weight", num_bytes=0,
)  # fmt: skip
EMBEDDING = source("model.embed_tokens.weight", "token_embd.weight", held="Q8_0", num_bytes=20)


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [
        ("llama-3.2-1b", 1_235_814_400, 32_768),
        ("llama-3.1-8b", 8_030_261_248, 131_072),
        ("smollm2-135m", 134_515_008, 23_040),
    ],
)
def test_costs_of_published_shapes(name: str, parameters: int, kv_bytes: int) -> None:
    """Bytes per cached token: 2 · L · K · H · 2, by hand."""
    config = preset(name)
    found = summarize(config)
    assert found.parameters.total == parameters
    assert (found.kv_dtype, found.kv_bytes_per_token) == ("bfloat16", kv_bytes)
    assert found.kv_bytes_at_full_context == kv_bytes * config.max_position_embeddings
    assert found.bytes_by_dtype == {} and found.sources == ()
    matrices = parameters - found.parameters.norms - (0 if config.tie_word_embeddings else found.parameters.embedding)
    one_look = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    assert found.flops_per_token == 2 * matrices + one_look
    assert found.flops_per_token_at_full_context == 2 * matrices + one_look * config.max_position_embeddings


def test_bytes_of_a_model_count_a_tied_head_once() -> None:
    model = LlamaForCausalLM(preset("tiny"))
    assert summarize(model.config, LoadedModel.of_modules(model)).bytes_by_dtype == {"F32": 4 * 402_048}
    assert summarize(model.config, LoadedModel.of_modules(model)).parameters.total == 402_048
    half = summarize(model.config, LoadedModel.of_modules(model.to(torch.float16)))
    assert half.bytes_by_dtype == {"F16": 2 * 402_048} and half.kv_dtype == "float16"
    with torch.device("meta"):
        nothing_loaded = LlamaForCausalLM(preset("tiny"))
    assert summarize(model.config, LoadedModel.of_modules(nothing_loaded)).bytes_by_dtype == {}


def test_bytes_of_sources_are_named_as_they_are_held() -> None:
    found = summarize(preset("tiny"), None, [EMBEDDING, q_of(0), q_of(1), HEAD])
    assert found.bytes_by_dtype == {"Q8_0": 20, "Q4_1": 20}


def test_sources_are_grouped_over_layers_and_shards() -> None:
    groups = group_sources([EMBEDDING, q_of(0), q_of(1), q_of(2, held="bfloat16"), q_of(3, "b.gguf"), HEAD])
    assert [g.pattern for g in groups] == [
        "model.embed_tokens.weight", *["model.layers.*.self_attn.q_proj.weight"] * 2, "lm_head.weight"
    ]  # fmt: skip
    quantized, plain = groups[1], groups[2]
    assert (quantized.layers, quantized.name, quantized.num_bytes) == ((0, 1, 3), "blk.*.attn_q.weight", 30)
    assert quantized.files == (Path("a.gguf"), Path("b.gguf")) and quantized.permuted
    assert (plain.layers, plain.dtype) == ((2,), "bfloat16")
    assert groups[3].tied_to == "model.embed_tokens.weight" and groups[3].layers == ()


def test_to_dict_is_json() -> None:
    data = json.loads(json.dumps(summarize(preset("tiny"), None, [EMBEDDING, q_of(0)]).to_dict(), allow_nan=False))
    assert data["parameters"]["total"] == 402_048
    assert data["config"]["hidden_size"] == 128 and data["config"]["model_type"] == "llama"
    assert data["sources"][1]["files"] == ["a.gguf"] and data["sources"][1]["layers"] == [0]
