"""The pieces of learning: the chunked loss, the optimizers, the schedule, the order of the data, and one step."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from llamarium.errors import TrainingError
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.train.data.batch import IGNORED, TrainingBatch
from llamarium.train.data.order import Cursor, Order, derived_seed
from llamarium.train.objectives import cross_entropy as loss_module
from llamarium.train.objectives.cross_entropy import cross_entropy_sum
from llamarium.train.optim import (
    make_optimizers,
    optimizer_tensors,
    restore_optimizers,
    schedule,
    set_learning_rate,
)
from llamarium.train.step import any_learned, bidirectional_trunk, checkpoint_layers, measure, train_step

pytestmark = pytest.mark.torch

TINY = replace(preset("tiny"), vocab_size=50, hidden_size=32, intermediate_size=64, head_dim=8)


def tiny(seed: int = 0, **changes) -> LlamaForCausalLM:
    return init_weights(LlamaForCausalLM(replace(TINY, initializer_range=0.1, **changes)), seed)


def batch_of(rows: int, length: int = 16, seed: int = 0, masked: float = 0.0) -> TrainingBatch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, TINY.vocab_size, (rows, length + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < masked] = IGNORED
    return TrainingBatch(ids[:, :-1], labels, torch.arange(length).expand(rows, length), None)


def rows_of(batch: TrainingBatch, rows: slice) -> TrainingBatch:
    return TrainingBatch(batch.ids_BT[rows], batch.labels_BT[rows], batch.positions_BT[rows], None)


def distance(before: Sequence[torch.Tensor], model: LlamaForCausalLM) -> float:
    moved = [(p.detach() - q).flatten() for p, q in zip(model.parameters(), before, strict=True)]
    return float(torch.cat(moved).norm())


def adamw(model: LlamaForCausalLM, **options):
    given = {"learning_rate": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), **options}
    return make_optimizers(model, given.pop("name", "adamw"), **given)


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [20, 50, 2**23])
def test_the_chunked_loss_and_its_gradients_are_cross_entropys(chunk, monkeypatch):
    monkeypatch.setattr(loss_module, "_CHUNK_LOGITS", 50 * chunk)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 17, 32, generator=generator, requires_grad=True)
    head = torch.randn(50, 32, generator=generator, requires_grad=True)
    labels = torch.randint(0, 50, (3, 17), generator=generator)
    labels[1, :9] = IGNORED
    (cross_entropy_sum(hidden, head, labels) / 42).backward()
    found = hidden.grad, head.grad
    hidden.grad = head.grad = None
    expected = F.cross_entropy((hidden @ head.T).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(cross_entropy_sum(hidden, head, labels), expected)
    (expected / 42).backward()
    torch.testing.assert_close(found, (hidden.grad, head.grad))


def test_weights_of_tokens_count_in_the_loss_and_in_both_gradients() -> None:
    """Against autograd in float64; 0 and 1 are among the weights, and one token has no label."""
    torch.manual_seed(3)
    hidden, head = torch.randn(2, 5, 8), torch.randn(11, 8)
    labels = torch.randint(0, 11, (2, 5))
    labels[0, 2] = IGNORED
    weights = torch.tensor([[1.0, 0.25, 9.0, 0.0, 2.0], [0.5, 3.0, 1.0, 0.1, 0.75]])

    own = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
    loss = cross_entropy_sum(*own, labels, weights)
    loss.backward()

    exact = [hidden.double().requires_grad_(), head.double().requires_grad_()]
    losses = F.cross_entropy(
        (exact[0] @ exact[1].T).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    expected = (losses * weights.flatten()).sum()
    expected.backward()

    torch.testing.assert_close(loss.double(), expected)
    for mine, theirs in zip(own, exact, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)


def test_logits_are_never_held_whole():
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor):
                    self.numel = max(self.numel, tensor.numel())
            return out

    hidden, head = torch.randn(2048, 4, requires_grad=True), torch.randn(128256, 4, requires_grad=True)
    with Largest() as largest:
        cross_entropy_sum(hidden, head, torch.randint(0, 128256, (2048,))).backward()
    assert largest.numel <= loss_module._CHUNK_LOGITS < hidden.shape[0] * head.shape[0] / 16


def test_rows_that_are_not_learned_go_through_no_product():
    products = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "mm" in func.__name__:
                products.append([tuple(a.shape) for a in args])
            return func(*args, **(kwargs or {}))

    hidden, head = torch.randn(2048, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    labels = torch.full((2048,), IGNORED)
    labels[::400] = 7
    with Products():
        cross_entropy_sum(hidden, head, labels).backward()
    assert len(products) == 3 and all(2048 not in shape for shapes in products for shape in shapes)
    assert hidden.grad is not None and torch.equal(hidden.grad.any(dim=1), labels == 7)


def test_a_loss_of_nothing_is_zero_and_gradients_can_be_had_once():
    hidden, head = torch.randn(4, 8, requires_grad=True), torch.randn(10, 8)
    loss = cross_entropy_sum(hidden, head, torch.full((4,), IGNORED))
    loss.backward(retain_graph=True)
    assert loss == 0 and not hidden.grad.any()
    with pytest.raises(RuntimeError, match="can be had once"):
        loss.backward()


# --- a step -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [(0, 4, 8), (0, 1, 8), (0, 2, 3, 8)])
def test_small_batches_equal_one_large_one(cut):
    """Also where they hold different numbers of learned tokens: a mean of means would not."""
    whole = batch_of(8, masked=0.4)
    whole.labels_BT[0] = IGNORED  # a row, and for one of the cuts a batch, of nothing
    large, small = tiny().double(), tiny().double()  # AdamW makes much of a float32's last bit near zero
    a = train_step(large, adamw(large), [whole])
    b = train_step(small, adamw(small), [rows_of(whole, slice(*pair)) for pair in itertools.pairwise(cut)])
    assert b.loss == pytest.approx(a.loss, rel=1e-6)
    assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
    assert a.num_tokens == b.num_tokens
    for p, q in zip(large.parameters(), small.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_gradients_that_are_not_finite_leave_the_weights_alone(poison):
    model = tiny()
    optimizers = adamw(model)
    train_step(model, optimizers, [batch_of(2)])
    kept = [p.detach().clone() for p in model.parameters()]
    hook = model.model.layers[1].mlp.register_forward_hook(lambda _module, _args, out: out * poison)
    found = train_step(model, optimizers, [batch_of(2)])
    hook.remove()
    assert not found.updated and not math.isfinite(found.grad_norm)
    assert all(torch.equal(p, q) for p, q in zip(kept, model.parameters(), strict=True))
    assert train_step(model, optimizers, [batch_of(2)]).updated


def test_a_step_without_labels_changes_nothing():
    model = tiny()
    kept = [p.detach().clone() for p in model.parameters()]
    found = train_step(model, adamw(model), [batch_of(2, masked=1.1)])
    assert not found.updated and found.grad_norm == 0 and math.isnan(found.loss)
    assert all(torch.equal(p, q) for p, q in zip(kept, model.parameters(), strict=True))


def test_clipping_bounds_the_step():
    small, large = tiny(), tiny()
    sgd = [[torch.optim.SGD(m.parameters(), lr=1.0)] for m in (small, large)]
    before = [p.detach().clone() for p in small.parameters()]
    norm = train_step(small, sgd[0], [batch_of(2)], max_grad_norm=0.01).grad_norm
    assert norm > 0.1
    assert distance(before, small) == pytest.approx(0.01, rel=1e-3)
    train_step(large, sgd[1], [batch_of(2)], max_grad_norm=0.0)
    assert distance(before, large) == pytest.approx(norm, rel=1e-3)


def test_forgotten_activations_give_the_same_step():
    plain, forgetful = tiny(), tiny()
    checkpoint_layers(forgetful)
    a, b = (train_step(m, adamw(m), [batch_of(4)]) for m in (plain, forgetful))
    assert a == b
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), forgetful.parameters(), strict=True))


def test_bfloat16_is_computed_in_and_float32_is_kept():
    model = tiny()
    exact = train_step(tiny(), adamw(tiny()), [batch_of(4)]).loss
    found = train_step(model, adamw(model), [batch_of(4)], precision="bfloat16")
    assert found.loss == pytest.approx(exact, rel=0.02) and found.loss != exact
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_both_optimizers_learn_and_a_tied_head_stays_tied():
    for name in ("adamw", "muon"):
        model = tiny()
        optimizers = adamw(model, name=name)
        losses = [train_step(model, optimizers, [batch_of(4)]).loss for _ in range(12)]
        assert losses[-1] < 0.7 * losses[0]
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_encoders_view_sees_what_it_predicts():
    model = tiny()
    batch = batch_of(2)
    changed = TrainingBatch(batch.ids_BT.clone(), batch.labels_BT, batch.positions_BT, None)
    changed.ids_BT[:, -1] = (changed.ids_BT[:, -1] + 1) % TINY.vocab_size
    a, b = bidirectional_trunk(model, batch), bidirectional_trunk(model, changed)
    assert (a[:, 0] - b[:, 0]).abs().max() > 1e-4


# --- optimizers and schedule ------------------------------------------------------------------------------------------


def test_every_trainable_parameter_is_in_one_group_and_vectors_do_not_decay():
    for name in ("adamw", "muon"):
        model = tiny(tie_word_embeddings=False)
        groups = [g for o in adamw(model, name=name) for g in o.param_groups]
        held = [id(p) for g in groups for p in g["params"]]
        assert sorted(held) == sorted({id(p) for p in model.parameters()})
        assert all(g["weight_decay"] == (0.1 if p.ndim == 2 else 0.0) for g in groups for p in g["params"])
    muon = adamw(tiny(), name="muon")[1]
    assert isinstance(muon, torch.optim.Muon)
    assert {tuple(p.shape) for g in muon.param_groups for p in g["params"]} == {(32, 32), (16, 32), (64, 32), (32, 64)}
    with pytest.raises(TrainingError, match="no parameter is trainable"):
        adamw(tiny().requires_grad_(False))


def test_an_optimizer_goes_on_where_it_was_to_the_bit():
    for name in ("adamw", "muon"):
        model = tiny()
        optimizers = adamw(model, name=name)
        train_step(model, optimizers, [batch_of(2)])
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        saved = {key: value.clone() for key, value in optimizer_tensors(model, optimizers).items()}
        train_step(model, optimizers, [batch_of(2, seed=1)])

        again = tiny(seed=5)
        again.load_state_dict(weights)
        fresh = adamw(again, name=name)
        restore_optimizers(again, fresh, saved)
        train_step(again, fresh, [batch_of(2, seed=1)])
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    with pytest.raises(TrainingError, match="belongs to no parameter"):
        restore_optimizers(again, fresh, {"exp_avg/model.nothing": torch.zeros(1)})


def test_schedules():
    def at(step: int, **options) -> float:
        return schedule(step, warmup_steps=10, num_steps=110, final_ratio=0.1, **options)

    for name in ("cosine", "linear", "wsd", "constant"):
        assert [at(s, name=name) for s in (0, 4, 9)] == [0.1, 0.5, 1.0]
        values = [at(s, name=name) for s in range(10, 110)]
        assert values == sorted(values, reverse=True)
        assert values[-1] == pytest.approx(1.0 if name == "constant" else 0.1)
    assert at(59, name="cosine") == pytest.approx(0.55) == at(59, name="linear")
    assert at(87, name="wsd") == 1.0 > at(88, name="wsd")
    optimizers = adamw(tiny(), name="muon", muon_learning_rate=0.5)
    set_learning_rate(optimizers, 0.5)
    assert [o.param_groups[0]["lr"] for o in optimizers] == [5e-3, 0.25]


def test_labels_are_looked_for_in_every_row():
    class Masked(Numbered):
        def batch(self, epoch: int, indices: Sequence[int]) -> TrainingBatch:
            labels = torch.tensor([[IGNORED, 7 if i == self.counts[0] - 1 and self.last else IGNORED] for i in indices])
            return TrainingBatch(labels.clamp(min=0), labels, torch.arange(2).expand(len(labels), 2), None)

        last = True

    rows = Masked(2001)
    assert any_learned(rows) is True
    rows.last = False
    assert any_learned(rows) is False


# --- the order --------------------------------------------------------------------------------------------------------


class Numbered:
    """Rows that are their own (epoch, index)."""

    fingerprint, context = "", 2

    def __init__(self, *counts: int) -> None:
        self.counts = counts

    def num_rows(self, epoch: int) -> int:
        return self.counts[epoch % len(self.counts)]

    def batch(self, epoch: int, indices: Sequence[int]) -> TrainingBatch:
        ids = torch.tensor([[epoch, i] for i in indices])
        return TrainingBatch(ids, ids, torch.arange(2).expand(len(ids), 2), None)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(4, 12), min_size=1, max_size=3), st.integers(1, 4), st.integers(0, 20), st.integers(0, 2**31)
)
def test_the_order_is_that_of_one_that_was_interrupted(counts, size, stop, seed):
    straight = Order(Numbered(*counts), seed)
    taken = [straight.take(size).ids_BT.tolist() for _ in range(25)]
    first = Order(Numbered(*counts), seed)
    begun = [first.take(size).ids_BT.tolist() for _ in range(stop)]
    resumed = Order(Numbered(*counts), seed, Cursor(first.cursor.epoch, first.cursor.index))
    assert begun + [resumed.take(size).ids_BT.tolist() for _ in range(25 - stop)] == taken
    seen = [tuple(row) for batch in taken for row in batch]
    assert len(set(seen)) == len(seen), "no row twice within an epoch"
    for epoch in {epoch for epoch, _ in seen if epoch < straight.cursor.epoch}:
        assert sum(e == epoch for e, _ in seen) == straight.rows.num_rows(epoch), "and none left out"


def test_epochs_differ_and_a_step_may_be_larger_than_one():
    order = Order(Numbered(64), 3)
    first, second = order.take(64).ids_BT[:, 1].tolist(), order.take(64).ids_BT[:, 1].tolist()
    assert sorted(first) == sorted(second) == list(range(64)) and first != second != sorted(second)
    few = Order(Numbered(3, 2), 0, Cursor(0, 1))
    assert few.take(6).ids_BT[:, 0].tolist() == [0, 0, 1, 1, 2, 2] and few.cursor == Cursor(2, 2)
    halves = [Order(Numbered(3, 2), 0, Cursor(0, 1), shard_idx=part, num_shards=2).take(6).ids_BT for part in range(2)]
    whole = Order(Numbered(3, 2), 0, Cursor(0, 1)).take(6).ids_BT
    assert sorted(torch.cat(halves).tolist()) == sorted(whole.tolist())
    with pytest.raises(TrainingError, match="the data has no row"):
        Order(Numbered(0), 0)


def test_draws_for_different_purposes_seeds_and_numbers_are_different():
    seeds = {derived_seed(what, seed, n) for what in ("order", "step") for seed in range(9) for n in range(9)}
    assert len(seeds) == 2 * 9 * 9 and all(0 <= seed < 2**63 for seed in seeds)
    assert derived_seed("order", 0, 1) == derived_seed("order", 0, 1)


def test_a_validation_is_of_all_rows_or_of_some_spread_evenly():
    class Random(Numbered):
        def batch(self, epoch: int, indices: Sequence[int]) -> TrainingBatch:
            parts = [batch_of(1, seed=100 * epoch + i) for i in indices]
            fields = [torch.cat([getattr(p, name) for p in parts]) for name in ("ids_BT", "labels_BT", "positions_BT")]
            return TrainingBatch(*fields, None)

    model, rows = tiny().train(), Random(10)
    with torch.no_grad():
        logits = model(rows.batch(0, range(10)).ids_BT)
    every = F.cross_entropy(logits.transpose(1, 2), rows.batch(0, range(10)).labels_BT, reduction="none").mean(dim=1)
    assert measure(model, rows, batch_rows=3).loss == pytest.approx(float(every.mean()), rel=1e-6)
    some = measure(model, rows, batch_rows=3, max_rows=4).loss
    assert some == pytest.approx(float(every[::3].mean()), rel=1e-6)
    assert model.training
