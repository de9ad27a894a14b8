"""Opening a model with all that belongs to it, and what is refused before a weight is read."""

import dataclasses
import json
import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

import llamarium
from llamarium.checkpoints.export import export
from llamarium.checkpoints.open import open_checkpoint, open_model
from llamarium.errors import CheckpointError, ConfigError, LlamariumError, OptionError, TokenizerError
from llamarium.tokenizer.backends.characters import CharacterTokenizer

pytestmark = pytest.mark.torch

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(model_files) -> Path:
    folder = model_files(vocab_size=128).huggingface()
    CharacterTokenizer.from_text("the cat sat").save(folder)
    return folder


def test_all_that_belongs_to_it(folder, smollm2_path):
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 7}))
    opened = open_model(folder)
    assert (opened.path, opened.name, opened.generation_config) == (folder, str(folder), {"top_k": 7})
    assert (
        opened.checkpoint.format == "huggingface" and opened.tokenizer.decode(opened.tokenizer.encode("cat")) == "cat"
    )
    assert opened.tokenizer.decode([127]) is not None, "ids that only the model has"
    built_in = open_model("smollm2-135m")
    assert built_in.path == smollm2_path and built_in.generation_config == {"temperature": 0.2, "top_p": 0.9}


def test_a_model_without_a_tokenizer_says_why(model_files):
    opened = open_model(model_files().huggingface())
    assert opened.optional_tokenizer is None
    with pytest.raises(TokenizerError, match="has no tokenizer files"):
        _ = opened.tokenizer
    gguf = open_model(model_files().gguf_file())
    assert gguf.optional_tokenizer is None
    assert "tokenizer.json" not in gguf.why_no_tokenizer, "no file beside a GGUF file is looked for"


def test_a_tokenizer_of_another_model_is_refused(model_files):
    folder = model_files(vocab_size=8, eos_token_id=(2,)).huggingface()
    CharacterTokenizer.from_text("abcdefghijklmnop").save(folder)
    with pytest.raises(CheckpointError, match="do not belong together"):
        open_model(folder)
    assert open_model(folder, with_tokenizer=False).checkpoint.config.vocab_size == 8


@pytest.mark.parametrize("field", ["bos_token_id", "eos_token_id"])
@pytest.mark.parametrize("value", [256, 10**30])
def test_ids_that_are_not_in_the_vocabulary(model_files, field, value):
    with pytest.raises(CheckpointError, match=rf"{field} is {value}, and there are 256 rows"):
        open_checkpoint(model_files().huggingface(**{field: value}))
    assert open_checkpoint(model_files().huggingface(**{field: 255}))


def test_a_padding_id_may_be_any(model_files):
    assert open_checkpoint(model_files().huggingface(pad_token_id=256)).config.pad_token_id == 256


def test_ids_of_a_gguf_file(model_files):
    files = model_files()
    files.config = dataclasses.replace(files.config, eos_token_id=(2, 256))
    with pytest.raises(CheckpointError, match="eos_token_id is 256"):
        open_checkpoint(files.gguf_file())


@pytest.mark.parametrize("text", ['{"temperature": -Infinity}', '{"top_p": NaN}', "[]", "{"])
def test_a_generation_config_that_is_none(folder, text):
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match="generation_config"):
        open_model(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_json_files_have_limits(folder, smollm2_path, name):
    if name.startswith("tokenizer"):
        (folder / "characters.json").unlink()
        open_model(smollm2_path).tokenizer.save(folder)
    with (folder / name).open("wb") as file:
        file.truncate(33 * 2**20)
    with (
        pytest.warns(UserWarning, match=name) if name.startswith("tokenizer") else nullcontext(),
        pytest.raises(LlamariumError, match=rf"{name}: 34603008 bytes; expected"),
    ):
        _ = open_model(folder).tokenizer


def test_json_of_many_small_values_is_refused_before_it_is_parsed(folder):
    (folder / "characters.json").unlink()
    (folder / "tokenizer.json").write_text('{"a": [' + ",".join(["[]"] * 2**22) + "]}")
    with pytest.warns(UserWarning, match="no text"):
        opened = open_model(folder)
    with pytest.raises(TokenizerError, match="more than 4,194,304 values"):
        _ = opened.tokenizer


def test_a_fault_of_the_tokenizer_stops_only_text(folder):
    (folder / "characters.json").write_text('{"characters": 3}')
    with pytest.warns(UserWarning, match=r"characters\.json") as warned:
        llama = llamarium.load(folder)
    assert len(warned) == 1
    assert llama.model(torch.tensor([[1, 2, 3]])).isfinite().all()
    assert "characters.json" in llama.why_no_tokenizer
    with pytest.raises(TokenizerError, match=r"characters\.json"):
        llama.generate("the cat")
    with pytest.warns(UserWarning), pytest.raises(OptionError, match="no-tokenizer"):
        export(folder, folder / "whole.gguf", format="gguf")
    assert export(folder, folder / "weights.gguf", format="gguf", with_tokenizer=False).is_file()


# --- files that change while they are in use --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["huggingface", "shards", "meta", "gguf"])
def test_a_file_that_is_written_to_is_noticed(model_files, kind):
    files = model_files()
    path = {"gguf": files.gguf_file, "meta": files.meta}.get(
        kind, lambda: files.huggingface(shards=1 + (kind == "shards"))
    )()
    file = path if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".pth"))[-1]
    checkpoint = open_checkpoint(path)
    for key in checkpoint.entries:
        checkpoint.stored(key)
    checkpoint.check_unchanged()
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=rf"{file.name}: was written to while the model was in use"):
        checkpoint.check_unchanged()


def test_a_file_that_is_cut_short_after_it_was_removed_is_noticed(model_files):
    checkpoint = open_checkpoint(folder := model_files().huggingface())
    checkpoint.stored(Q)
    file = folder / "model.safetensors"
    os.link(file, folder / "elsewhere")
    file.unlink()
    checkpoint.check_unchanged()
    os.truncate(folder / "elsewhere", 100)
    with pytest.raises(CheckpointError, match="was written to"):
        checkpoint.check_unchanged()


def test_a_file_that_is_replaced_is_what_it_was(model_files, tmp_path):
    checkpoint = open_checkpoint(folder := model_files().huggingface())
    before = checkpoint.stored(Q).data.copy()
    (tmp_path / "other").write_bytes(b"another model")
    (tmp_path / "other").replace(folder / "model.safetensors")
    checkpoint.check_unchanged()
    assert np.array_equal(checkpoint.stored(Q).data, before)


def test_what_was_copied_need_not_stay(model_files):
    checkpoint = open_checkpoint(path := model_files().gguf_file("Q8_0"))
    for key in checkpoint.entries:
        checkpoint.stored(key, copy=True)
    os.truncate(path, 100)
    checkpoint.check_unchanged()
