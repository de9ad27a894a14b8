"""The built-in model against transformers reading the same GGUF file, float32: layers, far positions, 64 tokens."""

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import pytest
import torch
import transformers

import llamarium
from llamarium.attention import CausalAttend

pytestmark = pytest.mark.torch

TEXT = "The cat sat on the mat, because the river bank was wet and the money in the bank was not.\nWhy? "


@pytest.fixture(scope="module")
def theirs(smollm2_path: Path) -> Any:
    """Takes transformers half a minute to unpack, half of which it would make one table of names 400 times."""
    transformers.logging.disable_progress_bar()
    with mock.patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)):
        return transformers.AutoModelForCausalLM.from_pretrained(
            smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
        ).eval()


@torch.no_grad()
def test_every_layer_and_the_logits(smollm2: llamarium.Llama, theirs: Any) -> None:
    ids = torch.tensor([smollm2.encode(TEXT)])
    positions = torch.arange(ids.shape[1]).unsqueeze(0) * 150  # to 4,000, with room between
    expected = theirs(ids, position_ids=positions, attention_mask=torch.ones_like(ids), output_hidden_states=True)
    model = smollm2.model.model
    x_BTD = model.embed_tokens(ids)
    rotary = model.rotary_emb(positions, x_BTD.dtype)
    for i, layer in enumerate(model.layers):
        assert _relative_error(x_BTD, expected.hidden_states[i]) < 1e-5, f"before layer {i}"
        x_BTD = layer(x_BTD, rotary, CausalAttend())
    assert _relative_error(model.norm(x_BTD), expected.hidden_states[-1]) < 1e-5
    # Float32 sums over a stream with values of a few hundred: logits of up to 40 agree to a few 1e-4.
    torch.testing.assert_close(smollm2.model(ids, positions), expected.logits, rtol=1e-4, atol=1e-3)


def _relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The residual stream of a trained model holds values of a few hundred; the error is measured against its size."""
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("prompt", ["Once upon a time", "def fibonacci(n):\n", "The capital of France is"])
@torch.no_grad()
def test_64_greedy_tokens(prompt: str, smollm2: llamarium.Llama, theirs: Any) -> None:
    """Each is what transformers finds most probable after those before it, so that its own answer is this one."""
    ids = smollm2.encode(prompt)
    (ours,) = smollm2.generate(prompt, temperature=0.0, max_new_tokens=64).completions
    logits = theirs(torch.tensor([[*ids, *ours.token_ids]])).logits[0, len(ids) - 1 : -1]
    assert list(ours.token_ids) == logits.argmax(-1).tolist()
    assert len(ours.token_ids) == 64 or ours.finish_reason == "stop"
