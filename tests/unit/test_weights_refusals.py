"""A checkpoint that is malformed, incomplete or at odds with its config is refused, and says by what."""

import json
import math
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import llamarium
from llamarium.checkpoints.decode import read
from llamarium.checkpoints.export import read_array
from llamarium.checkpoints.gguf.file import read_gguf, write_gguf
from llamarium.checkpoints.open import open_checkpoint
from llamarium.config import RopeScaling
from llamarium.errors import (
    CheckpointError,
    ConfigError,
    LlamariumError,
    ModelNotFoundError,
    SamplingError,
    UnsupportedFormatError,
)

pytestmark = pytest.mark.torch

Q = "model.layers.0.self_attn.q_proj.weight"


def refused(path: Path, match: str, error: type[LlamariumError] = CheckpointError) -> str:
    with pytest.raises(error, match=match) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert len(message) < 1500 and message.isprintable()
    return message


def change_safetensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def change_json(path: Path, **fields: Any) -> Path:
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, **fields}))
    return path.parent


def change_gguf(path: Path, metadata: dict[str, Any] | None = None, drop: str = "", tensors: Any = dict) -> Path:
    """Rewrite a GGUF file with other metadata, without the key `drop`, and with what `tensors` did to its tensors."""
    file, content = read_gguf(path), path.read_bytes()
    fields = dict(file.metadata)
    rows = {
        name: (t.type_name, t.shape, content[t.offset : t.offset + t.num_bytes]) for name, t in file.tensors.items()
    }
    fields |= metadata or {}
    fields.pop(drop, None)
    tensors(rows)
    write_gguf(path, fields, rows)
    return path


# --- all formats: what the config says against what the weights are ---------------------------------------------


CONFIG_FAULTS = {
    "num_hidden_layers": (3, "num_hidden_layers 3, the weights have 2 layers"),
    "hidden_size": (64, r"embed_tokens.weight has shape \(256, 128\).*vocab_size, hidden_size it is \(256, 64\)"),
    "intermediate_size": (200, r"gate_proj.weight has shape \(384, 128\).*intermediate_size.*\(200, 128\)"),
    "num_attention_heads": (4, r"q_proj.weight has shape \(128, 128\).*\(64, 128\)"),
    "num_key_value_heads": (4, r"k_proj.weight has shape \(32, 128\).*num_key_value_heads \* head_dim.*\(64, 128\)"),
    "head_dim": (32, r"q_proj.weight has shape \(128, 128\).*\(256, 128\)"),
    "vocab_size": (300, r"embed_tokens.weight has shape \(256, 128\).*\(300, 128\)"),
}


@pytest.mark.parametrize(("field", "value", "match"), [(k, *v) for k, v in CONFIG_FAULTS.items()])
def test_config_against_weights(model_files, field, value, match):
    refused(change_json(model_files().huggingface() / "config.json", **{field: value}), match)


def test_a_config_of_billions_of_layers_is_refused_before_anything_is_built(model_files):
    folder = model_files().huggingface()
    refused(change_json(folder / "config.json", num_hidden_layers=2**31 - 1), "the weights have 2 layers")
    refused(change_json(folder / "config.json", num_hidden_layers=2, hidden_size=2**30), r"\(256, 1073741824\)")


def test_gguf_metadata_against_weights(model_files):
    path = model_files().gguf_file()
    original = path.read_bytes()
    for key, value, match in (
        ("llama.block_count", 3, "num_hidden_layers 3, the weights have 2"),
        ("llama.block_count", 2**31 - 1, "num_hidden_layers 2147483647, the weights have 2"),
        ("llama.embedding_length", 64, r"has shape \(256, 128\).*\(256, 64\)"),
        ("llama.vocab_size", 300, "vocab_size is 300, token_embd.weight has 256 rows"),
        ("llama.attention.value_length", 32, "value_length is 32, but a head is 16 wide"),
        ("llama.rope.dimension_count", 8, "dimension_count is 8, but a head is 16 wide"),
        ("tokenizer.ggml.tokens", ["x"] * 257, "257 tokens, but token_embd.weight has 256 rows"),
        ("llama.attention.head_count_kv", 3, "expected a divisor"),
        ("llama.context_length", 0, "max_position_embeddings is 0"),
        ("llama.block_count", "two", "expected a whole number"),
        ("llama.rope.freq_base", 10000, "freq_base is 10000; expected a float"),
        ("tokenizer.ggml.eos_token_id", True, "expected a whole number"),
    ):
        path.write_bytes(original)
        refused(change_gguf(path, {key: value}), match)
    for key in ("llama.context_length", "llama.attention.layer_norm_rms_epsilon"):
        path.write_bytes(original)
        refused(change_gguf(path, drop=key), f"{key} is missing")


