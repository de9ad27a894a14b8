"""Fifty steps beside transformers' Llama from the same weights and data, in float32: losses, gradients, weights."""

from dataclasses import replace

import pytest
import torch
import transformers

from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.train.batch import IGNORED, Batch
from llamarium.train.optim import make_optimizers
from llamarium.train.step import train_step

STEPS = 50


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(STEPS):
        ids = torch.randint(0, 97, (4, 33), generator=generator)
        ids[:, ::2] = 5  # something to learn
        labels = ids[:, 1:].clone()
        labels[0, :20] = IGNORED
        made.append(Batch(ids[:, :-1].contiguous(), labels, torch.arange(32).expand(4, 32), None))
    return made


@pytest.mark.parametrize("tied", [True, False])
def test_fifty_steps_beside_transformers(tied: bool) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 160, "head_dim": 16, "num_attention_heads": 4}
    config = replace(preset("tiny"), vocab_size=97, num_hidden_layers=2, tie_word_embeddings=tied, **shape)
    ours = init_weights(LlamaForCausalLM(config), 0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config.to_hf(), attn_implementation="sdpa"))
    theirs.load_state_dict(ours.state_dict())
    optimizers = make_optimizers(ours, "adamw", learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    matrices = [p for p in theirs.parameters() if p.ndim >= 2]
    vectors = [p for p in theirs.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), foreach=False)

    losses = []
    for batch in batches():
        loss = theirs(input_ids=batch.ids_BT, labels=batch.labels_BT, shift_labels=batch.labels_BT).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        found = train_step(ours, optimizers, [batch])
        assert found.loss == pytest.approx(float(loss.detach()), rel=1e-5)
        assert found.grad_norm == pytest.approx(float(norm), rel=1e-4)
        losses.append(found.loss)
        reference.step()
        reference.zero_grad()
    assert losses[-1] < 0.7 * losses[0]
    expected = theirs.state_dict()
    for key, value in ours.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=2e-5)


def test_the_first_gradients_are_transformers() -> None:
    config = replace(preset("tiny"), vocab_size=97)
    ours = init_weights(LlamaForCausalLM(config), 1)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config.to_hf(), attn_implementation="eager"))
    theirs.load_state_dict(ours.state_dict())
    batch = batches()[0]
    theirs(input_ids=batch.ids_BT, labels=batch.labels_BT, shift_labels=batch.labels_BT).loss.backward()
    kept: dict[str, torch.Tensor] = {}
    stop = torch.optim.SGD(ours.parameters(), lr=0.0)
    stop.register_step_pre_hook(lambda *_: kept.update({k: p.grad.clone() for k, p in ours.named_parameters()}))
    train_step(ours, [stop], [batch], clip=0.0)
    expected = dict(theirs.named_parameters())
    for key, gradient in kept.items():
        scale = float(expected[key].grad.abs().max())
        torch.testing.assert_close(gradient, expected[key].grad, rtol=1e-5, atol=1e-5 * scale)
