"""Edits, experiments and patch grids on a tiny model: exact where nothing is edited, and nothing left behind."""

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import llamarium
from llamarium.attention import EagerAttend
from llamarium.config import RopeScaling
from llamarium.errors import AnswerError, InputError, LlamariumError, MemoryBudgetError
from llamarium.generation.loop import generate_tokens
from llamarium.inspect.interventions.edits import Edit, ablate, ablate_to_mean, edited, effect_of, scale, steer
from llamarium.inspect.interventions.experiments import Experiment, trace_experiment
from llamarium.inspect.interventions.patching import PatchGrid
from llamarium.inspect.trace import trace, trace_steps
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.runtime.edits import ModuleSnapshot
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.sampling.params import SamplingParams
from native_models import build

pytestmark = pytest.mark.torch

SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
CONFIG = replace(preset("tiny"), num_hidden_layers=3, vocab_size=200, initializer_range=0.2, rope_scaling=SCALING)
IDS, OTHER = [7, 3, 150, 3, 42, 199], [7, 90, 150, 3, 11, 199]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return init_weights(LlamaForCausalLM(CONFIG), seed=0).requires_grad_(False)


def logits(model: LlamaForCausalLM, ids: list[int] = IDS) -> torch.Tensor:
    return model(torch.tensor([ids]))[0]


def num_hooks(model: torch.nn.Module) -> int:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    return sum(len(vars(module)[name]) for module in model.modules() for name in tables)


NOTHING = [
    scale("attention", 1.0, layer=1), scale("head", 1.0, layer=0, head=2), scale("mlp", 1.0, layer=2, positions=[1]),
    scale("embed", 1.0), ablate("residual", layer=1, positions=[]),
]  # fmt: skip


@pytest.mark.parametrize("edits", [[], NOTHING])
def test_ablating_nothing_is_the_plain_pass_to_the_bit(model: LlamaForCausalLM, edits: list[Edit]) -> None:
    with edited(model, edits, Experiment()) as same:
        assert torch.equal(logits(same), logits(model))
        seen, plain = trace(ModuleRunner(same), IDS), trace(ModuleRunner(model), IDS)
    assert all(torch.equal(seen[key], plain[key]) for key in plain)


def test_nothing_is_left_behind_also_after_an_error(model: LlamaForCausalLM) -> None:
    plain, snapshot, rotary = logits(model), ModuleSnapshot(model), model.model.rotary_emb
    edits = [ablate("head", layer=1, head=0), ablate("mlp", layer=2), ablate("embed", positions=[0])]
    with (
        pytest.raises(ZeroDivisionError),
        edited(model, edits, Experiment(bidirectional=True, rotation=False)) as other,
    ):
        assert snapshot.look(model) == (False, False) and torch.equal(logits(model), plain)
        assert not torch.allclose(logits(other), plain)
        raise ZeroDivisionError
    assert num_hooks(model) == num_hooks(other) == 0 and torch.equal(logits(other), plain)
    assert model.model.rotary_emb is rotary and snapshot.look(model) == (False, False)


def test_what_is_wrong_is_refused_before_anything_is_hooked(model: LlamaForCausalLM) -> None:
    wrong: list[tuple[Any, str]] = [
        (ablate("mlp", layer=3), r"layer is 3; expected 0 to 2 for mlp"),
        (ablate("mlp"), "layer is None"),
        (ablate("head", layer=0), r"head is None; expected 0 to 3"),
        (ablate("mlp", layer=0, head=1), "head is 1; expected none"),
        (ablate("embed", layer=0), "layer is 0; expected none"),
        (ablate("mlp", layer=0, positions=[-1]), "position is -1"),
        (scale("mlp", float("nan"), layer=0), "factor is nan"),
        (Edit("mlp", 0, add=torch.zeros(3)), r"vector added to mlp is \(3,\); expected \(128,\)"),
        (Edit("logits", 0), "part is 'logits'"),  # pyright: ignore[reportArgumentType]
    ]
    for edit, message in wrong:
        with pytest.raises(LlamariumError, match=message), edited(model, [ablate("mlp", layer=0), edit]):
            pass
    assert num_hooks(model) == 0