def test_gguf_of_what_is_not_supported(model_files):
    path = model_files().gguf_file()
    original = path.read_bytes()
    for key, value, match in (
        ("general.architecture", "qwen3", "architecture 'qwen3'"),
        ("general.architecture", ["llama"], "architecture"),
        ("llama.expert_count", 8, "expert_count is 8"),
        ("llama.rope.scaling.type", "longrope", "rope.scaling.type is longrope"),
        ("llama.rope.scaling.factor", 4.0, "scaled twice"),
        ("llama.rope.scaling.attn_factor", 2.0, "attn_factor is 2.0"),
        ("llama.attention.head_count", [8, 4], "differs by layer"),
    ):
        path.write_bytes(original)
        refused(change_gguf(path, {key: value}), match, UnsupportedFormatError)
    path.write_bytes(original)
    change_gguf(path, {"llama.new_thing": 1})
    with pytest.warns(UserWarning, match="not known and not used: new_thing"):
        open_checkpoint(path)


def test_gguf_rope_as_llama_cpp_reads_its_keys(model_files):
    files = model_files(rope_scaling=None, rope_theta=10000.0)
    path = files.gguf_file()
    original = path.read_bytes()

    def read(values: dict[str, Any], drop: str = "") -> Any:
        path.write_bytes(original)
        return open_checkpoint(change_gguf(path, values, drop=drop) if drop else change_gguf(path, values)).config

    theta = read({}, drop="llama.rope.freq_base")
    assert theta.rope_theta == 10000 and "rope.freq_base 10000" in theta.notes[0]
    prefix = "llama.rope.scaling."
    assert read({f"{prefix}type": "none", f"{prefix}factor": 4.0}).rope_scaling is None
    assert read({f"{prefix}type": "linear"}).rope_scaling is None
    linear = RopeScaling(rope_type="linear", factor=4.0)
    for keys in ({f"{prefix}type": "linear", f"{prefix}factor": 4.0}, {"llama.rope.scale_linear": 4.0}):
        assert read(keys).rope_scaling == linear
    yarn = {f"{prefix}type": "yarn", f"{prefix}factor": 4.0, f"{prefix}original_context_length": 64}
    found = read(yarn).rope_scaling
    assert found == RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    more = {f"{prefix}attn_factor": 0.5, f"{prefix}yarn_beta_fast": 16.0, f"{prefix}yarn_beta_slow": 2.0}
    found = read(yarn | more).rope_scaling
    assert (found.beta_fast, found.beta_slow) == (16.0, 2.0)
    assert found.attention_factor == pytest.approx(0.5 * (0.1 * math.log(4) + 1))
    found = read(yarn | {f"{prefix}yarn_log_multiplier": 0.5}).rope_scaling
    assert found.attention_factor == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))
    for key, value in (
        ("factor", float("nan")),
        ("factor", -2.0),
        ("factor", 0.5),
        ("factor", 1e9),
        ("attn_factor", 0.0),
        ("yarn_beta_fast", -1.0),
        ("yarn_log_multiplier", -100.0),
        ("original_context_length", "64"),
    ):
        path.write_bytes(original)
        refused(change_gguf(path, yarn | {f"{prefix}{key}": value}), r"\.gguf")


def test_gguf_biases_that_are_left_out_are_zero(model_files):
    files = model_files(attention_bias=True, dtype=torch.float32)
    path = change_gguf(files.gguf_file(), tensors=lambda t: [t.pop(f"blk.{i}.attn_output.bias") for i in (0, 1)])
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.attention_bias and not checkpoint.config.mlp_bias
    for part in ("q", "k", "v"):
        key = f"model.layers.1.self_attn.{part}_proj.bias"
        assert np.array_equal(read_array(checkpoint, key), files.weights[key].numpy())
    assert not read_array(checkpoint, "model.layers.0.self_attn.o_proj.bias").any()
    wrong = change_gguf(path, tensors=lambda t: t.update({"blk.0.attn_q.bias": t["blk.0.attn_k.bias"]}))
    refused(wrong, r"q_proj.bias has shape \(32,\)")


