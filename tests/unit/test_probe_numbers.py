"""Neurons, RoPE in plain numbers, and one step of learning, on a tiny model."""

import copy
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from llamarium.config import RopeScaling
from llamarium.errors import InputError, LlamariumError, MemoryBudgetError
from llamarium.inspect.probes.learning import learn, lesson_bytes
from llamarium.inspect.probes.neurons import top_neurons
from llamarium.inspect.probes.rope import rope_pairs, score_by_distance
from llamarium.inspect.trace import Trace, trace
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.quant.base import QuantizedLinear
from llamarium.runtime.module_runner import ModuleRunner
from swapping import quantize_linears

pytestmark = pytest.mark.torch

SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
CONFIG = replace(
    preset("tiny"), num_hidden_layers=3, vocab_size=200, initializer_range=0.2, rope_scaling=SCALING,
    max_position_embeddings=131072, tie_word_embeddings=True,
)  # fmt: skip
IDS = [7, 3, 150, 3, 42, 199]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return init_weights(LlamaForCausalLM(CONFIG), seed=0).requires_grad_(False)


@pytest.fixture(scope="module")
def seen(model: LlamaForCausalLM) -> Trace:
    return trace(ModuleRunner(model), IDS)


# --- neurons ----------------------------------------------------------------------------------------------------------


def test_the_neurons_that_fire_most(model: LlamaForCausalLM, seen: Trace) -> None:
    found = top_neurons(CONFIG, seen, -2, position=-3, k=5)
    assert (found.layer, found.position, found.positions) == (1, 3, tuple(range(6)))
    products = seen["layers.1.gated"]
    assert [n.index for n in found.neurons] == products[3].abs().topk(5).indices.tolist()
    assert any(n.gated < 0 for n in top_neurons(CONFIG, seen, 1, k=CONFIG.intermediate_size).neurons)
    for n in found.neurons:
        assert n.act == pytest.approx(n.gate / (1 + math.exp(-n.gate)), rel=1e-5)
        assert n.gated == pytest.approx(n.act * n.up, rel=1e-6)
        assert n.by_token == pytest.approx(products[:, n.index].tolist()) and n.by_token[3] == n.gated
    assert json.loads(json.dumps(found.to_dict()))["neurons"][0]["index"] == found.neurons[0].index


def test_what_a_trace_has_of_the_neurons(model: LlamaForCausalLM, seen: Trace) -> None:
    part = seen.select(positions=[4, 1])
    found = top_neurons(CONFIG, part, 0, position=1, k=2)
    assert found.positions == (4, 1) and found.neurons[0].by_token[1] == found.neurons[0].gated
    with pytest.raises(InputError, match=r"position is 0; this trace holds \[4, 1\]"):
        top_neurons(CONFIG, part, 0, position=0)
    with pytest.raises(InputError, match=r"lacks layers\.0\.up"):
        top_neurons(CONFIG, seen.select(names=["gate", "act", "gated"]), 0)
    with pytest.raises(InputError, match="k is 0"):
        top_neurons(CONFIG, seen, 0, k=0)


# --- RoPE -------------------------------------------------------------------------------------------------------------


def test_pairs_are_the_published_frequencies() -> None:
    plain, pairs = rope_pairs(replace(CONFIG, rope_scaling=None), 10), rope_pairs(CONFIG, 10)
    half = CONFIG.head_dim // 2
    for i, (pair, other) in enumerate(zip(pairs, plain, strict=True)):
        assert other.frequency == pytest.approx(CONFIG.rope_theta ** (-2 * i / CONFIG.head_dim), rel=1e-6)
        assert pair.index == i and pair.unscaled == other.frequency == other.unscaled
        assert pair.angle == pytest.approx(10 * pair.frequency, rel=1e-6)
        assert pair.turns == pytest.approx(131072 * pair.frequency / (2 * math.pi))
        if pair.wavelength < 64 / 4:
            assert pair.frequency == pair.unscaled
        if 2 * math.pi / pair.unscaled > 64:
            assert pair.frequency == pytest.approx(pair.unscaled / 8)
    assert len(pairs) == half and pairs[0].frequency == 1 and pairs[-1].frequency < plain[-1].frequency
    assert rope_pairs(CONFIG, 131071)[0].angle == 131071
    with pytest.raises(InputError, match=r"expected some within 0\.\.131071"):
        rope_pairs(CONFIG, 131072)


def test_a_score_hangs_on_the_distance_alone(seen: Trace) -> None:
    q, k = seen["layers.2.q"][5, 2], seen["layers.2.k"][1, 1]
    scores = score_by_distance(CONFIG, q, k, [0, 4, 131071])
    assert scores[1] == pytest.approx(float(seen["layers.2.scores"][2, 5, 1]), rel=1e-4)
    assert scores[0] == pytest.approx(float(q @ k) / CONFIG.head_dim**0.5, rel=1e-5)
    angles = torch.tensor([pair.frequency for pair in rope_pairs(CONFIG)]).double() * 131071
    a, b = (torch.complex(*x.double().chunk(2)) for x in (q, k))
    far = (a * torch.polar(torch.ones_like(angles), angles) * b.conj()).real.sum() / CONFIG.head_dim**0.5
    assert scores[2] == pytest.approx(float(far), abs=0.02)  # angles in float32
    with pytest.raises(InputError, match=r"expected \(32,\) each"):
        score_by_distance(CONFIG, q[:3], k, [0])
    with pytest.raises(InputError, match="positions are"):
        score_by_distance(CONFIG, q, k, [-1])


