"""Adapters against `peft`: what one writes the other reads, and both compute the same logits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import llamarium
from llamarium.train.adapters import CONFIG, load_adapter, save_adapter
from llamarium.train.lora import LoRAConfig, apply_lora, lora_linears
from llamarium.train.merge import merge_adapters

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)  # peft's use of transformers

IDS = torch.tensor([[1, 5, 17, 200, 3, 255, 0, 42], [9, 8, 7, 6, 5, 4, 3, 2]])
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
TARGETS = ("q_proj", "v_proj", "o_proj", "mlp.up_proj", "layers.1.mlp.down_proj")
VARIANTS: dict[str, dict[str, bool]] = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}


@pytest.fixture
def base(model_files: Callable[..., Any]) -> Path:
    return model_files(dtype=torch.float32).huggingface()


def theirs(base: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


def randomize(tensors: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in tensors:
            if "lora_B" in name:
                tensor.normal_(0, 0.3, generator=generator)
            elif "magnitude" in name:
                tensor.mul_(torch.empty_like(tensor).uniform_(0.5, 1.5, generator=generator))


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_ours_in_peft(variant: str, base: Path, tmp_path: Path) -> None:
    model = llamarium.load(base, device="cpu").model
    before = model(IDS)
    apply_lora(model, LoRAConfig(r=4, alpha=8, target_modules=TARGETS, **VARIANTS[variant]))
    randomize(model.named_parameters())
    save_adapter(model, tmp_path / "a", base_model=str(base))
    found = peft.PeftModel.from_pretrained(theirs(base), tmp_path / "a").eval()
    torch.testing.assert_close(found(IDS).logits, model(IDS), **CLOSE)
    assert (model(IDS) - before).abs().max() > 0.01
    merged = found.merge_and_unload()
    torch.testing.assert_close(merge_adapters(model)(IDS), merged(IDS).logits, **CLOSE)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("targets", ["named", "all-linear"])
@torch.no_grad()
def test_pefts_in_ours(variant: str, targets: str, base: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.1,
        target_modules=targets if targets == "all-linear" else list(TARGETS),
        task_type="CAUSAL_LM",
        **VARIANTS[variant],
    )
    wrapped = peft.get_peft_model(theirs(base), config).eval()
    randomize(wrapped.named_parameters())
    wrapped.save_pretrained(tmp_path / "a")
    model = llamarium.load(base, device="cpu").model
    load_adapter(model, tmp_path / "a")
    assert sum(1 for _ in lora_linears(model)) == (14 if targets == "all-linear" else 9)
    torch.testing.assert_close(model(IDS), wrapped(IDS).logits, **CLOSE)
    save_adapter(model, tmp_path / "b", base_model=str(base))
    left, right = (json.loads((tmp_path / name / CONFIG).read_text()) for name in "ab")
    assert {key: value for key, value in right.items() if key != "target_modules"}.items() <= left.items()
    assert sorted(left["target_modules"]) == sorted(right["target_modules"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_pefts(variant: str, base: Path, tmp_path: Path) -> None:
    model = llamarium.load(base, device="cpu").model
    apply_lora(model, LoRAConfig(r=4, alpha=8, target_modules=TARGETS, **VARIANTS[variant]))
    randomize(model.named_parameters())
    save_adapter(model, tmp_path / "a")
    other = peft.PeftModel.from_pretrained(theirs(base), tmp_path / "a", is_trainable=True)
    weights = torch.randn(2, 8, 256, generator=torch.Generator().manual_seed(1))
    (model(IDS) * weights).sum().backward()
    (other(IDS).logits * weights).sum().backward()
    grads = {name: p.grad for name, p in other.named_parameters() if p.requires_grad}
    ours = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert len(ours) == len(grads) > 0
    for name, grad in ours.items():
        key = "base_model.model." + name.replace(".weight", ".default.weight")
        if name.endswith("lora_magnitude_vector"):
            key = f"base_model.model.{name}.default.weight"
        torch.testing.assert_close(grad, grads[key], rtol=1e-4, atol=1e-4)


def test_a_begins_as_pefts_does(base: Path) -> None:
    wrapped = peft.get_peft_model(theirs(base), peft.LoraConfig(r=64, target_modules=["q_proj"]))
    model = llamarium.load(base, device="cpu").model
    apply_lora(model, LoRAConfig(r=64, target_modules=("q_proj",)))
    name = "model.layers.0.self_attn.q_proj"
    ours = model.get_submodule(name).lora_A.weight
    other = wrapped.get_submodule(f"base_model.model.{name}").lora_A["default"].weight
    assert ours.abs().max().item() == pytest.approx(other.abs().max().item(), rel=1e-2)
    assert ours.std().item() == pytest.approx(other.std().item(), rel=3e-2)


def test_pissa_is_refused(base: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa")
    peft.get_peft_model(theirs(base), config).save_pretrained(tmp_path / "a")
    with pytest.raises(llamarium.errors.UnsupportedFormatError, match="pissa"):
        load_adapter(llamarium.load(base, device="cpu").model, tmp_path / "a")
