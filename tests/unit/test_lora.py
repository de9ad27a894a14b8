"""LoRA: what it computes, what it trains, where it goes, and that nothing goes past it."""

import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import llamarium
from llamarium.adapters.base_check import LINEARS_KEY, PROJECTION_KEY
from llamarium.adapters.config import ALL_PROJECTIONS, LoRAConfig
from llamarium.adapters.files import base_name, read_metadata
from llamarium.adapters.lora import LoRALinear, apply_lora, lora_linears, without_adapters
from llamarium.adapters.merge import merge_adapters
from llamarium.adapters.modules import ModuleBase, load_adapter
from llamarium.adapters.save import save_adapter
from llamarium.errors import CheckpointError, LlamariumError, ModelNotFoundError, TrainingError, UnsupportedFormatError
from llamarium.file_names import ADAPTER, ADAPTER_CONFIG
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.quant.ggml.linear import LinearGGML
from llamarium.quant.linears import quantize_linear
from llamarium.quant.nf4 import Linear4bit
from llamarium.quant.packed import LinearPacked
from llamarium.runtime.batch import Span, pack
from llamarium.runtime.native.runner import NativeRunner
from llamarium.train.data.bpe import train_bpe
from llamarium.train.objectives.base import head_weight
from llamarium.train.state.checkpoint import checkpoint_folder, point_at
from reference_tiles import pack_ggml, quantize
from swapping import quantize_linears

pytestmark = pytest.mark.torch

IDS = torch.tensor([[1, 5, 17, 200, 3, 255, 0, 42]])
CLOSE = {"rtol": 1.3e-6, "atol": 1e-5}
VARIANTS = {
    "lora": LoRAConfig(r=4, alpha=8),
    "rslora": LoRAConfig(r=4, alpha=8, use_rslora=True),
    "dora": LoRAConfig(r=4, alpha=8, use_dora=True),
}


def plain(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight)
    return linear


def half(weight: Tensor) -> nn.Linear:
    return plain(weight.bfloat16())


def exact(linear: LinearPacked) -> LinearPacked:
    """Tiles as training holds them: dequantized at each use."""
    linear.uses_kernels = False
    return linear


BASES: dict[str, Callable[[Tensor], nn.Module]] = {
    "plain": plain,
    "half": half,
    "NF4": Linear4bit.from_weight,
    "Q8_0": lambda weight: quantize_linear(weight, "Q8_0"),
    "Q4_1": lambda weight: quantize_linear(weight, "Q4_1"),
    "packed": lambda weight: exact(pack_ggml(quantize(weight, "Q4_0"), "Q4_0")),
    "GGML": lambda weight: LinearGGML(quantize(weight, "Q4_1"), "Q4_1"),
}


def base_weight(base: nn.Module) -> Tensor:
    return base.weight.detach().float() if isinstance(base, nn.Linear) else base.dequantize(torch.float32)


def make_model(seed: int = 3) -> LlamaForCausalLM:
    return init_weights(LlamaForCausalLM(preset("tiny")), seed=seed).eval()


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Give the adapters values as training would: B no longer zeros, m no longer the norms."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, linear in lora_linears(model):
            linear.lora_B.weight.normal_(0, 0.3, generator=generator)
            if linear.lora_magnitude_vector is not None:
                stretch = torch.empty(linear.out_features).uniform_(0.5, 1.5, generator=generator)
                linear.lora_magnitude_vector.mul_(stretch)


