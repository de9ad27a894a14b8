"""The trace against what transformers shows of the same model: hidden states and attention patterns."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llamarium.inspect.score import score
from llamarium.inspect.trace import trace
from llamarium.runtime.module_runner import ModuleRunner

pytestmark = pytest.mark.torch

TOLERANCE = {"rtol": 1.3e-6, "atol": 1e-5}
IDS = torch.randint(0, 512, (23,), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b", "llama-2", "mqa"])
@torch.no_grad()
def test_trace_equals_theirs(name: str, pair_of: Callable[[str], Any]) -> None:
    pair = pair_of(name)
    pair.theirs.set_attn_implementation("eager")  # the only one that shows patterns
    theirs = pair.theirs(IDS.unsqueeze(0), output_hidden_states=True, output_attentions=True)
    pair.theirs.set_attn_implementation("sdpa")
    ours = trace(ModuleRunner(pair.ours), IDS)
    torch.testing.assert_close(ours["embed"], theirs.hidden_states[0][0], rtol=0, atol=0)
    for i, pattern in enumerate(theirs.attentions):
        torch.testing.assert_close(ours[f"layers.{i}.pattern"], pattern[0], **TOLERANCE)
    for i, hidden in enumerate(theirs.hidden_states[1:-1]):
        torch.testing.assert_close(ours[f"layers.{i}.resid"], hidden[0], **TOLERANCE)
    torch.testing.assert_close(ours["final_norm"], theirs.hidden_states[-1][0], **TOLERANCE)
    torch.testing.assert_close(ours["logits"], theirs.logits[0], **TOLERANCE)


@torch.no_grad()
def test_score_equals_their_loss(pair_of: Callable[[str], Any]) -> None:
    pair = pair_of("llama-3.2-3b")
    loss = pair.theirs(IDS.unsqueeze(0), labels=IDS.unsqueeze(0)).loss
    found = score(ModuleRunner(pair.ours), IDS)
    assert found.total_logprob == pytest.approx(-float(loss) * (len(IDS) - 1), rel=1e-5)
    assert found.perplexity == pytest.approx(float(loss.exp()), rel=1e-5)
