"""Norms, rotations and gates of a training step in C, held to float64 and to the model's own methods."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from functorch.compile import default_partition, nop
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.nn.modules.module import register_module_forward_hook

from closeness import reference_of, roundings
from llamarium.adapters.config import LoRAConfig
from llamarium.attention import CausalAttend, TrainingAttend
from llamarium.config import ModelConfig
from llamarium.kernels import cpu_training, native, structs
from llamarium.model import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    Rotary,
)
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.runtime.batch import Span, pack
from llamarium.runtime.native.runner import NativeRunner
from llamarium.train.objectives.logprobs import token_logprobs
from llamarium.train.step import checkpoint_layers, compute_layer, computing_in
from native_models import build, weights_of
from strong_adapters import UNTIED, adapted, low_rank_of

pytestmark = [pytest.mark.torch, pytest.mark.skipif(native.library() is None, reason="no kernels")]
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
Tensors = tuple[Tensor, ...]
CONFIG: ModelConfig = preset("tiny")


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = FLOAT32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(2 * torch.randn(*shape, generator=generator)).to(dtype) for shape in shapes]


def with_gradients(f: Callable[..., Tensor], *given: Tensor) -> Tensors:
    """The result, and the gradients of all but the last of `given`, which is the result's."""
    leaves = [x.detach().clone().requires_grad_() for x in given[:-1]]
    out = f(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, given[-1].to(out.dtype))


def nth(i: int, f: Callable[..., Tensor], *given: Tensor) -> Tensor:
    return with_gradients(f, *given)[i]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def gate(x: Tensor, up: Tensor) -> Tensor:
    return x * x.sigmoid() * up


def turn(x: Tensor, rotary: Rotary) -> Tensor:
    return Rotary(rotary.cos_BT1H.to(x.dtype), rotary.sin_BT1H.to(x.dtype)).rotate(x)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("shape", [(1, 1, 16), (2, 37, 48), (3, 70, 400)])