def test_missing_and_extra_tensors_are_listed_at_most_ten(model_files):
    folder = model_files(num_hidden_layers=3).huggingface()
    change_safetensors(folder, lambda t: [t.pop(k) for k in list(t) if "proj" in k and "layers.0" not in k])
    message = refused(folder, "14 tensors are missing")
    assert message.count("_proj") == 10 and "and 4 more" in message
    folder = model_files().huggingface()
    change_safetensors(folder, lambda t: t.update({f"extra{i}": torch.zeros(1) for i in range(12)}))
    with pytest.warns(UserWarning, match="12 tensors are not used") as warned:
        assert len(open_checkpoint(folder).entries) == len(open_checkpoint(model_files().huggingface()).entries)
    assert len(warned) == 1 and str(warned[0].message).count(" extra") == 10
    path = model_files().gguf_file()
    refused(change_gguf(path, tensors=lambda t: t.pop("blk.1.ffn_up.weight")), "missing: model.layers.1.mlp.up_proj")


HARMLESS = ["v_head.summary.weight", "score.weight", "model.layers.0.self_attn.rotary_emb.cos_cached", "lm_head.bias"]
CHANGING = [
    "model.layers.0.self_attn.q_norm.weight",
    "model.layers.1.mlp.experts.0.gate_proj.weight",
    "model.layers.0.self_attn.q_proj.lora_A.weight",
    "model.layers.1.post_feedforward_layernorm.weight",
]


@pytest.mark.parametrize("name", HARMLESS)
def test_tensors_that_this_model_does_not_use_are_reported_once(model_files, name):
    folder = model_files().huggingface()
    change_safetensors(folder, lambda t: t.update({name: torch.ones(3, dtype=torch.int64)}))
    with pytest.warns(UserWarning, match=re.escape(name)) as warned:
        assert name not in open_checkpoint(folder).entries
    assert len(warned) == 1


@pytest.mark.parametrize("name", CHANGING)
def test_tensors_of_layers_that_compute_more_are_refused(model_files, name):
    folder = model_files().huggingface()
    change_safetensors(folder, lambda t: t.update({name: torch.ones(3)}))
    refused(folder, re.escape(name))


def test_a_gguf_list_by_layer_may_have_one_value(model_files):
    path = model_files().gguf_file("F16")
    heads = open_checkpoint(path).config.num_attention_heads
    changed = change_gguf(path, {"llama.attention.head_count": [heads, heads]})
    assert open_checkpoint(changed).config.num_attention_heads == heads


def test_a_gguf_file_of_another_architecture_is_refused(model_files):
    path = model_files().gguf_file("F16")
    add = lambda tensors: tensors.update({"blk.0.attn_q_norm.weight": tensors["output_norm.weight"]})  # noqa: E731
    refused(change_gguf(path, tensors=add), "attn_q_norm")


def test_tables_that_follow_from_the_config_are_not_mentioned(model_files):
    folder = model_files().huggingface()
    change_safetensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert open_checkpoint(folder)  # a warning would be an error


def test_a_bias_that_the_config_denies_is_dropped_only_where_it_is_zero(model_files):
    name = "model.layers.0.mlp.down_proj.bias"
    folder = model_files().huggingface()
    change_safetensors(folder, lambda t: t.update({name: torch.zeros(128)}))
    with pytest.warns(UserWarning, match=re.escape(name)):
        open_checkpoint(folder)
    change_safetensors(folder, lambda t: t.update({name: torch.eye(1, 128)[0]}))
    refused(folder, re.escape(name))


def test_a_gguf_with_names_of_another_format(model_files):
    def rename(tensors: dict[str, Any]) -> None:
        tensors["model.norm.weight"] = tensors.pop("output_norm.weight")

    refused(change_gguf(model_files().gguf_file(), tensors=rename), r"not known: 'model\.norm\.weight'")


