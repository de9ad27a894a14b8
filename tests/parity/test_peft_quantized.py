"""Adapters on quantized bases: the logits are those of `peft` in float64, over the weights that the format's formula
gives."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import peft
import pytest
import torch
import transformers

import llamarium
from llamarium.config import ModelConfig
from llamarium.kernels import native
from llamarium.runtime.batch import Span, pack
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.runtime.native.runner import NativeRunner
from llamarium.runtime.runner import Runner
from quantized_cases import CASES, CONFIG, Model

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft's use of transformers
    pytest.mark.filterwarnings("ignore:(?s).*(dequantized once|activations were meant):UserWarning"),
]

IDS = [1, 5, 9, 33, 77, 100, 3, 8]
FOLDERS = ("awq", "awq gemv", "gptq zeros", "gptq order", "w4a16 zeros", "fp8 blocks", "float8 rows")
VARIANTS: dict[str, dict[str, Any]] = {"rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
Weights = dict[str, torch.Tensor]


def of_transformers(config: ModelConfig, weights: Weights | None = None) -> Any:
    fields = {key: value for key, value in config.to_hf().items() if key not in ("architectures", "dtype")}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    if weights is not None:
        missing = model.load_state_dict(weights, strict=False).missing_keys
        assert missing in ([], ["lm_head.weight"])
    return model.eval()


@torch.no_grad()
def write_adapter(folder: Path, config: ModelConfig, **options: Any) -> Path:
    """Write an adapter whose correction is far from zero, as peft does."""
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(of_transformers(config), lora)
    for name, tensor in model.named_parameters():
        if "lora_B" in name:
            tensor.normal_(0, 0.1)
        elif "magnitude" in name:
            tensor.mul_(torch.empty_like(tensor).uniform_(0.8, 1.2))
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def expected(config: ModelConfig, weights: Weights, adapter: Path) -> np.ndarray:
    model = of_transformers(config, {key: weight.double() for key, weight in weights.items()}).double()
    return peft.PeftModel.from_pretrained(model, adapter).double().eval()(torch.tensor([IDS])).logits[0].numpy()


def logits(runner: Runner) -> np.ndarray:
    return np.asarray(runner.run(pack([Span(IDS, 0, [0], num_logits=len(IDS))]), runner.new_cache(1)))


def runners(base: Path, adapter: Path) -> Iterator[Runner]:
    model = llamarium.load(base, adapter=adapter, device="cpu", dtype="float32")
    yield model.runner
    yield ModuleRunner(model.model)


def check(base: Path, config: ModelConfig, weights: Weights, tmp_path: Path, variant: str) -> None:
    adapter = write_adapter(tmp_path / "adapter", config, **VARIANTS[variant])
    wanted = expected(config, weights, adapter)
    plain = logits(llamarium.load(base, device="cpu", dtype="float32").runner)
    assert np.abs(plain - wanted).max() > 0.05 * np.abs(wanted).max()  # the adapter counts
    for runner in runners(base, adapter):
        np.testing.assert_allclose(logits(runner), wanted, rtol=0, atol=5e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", FOLDERS)
def test_quantized_folders(name: str, variant: str, tmp_path: Path) -> None:
    model = Model(*CASES[name][:2])
    weights = {key: torch.from_numpy(made.values) for key, made in model.linears.items()}
    weights |= {key: torch.from_numpy(values) for key, values in model.plain.items()}
    check(model.write(tmp_path / "base"), CONFIG, weights, tmp_path, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_nf4(variant: str, model_files: Callable[..., Any], tmp_path: Path) -> None:
    files = model_files(dtype=torch.float32, tie_word_embeddings=False)
    folder, decoded = files.nf4()
    check(folder, files.config, decoded, tmp_path, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gguf(variant: str, model_files: Callable[..., Any], tmp_path: Path) -> None:
    files = model_files(dtype=torch.float32, tie_word_embeddings=False)
    kind = gguf.GGMLQuantizationType.Q4_0
    weights = {
        key: torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind))
        if weight.ndim == 2
        else weight
        for key, weight in files.weights.items()
    }
    check(files.gguf_file("Q4_0"), files.config, weights, tmp_path, variant)


@pytest.mark.skipif(native.library() is None, reason="needs the C kernels")
def test_packed_weights_are_multiplied_in_c(tmp_path: Path) -> None:
    """Their activations have 8 bits, so the logits are near: within what that rounding makes of a base alone."""
    model = Model(*CASES["awq"][:2])
    base = model.write(tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", CONFIG)
    weights = {key: torch.from_numpy(made.values) for key, made in model.linears.items()}
    weights |= {key: torch.from_numpy(values) for key, values in model.plain.items()}
    wanted = expected(CONFIG, weights, adapter)
    runner = llamarium.load(base, adapter=adapter, device="cpu").runner
    assert isinstance(runner, NativeRunner)
    assert {runner.weights[key].type_name for key in model.linears} == {"Q5_0"}
    np.testing.assert_allclose(logits(runner), wanted, rtol=0, atol=0.03 * np.abs(wanted).max())
