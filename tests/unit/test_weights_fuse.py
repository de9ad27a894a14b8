"""Joined projections: the same numbers, and never stale, whatever is done to the Linears afterwards."""

import copy
from collections.abc import Callable

import pytest
import torch

from llamarium.inspect.trace import trace
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.runtime import fuse
from llamarium.runtime.fuse import JoinedAttention, JoinedMLP, join_projections

TOKEN = torch.tensor([[7]])


def models(dtype: torch.dtype = torch.float32) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """The same model, separate and joined."""
    made = [init_weights(LlamaForCausalLM(preset("tiny")), seed=3).to(dtype).requires_grad_(False) for _ in range(2)]
    assert join_projections(made[1]) == 4
    return made[0], made[1]


@pytest.fixture
def joined_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the products that went through a joined matrix."""
    calls: list[int] = []
    true = fuse.Joined.__call__
    monkeypatch.setattr(fuse.Joined, "__call__", lambda self, x: calls.append(1) or true(self, x))
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_joined_equals_separate(dtype: torch.dtype, joined_calls: list[int]) -> None:
    separate, joined = models(dtype)
    tolerance = {"rtol": 1.3e-6, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.016, "atol": 1e-2}
    torch.testing.assert_close(joined(TOKEN), separate(TOKEN), **tolerance)
    assert len(joined_calls) == 4, "q, k, v and gate, up of two layers"
    several = torch.tensor([[1, 2, 3]])
    assert torch.equal(joined(several), separate(several))
    assert len(joined_calls) == 4, "several tokens go through the Linears"


def test_keys_tree_and_memory_stay() -> None:
    separate, joined = models()
    assert str(joined) == str(separate)
    assert list(joined.state_dict()) == list(separate.state_dict())
    for key, weight in joined.state_dict().items():
        assert torch.equal(weight, separate.state_dict()[key])
    attention = joined.model.layers[0].self_attn
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()


def replace_linear(model: LlamaForCausalLM) -> None:
    old = model.model.layers[0].self_attn.v_proj
    new = torch.nn.Linear(old.in_features, old.out_features, bias=False)
    new.weight = torch.nn.Parameter(old.weight * 2, requires_grad=False)
    model.model.layers[0].self_attn.v_proj = new


def replace_weight(model: LlamaForCausalLM) -> None:
    up = model.model.layers[1].mlp.up_proj
    up.weight = torch.nn.Parameter(up.weight * 2, requires_grad=False)


def edit_in_place(model: LlamaForCausalLM) -> None:
    model.model.layers[1].mlp.gate_proj.weight.mul_(2)


def cast(model: LlamaForCausalLM) -> None:
    model.double()


def load_other_weights(model: LlamaForCausalLM) -> None:
    model.load_state_dict(init_weights(LlamaForCausalLM(preset("tiny")), seed=4).state_dict())


@pytest.mark.parametrize("change", [replace_linear, replace_weight, edit_in_place, cast, load_other_weights])
@torch.no_grad()
def test_nothing_goes_stale(change: Callable[[LlamaForCausalLM], None]) -> None:
    separate, joined = models()
    joined = copy.deepcopy(joined) if change is edit_in_place else joined
    before = joined(TOKEN)
    change(separate)
    change(joined)
    torch.testing.assert_close(joined(TOKEN), separate(TOKEN), rtol=1.3e-6, atol=1e-5)
    assert change is cast or not torch.allclose(joined(TOKEN), before)


def test_gradients_go_through_the_linears(joined_calls: list[int]) -> None:
    _, joined = models()
    joined.requires_grad_(True)
    joined(TOKEN).sum().backward()
    assert joined.model.layers[0].self_attn.q_proj.weight.grad is not None
    assert not joined_calls


def test_a_trace_sees_the_linears() -> None:
    separate, joined = models()
    for ids in ([7], [1, 2, 3]):
        ours, expected = trace(joined, ids), trace(separate, ids)
        assert list(ours) == list(expected)
        assert all(torch.equal(ours[key], expected[key]) for key in ours)


def test_what_is_large_or_quantized_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from llamarium.quant.swap import quantize_linears

    model = init_weights(LlamaForCausalLM(preset("tiny")), seed=3)
    quantize_linears(model, "Q8_0")
    assert join_projections(model) == 0
    monkeypatch.setattr(fuse, "_MAX_WEIGHTS", 2 * 128 * 128)  # q, k and v have as many, gate and up more
    model = init_weights(LlamaForCausalLM(preset("tiny")), seed=3)
    assert join_projections(model) == 2
    assert isinstance(model.model.layers[0].self_attn, JoinedAttention)
    assert not isinstance(model.model.layers[0].mlp, JoinedMLP)


@torch.no_grad()
def test_hooks_on_the_linears_run() -> None:
    _, joined = models()
    seen: list[int] = []
    joined.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *_: seen.append(1))
    joined(TOKEN)
    assert seen == [1]