def test_wrong_shapes(model_files):
    folder = model_files().huggingface()
    change_safetensors(folder, lambda t: t.update({Q: t[Q].view(64, 256)}))
    refused(folder, r"q_proj.weight has shape \(64, 256\)")
    change_safetensors(folder, lambda t: t.update({Q: t[Q].view(-1)}))
    refused(folder, r"q_proj.weight has shape \(16384,\)")


def test_weights_that_are_no_floats(model_files):
    folder = model_files().huggingface()
    change_safetensors(folder, lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)}))
    refused(folder, "q_proj.weight is F8_E4M3; expected F32, F16, BF16", UnsupportedFormatError)


# --- tied and untied heads --------------------------------------------------------------------------------------


def test_untied_without_a_head(model_files):
    folder = model_files().huggingface()
    refused(
        change_json(folder / "config.json", tie_word_embeddings=False), "tie_word_embeddings false, but there is no"
    )


def test_tied_with_a_head(model_files):
    files = model_files(tie_word_embeddings=False)
    folder = change_json(files.huggingface() / "config.json", tie_word_embeddings=True)
    refused(folder, r"true, but lm_head.weight \(\w+ .*\) differs from model.embed_tokens.weight \(")
    change_safetensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in open_checkpoint(folder).entries
    change_safetensors(folder, lambda t: t.update({"lm_head.weight": torch.zeros(2, 2)}))
    refused(folder, r"lm_head.weight \(F32 \(2, 2\)\) differs")


@pytest.mark.parametrize("change", [lambda w: w.reshape(w.shape[::-1]), lambda w: w.view(torch.int16)])
def test_tied_with_a_head_of_the_same_bytes_and_another_shape_or_dtype(model_files, change):
    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = change(tensors["model.embed_tokens.weight"].clone())

    folder = change_safetensors(model_files(tie_word_embeddings=True).huggingface(), add_head)
    refused(folder, r"lm_head.weight \(\w+ .*\) differs from model.embed_tokens.weight \(\w+ .*\)")


def test_frequencies_that_old_transformers_saved_are_left_out(model_files):
    folder = model_files().huggingface()
    names = ["model.rotary_emb.inv_freq", *(f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(2))]
    change_safetensors(folder, lambda t: t.update({name: torch.zeros(8) for name in names}))
    assert not set(names) & set(open_checkpoint(folder).entries)


# --- Hugging Face folders ---------------------------------------------------------------------------------------


def test_another_architecture(model_files):
    folder = change_json(model_files().huggingface() / "config.json", model_type="gemma")
    refused(folder, "gemma", ConfigError)


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"quant_method": "hqq"}, "HQQ"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes INT8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "bitsandbytes fp4"),
        ("\x1b[2J", r"\\x1b"),
    ],
)
def test_other_quantizations_are_refused_by_name(model_files, how, match):
    folder = change_json(model_files().huggingface() / "config.json", quantization_config=how)
    refused(folder, match, UnsupportedFormatError)


def test_config_json_itself(model_files):
    folder = model_files().huggingface()
    for content in ("", "{", "[]", "[" * 100_000, '{"a":' * 5_000 + "1" + "}" * 5_000, "\0"):
        (folder / "config.json").write_text(content)
        refused(folder, re.escape(str(folder)), LlamariumError)
    (folder / "config.json").write_bytes(b'{"a": "' + b"x" * 3 * 2**20 + b'"}')
    refused(folder, "expected at most", ConfigError)
    (folder / "config.json").unlink()
    refused(folder, "config.json", ConfigError)
    (folder / "config.json").mkdir()
    refused(folder, "config.json", ConfigError)


def test_shards(model_files):
    files = model_files()
    first, last = "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"
    index = "model.safetensors.index.json"

    def fresh() -> Path:
        return files.huggingface(shards=3)

    folder = fresh()
    (folder / last).unlink()
    refused(folder, f"{last}: no such file", ModelNotFoundError)
    folder = fresh()
    (folder / last).unlink()
    (folder / last).mkdir()
    refused(folder, f"{last}: is a folder")
    folder = fresh()
    (folder / last).unlink()
    (folder / last).symlink_to(folder / "nowhere")
    refused(folder, "leads nowhere", ModelNotFoundError)
    folder = fresh()
    shutil.copy(folder / first, folder / last)
    with pytest.warns(UserWarning, match=index):
        refused(folder, "tensors are missing")


