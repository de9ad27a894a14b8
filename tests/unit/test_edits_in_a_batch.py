"""Edits of some sequences of a batch: what edited modules compute, and nothing that the others would notice."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llamarium.errors import InputError
from llamarium.inspect.interventions.edits import edited
from llamarium.kernels.threads import computing_with
from llamarium.model import LlamaForCausalLM
from llamarium.runtime.batch import Span, pack
from llamarium.runtime.intervention import Edit, Part, edits_key
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.runtime.runner import Runner
from llamarium.runtime.taps import Taps
from native_models import build, native_runner

pytestmark = pytest.mark.torch

IDS = list(range(1, 40))
NUMBERS = np.random.default_rng(3)
VECTOR = NUMBERS.normal(0, 3, 96).astype(np.float32)
OF_A_HEAD = NUMBERS.normal(0, 3, 32).astype(np.float32)

EDITS: dict[str, tuple[Edit, ...]] = {
    "steer": (Edit("residual", 1, add=VECTOR),),
    "steer some": (Edit("residual", 0, None, (3, 38), add=VECTOR),),
    "nowhere and twice": (Edit("residual", 0, None, (), add=VECTOR), *[Edit("residual", 2, add=VECTOR / 2)] * 2),
    "head": (Edit("head", 1, 2, factor=0.0), Edit("head", 0, 0, factor=-0.5, add=OF_A_HEAD)),
    "mlp": (Edit("mlp", 0, factor=0.0), Edit("mlp", 2, factor=2.0, positions=(38,))),
    "attention": (Edit("attention", 1, factor=0.0, add=VECTOR),),
    "embed": (Edit("embed", factor=0.5, add=VECTOR),),
}


def logits(runner: Runner, edits: tuple[Edit, ...] = (), ids: list[int] = IDS) -> NDArray[np.float32]:
    cache = runner.new_cache(1)
    return runner.run(pack([Span(ids, 0, [0], edits=edits)]), cache)[0]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return build(None, torch.float32)


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_sequence_is_what_the_edited_model_answers(kernels: str, model: LlamaForCausalLM, name: str) -> None:
    plain = ModuleRunner(model)
    with edited(model, EDITS[name]) as other:
        expected = logits(ModuleRunner(other))
    for runner in (native_runner(model), plain):
        found = logits(runner, EDITS[name])
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-5 * float(expected.std()))
    assert np.abs(expected - logits(plain)).max() > 1e-2 * float(expected.std()), "an edit without effect shows nothing"


@pytest.mark.parametrize("name", EDITS)
def test_neighbours_keep_their_bits_and_so_does_the_edited_one(kernels: str, name: str) -> None:
    """Alone and between others, whole and in chunks, on one thread and on two."""
    runner = native_runner(build("Q4_0", torch.bfloat16))
    alone = [logits(runner, edits) for edits in ((), EDITS[name])]
    for num_threads in (1, 2):
        with computing_with(num_threads):
            together, last = side_by_side(runner, [(), EDITS[name], (), EDITS["steer"]])
        assert (together[:3] == np.stack([alone[0], alone[1], alone[0]])).all()
        assert (last == together).all()


def side_by_side(runner: Runner, own: list[tuple[Edit, ...]]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The last logits of sequences with such edits, run whole, and run half and then token by token."""
    cache, last = runner.new_cache(len(own)), np.empty(0, np.float32)
    together = runner.run(pack([Span(IDS, 0, [row], edits=edits) for row, edits in enumerate(own)]), cache)
    runner.run(pack([Span(IDS[:20], 0, [row], 0, edits=edits) for row, edits in enumerate(own)]), cache)
    for end in range(20, len(IDS)):
        last = runner.run(pack([Span([IDS[end]], end, [row], edits=edits) for row, edits in enumerate(own)]), cache)
    return together, last


@pytest.mark.parametrize("edit", [Edit("residual", 2, add=VECTOR * 0 + 1e20), Edit("residual", 0, factor=1e20)])
def test_a_stream_whose_squares_float32_does_not_hold_has_no_logits(
    kernels: str, model: LlamaForCausalLM, edit: Edit
) -> None:
    """Its norm would be 0, and every token as probable as any other."""
    runners: list[Runner] = [native_runner(model), ModuleRunner(model)]
    with edited(model, [edit]) as other:
        assert np.isnan(logits(ModuleRunner(other))).all()
    for runner in runners:
        together, _ = side_by_side(runner, [(), (edit,), ()])
        assert np.isnan(together[1]).all()
        np.testing.assert_allclose(
            together[[0, 2]], [logits(runner)] * 2, rtol=0, atol=0 if runner.is_row_exact else 1e-5
        )
        with np.errstate(all="ignore"):
            read = runner.read_stream(np.stack([VECTOR, VECTOR * 0 + np.float32(1e20)]))
        assert np.isfinite(read[0]).all() and np.isnan(read[1]).all()


def test_taps_hand_out_what_was_edited(model: LlamaForCausalLM) -> None:
    parts: tuple[Part, ...] = ("embed", "attention", "head", "mlp", "residual")
    for name, part in zip(("embed", "attn_out", "head_out", "mlp_out", "resid"), parts, strict=True):
        layer, head = None if part == "embed" else 1, 2 if part == "head" else None
        edit = Edit(part, layer, head, factor=0.0, add=OF_A_HEAD if part == "head" else VECTOR)
        for runner in (native_runner(model), ModuleRunner(model)):
            taps = Taps([(name, layer)])
            runner.run(pack([Span(IDS, 0, [0], edits=(edit,))]), runner.new_cache(1), taps)
            found = taps.kept[name, layer][0]
            np.testing.assert_array_equal(found[:, 2] if part == "head" else found, np.tile(edit.add, (len(IDS), 1)))


def test_a_part_that_there_is_not_is_refused_by_c(model: LlamaForCausalLM) -> None:
    runner = native_runner(model)
    for edit in (Edit("mlp", 3, factor=0.0), Edit("head", 0, 4, factor=0.0), Edit("mlp", -1)):
        with pytest.raises(InputError, match="edit"):
            logits(runner, (edit,))


def test_a_key_is_of_all_that_an_edit_changes() -> None:
    edits = [
        Edit("mlp", 1), Edit("mlp", 2), Edit("head", 1, 0), Edit("head", 1, 1), Edit("mlp", 1, positions=(1,)),
        Edit("mlp", 1, factor=0.0), Edit("mlp", 1, add=VECTOR), Edit("mlp", 1, add=VECTOR + 1),
    ]  # fmt: skip
    alone = {edits_key((edit,)) for edit in edits}
    assert len(alone) == len(edits) and edits_key((edits[0], edits[1])) not in alone
    assert edits_key((Edit("mlp", 1, add=torch.from_numpy(VECTOR.copy())),)) == edits_key((edits[6],))