def test_a_mean_is_that_of_the_reference(model: LlamaForCausalLM) -> None:
    reference = [1, 2, 3, 4]
    seen = trace(ModuleRunner(model), reference)
    edits = [
        ablate_to_mean(model, "mlp", reference, layer=1),
        ablate_to_mean(model, "head", reference, layer=2, head=3, positions=[5]),
    ]
    with edited(model, edits) as other:
        found = trace(ModuleRunner(other), IDS, names=["mlp_out", "attn_out", "head_out", "resid_mid"])
    mean = seen["layers.1.mlp_out"].mean(0)
    torch.testing.assert_close(found["layers.1.mlp_out"], mean.expand(6, -1))
    assert edits[1].add is not None and torch.equal(edits[1].add, seen["layers.2.head_out"].mean(0)[3])
    heads = found["layers.2.head_out"].clone()
    assert not torch.allclose(heads[4, 3], edits[1].add)
    torch.testing.assert_close(heads[5, 3], edits[1].add)


def test_steering_adds_the_difference_at_the_last_tokens(model: LlamaForCausalLM) -> None:
    one, two = (trace(ModuleRunner(model), ids)["layers.1.resid"][-1] for ids in (IDS, OTHER[:3]))
    edit = steer(model, IDS, OTHER[:3], 1, scale=-2.0, positions=[4])
    assert edit.add is not None
    torch.testing.assert_close(edit.add, -2 * (one - two))
    plain = trace(ModuleRunner(model), [1, 2, 3, 4, 5])["layers.1.resid"]
    with edited(model, [edit]) as other:
        found = trace(ModuleRunner(other), [1, 2, 3, 4, 5])["layers.1.resid"]
    torch.testing.assert_close(found[4] - plain[4], edit.add, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[:4], plain[:4])


def test_positions_count_from_the_beginning_while_an_answer_grows(model: LlamaForCausalLM) -> None:
    """A token that is run alone stands at its own place, so answers with and without the cache are the same."""
    with edited(model, [scale("residual", -1.0, layer=0, positions=[4, 7])]) as other:
        llama = llamarium.Llama("edited", other, None)
        runner = llama.runner
        params = [SamplingParams(temperature=0, max_tokens=6)]
        cached = [event.token_id for event in generate_tokens(runner, [IDS], params)]
        anew = [event.token_id for event in generate_tokens(runner, [IDS], params, use_cache=False)]
        plain = [event.token_id for event in generate_tokens(ModuleRunner(model), [IDS], params)]
    assert cached == anew != plain


def test_without_the_mask_every_token_sees_all(model: LlamaForCausalLM) -> None:
    expected = model(torch.tensor([IDS]), None, EagerAttend(bidirectional=True))[0]
    with edited(model, experiment=Experiment(bidirectional=True)) as other:
        torch.testing.assert_close(logits(other), expected, rtol=1e-4, atol=1e-4)
        changed = logits(other, [*IDS[:-1], 8])
        assert not torch.allclose(changed[0], expected[0])  # later words change earlier ones
        seen = trace_experiment(
            other, IDS, Experiment(bidirectional=True), names=["pattern", "v", "head_out", "logits"]
        )
    torch.testing.assert_close(seen["logits"], expected, rtol=1e-4, atol=1e-4)
    assert list(seen)[:3] == ["layers.0.v", "layers.0.pattern", "layers.0.head_out"] and "layers.0.q_rot" not in seen
    pattern = seen["layers.1.pattern"]
    assert (pattern > 0).all() and torch.allclose(pattern.sum(-1), torch.ones(4, 6))
    gathered = torch.einsum("nts,snh->tnh", pattern, seen["layers.1.v"].repeat_interleave(2, dim=1))
    torch.testing.assert_close(gathered, seen["layers.1.head_out"], rtol=1e-4, atol=1e-5)


