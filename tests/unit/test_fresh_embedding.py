"""The table as initialisation draws it: `init_weights`' own, to the bit, a piece at a time."""

from dataclasses import replace

import pytest
import torch

from llamarium.model import LlamaForCausalLM
from llamarium.model.init import FreshEmbedding, init_weights
from llamarium.presets import preset

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("vocab_size", [50, 8193, 20001])
@pytest.mark.parametrize("tied", [True, False])
def test_rows_are_those_of_a_new_model(vocab_size: int, tied: bool) -> None:
    config = replace(
        preset("tiny"), vocab_size=vocab_size, hidden_size=12, intermediate_size=20, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=1, head_dim=4, tie_word_embeddings=tied,
    )  # fmt: skip
    expected_VD = init_weights(LlamaForCausalLM(config), seed=7).model.embed_tokens.weight.detach()
    fresh = FreshEmbedding(config, seed=7)
    assert torch.equal(fresh(torch.arange(vocab_size)), expected_VD)
    ids = torch.tensor([[vocab_size - 1, 0], [3, vocab_size // 2]])
    assert torch.equal(fresh(ids), expected_VD[ids])
    assert not torch.equal(FreshEmbedding(config, seed=8)(ids), expected_VD[ids])