def test_norms_and_gradients_are_float64s(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = drawn(shape, shape[-1:], shape)
    given[-1] = given[-1].to(dtype)
    with torch.autocast("cpu", dtype) if dtype == BFLOAT16 else nullcontext():
        found = with_gradients(partial(cpu_training.rms_norm, eps=1e-5), *given)
    assert found[0].dtype == dtype and {x.dtype for x in found[1:]} == {FLOAT32}
    for i in range(3):
        assert roundings(found[i], reference_of(partial(nth, i, norm), *given, dtype=dtype if i == 0 else FLOAT32)) < 3


def test_a_norms_factor_is_rounded_once() -> None:
    """All numbers share it, so that its error is no noise: scores of attention square it."""
    (x,) = drawn((200, 2048))
    x *= torch.logspace(-2, 2, 200)[:, None]
    x[:, 0] = 1  # which becomes the factor
    factors = cpu_training.rms_norm(x, torch.ones(2048), 1e-5)[:, 0]
    assert torch.equal(factors, (1 / (x.double().square().mean(-1) + CONFIG.rms_norm_eps).sqrt()).float())


@pytest.mark.parametrize(
    "config", [None, LoRAConfig(r=5, use_rslora=True), LoRAConfig(use_dora=True)], ids=["plain", "rslora", "dora"]
)
def test_as_a_pass_training_has_the_bits_of_one(kernels: str, config: LoRAConfig | None) -> None:
    """Of a prompt that runs at once, and of tokens behind it that run one by one, over more than one KV chunk."""
    base, tokens, prompt = build(None, config=UNTIED), 290, 270
    model = base if config is None else adapted(config, seed=1)
    adapters = [] if config is None else [low_rank_of(model)]
    runner = NativeRunner(UNTIED, weights_of(base), adapters, default_adapter=len(adapters) - 1)
    ids_BT = torch.randint(300, (2, tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), computing_in(model.device, "float32", as_pass=True):
        found = model.logits(model.model(ids_BT, torch.arange(tokens)[None], TrainingAttend()))
    for row, ids in enumerate(ids_BT.tolist()):
        cache, blocks = runner.new_cache(10), list(range(10))
        spans = [Span(ids[:prompt], 0, blocks, prompt)]
        spans += [Span([ids[place]], place, blocks) for place in range(prompt, tokens)]
        logits = np.concatenate([runner.run(pack([span]), cache) for span in spans])
        assert torch.equal(found[row], torch.from_numpy(logits))


@pytest.mark.parametrize("shape", [(1, 1, 16), (3, 70, 400)])
def test_norms_of_bfloat16_round_where_the_modules_do(shape: tuple[int, ...]) -> None:
    given = drawn(shape, shape[-1:], shape, dtype=BFLOAT16)
    found = with_gradients(partial(cpu_training.rms_norm, eps=1e-5), *given)
    own = LlamaRMSNorm(shape[-1], 1e-5).bfloat16()
    with torch.no_grad():
        own.weight.copy_(given[1])
    torch.testing.assert_close(found[0], own(given[0]), rtol=0.01, atol=0)  # the sum of squares has another order
    assert (found[0] == own(given[0])).float().mean() > 0.98
    for i in range(3):
        assert found[i].dtype == BFLOAT16
        assert roundings(found[i], reference_of(partial(nth, i, norm), *given, dtype=BFLOAT16)) < 3


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("shape", [(1, 16), (3, 70, 400)])
def test_gates_and_gradients_are_float64s(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = drawn(shape, shape, shape, dtype=dtype)
    found = with_gradients(cpu_training.swiglu, *given)
    for i in range(3):
        assert found[i].dtype == dtype
        assert roundings(found[i], reference_of(partial(nth, i, gate), *given, dtype=dtype)) < 3


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("shape", [(1, 5, 1, 32), (2, 50, 3, 64)])
@pytest.mark.parametrize("apart", [False, True])
def test_rotations_and_gradients_are_float64s(shape: tuple[int, ...], apart: bool, dtype: torch.dtype) -> None:
    """With positions for each row, and with one row of them for all."""
    given, (angles,) = drawn(shape, shape, dtype=dtype), drawn((shape[0] if apart else 1, shape[1], 1, shape[3] // 2))
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    rotary = Rotary(torch.cat((angles, angles), -1).cos(), sin)
    found = with_gradients(partial(cpu_training.rotate, cos=rotary.cos_BT1H, sin=rotary.sin_BT1H), *given)
    for i in range(2):
        assert found[i].dtype == dtype
        assert roundings(found[i], reference_of(partial(nth, i, partial(turn, rotary=rotary)), *given, dtype=dtype)) < 3


def every_result() -> Iterator[Tensor]:
    for shape in ((1, 33, 2, 32), (2, 300, 4, 64)):
        wide = (*shape[:2], shape[2] * shape[3])
        x, weight, grad, up = drawn(wide, wide[-1:], wide, wide)
        yield from with_gradients(partial(cpu_training.rms_norm, eps=1e-5), x, weight, grad)
        yield from with_gradients(cpu_training.swiglu, x, up, grad)
        cos, sin = drawn((1, shape[1], 1, shape[3]), (1, shape[1], 1, shape[3]))
        yield from with_gradients(partial(cpu_training.rotate, cos=cos, sin=sin), *drawn(shape, shape))


def test_every_number_of_threads_and_every_run_gives_the_same_bits() -> None:
    before, found = torch.get_num_threads(), list[list[Tensor]]()
    try:
        for threads in (1, 2, 3, 4, 2):
            torch.set_num_threads(threads)
            found.append(list(every_result()))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_what_is_not_a_number_is_seen() -> None:
    x, up, weight = torch.zeros(3, 16), torch.ones(3, 16), torch.ones(16)
    x[1, 3] = torch.nan
    assert cpu_training.rms_norm(x, weight, 1e-5).isnan().sum() == 16
    assert cpu_training.swiglu(x, up).isnan().sum() == 1


def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is computed in C from now on: the numbers of the operations."""
    found: list[int] = []
    compute = native.compute_pointwise

    def note(call: structs.CPointwise) -> None:
        found.append(call.op)
        compute(call)

    monkeypatch.setattr(native, "compute_pointwise", note)
    return found


def step(model: LlamaForCausalLM, precision: str) -> Tensor:
    model.zero_grad()
    ids = torch.arange(20).view(2, 10)
    with computing_in(torch.device("cpu"), precision):  # pyright: ignore[reportArgumentType]
        out = model(ids, attend=TrainingAttend())
    out.float().square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_models_gradients_are_those_of_its_modules(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = init_weights(LlamaForCausalLM(CONFIG), 0)
    found = calls(monkeypatch)
    ours = step(model, precision)
    layers = CONFIG.num_hidden_layers
    assert [found.count(op) for op in range(6)] == [2 * layers + 1] * 2 + [layers] * 2 + [2 * layers] * 2
    monkeypatch.setattr(cpu_training, "Replaced", nullcontext)
    theirs = step(model, precision)
    assert float((ours - theirs).norm() / theirs.norm()) < (1e-5 if precision == "float32" else 2e-2)


def layers_gradients(
    layer: LlamaDecoderLayer, x: Tensor, grad: Tensor, rotary: Rotary, attend: CausalAttend
) -> Tensors:
    layer.zero_grad()
    leaf = x.detach().clone().requires_grad_()
    out = layer(leaf, rotary, attend)
    out.backward(grad)
    return out.detach(), *(p.grad for p in (leaf, *layer.parameters()) if p.grad is not None)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_layers_output_and_gradients_are_float64s(
    packed: bool, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 within three roundings; in bfloat16 as near as the modules, which round as often."""
    layer = init_weights(LlamaForCausalLM(CONFIG), 0).model.layers[0]
    assert isinstance(layer, LlamaDecoderLayer)
    x, grad = drawn((2, 40, CONFIG.hidden_size), (2, 40, CONFIG.hidden_size))
    rotary = LlamaRotaryEmbedding(CONFIG)(torch.arange(80).view(2, 40)[: 1 + packed], FLOAT32)
    how: dict[str, Any] = (
        {"segments_BT": torch.tensor([[0] * 30 + [1] * 10] * 2), "bidirectional": True} if packed else {}
    )
    found = calls(monkeypatch)
    with computing_in(torch.device("cpu"), precision):
        ours = layers_gradients(layer, x, grad, rotary, TrainingAttend(**how))
    assert len(found) == 10
    layer.mlp.up_proj.requires_grad_(False)  # the modules compute, as in a frozen reference
    with computing_in(torch.device("cpu"), precision):
        assert torch.equal(layer(x, rotary, TrainingAttend(**how)), ours[0])
    layer.mlp.up_proj.requires_grad_(True)
    layer.mlp.act_fn.register_forward_hook(lambda *_: None)  # a part is watched: the modules compute
    with computing_in(torch.device("cpu"), precision):
        modules = layers_gradients(layer, x, grad, rotary, TrainingAttend(**how))
    exact = Rotary(rotary.cos_BT1H.double(), rotary.sin_BT1H.double())
    expected = layers_gradients(layer.double(), x.double(), grad.double(), exact, CausalAttend(**how))
    assert len(ours) == len(modules) == len(expected) == 11
    for a, b, reference in zip(ours, modules, expected, strict=True):
        error, theirs = (float((each - reference).norm() / reference.norm()) for each in (a, b))
        assert a.dtype == FLOAT32 and error < (1e-6 if precision == "float32" else 1.2 * theirs + 1e-4)


WATCHED = ["hook", "forward", "method", "patch", "global"]
CHANGED = ["frozen", "bias", "class", "attend", "rotary", "width", "pass"]


class OtherRotary(Rotary):
    """A caller's own, which may rotate otherwise."""


@pytest.mark.parametrize("change", [*WATCHED, *CHANGED])
def test_a_layer_that_is_changed_or_watched_is_its_modules(
    change: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    config = replace(CONFIG, intermediate_size=40) if change == "width" else CONFIG
    layer, (x,) = init_weights(LlamaForCausalLM(config), 0).model.layers[0], drawn((1, 8, CONFIG.hidden_size))
    assert isinstance(layer, LlamaDecoderLayer)
    rotary, attend = LlamaRotaryEmbedding(config)(torch.arange(8).view(1, 8), FLOAT32), TrainingAttend()
    if change == "hook":
        layer.self_attn.q_proj.register_forward_hook(lambda *_: None)
    elif change == "forward":
        layer.mlp.forward = lambda x_BTD: 0 * x_BTD
    elif change == "method":
        monkeypatch.setattr(layer.self_attn, "project", partial(LlamaAttention.project, layer.self_attn))
    elif change == "patch":
        project = LlamaMLP.project
        monkeypatch.setattr(LlamaMLP, "project", lambda mlp, x_BTD: project(mlp, 2 * x_BTD))
    elif change == "global":
        request.addfinalizer(register_module_forward_hook(lambda *_: None).remove)
    elif change == "rotary":
        rotary = OtherRotary(rotary.cos_BT1H, rotary.sin_BT1H)
    elif change == "frozen":
        layer.mlp.up_proj.requires_grad_(False)
    elif change == "bias":
        layer.mlp.up_proj.bias = torch.nn.Parameter(torch.ones(CONFIG.intermediate_size))
    elif change == "class":
        layer.mlp.set_submodule("act_fn", torch.nn.GELU())
    elif change == "attend":
        attend = CausalAttend()
    assert (compute_layer(layer, x, rotary, attend) is NotImplemented) == (change != "pass")
    found = calls(monkeypatch)
    with computing_in(torch.device("cpu"), "float32", as_pass=change == "pass"):
        out = layer(x, rotary, attend)
    assert {0, 4} <= {*found}, "the modules' own norms and rotations are in C"
    torch.testing.assert_close(out, layer(x, rotary, attend), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", [0.5, 1e9])
def test_clipping_is_pytorchs_with_the_same_bits_for_every_number_of_threads(norm: float) -> None:
    before, found = torch.get_num_threads(), list[Tensors]()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            weights = [torch.nn.Parameter(x) for x in drawn((300, 700), (7,), (65536,), (1,))]
            for weight in weights:
                weight.grad = weight.detach().clone()
            total = cpu_training.clip_grad_norm(weights, norm)
            found.append((torch.tensor(total), *(w.grad for w in weights if w.grad is not None)))
    finally:
        torch.set_num_threads(before)
    for weight in weights:
        weight.grad = weight.detach().double().float()
    expected = torch.nn.utils.clip_grad_norm_(weights, norm)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    for a, b in zip(found[0], (expected, *(w.grad for w in weights)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=0, check_dtype=False)


def test_a_norm_that_is_not_finite_leaves_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.ones(4, 3))
    weight.grad = torch.tensor([[1.0, torch.inf, 2.0]] * 4)
    assert cpu_training.clip_grad_norm([weight], 1.0) == torch.inf and weight.grad[0, 0] == 1
    weight.grad = torch.full((4, 3), 1e20)  # whose squares, which AdamW keeps, float32 does not hold
    assert cpu_training.clip_grad_norm([weight], torch.inf) == torch.inf and weight.grad[0, 0] == 1e20
    monkeypatch.setattr(native, "clip", pytest.fail)
    weight.grad = torch.ones(3, 4).T  # not contiguous: PyTorch's
    assert cpu_training.clip_grad_norm([weight], 1.0) == pytest.approx(12**0.5)


@pytest.mark.parametrize("change", ["hook", "forward", "class"])
def test_an_activation_that_is_watched_or_changed_is_called(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, seen = LlamaMLP(CONFIG), list[int]()

    def note(*_: object) -> None:
        seen.append(1)

    def relu(x: Tensor) -> Tensor:
        note()
        return x.relu()

    if change == "hook":
        mlp.act_fn.register_forward_hook(note)
    elif change == "forward":
        mlp.act_fn.forward = relu
    else:
        mlp.set_submodule("act_fn", torch.nn.GELU())
    found = calls(monkeypatch)
    x = torch.randn(1, 3, CONFIG.hidden_size)
    with computing_in(torch.device("cpu"), "float32"):
        out = mlp(x)
    torch.testing.assert_close(out, mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)))
    assert not found and (change == "class" or len(seen) == 2)


@pytest.mark.parametrize("change", ["kernels", "shape", "dtype", "device"])
def test_what_the_kernels_do_not_take_is_the_modules(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    width, dtype = 24 if change == "shape" else 32, torch.float64 if change == "dtype" else FLOAT32
    if change == "kernels":
        monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "compute_pointwise", pytest.fail)
    device = "meta" if change == "device" else "cpu"
    (x,) = drawn((1, 4, 2, width), dtype=dtype)
    x = x.to(device)
    own = LlamaRMSNorm(width, 1e-5).to(x)
    cos = torch.ones(1, 4, 1, width, device=device, dtype=dtype)
    with computing_in(torch.device("cpu"), "float32"):
        for out in (own(x), Rotary(cos, cos).rotate(x), LlamaMLP(CONFIG).gated(x, x)):
            assert out.shape == x.shape and out.dtype == dtype


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_shapes_that_broadcast_are_the_modules(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight (1,), an up (1, F), x (T, N, H), sines of fewer rows than cosines: C would read beyond them."""
    monkeypatch.setattr(native, "compute_pointwise", pytest.fail)
    x, weight, up, angles = drawn((2, 4, 2, 32), (1,), (1, 32), (2, 4, 1, 32), dtype=dtype)
    norm, mlp = LlamaRMSNorm(1, 1e-5).to(dtype), LlamaMLP(CONFIG)
    norm.load_state_dict({"weight": weight})

    def found() -> Tensors:
        rotated = Rotary(angles, angles[:1]).rotate(x), Rotary(angles[0], angles[0]).rotate(x[0])
        return norm(x), mlp.gated(x, up), *rotated, Rotary(angles[:1], angles[:1]).rotate(x[0])

    with computing_in(torch.device("cpu"), "float32"):
        inside = found()
    assert all(torch.equal(a, b) for a, b in zip(inside, found(), strict=True))


def test_angles_of_another_shape_are_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "compute_pointwise", pytest.fail)
    (x,) = drawn((2, 4, 2, 32))
    one = torch.ones(1, 1, 1, 1)
    with computing_in(torch.device("cpu"), "float32"):
        assert torch.equal(Rotary(one, 0 * one).rotate(x), x)
    assert LlamaRotaryEmbedding(CONFIG)


def test_a_compiled_step_computes_checkpoints_again() -> None:
    """The compiler is to recompute a layer's seven products, and the logits of log-probabilities."""
    model, products = init_weights(LlamaForCausalLM(replace(CONFIG, num_hidden_layers=1)), 0), list[Any]()
    checkpoint_layers(model)

    def partition(joint: torch.fx.GraphModule, inputs: object, **options: Any) -> Any:
        products.extend(n for n in joint.graph.nodes if n.target == torch.ops.aten.mm.default and "recompute" in n.meta)
        return default_partition(joint, inputs, **options)

    def loss(ids: Tensor) -> Tensor:
        hidden = model.model(ids, torch.arange(10).view(1, 10), TrainingAttend())
        return token_logprobs(hidden[0], model.lm_head.weight, ids[0]).sum()

    backend = aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=partition)
    torch.compile(loss, backend=backend)(torch.arange(10).view(1, 10)).backward()
    assert [node.meta["recompute"].name for node in products] == ["PREFER_RECOMPUTE"] * 8


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_a_checkpoint_computes_again_is_in_c_too(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, forgetful = (init_weights(LlamaForCausalLM(CONFIG), 0) for _ in range(2))
    checkpoint_layers(forgetful)
    plain = step(model, precision)
    found = calls(monkeypatch)
    assert torch.equal(step(forgetful, precision), plain)
    layers = CONFIG.num_hidden_layers
    assert [found.count(op) for op in range(6)] == [
        4 * layers + 1, 2 * layers + 1, 2 * layers, layers, 4 * layers, 2 * layers,
    ]  # fmt: skip