def test_a_hidden_token_is_seen_by_itself_alone(model: LlamaForCausalLM) -> None:
    hidden = Experiment(hidden=(2,))
    with edited(model, experiment=hidden) as other:
        seen = trace_experiment(other, IDS, hidden, names=["pattern", "logits"], positions=[2, 5])
        assert torch.equal(logits(other, [7, 3, 9, 3, 42, 199])[3:], logits(other)[3:])
    assert (seen["layers.0.pattern"][:, 0, 2] > 0).all() and (seen["layers.0.pattern"][:, 1, 2] == 0).all()
    beyond = edited(model, experiment=Experiment(hidden=(6,)))
    with pytest.raises(InputError, match=r"hidden is \[6\]; the text has 6 tokens"), beyond as other:
        logits(other)


def test_another_mask_needs_the_whole_text(model: LlamaForCausalLM) -> None:
    with edited(model, experiment=Experiment(bidirectional=True)) as other:
        runner = ModuleRunner(other)
        with pytest.raises(InputError, match="a text is run as a whole"):
            list(trace_steps(runner, IDS, 2, names=["logits"]))
        with pytest.raises(MemoryBudgetError, match=r"pattern of 6 tokens need .* MB and the budget is 0\.0 MB"):
            trace_experiment(other, IDS, Experiment(bidirectional=True), names=["pattern"], budget_mb=0.001)


def test_without_rotation_order_is_lost_but_for_the_mask(model: LlamaForCausalLM) -> None:
    with edited(model, experiment=Experiment(rotation=False)) as other:
        seen = trace(ModuleRunner(other), IDS, names=["q", "q_rot"])
        assert all(torch.equal(seen[f"layers.{i}.q"], seen[f"layers.{i}.q_rot"]) for i in range(3))
        swapped = [IDS[1], IDS[0], *IDS[2:]]
        with edited(other, experiment=Experiment(bidirectional=True)) as bag:
            torch.testing.assert_close(logits(bag, swapped)[2:], logits(bag)[2:], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(model, swapped)[2:], logits(model)[2:])


def test_rope_scaling_off_and_another(model: LlamaForCausalLM) -> None:
    for given, expected in (("off", None), (replace(SCALING, factor=2.0), replace(SCALING, factor=2.0))):
        built = LlamaForCausalLM(replace(CONFIG, rope_scaling=expected))
        built.load_state_dict(model.state_dict())
        with edited(model, experiment=Experiment(rope_scaling=given)) as other:
            assert torch.equal(logits(other), logits(built)) and not torch.equal(logits(other), logits(model))
    both = edited(model, experiment=Experiment(rotation=False, rope_scaling="off"))
    with pytest.raises(InputError, match="rope_scaling is given beside rotation=False"), both:
        pass


@pytest.mark.parametrize("part", ["residual", "attention", "mlp"])
def test_a_cell_is_the_pass_with_the_place_exchanged(model: LlamaForCausalLM, part: Any) -> None:
    grid = PatchGrid(model, IDS, OTHER, 17, part=part)
    name = {"residual": "resid", "attention": "attn_out", "mlp": "mlp_out"}[part]
    source = trace(ModuleRunner(model), OTHER, names=[name])
    cells = list(grid.cells())
    assert [(c.layer, c.position, c.done) for c in cells[:7]] == [*((0, i, i + 1) for i in range(6)), (1, 0, 7)]
    for cell in cells:
        edit = Edit(part, cell.layer, None, (cell.position,), 0.0, source[f"layers.{cell.layer}.{name}"][cell.position])
        with edited(model, [edit]) as other:
            expected = logits(other)[-1]
        assert cell.logit == pytest.approx(float(expected[17]), rel=1e-4, abs=1e-4)
        assert cell.probability == pytest.approx(float(expected.softmax(-1)[17]), rel=1e-3, abs=1e-6)
        assert json.dumps(cell.to_dict())