# --- one Linear -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", BASES)
def test_computes_and_learns_what_the_papers_say(kind: str, variant: str) -> None:
    torch.manual_seed(0)
    config, base = VARIANTS[variant], BASES[kind](torch.randn(48, 64) * 0.2)
    dtype = torch.bfloat16 if kind == "half" else torch.float32
    linear = LoRALinear(base, config, torch.Generator().manual_seed(0))
    x = torch.randn(2, 3, 64).to(dtype)
    weight = base_weight(base)
    loose = {"rtol": 0.02, "atol": 0.02} if kind == "half" else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(linear(x).float(), F.linear(x.float(), weight), **loose)  # it begins as the base
    assert linear.lora_A.weight.abs().max() <= 1 / 8 and linear.lora_A.weight.std() > 0.06

    randomize(linear)
    a, b = linear.lora_A.weight.detach().requires_grad_(), linear.lora_B.weight.detach().requires_grad_()
    scale = {"lora": 2.0, "rslora": 4.0, "dora": 2.0}[variant]
    changed = weight + scale * b @ a
    expected = F.linear(x.float(), changed)
    if variant == "dora":
        m = linear.lora_magnitude_vector.detach().requires_grad_()
        expected = expected * (m / changed.detach().norm(dim=1))
    found = linear(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, **loose)
    out = torch.randn_like(expected)
    expected.backward(out)
    found.backward(out.to(dtype))
    grads = {"rtol": 0.05, "atol": 0.3} if kind == "half" else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(linear.lora_A.weight.grad, a.grad, **grads)
    torch.testing.assert_close(linear.lora_B.weight.grad, b.grad, **grads)
    assert all(p.grad is None for p in base.parameters())
    merged = torch.cat([rows for _, _, rows in linear.merged_rows()])
    torch.testing.assert_close(F.linear(x.float(), merged), expected.detach(), **loose)
    if variant == "dora":
        torch.testing.assert_close(linear.lora_magnitude_vector.grad, m.grad, **grads)


def test_rows_are_unpacked_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = LoRALinear(Linear4bit.from_weight(torch.randn(48, 64)), VARIANTS["dora"], torch.Generator())
    ((_, _, whole),) = linear.merged_rows()
    monkeypatch.setattr("llamarium.adapters.lora._CHUNK_WEIGHTS", 64 * 10)
    asked: list[int] = []
    true = Linear4bit.dequantize_rows
    monkeypatch.setattr(
        Linear4bit, "dequantize_rows", lambda self, i, j, dtype: asked.append(j - i) or true(self, i, j, dtype)
    )
    assert torch.allclose(torch.cat([rows for _, _, rows in linear.merged_rows()]), whole, atol=1e-6)
    assert asked == [10, 10, 10, 10, 8]


def test_dropout_is_the_adapters_own_and_only_in_training() -> None:
    config = LoRAConfig(r=4, dropout=0.5)
    base = plain(torch.randn(8, 64)).eval()
    linear = LoRALinear(base, config, torch.Generator().manual_seed(0))
    assert not linear.lora_dropout.training, "an evaluated base gets evaluated adapters"
    randomize(linear)
    x = torch.randn(1, 64)
    assert torch.equal(linear(x), linear(x))
    linear.train()
    assert not torch.equal(linear(x), linear(x))
    linear.lora_B.weight.data.zero_()
    assert torch.equal(linear(x), base(x)), "the base sees all of x"


def test_under_autocast_and_with_bf16() -> None:
    linear = LoRALinear(plain(torch.randn(8, 64)), VARIANTS["dora"], torch.Generator().manual_seed(0))
    randomize(linear)
    x = torch.randn(2, 64)
    exact = linear(x)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = linear(x)
        rounded.float().sum().backward()
    torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.3)
    assert linear.lora_A.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("variant", ["lora", "rslora"])
def test_a_small_correction_is_not_rounded_away_under_autocast(variant: str) -> None:
    linear = LoRALinear(plain(torch.randn(8, 64)).bfloat16(), VARIANTS[variant], torch.Generator().manual_seed(0))
    x = torch.randn(5, 64)
    with torch.autocast("cpu", torch.bfloat16):
        before = linear(x)
        with torch.no_grad():
            linear.lora_B.weight.fill_(1e-4)  # below a rounding of most numbers of bfloat16
        after = linear(x)
        after.sum().backward()
    low = (x @ linear.lora_A.weight.T * linear.scale).sum(1, keepdim=True) * 1e-4
    assert after.dtype == torch.float32 and linear.lora_B.weight.grad.abs().min() > 0
    torch.testing.assert_close((after - before).detach(), low.expand(5, 8).detach(), rtol=0.05, atol=2e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 0), ("r", 1.5), ("r", True), ("alpha", 0), ("alpha", math.nan), ("alpha", math.inf), ("alpha", "x"),
        ("dropout", 1.0), ("dropout", -0.1), ("dropout", math.nan), ("use_dora", 1), ("use_rslora", None),
        ("target_modules", ()), ("target_modules", ""), ("target_modules", ["q_proj"]),
        ("rank_pattern", {"q_proj": 0}), ("alpha_pattern", {"q_proj": -1}), ("layers_to_transform", (True,)),
        ("target_modules", ("",)),
    ],
)  # fmt: skip
def test_ranges(field: str, value: Any) -> None:
    with pytest.raises(TrainingError, match=f"{field}.* is .*expected"):
        LoRAConfig(**{field: value})


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loss_sees_an_adapted_head_as_the_module_does(variant: str) -> None:
    model = LlamaForCausalLM(replace(preset("tiny"), tie_word_embeddings=True))
    init_weights(model, seed=3)
    apply_lora(model, replace(VARIANTS[variant], dropout=0.0, target_modules=("lm_head",)))
    randomize(model)
    head: Any = model.lm_head
    hidden = torch.randn(5, model.config.hidden_size)
    weights = torch.randn(5, model.config.vocab_size)

    grads = []
    for product in (head, lambda x: F.linear(x, head_weight(model))):
        model.zero_grad()
        logits = product(hidden)
        (logits * weights).sum().backward()
        found = [logits.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]
        grads.append([tensor.clone() for tensor in found])
    assert len(grads[0]) > 2
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)

    with without_adapters(model):
        torch.testing.assert_close(F.linear(hidden, head_weight(model)), head(hidden))