# --- learning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_step_on_a_copy(model: LlamaForCausalLM, optimizer: Any) -> None:
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = learn(model, IDS, optimizer=optimizer, learning_rate=1e-3, k=3)
    assert all(torch.equal(p, before[name]) and not p.requires_grad for name, p in model.named_parameters())
    pupil = LlamaForCausalLM(CONFIG)
    pupil.load_state_dict(model.state_dict())
    pupil.tie_weights()
    ids = torch.tensor([IDS])
    losses = F.cross_entropy(pupil(ids)[0, :-1], ids[0, 1:], reduction="none")
    losses.mean().backward()
    losses = losses.detach()
    assert found.losses == pytest.approx(losses.tolist(), rel=1e-5) and found.loss == pytest.approx(
        float(losses.mean())
    )
    assert found.row_ids == (7, 3, 150, 42, 199)
    torch.testing.assert_close(found.row_gradients_RD, pupil.model.embed_tokens.weight.grad[list(found.row_ids)])
    squares = sum(float(p.grad.double().square().sum()) for p in pupil.parameters())
    assert found.gradient_norm == pytest.approx(squares**0.5, rel=1e-5)
    rule = torch.optim.SGD if optimizer == "SGD" else torch.optim.AdamW
    options = {} if optimizer == "SGD" else {"weight_decay": 0.0}
    rule(pupil.parameters(), lr=1e-3, **options).step()
    logits = pupil(ids)[0]
    after = F.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
    assert found.losses_after == pytest.approx(after.tolist(), rel=1e-4)
    assert sum(found.losses_after) < sum(found.losses)
    assert [c.token_id for c in found.after] == logits[-1].topk(3).indices.tolist()
    assert [c.token_id for c in found.before] == model(ids)[0, -1].topk(3).indices.tolist()
    moved = (pupil.model.embed_tokens.weight - model.model.embed_tokens.weight)[list(found.row_ids)].norm(dim=-1)
    assert found.row_moves == pytest.approx(moved.tolist(), rel=1e-4) and min(found.row_moves) > 0
    assert found.num_unpacked == 0
    names = [(one.name, one.layer) for one in found.parts]
    layers = [(name, layer) for layer in range(CONFIG.num_hidden_layers) for name in ("attention", "MLP", "norms")]
    assert names == [("embedding", None), *layers, ("norms", None)]  # the head is tied
    with torch.no_grad():
        weights = [(name, p) for name, p in pupil.named_parameters() if "layers.1.self_attn." in name]
        gradients = torch.cat([p.grad.flatten() for _, p in weights])
        moves = torch.cat([(p - before[name]).flatten() for name, p in weights])
    part = found.parts[names.index(("attention", 1))]
    assert part.gradient == pytest.approx(gradients.norm().item(), rel=1e-5)
    assert part.moved == pytest.approx(moves.norm().item(), rel=1e-4)
    assert sum(one.gradient**2 for one in found.parts) == pytest.approx(squares, rel=1e-5)
    assert json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize("type_name", ["NF4", "Q4_1"])
def test_a_model_with_packed_weights_learns_as_a_copy_that_is_unpacked(type_name: str) -> None:
    packed = init_weights(LlamaForCausalLM(CONFIG), seed=0).requires_grad_(False)
    quantize_linears(packed, type_name)
    plain = LlamaForCausalLM(CONFIG)
    means = {f"{n}.weight": m.dequantize() for n, m in packed.named_modules() if isinstance(m, QuantizedLinear)}
    plain.load_state_dict({**dict(packed.named_parameters()), **means}, strict=False)
    plain.tie_weights()
    found, expected = learn(packed, IDS, unpack=True), learn(plain.requires_grad_(False), IDS)
    assert (found.num_unpacked, expected.num_unpacked) == (21, 0)
    assert found.losses == expected.losses and found.losses_after == expected.losses_after
    assert torch.equal(found.row_gradients_RD, expected.row_gradients_RD)
    assert sum(isinstance(m, QuantizedLinear) for m in packed.modules()) == 21


def test_a_step_that_would_need_too_much_is_refused_before_anything_is_copied(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = lesson_bytes(CONFIG, len(IDS), "SGD")
    parameters = sum(p.numel() for p in model.parameters())
    moments = 2 * 4 * CONFIG.vocab_size * CONFIG.hidden_size  # of the largest parameter alone
    assert 8 * parameters < needed == lesson_bytes(CONFIG, len(IDS), "AdamW") - moments
    monkeypatch.setattr(copy, "deepcopy", lambda _: pytest.fail("copied"))
    with pytest.raises(MemoryBudgetError, match=r"needs about .* the budget is 1 MB"):
        learn(model, IDS, budget_mb=1)


def test_what_cannot_be_learned_is_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(InputError, match="one token has no loss"):
        learn(model, [3])
    with pytest.raises(InputError, match="learning_rate is 0"):
        learn(model, IDS, learning_rate=0)
    with pytest.raises(LlamariumError, match="optimizer is 'Adam'"):
        learn(model, IDS, optimizer="Adam")  # pyright: ignore[reportArgumentType]
    packed = init_weights(LlamaForCausalLM(CONFIG), seed=0)
    quantize_linears(packed, "NF4")
    with pytest.raises(InputError, match=r'21 modules have packed weights .* dtype="float32".* unpack=True'):
        learn(packed, IDS)
