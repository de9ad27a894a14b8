"""The engine's vectors against transformers' hidden states of the same model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llamarium.engine.engine import Engine
from llamarium.engine.pooling import Pooling
from llamarium.engine.request import Request
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.sampling.params import SamplingParams
from native_models import native_runner

pytestmark = pytest.mark.torch

IDS = torch.randint(0, 512, (150,), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("kind", ["mean", "last"])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b"])
@torch.no_grad()
def test_vectors_equal_their_hidden_states(name: str, kind: Pooling, pair_of: Callable[[str], Any]) -> None:
    pair = pair_of(name)
    hidden = pair.theirs(IDS.unsqueeze(0), output_hidden_states=True).hidden_states[-1][0].double()
    expected = torch.nn.functional.normalize(hidden.mean(0) if kind == "mean" else hidden[-1], dim=0).float()
    for runner in (ModuleRunner(pair.ours), native_runner(pair.ours)):
        engine = Engine(runner, 10, chunk=40)
        engine.add(Request(IDS.tolist(), SamplingParams(max_tokens=1), pooling=kind))
        (event,) = engine.run()
        assert event.vector is not None
        torch.testing.assert_close(torch.from_numpy(event.vector), expected, rtol=1e-4, atol=1e-5)