@pytest.mark.parametrize("part", ["residual", "attention", "mlp"])
@torch.inference_mode()
def test_the_tokens_from_the_patched_one_on_have_the_bits_of_the_whole_pass(part: Any) -> None:
    """Of packed weights, whose products are exact by rows; the whole pass is one with a hook."""
    model = build("Q8_0")
    name, module = {"residual": ("resid", ""), "attention": ("attn_out", ".self_attn"), "mlp": ("mlp_out", ".mlp")}[
        part
    ]
    handle = model.model.norm.register_forward_hook(lambda _, args, out: None)
    whole = PatchGrid(model, IDS, OTHER, 17, part=part)
    handle.remove()
    grid = PatchGrid(model, IDS, OTHER, 17, part=part)
    with edited(model) as plain:
        source = trace(ModuleRunner(plain), OTHER, names=[name])
        for cell, other in zip(grid.cells(), whole.cells(), strict=True):
            put = source[f"layers.{cell.layer}.{name}"][cell.position]

            def change(
                _: Any, args: Any, out: torch.Tensor, at: int = cell.position, put: torch.Tensor = put
            ) -> torch.Tensor:
                out = out.clone()
                out[:, at] = put
                return out

            hook = plain.get_submodule(f"model.layers.{cell.layer}{module}").register_forward_hook(change)
            expected_V = logits(plain)[-1]
            hook.remove()
            assert cell.logit == other.logit == float(expected_V[17])
            assert cell.probability == other.probability == float(expected_V.softmax(-1)[17])


