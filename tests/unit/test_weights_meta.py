"""Meta's folders: nothing in a pickle runs, and what params.json leaves out is never guessed."""

import collections
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llamarium.checkpoints.decode import read
from llamarium.checkpoints.meta import file as meta_file
from llamarium.checkpoints.meta.config import meta_config
from llamarium.checkpoints.open import open_checkpoint
from llamarium.errors import (
    CheckpointError,
    ConfigError,
    LlamariumError,
    ModelNotFoundError,
    UnsupportedFormatError,
)
from llamarium.presets import preset

pytestmark = pytest.mark.torch

SHARD = "consolidated.00.pth"


def refused(path: Path, match: str, error: type[LlamariumError] = CheckpointError) -> str:
    with pytest.raises(error, match=match) as caught:
        open_checkpoint(path)
    assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()
    return str(caught.value)


def change_shard(folder: Path, change: Callable[[dict[str, Any]], Any], shard: str = SHARD) -> Path:
    tensors = torch.load(folder / shard, weights_only=True)
    change(tensors)
    torch.save(tensors, folder / shard)
    return folder


def change_json(path: Path, **fields: Any) -> Path:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return path.parent


# --- pickles ----------------------------------------------------------------------------------------------------


class Hostile:
    """Its pickle calls `call` with `arguments` when it is loaded."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("beside", [True, False])
def test_a_pickle_that_runs_a_command_is_refused_and_does_not_run(model_files, tmp_path, protocol, beside):
    folder = model_files().meta()
    proof = tmp_path / "it ran"
    hostile = Hostile(os.system, f"touch '{proof}'")
    tensors = torch.load(folder / SHARD, weights_only=True)
    torch.save({**tensors, "norm.weight": hostile} if beside else hostile, folder / SHARD, pickle_protocol=protocol)
    with zipfile.ZipFile(folder / SHARD) as archive:
        assert b"system" in archive.read("consolidated.00/data.pkl")
    refused(folder, "its pickle names .*system|STACK_GLOBAL")
    assert not proof.exists()


def test_a_bare_pickle_is_refused_and_does_not_run(model_files, tmp_path):
    folder, proof = model_files().meta(), tmp_path / "it ran"
    (folder / SHARD).write_bytes(pickle.dumps(Hostile(os.system, f"touch '{proof}'")))
    refused(folder, "bare pickle", UnsupportedFormatError)
    torch.save({}, folder / SHARD, _use_new_zipfile_serialization=False)
    refused(folder, "bare pickle", UnsupportedFormatError)
    assert not proof.exists()


@pytest.mark.parametrize(
    ("call", "arguments"),
    [(bytearray, (2**40,)), (collections.Counter, ()), (torch.empty, (2**40,)), (getattr, (os, "system"))],
)
def test_a_pickle_may_ask_for_tensors_only(model_files, call, arguments):
    folder = model_files().meta()
    if arguments and arguments[0] is os:
        arguments = ("os", "system")
    torch.save({"x": Hostile(call, *arguments)}, folder / SHARD)
    refused(folder, "its pickle names")


def test_torch_is_not_needed_and_not_asked(model_files):
    files = model_files()
    code = (
        "import sys, pathlib; sys.modules['torch'] = None; from llamarium.checkpoints.open import open_checkpoint\n"
        "checkpoint = open_checkpoint(pathlib.Path(sys.argv[1]))\n"
        "sys.stdout.write(checkpoint.stored('model.norm.weight').data.tobytes().hex())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(files.meta())], capture_output=True, text=True, check=True)
    norm = files.weights["model.norm.weight"]
    assert done.stdout == norm.view(torch.int16).numpy().tobytes().hex()


def test_the_environment_cannot_switch_the_safety_off(model_files, tmp_path):
    folder, proof = model_files().meta(), tmp_path / "it ran"
    torch.save(Hostile(os.system, f"touch '{proof}'"), folder / SHARD)
    code = "import sys, pathlib, llamarium.checkpoints.open as o; o.open_checkpoint(pathlib.Path(sys.argv[1]))"
    env = {**os.environ, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    done = subprocess.run([sys.executable, "-c", code, str(folder)], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "CheckpointError" in done.stderr and not proof.exists()


# --- archives ---------------------------------------------------------------------------------------------------


def rewrite(path: Path, change: Callable[[dict[str, bytes]], Any], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    change(records)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, data)


def test_archives(model_files):
    files = model_files()

    def with_change(change: Callable[[Path], Any]) -> Path:
        folder = files.meta()
        change(folder / SHARD)
        return folder

    for match, change in {
        "no zip archive, or one that was cut short": lambda p: p.write_bytes(p.read_bytes()[:-1]),
        "extended": lambda p: p.write_bytes(p.read_bytes() + b"\0"),
        "no zip archive": lambda p: p.write_bytes(b""),
        "no zip": lambda p: p.write_bytes(b"\0" + p.read_bytes()),
        "does not end it": lambda p: p.write_bytes(b"PK\3\4" + p.read_bytes()),
        "compressed": lambda p: rewrite(p, dict, zipfile.ZIP_DEFLATED),
        "0 pickles": lambda p: rewrite(p, lambda r: r.pop("consolidated.00/data.pkl")),
        "2 pickles": lambda p: rewrite(p, lambda r: r.update({"consolidated.00/constants.pkl": b""})),
        "above 1048576": lambda p: rewrite(p, lambda r: r.update({"consolidated.00/data.pkl": bytes(2**20 + 1)})),
        "damaged": lambda p: rewrite(p, lambda r: r.update({"consolidated.00/data.pkl": b"\xff\xff"})),
        "leaves something": lambda p: rewrite(p, lambda r: r.update({"consolidated.00/data.pkl": b"\x80\x02."})),
        "directory of": lambda p: rewrite(p, lambda r: r.update({f"{i:0200d}": b"" for i in range(9000)})),
    }.items():
        refused(with_change(change), match)


def test_a_record_that_is_missing_or_short(model_files):
    folder = model_files().meta()
    rewrite(folder / SHARD, lambda r: r.pop("consolidated.00/data/0"))
    refused(folder, "record data/0, which is missing")
    folder = model_files().meta()
    rewrite(folder / SHARD, lambda r: r.update({"consolidated.00/data/0": b"x"}))
    refused(folder, "its record has 1 byte")


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (torch.zeros(1).expand(2**20, 2**20), "its storage has 1 item"),
        (torch.zeros(2, 2, dtype=torch.int8), "is I8"),
        (torch.zeros(2, 2).to_sparse(), "its pickle names"),
    ],
)
def test_values_that_are_no_plain_tensors(model_files, value, match):
    refused(change_shard(model_files().meta(), lambda t: t.update({"norm.weight": value})), match)


def test_tensors_that_share_bytes_cannot_add_up_to_more_than_the_file(model_files):
    shared = torch.zeros(256, 4096)
    folder = model_files().meta()
    change_shard(folder, lambda t: t.update({f"layers.{i}.attention.wq.weight": shared for i in range(100)}))
    refused(folder, "its tensors share bytes")


def test_not_a_dictionary(model_files):
    folder = model_files().meta()
    torch.save([torch.zeros(1)], folder / SHARD)
    refused(folder, "holds a list")
    torch.save({1: torch.zeros(1)}, folder / SHARD)
    refused(folder, "no tensors by name")


def test_what_is_no_tensor_is_named_and_not_used(model_files):
    files = model_files()
    folder = change_shard(files.meta(), lambda t: t.update({"step": 3, "args": {"x": 1}}))
    with pytest.warns(UserWarning, match=r"step \(int\), args \(dict\)"):
        checkpoint = open_checkpoint(folder)
    assert torch.equal(read(checkpoint, "model.norm.weight"), files.weights["model.norm.weight"])


def test_weights_in_columns_and_in_float64_are_read(model_files):
    files = model_files(dtype=torch.float32)

    def in_columns(tensors: dict[str, Any]) -> None:
        name = "layers.0.feed_forward.w1.weight"
        tensors[name] = tensors[name].t().contiguous().t()
        tensors["norm.weight"] = tensors["norm.weight"].double()

    checkpoint = open_checkpoint(change_shard(files.meta(), in_columns))
    for key in ("model.layers.0.mlp.gate_proj.weight", "model.norm.weight"):
        assert torch.equal(read(checkpoint, key), files.weights[key])


# --- shards -----------------------------------------------------------------------------------------------------


def test_shards(model_files):
    files = model_files()
    folder = files.meta(shards=2)
    (folder / SHARD).unlink()
    refused(folder, "consolidated.00.pth is missing")
    folder = files.meta(shards=2)
    (folder / "consolidated.01.pth").unlink()
    refused(folder, "1 shard; consolidated.01.pth is missing")
    folder = files.meta(shards=2)
    change_shard(folder, lambda t: t.pop("layers.1.feed_forward.w2.weight"), "consolidated.01.pth")
    refused(folder, "consolidated.01.pth: 1 tensor is missing: layers.1.feed_forward.w2.weight")
    folder = files.meta(shards=2)
    change_shard(folder, lambda t: t["norm.weight"].add_(1), "consolidated.01.pth")
    refused(folder, "the shards disagree on norm.weight")
    folder = files.meta(shards=2)
    name = "layers.0.attention.wq.weight"
    change_shard(folder, lambda t: t.update({name: t[name][:-1].clone()}), "consolidated.01.pth")
    refused(folder, f"the slices of {re.escape(name)} differ")
    folder = files.meta(shards=2)
    (folder / "consolidated.01.pth").unlink()
    (folder / "consolidated.01.pth").mkdir()
    refused(folder, "is a folder")


def test_numbers_that_are_not_what_their_bytes_say(model_files):
    negative = torch._neg_view(torch.ones(128).bfloat16())
    refused(change_shard(model_files().meta(), lambda t: t.update({"norm.weight": negative})), "negative or conjugate")


def test_missing_and_unknown_tensors(model_files):
    refused(change_shard(model_files().meta(), lambda t: t.pop("norm.weight")), "norm.weight is missing")
    refused(
        change_shard(model_files().meta(), lambda t: t.pop("tok_embeddings.weight")), "embed_tokens.weight is missing"
    )
    refused(change_shard(model_files().meta(), lambda t: t.pop("layers.1.ffn_norm.weight")), "1 tensor is missing")
    folder = change_shard(model_files().meta(), lambda t: t.update({"model.norm.weight": t["norm.weight"]}))
    with pytest.warns(UserWarning, match=r"model\.norm\.weight"):
        assert open_checkpoint(folder).entries.keys() == open_checkpoint(model_files().meta()).entries.keys()
    assert open_checkpoint(change_shard(model_files().meta(), lambda t: t.update({"rope.freqs": torch.zeros(8)})))


# --- heads ------------------------------------------------------------------------------------------------------


def test_a_head_that_is_the_embedding_is_tied(model_files):
    files = model_files(rope_scaling=None, max_position_embeddings=8192, bos_token_id=None, eos_token_id=())
    folder = files.meta(config_json=False)
    change_shard(folder, lambda t: t.update({"output.weight": t["tok_embeddings.weight"].clone()}))
    assert open_checkpoint(folder).config == files.config
    assert "lm_head.weight" not in open_checkpoint(folder).entries
    change_shard(folder, lambda t: t["output.weight"].add_(1))
    checkpoint = open_checkpoint(folder)
    assert not checkpoint.config.tie_word_embeddings and "lm_head.weight" in checkpoint.entries


def test_heads_against_a_config_json(model_files):
    files = model_files(tie_word_embeddings=False)
    folder = change_json(files.meta() / "config.json", tie_word_embeddings=True)
    refused(folder, "tie_word_embeddings true, but output.weight differs")
    change_shard(folder, lambda t: t.update({"output.weight": t["tok_embeddings.weight"].clone()}))
    assert "lm_head.weight" not in open_checkpoint(folder).entries
    change_json(folder / "config.json", tie_word_embeddings=False)
    assert "lm_head.weight" in open_checkpoint(folder).entries
    change_shard(folder, lambda t: t.pop("output.weight"))
    refused(folder, "tie_word_embeddings false, but there is no lm_head.weight")


# --- params.json ------------------------------------------------------------------------------------------------

# As Meta published them.
LLAMA32 = {"ffn_dim_multiplier": 1.5, "multiple_of": 256, "norm_eps": 1e-5, "rope_theta": 500000.0}
PUBLISHED = {
    "llama-3.2-1b": {**LLAMA32, "dim": 2048, "n_heads": 32, "n_kv_heads": 8, "n_layers": 16, "use_scaled_rope": True},
    "llama-3.2-3b": {
        **LLAMA32, "dim": 3072, "n_heads": 24, "n_kv_heads": 8, "n_layers": 28, "use_scaled_rope": True,
        "ffn_dim_multiplier": 1.0,
    },
    "llama-3.1-8b": {
        **LLAMA32, "dim": 4096, "n_heads": 32, "n_kv_heads": 8, "n_layers": 32, "use_scaled_rope": True,
        "ffn_dim_multiplier": 1.3, "multiple_of": 1024,
    },
    "llama-3.1-70b": {
        **LLAMA32, "dim": 8192, "n_heads": 64, "n_kv_heads": 8, "n_layers": 80, "use_scaled_rope": True,
        "ffn_dim_multiplier": 1.3, "multiple_of": 4096,
    },
    "llama-3-8b": {
        **LLAMA32, "dim": 4096, "n_heads": 32, "n_kv_heads": 8, "n_layers": 32,
        "ffn_dim_multiplier": 1.3, "multiple_of": 1024,
    },
    "llama-2-7b": {"dim": 4096, "n_heads": 32, "n_layers": 32, "multiple_of": 256, "norm_eps": 1e-5, "vocab_size": -1},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_params(tmp_path, name):
    config = preset(name)
    (tmp_path / "params.json").write_text(json.dumps({"vocab_size": config.vocab_size, **PUBLISHED[name]}))
    found = meta_config(tmp_path, config.vocab_size, config.tie_word_embeddings)
    if name == "llama-3-8b":  # Meta's own tokenizer has <|eot_id|>; config.json of the base model does not name it
        assert set(found.eos_token_id) > set(config.eos_token_id)
        found = type(found)(**{f: getattr(found, f) for f in found.__slots__} | {"eos_token_id": config.eos_token_id})
    assert found == config


def test_what_params_json_leaves_out_is_not_guessed(model_files):
    refused(model_files().meta(config_json=False), "use_scaled_rope is true without a factor", ConfigError)
    files = model_files(rope_scaling=None)
    params = files.meta(config_json=False) / "params.json"
    raw = json.loads(params.read_text())
    params.write_text(json.dumps({k: v for k, v in raw.items() if k != "rope_theta"}))
    refused(params.parent, "rope_theta is missing", ConfigError)


@pytest.mark.parametrize(
    ("fields", "match", "error"),
    [
        ({"dim": 0}, "dim is 0", ConfigError),
        ({"dim": "128"}, "dim is 128", ConfigError),
        ({"dim": 130}, "no multiple of n_heads", ConfigError),
        ({"n_heads": None}, "n_heads is None", ConfigError),
        ({"norm_eps": -1}, "norm_eps is -1", ConfigError),
        ({"norm_eps": float("nan")}, "NaN is not JSON", ConfigError),
        ({"multiple_of": 0}, "multiple_of is 0", ConfigError),
        ({"ffn_dim_multiplier": "x"}, "ffn_dim_multiplier", ConfigError),
        ({"use_scaled_rope": 1}, "use_scaled_rope is 1", ConfigError),
        ({"moe": {}}, "moe not supported", ConfigError),
        ({"quantization_args": {"group_size": 32}}, "quantization_args not supported", ConfigError),
        ({"vocab_size": 300}, "vocab_size is 300, the embedding has 256 rows", CheckpointError),
        ({"vocab_size": "many"}, "vocab_size is many", ConfigError),
        ({"n_layers": 3}, "num_hidden_layers 3, the weights have 2", CheckpointError),
        ({"n_layers": 2**31 - 1}, "num_hidden_layers 2147483647", CheckpointError),
        ({"n_kv_heads": 4}, r"k_proj.weight has shape \(32, 128\).*\(64, 128\)", CheckpointError),
        ({"multiple_of": 500}, r"gate_proj.weight has shape \(384, 128\).*\(500, 128\)", CheckpointError),
    ],
)
def test_params_json_itself(model_files, fields, match, error):
    files = model_files(rope_scaling=None, max_position_embeddings=8192)
    refused(change_json(files.meta(config_json=False) / "params.json", **fields), match, error)


def test_a_config_json_that_says_otherwise(model_files):
    folder = model_files().meta()
    refused(change_json(folder / "config.json", rms_norm_eps=1e-6), "rms_norm_eps is 1e-06, params.json .* 1e-05")


def test_without_params_json(model_files):
    folder = model_files().meta()
    (folder / "params.json").unlink()
    refused(folder, "without params.json", ModelNotFoundError)


def test_a_good_folder_loads_after_a_bad_one(model_files):
    files = model_files()
    good, bad = files.meta(), files.meta()
    shutil.copy(Path(__file__), bad / SHARD)
    refused(bad, "no zip archive")
    assert torch.equal(read(open_checkpoint(good), "model.norm.weight"), files.weights["model.norm.weight"])
    assert meta_file.read_meta_shard(good / SHARD)


def test_what_is_not_read_is_a_fault_of_the_checkpoint(model_files):
    folder = change_shard(model_files().meta(), lambda t: t.update({"norm.weight": t["norm.weight"].to(torch.int64)}))
    refused(folder, "norm.weight is I64", UnsupportedFormatError)
    assert issubclass(UnsupportedFormatError, CheckpointError)


@pytest.mark.parametrize(
    ("params", "vocab_size", "context", "theta"),
    [
        ({"dim": 4096, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-6}, 32000, 2048, 10000.0),  # Llama 1 7B
        ({"dim": 6656, "n_heads": 52, "n_layers": 60, "norm_eps": 1e-6}, 32000, 2048, 10000.0),
        ({"dim": 8192, "n_heads": 64, "n_layers": 80, "norm_eps": 1e-5}, 32000, 2048, 10000.0),  # Llama 1 65B
        ({"dim": 4096, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-5}, 32000, 4096, 10000.0),  # Llama 2 7B
        (
            {"dim": 8192, "n_heads": 64, "n_kv_heads": 8, "n_layers": 80, "norm_eps": 1e-5},
            32000,
            4096,
            10000.0,
        ),
        (
            {"dim": 4096, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-5, "rope_theta": 1e6},
            32016,
            16384,
            1e6,
        ),  # Code Llama 7B
        ({"dim": 4096, "n_heads": 32, "n_kv_heads": 8, "n_layers": 32, "norm_eps": 1e-5}, 128256, 8192, 500000.0),
    ],
)
def test_contexts_and_theta_of_releases(
    params: dict[str, Any], vocab_size: int, context: int, theta: float, tmp_path: Path
) -> None:
    (tmp_path / "params.json").write_text(json.dumps({"multiple_of": 256, "vocab_size": -1} | params))
    config = meta_config(tmp_path, vocab_size, tied=False)
    assert (config.max_position_embeddings, config.rope_theta) == (context, theta)
    assert any("max_position_embeddings" in note for note in config.notes)
    assert any("rope_theta" in note for note in config.notes) == ("rope_theta" not in params)