# --- a model ----------------------------------------------------------------------------------------------------------


def test_the_seven_projections_are_adapted_and_nothing_else_learns() -> None:
    model = make_model()
    before = model(IDS)
    assert apply_lora(model, LoRAConfig(r=2), seed=1) == sum(
        p.numel() for name, p in model.named_parameters() if "lora_" in name
    )
    names = [name for name, _ in lora_linears(model)]
    assert len(names) == 7 * model.config.num_hidden_layers
    assert {name.rpartition(".")[2] for name in names} == set(ALL_PROJECTIONS)
    assert all(p.requires_grad == ("lora_" in name) for name, p in model.named_parameters())
    assert torch.equal(model(IDS), before)
    again = make_model()
    apply_lora(again, LoRAConfig(r=2), seed=1)
    assert all(torch.equal(t, again.state_dict()[key]) for key, t in model.state_dict().items())
    other = make_model()
    apply_lora(other, LoRAConfig(r=2), seed=2)
    key = f"{names[0]}.lora_A.weight"
    assert not torch.equal(model.state_dict()[key], other.state_dict()[key])


def test_targets() -> None:
    def adapted(*targets: str, tied: bool = True) -> list[str]:
        model = LlamaForCausalLM(replace(preset("tiny"), tie_word_embeddings=tied))
        apply_lora(model, LoRAConfig(r=1, target_modules=targets if targets != ("all-linear",) else "all-linear"))
        return [name for name, _ in lora_linears(model)]

    assert adapted("layers.1.self_attn.q_proj", "mlp.up_proj") == [
        "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj",
    ]  # fmt: skip
    assert len(adapted("all-linear", tied=False)) == 14
    assert "lm_head" in adapted("lm_head", "q_proj", tied=False)
    assert "lm_head" in adapted("lm_head", "q_proj")
    with pytest.raises(TrainingError, match="q_proj"):  # a pattern that matches no full name
        apply_lora(LlamaForCausalLM(preset("tiny")), LoRAConfig(target_modules="q_proj"))
    with pytest.raises(
        TrainingError, match=r"no Linear or embedding called proj, c_attn; there are: embed_tokens, q_proj, .*, lm_head"
    ):
        adapted("q_proj", "proj", "c_attn")


