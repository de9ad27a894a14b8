"""Edits and patches against transformers' model with forward hooks that do the same."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from llamarium.inspect.interventions.edits import Edit, ablate, edited, scale
from llamarium.inspect.interventions.patching import PatchGrid, PatchPart

pytestmark = pytest.mark.torch

IDS, OTHER = [5, 77, 300, 12, 9, 451], [5, 301, 300, 12, 40, 451]
VECTOR = torch.linspace(-1, 1, 256)
TOLERANCE = {"rtol": 1.3e-6, "atol": 1e-5}


def whole(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Their attention returns a tuple."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


@contextmanager
def hooked(module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Generator[None]:
    handle = module.register_forward_hook(lambda _, args, output: whole(output, change))
    try:
        yield
    finally:
        handle.remove()


def no_head(heads: torch.Tensor) -> torch.Tensor:
    """Zero head 3, of eight of 64, in what goes into `o_proj`."""
    heads = heads.clone()
    heads[..., 3 * 64 : 4 * 64] = 0
    return heads


def at(positions: list[int], change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def changed(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[:, positions] = change(x[:, positions])
        return x

    return changed


CASES: dict[str, tuple[Edit, str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "attention": (ablate("attention", layer=1), "layers.1.self_attn", torch.zeros_like),
    "half an MLP": (scale("mlp", 0.5, layer=2), "layers.2.mlp", lambda x: x * 0.5),
    "MLP at a token": (ablate("mlp", layer=0, positions=[3]), "layers.0.mlp", at([3], torch.zeros_like)),
    "stream": (Edit("residual", 1, add=VECTOR), "layers.1", lambda x: x + VECTOR),
    "stream at tokens": (scale("residual", 2.0, layer=0, positions=[1, 4]), "layers.0", at([1, 4], lambda x: x * 2)),
    "embedding": (ablate("embed", positions=[2]), "embed_tokens", at([2], torch.zeros_like)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_edits(case: str, pair_of: Callable[[str], Any]) -> None:
    pair, (edit, name, change) = pair_of("llama-3.2-1b"), CASES[case]
    ids = torch.tensor([IDS])
    with edited(pair.ours, [edit]) as model, hooked(pair.theirs.model.get_submodule(name), change):
        ours, theirs = model(ids), pair.theirs(ids).logits
    torch.testing.assert_close(ours, theirs, **TOLERANCE)
    assert (ours - pair.ours(ids)).abs().max() > 0.01, "the edit shows"


@torch.no_grad()
def test_a_head_is_its_columns(pair_of: Callable[[str], Any]) -> None:
    pair, ids = pair_of("llama-3.2-1b"), torch.tensor([IDS])
    o_proj = pair.theirs.model.layers[1].self_attn.o_proj
    handle = o_proj.register_forward_pre_hook(lambda _, args: (no_head(args[0]),))
    try:
        theirs = pair.theirs(ids).logits
    finally:
        handle.remove()
    with edited(pair.ours, [ablate("head", layer=1, head=3)]) as model:
        torch.testing.assert_close(model(ids), theirs, **TOLERANCE)


@pytest.mark.parametrize(("part", "name"), [("residual", ""), ("attention", ".self_attn"), ("mlp", ".mlp")])
@torch.no_grad()
def test_patches(part: PatchPart, name: str, pair_of: Callable[[str], Any]) -> None:
    pair, base, source = pair_of("llama-3.2-1b"), torch.tensor([IDS]), torch.tensor([OTHER])
    grid = PatchGrid(pair.ours, IDS, OTHER, 7, against_id=8, part=part)
    seen: list[torch.Tensor] = []
    for cell in grid.cells():
        module = pair.theirs.model.get_submodule(f"layers.{cell.layer}{name}")
        with hooked(module, lambda x: seen.append(x.clone()) or x):
            pair.theirs(source)

        def put(x: torch.Tensor, position: int = cell.position) -> torch.Tensor:
            x = x.clone()
            x[:, position] = seen[-1][:, position]
            return x

        with hooked(module, put):
            logits = pair.theirs(base).logits[0, -1]
        assert cell.logit == pytest.approx(float(logits[7] - logits[8]), abs=2e-5)
        assert cell.probability == pytest.approx(float(logits.softmax(-1)[7]), rel=1e-4)
    assert cell.done == cell.total == 3 * 6
