"""What is written, read by others: transformers, the gguf package and llama.cpp."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from llamarium.weights.huggingface import HuggingFaceCheckpoint
from llamarium.weights.load import LoadOptions, load_model
from llamarium.weights.save import save_model


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b", "llama-3.2-3b", "llama-2", "mqa"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 10**6])
@torch.no_grad()
def test_a_saved_folder_gives_the_same_logits_in_transformers(
    name: str, max_shard_bytes: int, pair_of: Callable[[str], Any], tmp_path: Path
) -> None:
    ours = pair_of(name).ours
    save_model(ours, tmp_path, max_shard_bytes=max_shard_bytes)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.dtype == torch.float32
    ids = torch.arange(24).view(2, 12) * 17 % ours.config.vocab_size
    torch.testing.assert_close(theirs(ids).logits, pair_of(name).theirs(ids).logits, rtol=0, atol=0)
    again, _ = load_model(HuggingFaceCheckpoint(tmp_path), LoadOptions())
    assert again.config == ours.config
    torch.testing.assert_close(again(ids), ours(ids), rtol=0, atol=0)