def test_an_index_that_is_stale(model_files):
    files = model_files()
    last, index = "model-00003-of-00003.safetensors", "model.safetensors.index.json"
    folder = files.huggingface(shards=3)
    right = open_checkpoint(folder)
    weight_map = json.loads((folder / index).read_text())["weight_map"]
    name = next(iter(weight_map))

    change_json(folder / index, weight_map={**weight_map, name: last})
    with pytest.warns(UserWarning, match=re.escape(name)):
        checkpoint = open_checkpoint(folder)
    assert np.array_equal(checkpoint.stored(name).data, right.stored(name).data)

    change_json(folder / index, weight_map={**weight_map, "new.weight": last})
    with pytest.warns(UserWarning, match=r"new\.weight"):
        assert open_checkpoint(folder).entries.keys() == right.entries.keys()

    change_json(folder / index, weight_map={key: shard for key, shard in weight_map.items() if key != name})
    assert open_checkpoint(folder).entries.keys() == right.entries.keys(), "the file has what the index forgot"


def test_of_two_tensors_of_one_name_the_one_that_the_index_names_counts(model_files):
    folder = model_files().huggingface(shards=3)
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    right = {key: open_checkpoint(folder).stored(key, copy=True).data for key in weight_map}
    for other in sorted({*weight_map.values()}):
        name = next(key for key, shard in weight_map.items() if shard != other and "norm" in key)
        tensors = load_file(folder / other) | {name: torch.full((128,), 7.0)}
        save_file(tensors, folder / other)
        assert np.array_equal(open_checkpoint(folder).stored(name).data, right[name])


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b", 3, None])
def test_a_shard_path_that_leaves_the_folder(model_files, shard):
    files = model_files()
    folder = files.huggingface(shards=2)
    save_file(files.weights, folder.parent / "model.safetensors")
    weight_map = dict.fromkeys(files.weights, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(folder, "without a folder|is a folder")


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_an_index_without_a_map(model_files, weight_map):
    folder = model_files().huggingface(shards=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(folder, "weight_map is missing or empty")


def test_links_as_the_hubs_cache_makes_them_are_followed(model_files, tmp_path):
    folder = model_files().huggingface()
    blob = tmp_path / "blob"
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to(blob)
    assert read(open_checkpoint(folder), Q).shape == (128, 128)


# --- NF4 --------------------------------------------------------------------------------------------------------


def nf4_faults() -> dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]]:
    state = f"{Q}.quant_state.bitsandbytes__nf4"

    def say(**fields: Any) -> Callable[[dict[str, torch.Tensor]], None]:
        def change(t: dict[str, torch.Tensor]) -> None:
            raw = {**json.loads(bytes(t[state].tolist())), **fields}
            t[state] = torch.tensor(list(json.dumps(raw).encode()), dtype=torch.uint8)

        return change

    return {
        "absmax": (lambda t: t.pop(f"{Q}.absmax"), "absmax"),
        "state": (lambda t: t.pop(state), "quant_state"),
        "codes": (lambda t: t.pop(Q), "q_proj.weight"),
        "short codes": (lambda t: t.update({Q: t[Q][:-1].clone()}), "8191"),
        "nested": (lambda t: t.pop(f"{Q}.nested_absmax"), "nested_absmax"),
        "extra": (lambda t: t.update({f"{Q}.SCB": torch.zeros(1)}), "SCB"),
        "map": (lambda t: t.update({f"{Q}.quant_map": torch.zeros(16)}), "quant_map"),
        "dtype": (lambda t: t.update({f"{Q}.absmax": t[f"{Q}.absmax"].float()}), "absmax"),
        "shape": (say(shape=[128, 64]), "weight"),
        "huge shape": (say(shape=[2**30, 2**30]), "weight"),
        "block size": (say(blocksize=0), "blocksize"),
        "no JSON": (lambda t: t.update({state: torch.zeros(9, dtype=torch.uint8)}), "JSON"),
        "transposed": (say(shape=[64, 256]), r"q_proj.weight has shape \(64, 256\)"),
    }


@pytest.mark.parametrize("fault", nf4_faults())
def test_nf4_components(model_files, fault):
    folder, _ = model_files().nf4()
    change, match = nf4_faults()[fault]
    refused(change_safetensors(folder, change), match)