def test_a_second_adapter_is_refused() -> None:
    model = make_model()
    apply_lora(model, LoRAConfig(r=1))
    with pytest.raises(TrainingError, match="already"):
        apply_lora(model, LoRAConfig(r=1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.no_grad()
def test_a_loaded_model_does_not_answer_past_its_adapters(model_files: Callable[..., Any], dtype: Any) -> None:
    """C reads the weights alone, so a model with adapters answers through its modules."""
    files, ids = model_files(), IDS[0].tolist()
    for weight in files.weights.values():  # such that every projection matters
        weight.fill_(1) if weight.ndim == 1 else weight.mul_(3)
    folder, batch = files.huggingface(), pack([Span(ids, 0, [0], num_logits=len(ids))])

    def distance(found: Tensor, expected: Tensor) -> float:
        return float((found - expected).norm() / expected.norm())

    for target in ALL_PROJECTIONS:
        llama = llamarium.load(folder, dtype=dtype, device="cpu")
        assert isinstance(llama.runner, NativeRunner)
        before = torch.from_numpy(llama.runner.run(batch, llama.runner.new_cache(1)))
        assert distance(before, llama.model(IDS)[0].float()) < 0.02
        apply_lora(llama.model, LoRAConfig(r=4, target_modules=(target,)))
        randomize(llama.model)
        with pytest.warns(UserWarning, match="PyTorch answers from now on"):
            runner = llama.runner
        after = torch.from_numpy(runner.run(batch, runner.new_cache(1)))
        assert distance(after, llama.model(IDS)[0].float()) < 0.02 and distance(after, before) > 0.1, target


def test_it_learns() -> None:
    model = make_model()
    quantize_linears(model, "nf4")
    apply_lora(model, LoRAConfig(r=4))
    frozen = {key: t.clone() for key, t in model.state_dict().items() if "lora_" not in key}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2)
    losses = []
    for _ in range(5):
        loss = F.cross_entropy(model(IDS[:, :-1]).flatten(0, 1), IDS[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    assert all(torch.equal(t, model.state_dict()[key]) for key, t in frozen.items())


# --- merging ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", [None, "nf4", "q8_0"])
@torch.no_grad()
def test_merged_equals_adapted(variant: str, method: Any) -> None:
    model = make_model()
    base = model(IDS)
    if method is not None:
        quantize_linears(model, method)
    apply_lora(model, replace(VARIANTS[variant], target_modules=("q_proj", "down_proj")))
    randomize(model)
    adapted = model(IDS)
    assert (adapted - base).abs().max() > 0.01
    merged = merge_adapters(model)
    torch.testing.assert_close(merged(IDS), adapted, rtol=1e-4, atol=1e-5)
    assert str(merged) == str(make_model()) and list(merged.state_dict()) == list(make_model().state_dict())
    assert not any(p.requires_grad for p in merged.parameters())
    assert merged.lm_head.weight is merged.model.embed_tokens.weight


@torch.no_grad()
def test_merging_unpacks_a_tied_gguf_head(model_files: Callable[..., Any]) -> None:
    model = llamarium.load(model_files().gguf_file("Q4_1"), dtype="float32", device="cpu", dequantize="use").model
    apply_lora(model, LoRAConfig(r=2))
    randomize(model)
    adapted = model(IDS)
    merged = merge_adapters(model)
    torch.testing.assert_close(merged(IDS), adapted, rtol=1e-4, atol=1e-5)
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    assert all(isinstance(p, nn.Parameter) for p in merged.parameters())
    assert not list(merged.buffers())


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    model = make_model()
    apply_lora(model, LoRAConfig(r=2, alpha=3, target_modules=("q_proj", "up_proj")))
    randomize(model)
    save_adapter(model, tmp_path / "adapter", base_model="org/base")
    return tmp_path / "adapter"


def change(adapter: Path, **fields: Any) -> None:
    path = adapter / ADAPTER_CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_saved_and_loaded(variant: str, tmp_path: Path) -> None:
    model = make_model()
    apply_lora(model, VARIANTS[variant])
    randomize(model)
    save_adapter(model, tmp_path / "a", base_model=None)
    again = make_model()
    config = load_adapter(again, tmp_path / "a")
    assert (config.r, config.alpha, config.scale_of("")) == (4, 8, VARIANTS[variant].scale_of(""))
    assert torch.equal(again(IDS), model(IDS))
    assert not any(p.requires_grad for p in again.parameters())
    trained = make_model()
    load_adapter(trained, tmp_path / "a", trainable=True)
    assert {n for n, p in trained.named_parameters() if p.requires_grad} == {
        n for n, p in trained.named_parameters() if "lora_" in n
    }
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [ADAPTER_CONFIG, ADAPTER]


def test_the_same_base_in_other_clothes(model_files: Callable[..., Any], tmp_path: Path) -> None:
    folder = model_files().huggingface()
    trained = llamarium.load(folder, quantize="nf4", device="cpu").model
    fingerprint = ModuleBase(trained).fingerprint()
    apply_lora(trained, LoRAConfig(r=2))
    assert ModuleBase(trained).fingerprint() == fingerprint
    save_adapter(trained, tmp_path / "a")
    for options in ({}, {"dtype": "float32"}, {"quantize": "q8_0"}):
        load_adapter(llamarium.load(folder, device="cpu", **options).model, tmp_path / "a")
    with pytest.warns(UserWarning, match="float16.*not checked"):
        load_adapter(llamarium.load(folder, device="cpu", dtype="float16").model, tmp_path / "a")


def test_another_base_is_refused(adapter: Path) -> None:
    with pytest.raises(CheckpointError, match=r"trained on another base.*org/base"):
        load_adapter(make_model(seed=4), adapter)
    load_adapter(make_model(seed=4), adapter, check_base=False)
    config = preset("tiny")
    wider = init_weights(LlamaForCausalLM(replace(config, intermediate_size=2 * config.intermediate_size)), seed=3)
    with pytest.raises(CheckpointError, match=r"up_proj.lora_B.weight has shape .*this base need"):
        load_adapter(wider, adapter)
    deeper = init_weights(LlamaForCausalLM(replace(config, num_hidden_layers=3)), seed=3)
    with pytest.raises(CheckpointError, match=r"missing: model.layers.2"):
        load_adapter(deeper, adapter)
    shallow = init_weights(LlamaForCausalLM(replace(config, num_hidden_layers=1)), seed=3)
    with pytest.raises(CheckpointError, match=r"not known: model.layers.1"):
        load_adapter(shallow, adapter)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("trained_in", [None, "NF4"])
@pytest.mark.parametrize("merged_in", [None, "Q8_0", "Q4_1"])
def test_a_base_that_contains_the_adapter_is_refused(
    variant: str, trained_in: Any, merged_in: Any, tmp_path: Path
) -> None:
    """Merged and loaded again, in whatever storage, the weights would move a second time."""
    base, trained = make_model(), make_model()
    if trained_in is not None:
        quantize_linears(trained, trained_in)
    apply_lora(trained, VARIANTS[variant])
    randomize(trained)
    save_adapter(trained, tmp_path, base_model="org/base")
    load_adapter(base, tmp_path)  # onto its own base, in another storage
    merge_adapters(base)
    if merged_in is not None:
        quantize_linears(base, merged_in)
    before = {key: value.clone() for key, value in base.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"contains this adapter already.*twice as far.*org/base"):
        load_adapter(base, tmp_path)
    after = base.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(after[key], value) for key, value in before.items())


def test_another_adapters_base_is_refused(tmp_path: Path, adapter: Path) -> None:
    """Norms and embedding are the base's own; the Linears are not."""
    model = make_model()
    apply_lora(model, LoRAConfig(r=2, alpha=3, target_modules=("down_proj",)))
    randomize(model)
    merge_adapters(model)
    with pytest.raises(CheckpointError, match=r"trained on another base.*org/base"):
        load_adapter(model, adapter)


def test_an_adapter_of_before_says_that_it_is_not_checked(tmp_path: Path, adapter: Path) -> None:
    tensors, metadata = load_file(adapter / ADAPTER), read_metadata(adapter)
    old = {key: value for key, value in metadata.items() if key not in (LINEARS_KEY, PROJECTION_KEY)}
    save_file(tensors, adapter / ADAPTER, old)
    with pytest.warns(UserWarning, match="a version that did not note the base's Linears"):
        load_adapter(make_model(), adapter)
    save_file(tensors, adapter / ADAPTER, {**metadata, LINEARS_KEY: "Linear4bit:00", PROJECTION_KEY: "none"})
    with pytest.warns(UserWarning, match="stored otherwise than in training"):
        load_adapter(make_model(), adapter)


@pytest.mark.parametrize(
    "fields",
    [
        {"invented_in_2031": "on\x1b", "another": 3},
        {"fan_in_fan_out": True, "invented_in_2031": 1},
    ],
)
def test_unknown_fields_are_reported_once(adapter: Path, fields: dict[str, Any]) -> None:
    expected = make_model()
    load_adapter(expected, adapter)
    change(adapter, **fields)
    model = make_model()
    with pytest.warns(UserWarning, match="invented_in_2031") as warned:
        load_adapter(model, adapter)
    assert len(warned) == 1 and torch.equal(model(IDS), expected(IDS))


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern"])
def test_a_pattern_that_backtracks_forever_is_refused_in_time(adapter: Path, field: str) -> None:
    pattern = r"(.|..)+[!?]"
    change(adapter, **{field: {pattern: 3} if field == "rank_pattern" else pattern})
    begin = time.process_time()
    with pytest.raises(CheckpointError, match="takes longer"):
        load_adapter(make_model(), adapter)
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    ("fields", "error", "word"),
    [
        ({"peft_type": "IA3"}, UnsupportedFormatError, "peft_type is 'IA3'"),
        ({"task_type": "SEQ_CLS"}, UnsupportedFormatError, "task_type is 'SEQ_CLS'"),
        ({"bias": "some"}, UnsupportedFormatError, "bias is 'some'"),
        ({"modules_to_save": ["lm_head"]}, CheckpointError, "missing: lm_head.weight"),
        ({"rank_pattern": {"q_proj": 3}}, CheckpointError, "q_proj.lora_A.weight has shape"),
        ({"rank_pattern": {"q_proj": 0}}, CheckpointError, "rank_pattern"),
        ({"rank_pattern": ["q_proj"]}, CheckpointError, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": "x"}}, CheckpointError, "alpha_pattern"),
        ({"rank_pattern": {"(": 4}}, CheckpointError, "pattern"),
        ({"layers_to_transform": [0]}, CheckpointError, "not known: model.layers.1"),
        ({"layers_to_transform": 0}, CheckpointError, "not known: model.layers.1"),
        ({"exclude_modules": ["q_proj"]}, CheckpointError, "not known: .*q_proj"),
        ({"trainable_token_indices": [0, 10**9]}, CheckpointError, "trainable_token_indices"),
        ({"trainable_token_indices": [1, 1]}, CheckpointError, "trainable_token_indices"),
        ({"trainable_token_indices": [0]}, CheckpointError, "missing: .*trainable_tokens_delta"),
        ({"lora_bias": True}, UnsupportedFormatError, "lora_bias"),
        ({"target_parameters": ["mlp.experts"]}, UnsupportedFormatError, "target_parameters"),
        ({"init_lora_weights": "pissa"}, UnsupportedFormatError, "pissa"),
        ({"target_modules": ".*q_proj"}, CheckpointError, "not known: model.layers.0"),
        ({"target_modules": "(q"}, CheckpointError, "pattern"),
        ({"target_modules": ["nothing"]}, CheckpointError, "target_modules match no module"),
        ({"target_modules": [1]}, CheckpointError, "target_modules"),
        ({"r": 0}, CheckpointError, "r is 0"),
        ({"r": None}, CheckpointError, "r is None"),
        ({"r": 3}, CheckpointError, "lora_A.weight has shape"),
        ({"lora_alpha": "x"}, CheckpointError, "alpha is 'x'"),
        ({"lora_alpha": 10**400}, CheckpointError, "expected a number above 0, at most 1e6"),
        ({"lora_alpha": 1e300}, CheckpointError, "expected a number above 0, at most 1e6"),
        ({"use_dora": True}, CheckpointError, "missing: .*lora_magnitude_vector"),
        ({"base_model_name_or_path": 3}, CheckpointError, "base_model_name_or_path is 3"),
    ],
)
def test_configs_that_are_refused(adapter: Path, fields: dict[str, Any], error: type[Exception], word: str) -> None:
    change(adapter, **fields)
    model = make_model()
    with pytest.raises(error, match=word) as found:
        load_adapter(model, adapter)
    assert str(adapter) in str(found.value)
    assert not any(lora_linears(model)), "a refused adapter leaves the model as it was"


def test_fields_that_are_off_do_no_harm(adapter: Path) -> None:
    change(adapter, invented_in_2031=None, another=False, third={}, eva_config=None, qalora_group_size=16)
    change(adapter, megatron_core="megatron.core", peft_version="0.99", revision="main", init_lora_weights="gaussian")
    load_adapter(make_model(), adapter)


def test_files_that_are_refused(adapter: Path, tmp_path: Path) -> None:
    for read in (base_name, partial(load_adapter, make_model())):
        with pytest.raises(ModelNotFoundError, match="no such folder"):
            read(tmp_path / "nothing")
    tensors = load_file(adapter / ADAPTER)
    key = next(iter(tensors))
    for changed, word in (
        ({**tensors, "base_model.model.lm_head.weight": torch.zeros(2)}, "lm_head.weight has shape"),
        ({**tensors, "base_model.model.lm_head.lora_A.weight": torch.zeros(2)}, "not known: lm_head.lora_A"),
        ({k: t for k, t in tensors.items() if k != key}, "missing"),
        ({**tensors, key: tensors[key].to(torch.int32)}, "I32"),
        ({**tensors, key: tensors[key] * math.nan}, "NaN"),
    ):
        save_file(changed, adapter / ADAPTER)
        model = make_model()
        with pytest.raises(CheckpointError, match=word):
            load_adapter(model, adapter)
        assert not any(lora_linears(model))
    for metadata in ({"llamarium_base": 5}, [1], "x"):
        header = json.dumps({"__metadata__": metadata}).encode()
        (adapter / ADAPTER).write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(CheckpointError, match=r"__metadata__ is .*; expected texts by name"):
            read_metadata(adapter)
    (adapter / ADAPTER).write_bytes(b"\x80\x04junk")
    with pytest.raises(CheckpointError, match="damaged"):
        load_adapter(make_model(), adapter)
    (adapter / ADAPTER).rename(adapter / "adapter_model.bin")
    with pytest.raises(LlamariumError, match=r"adapter_model\.bin"):
        load_adapter(make_model(), adapter)
    (adapter / "adapter_model.bin").unlink()
    with pytest.raises(ModelNotFoundError, match=re.escape(ADAPTER)):
        load_adapter(make_model(), adapter)
    (adapter / ADAPTER_CONFIG).unlink()
    with pytest.raises(ModelNotFoundError, match=f"has no {ADAPTER_CONFIG}$"):
        load_adapter(make_model(), adapter)


def test_a_runs_folder_is_told_from_its_adapters(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint_folder(tmp_path, step).mkdir()
    with pytest.raises(ModelNotFoundError, match=r"folder of a training run; name .*/step-00000002 \(the newest"):
        base_name(tmp_path)
    point_at(tmp_path, "best", 1)
    with pytest.raises(ModelNotFoundError, match=r"folder of a training run; name .*/best \(the lowest"):
        base_name(tmp_path)


def test_a_model_without_adapters_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="no LoRA adapters"):
        save_adapter(make_model(), tmp_path / "a")
    assert not (tmp_path / "a").exists()


# --- tables in a run --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("options", [{}, {"dora": True}, {"quantize": "NF4"}, {"precision": "bfloat16"}], ids=str)
def test_a_run_over_the_embedding_and_the_head_resumes_to_the_bit_and_is_what_it_saves(
    tied: bool, options: dict[str, Any], model_files: Callable[..., Any], tmp_path: Path
) -> None:
    base = model_files(dtype=torch.float32, vocab_size=280, tie_word_embeddings=tied).huggingface()
    train_bpe(["one two three " * 9], 259).save(base)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one", "completion": " two"}\n' * 12)
    settings: dict[str, Any] = {
        "model": str(base), "data": str(tmp_path / "rows.jsonl"), "target_modules": "embed_tokens,lm_head,q_proj",
        "context": 16, "batch_rows": 2, "validation": 0.0, "sample_every": 0, "chat_format": "none", "device": "cpu",
        "threads": 1, "learning_rate": 1e-2, "save_every": 2, "log_every": 1, "steps": 4, **options,
    }  # fmt: skip
    losses: list[float] = []
    whole = llamarium.finetune(
        tmp_path / "whole", **settings, watch=lambda event: losses.append(event["loss"]) if "loss" in event else None
    )
    assert losses[-1] < losses[0] - 0.05

    def stop(event: Any) -> None:
        if event["event"] == "saved":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llamarium.finetune(tmp_path / "parts", **settings, watch=stop)
    parts = llamarium.finetune(tmp_path / "parts", resume=True)
    one, other = (load_file(ending.checkpoint / ADAPTER) for ending in (whole, parts))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert any("lora_embedding_A" in key for key in one) and any("lm_head.lora_B" in key for key in one)
    further = {name: value for name, value in settings.items() if name not in ("target_modules", "dora")}
    ending = llamarium.finetune(tmp_path / "further", **further, adapter=str(whole.checkpoint))
    assert load_file(ending.checkpoint / ADAPTER).keys() == one.keys()