def test_the_ends_of_a_grid(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarium.inspect.interventions.patching._TOKENS", 13)  # two rows at a time
    grid = PatchGrid(model, IDS, OTHER, 17, against_id=18, layers=[-1, 1], positions=[-1, 0, 2])
    cells = list(grid.cells())
    assert (grid.layers, grid.positions) == ((1, 2), (0, 2, 5)) and [c.total for c in cells] == [6] * 6
    last = next(c for c in cells if (c.layer, c.position) == (2, 5))
    assert last.logit == pytest.approx(grid.source.logit, abs=1e-4) and last.recovered == pytest.approx(1, abs=1e-4)
    first = next(c for c in cells if (c.layer, c.position) == (1, 0))
    assert first.recovered == pytest.approx(0, abs=1e-4), "the prompts begin with the same token"
    assert grid.base.logit == pytest.approx(float(logits(model)[-1, 17] - logits(model)[-1, 18]), abs=1e-5)
    same = PatchGrid(model, IDS, IDS, 17, layers=[0], positions=[0])
    assert [c.recovered for c in same.cells()] == [None]


def test_a_grid_that_is_closed_runs_nothing_more(model: LlamaForCausalLM) -> None:
    runs: list[int] = []
    handle = model.lm_head.register_forward_hook(lambda _, args, out: runs.append(len(args[0])))
    try:
        cells = PatchGrid(model, IDS, OTHER, 17).cells()
        runs.clear()
        next(cells)
        assert runs == [5]  # both prompts begin with the same token
        cells.close()  # pyright: ignore[reportAttributeAccessIssue]
        assert runs == [5]
    finally:
        handle.remove()


def test_a_grid_of_an_edited_model_is_edited(model: LlamaForCausalLM) -> None:
    whole = Experiment(bidirectional=True)
    with edited(model, [ablate("mlp", layer=2)], whole) as other:
        grid = PatchGrid(other, IDS, OTHER, 17, layers=[0], positions=[4])
        (cell,) = grid.cells()
        source = trace(ModuleRunner(other), OTHER, names=["resid"])["layers.0.resid"][4]
        with edited(other, [Edit("residual", 0, None, (4,), 0.0, source)]) as patched:
            assert cell.logit == pytest.approx(float(logits(patched)[-1, 17]), abs=1e-4)


def test_what_a_grid_refuses(model: LlamaForCausalLM) -> None:
    with pytest.raises(InputError, match="the prompts have 6 and 5 tokens; expected as many"):
        PatchGrid(model, IDS, OTHER[:5], 17)
    with pytest.raises(InputError, match=r"the token is 200; expected an id within 0\.\.199"):
        PatchGrid(model, IDS, OTHER, 17, against_id=200)
    with pytest.raises(InputError, match=r"layers are \[3\]"):
        PatchGrid(model, IDS, OTHER, 17, layers=[3])
    with pytest.raises(LlamariumError, match="part is 'head'"):
        PatchGrid(model, IDS, OTHER, 17, part="head")  # pyright: ignore[reportArgumentType]


def test_an_effect_is_told_by_the_logits_of_both(model: LlamaForCausalLM) -> None:
    edits = [ablate("mlp", layer=1), scale("head", -2.0, layer=0, head=1, positions=[2])]
    with edited(model, edits) as other:
        both = [logits(one)[3].double().log_softmax(dim=-1) for one in (model, other)]
    found = effect_of(model, IDS, edits, position=3, k=4, chosen_id=17)
    told = {17, *both[0].topk(4).indices.tolist(), *both[1].topk(4).indices.tolist()}
    assert {one.token_id for one in found.tokens} == told
    for one in found.tokens:
        for side, logprobs_V in zip((one.before, one.after), both, strict=True):
            assert side.logprob == pytest.approx(logprobs_V[one.token_id].item(), abs=1e-5)
            assert side.rank == 1 + int((logprobs_V > logprobs_V[one.token_id]).sum())
    assert [one.before.probability for one in found.tokens] == sorted(
        (one.before.probability for one in found.tokens), reverse=True
    )
    assert found.divergence == pytest.approx(torch.sum(both[0].exp() * (both[0] - both[1])).item(), rel=1e-4)
    assert (found.position, effect_of(model, IDS, []).divergence) == (3, 0)


def test_an_effect_without_numbers_is_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(AnswerError, match="not finite"):
        effect_of(model, IDS, [scale("residual", 1e20, layer=1)])  # finite, unlike the norm's sum of squares
    for wrong in ({"k": 0}, {"k": 201}, {"chosen_id": 200}, {"position": 6}):
        with pytest.raises(InputError):
            effect_of(model, IDS, [], **wrong)  # pyright: ignore[reportArgumentType]


def test_experiments_of_half_precision_weights_are_those_of_the_same_weights_in_float32() -> None:
    """Also of adapters' weights and with hooks of the caller's; the model itself still computes in bfloat16."""
    half = init_weights(LlamaForCausalLM(CONFIG), seed=0).requires_grad_(False).bfloat16()
    wide = copy.deepcopy(half).float()
    calls: list[torch.dtype] = []
    hook = half.model.layers[0].mlp.down_proj.register_forward_hook(lambda _, args, out: calls.append(out.dtype))
    with edited(half, [ablate("head", layer=1, head=2)]) as one, edited(wide, [ablate("head", layer=1, head=2)]) as two:
        assert logits(one).dtype is torch.float32 and torch.equal(logits(one), logits(two))
    assert set(calls) == {torch.float32} and logits(half).dtype is torch.bfloat16
    hook.remove()
    grids = [[cell.logit for cell in PatchGrid(m, IDS, OTHER, 11, against_id=12).cells()] for m in (half, wide)]
    assert grids[0] == grids[1]
    toward = [steer(m, IDS, OTHER, 1).add for m in (half, wide)]
    assert torch.equal(*toward)  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_the_floor_is_what_rounding_alone_changes() -> None:
    half = init_weights(LlamaForCausalLM(CONFIG), seed=0).requires_grad_(False).bfloat16()
    found = effect_of(half, IDS, [ablate("head", layer=1, head=2)], k=5)
    plain = copy.deepcopy(half).float()
    exact, rounded = (m(torch.tensor([IDS]))[0, -1].double().log_softmax(-1) for m in (plain, half))
    reported = [one.token_id for one in found.tokens]
    assert found.floor.logprob == pytest.approx((exact - rounded)[reported].abs().max().item(), abs=1e-4) != 0
    assert found.floor.divergence == pytest.approx((exact.exp() * (exact - rounded)).sum().item(), rel=0.02)
    assert [one.before.logprob for one in found.tokens] == pytest.approx(exact[reported].tolist(), abs=1e-4)
    answering = ModuleRunner(plain)
    assert effect_of(half, IDS, [], answering=answering).floor.logprob < 1e-5
    grid, even = (PatchGrid(half, IDS, OTHER, 11, answering=runner) for runner in (None, answering))
    far = [(m(torch.tensor([ids]))[0, -1]).double() for m in (plain, half) for ids in (IDS, OTHER)]
    probable = [set(logits_V.topk(10).indices.tolist()) | {11} for logits_V in far[:2]]
    expected = max((far[i] - far[i + 2])[list(tokens)].abs().max().item() for i, tokens in enumerate(probable))
    assert grid.floor == pytest.approx(expected, rel=0.02) and even.floor < 1e-5