def test_nf4_without_a_config_that_says_so(model_files):
    folder, _ = model_files().nf4()
    with pytest.warns(UserWarning, match="quant_map"):
        refused(change_json(folder / "config.json", quantization_config=None), "U8", UnsupportedFormatError)


# --- paths ------------------------------------------------------------------------------------------------------


def test_what_a_path_may_be(model_files, tmp_path):
    files = model_files()
    folder = files.huggingface()
    refused(tmp_path / "none", "no such file", ModelNotFoundError)
    refused(folder / "model.safetensors", "open its folder", UnsupportedFormatError)
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "is empty", ModelNotFoundError)
    (tmp_path / "a.txt").write_text("hello, this is no model at all")
    refused(tmp_path / "a.txt", "begins with b'hell'")
    (folder / "model.safetensors").unlink()
    refused(folder, "holds no weights", ModelNotFoundError)
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(folder, "pytorch_model.bin: no zip archive")
    (folder / "adapter_config.json").write_text("{}")
    (folder / "pytorch_model.bin").unlink()
    refused(folder, "it is an adapter", ModelNotFoundError)


def test_a_folder_of_gguf_files(model_files, tmp_path):
    folder = tmp_path / "ggufs"
    folder.mkdir()
    path = model_files().gguf_file()
    shutil.copy(path, folder / "a.gguf")
    assert open_checkpoint(folder).format == "gguf"
    shutil.copy(path, folder / "b.gguf")
    refused(folder, "holds a.gguf, b.gguf; name one", ModelNotFoundError)


def test_a_gguf_file_may_have_any_name(model_files, tmp_path):
    shutil.copy(model_files().gguf_file(), tmp_path / "blob")
    assert open_checkpoint(tmp_path / "blob").format == "gguf"


# --- RoPE's divisors in GGUF ------------------------------------------------------------------------------------


def set_factors(values: list[float]) -> Callable[[dict[str, Any]], None]:
    data = struct.pack(f"<{len(values)}f", *values)
    return lambda tensors: tensors.update({"rope_freqs.weight": ("F32", (len(values),), data)})


@pytest.mark.parametrize("factor", [8.0, 32.0, 16.0])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_the_scaling_is_found_again(model_files, factor, head_dim):
    config = model_files().config
    scaling = replace(config.rope_scaling, factor=factor)
    files = model_files(rope_scaling=scaling, head_dim=head_dim)
    assert open_checkpoint(files.gguf_file()).config == files.config


def test_other_parameters_are_not_taken_for_the_published_ones(model_files):
    published = model_files().config.rope_scaling
    for fields in ({"low_freq_factor": 2.0}, {"high_freq_factor": 5.0}, {"original_max_position_embeddings": 8190}):
        files = model_files(rope_scaling=replace(published, **fields), head_dim=64)
        refused(files.gguf_file(), "not those of Llama 3.1", UnsupportedFormatError)


def test_divisors_that_no_parameters_make(model_files):
    for values, match in (([1.0] * 7 + [5.0], "not those of Llama 3.1"), ([0.5] * 8, "not those of Llama 3.1")):
        path = change_gguf(model_files().gguf_file(), tensors=set_factors(values))
        refused(path, match, UnsupportedFormatError)
    for values in ([1.0] * 7, [float("nan")] * 8, [float("inf")] * 8):
        refused(change_gguf(model_files().gguf_file(), tensors=set_factors(values)), "8 finite numbers")
    path = change_gguf(model_files().gguf_file(), tensors=set_factors([1.0] * 8))
    assert open_checkpoint(path).config.rope_scaling is None


def test_a_llama_31_without_divisors_warns(model_files):
    files = model_files(vocab_size=128256, hidden_size=32, head_dim=4, intermediate_size=32, num_hidden_layers=1)
    path = change_gguf(files.gguf_file("F16"), tensors=lambda t: t.pop("rope_freqs.weight"))
    with pytest.warns(UserWarning, match="has no rope_freqs.weight"):
        assert open_checkpoint(path).config.rope_scaling is None


def test_a_publishers_parameters_are_refused_by_the_path_of_their_file(model_files):
    folder = model_files().huggingface()
    (folder / "generation_config.json").write_text('{"top_k": 2.5}')
    with pytest.raises(SamplingError, match=re.escape(f"{folder}/generation_config.json: ")):
        llamarium.load(folder)
