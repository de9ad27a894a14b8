"""`llamarium tree`."""

import dataclasses
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llamarium.api import load
from llamarium.cli.main import main
from llamarium.cli.tree import tree
from llamarium.model import LlamaForCausalLM
from llamarium.presets import PRESETS
from swapping import quantize_linears

pytestmark = pytest.mark.torch

LLAMA_32_1B_NF4 = """\
LlamaForCausalLM(
  (model): LlamaModel(
    (embed_tokens): Embedding(128256, 2048)
    (layers): ModuleList(
      (0-15): 16 x LlamaDecoderLayer(
        (self_attn): LlamaAttention(
          (q_proj): Linear4bit(in_features=2048, out_features=2048, bias=False)
          (k_proj): Linear4bit(in_features=2048, out_features=512, bias=False)
          (v_proj): Linear4bit(in_features=2048, out_features=512, bias=False)
          (o_proj): Linear4bit(in_features=2048, out_features=2048, bias=False)
        )
        (mlp): LlamaMLP(
          (gate_proj): Linear4bit(in_features=2048, out_features=8192, bias=False)
          (up_proj): Linear4bit(in_features=2048, out_features=8192, bias=False)
          (down_proj): Linear4bit(in_features=8192, out_features=2048, bias=False)
          (act_fn): SiLUActivation()
        )
        (input_layernorm): LlamaRMSNorm((2048,), eps=1e-05)
        (post_attention_layernorm): LlamaRMSNorm((2048,), eps=1e-05)
      )
    )
    (norm): LlamaRMSNorm((2048,), eps=1e-05)
    (rotary_emb): LlamaRotaryEmbedding()
  )
  (lm_head): Linear(in_features=2048, out_features=128256, bias=False)
)
"""


def user_seconds(*words: str) -> tuple[float, str]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True, env=env)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before, done.stdout


def test_llama_32_1b_in_nf4_costs_little_more_than_starting_python() -> None:
    start_s, _ = user_seconds("-c", "import argparse")
    tree_s, out = user_seconds("-m", "llamarium", "tree", "llama-3.2-1b", "--quantize", "nf4")
    assert out == LLAMA_32_1B_NF4
    # Processor time, so that other work on the machine does not count. Measured: 0.1 s more; PyTorch takes 1.5.
    assert tree_s < start_s + 0.7


@pytest.mark.parametrize("method", [None, "NF4", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("skip", [("lm_head",), ("lm_head", "layers.1", "mlp"), ()])
@pytest.mark.parametrize("name", ["tiny", "llama-3.2-1b", "smollm2-135m"])
def test_the_tree_is_what_print_shows_of_the_modules(name: str, method: str | None, skip: tuple[str, ...]) -> None:
    config = dataclasses.replace(PRESETS[name], num_hidden_layers=3, tie_word_embeddings=bool(skip))
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    if method is not None:
        quantize_linears(model, method, skip=skip)
    assert tree(config, method, skip) == str(model)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_tree(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tree", name]) == 0
    out = capsys.readouterr().out
    assert f"{PRESETS[name].num_hidden_layers} x LlamaDecoderLayer(" in out
    assert "Linear(in_features" in out


@pytest.mark.parametrize("method", ["Q8_0", "q4_1", "Q4_K"])
def test_other_quantizations(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tree", "llama-3.2-1b", "--quantize", method]) == 0
    expected = f"(q_proj): LinearPacked(in_features=2048, out_features=2048, bias=False, type={method.upper()})"
    assert expected in capsys.readouterr().out


def test_a_folder_or_config_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(PRESETS["tiny"].to_hf()))
    main(["tree", "tiny"])
    expected = capsys.readouterr().out
    for path in (tmp_path, config):
        assert main(["tree", str(path)]) == 0
        assert capsys.readouterr().out == expected


def test_a_gguf_file(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["tree"])  # the built-in model's preset
    expected = capsys.readouterr().out
    assert main(["tree", str(smollm2_path)]) == 0
    assert capsys.readouterr().out == expected


def test_a_hub_name_needs_its_config_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(PRESETS["tiny"].to_hf()))
    asked: list[tuple[str, str]] = []

    def download(repo: str, file: str) -> Path:
        asked.append((repo, file))
        return config

    monkeypatch.setattr("llamarium.hub.client.download_file", download)
    assert main(["tree", "org/name-1.0"]) == 0
    assert asked == [("org/name-1.0", "config.json")]
    assert "2 x LlamaDecoderLayer(" in capsys.readouterr().out


def test_a_config_that_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["tiny"].to_hf() | {"model_type": "gpt2"}))
    assert main(["tree", str(tmp_path)]) == 1
    assert "model_type is 'gpt2'" in capsys.readouterr().err


def test_a_packed_folder_has_the_tree_that_load_gives_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "-m", "letters", "--out", str(tmp_path / "q"), "--method", "nearest"]) == 0
    capsys.readouterr()
    assert main(["tree", str(tmp_path / "q")]) == 0
    out = capsys.readouterr().out
    assert out == f"{load(str(tmp_path / 'q')).model}\n" and "LinearPacked(" in out and "EmbeddingPacked(" in out
    assert main(["tree", str(tmp_path / "q"), "--quantize", "nf4"]) == 1
    assert "quantized with llamarium" in capsys.readouterr().err


def test_an_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tree", "lama-3.2-1b"]) == 1
    assert "did you mean llama-3.2-1b?" in capsys.readouterr().err


def test_a_folder_in_nf4_has_the_tree_that_load_gives_it(
    model_files: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = model_files().nf4()
    assert main(["tree", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "(q_proj): Linear4bit(" in out and "(lm_head): Linear(" in out
    assert out == f"{load(folder).model}\n"
    assert main(["tree", str(folder), "--quantize", "q8_0"]) == 0
    assert "(q_proj): LinearPacked(in_features=128, out_features=128, bias=False, type=Q8_0)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("listed", "tied", "plain"),
    [(None, True, {"lm_head"}), (["mlp"], True, {"up_proj", "lm_head"}), ([], False, set())],
)
def test_what_nf4_leaves_alone(
    listed: list[str] | None, tied: bool, plain: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    fields = {"tie_word_embeddings": tied, "quantization_config": how | {"llm_int8_skip_modules": listed}}
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["tiny"].to_hf() | fields))
    assert main(["tree", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert {name for name in ("q_proj", "up_proj", "lm_head") if f"({name}): Linear(" in out} == plain


def test_a_quantization_that_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"quantization_config": {"quant_method": "hqq"}}
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["tiny"].to_hf() | fields))
    assert main(["tree", str(tmp_path)]) == 1
    assert "quantized with HQQ" in capsys.readouterr().err


def test_the_model_may_stand_after_m(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("tree", "info"):
        assert main([command, "tiny"]) == main([command, "-m", "tiny"]) == 0
        out = capsys.readouterr().out
        assert out and out[: len(out) // 2] == out[len(out) // 2 :]
        assert main([command, "tiny", "-m", "small"]) == 2
        assert "given twice" in capsys.readouterr().err
