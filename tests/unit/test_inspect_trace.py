"""The trace: names, shapes, restrictions, the budget, and that only its own run is seen."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from llamarium.attention import Context, attend_eagerly
from llamarium.config import ModelConfig
from llamarium.errors import ContextLengthError, InputError, MemoryBudgetError
from llamarium.inspect import forward, shapes
from llamarium.inspect import trace as trace_module
from llamarium.inspect.forward import Memory, advance
from llamarium.inspect.lens import lens
from llamarium.inspect.numbers import scores_of, softmax
from llamarium.inspect.shapes import TracePlan, parse_key
from llamarium.inspect.trace import ACTIVATIONS, Trace, trace
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.runtime import module_runner
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.runtime.shell import shell_of

pytestmark = pytest.mark.torch

CONFIG = replace(preset("tiny"), num_hidden_layers=3, vocab_size=200, initializer_range=0.2)
IDS = [7, 3, 150, 3, 42, 199]


def make_model(config: ModelConfig = CONFIG, seed: int = 0) -> LlamaForCausalLM:
    return init_weights(LlamaForCausalLM(config), seed).requires_grad_(False)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return make_model()


@pytest.fixture(scope="module")
def full(model: LlamaForCausalLM) -> Trace:
    return trace(ModuleRunner(model), IDS)


def same(a: Trace, b: Trace) -> bool:
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


def generation_logits(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    """The logits from which generation chooses the first token."""
    runner = ModuleRunner(model)
    memory = Memory(runner, len(ids))
    return torch.from_numpy(advance(runner, memory.cache, [memory.begin(ids, len(ids))]))[0]


def test_every_name_of_every_layer_has_its_documented_shape(full: Trace) -> None:
    c = CONFIG
    sizes = {"T": 6, "S": 6, "D": c.hidden_size, "N": 4, "K": 2, "H": c.head_dim, "F": c.intermediate_size, "V": 200}
    names = [name for name in ACTIVATIONS if ACTIVATIONS[name].in_layer]
    inner = [f"layers.{i}.{name}" for i in range(3) for name in names]
    assert list(full) == ["embed", *inner, "final_norm", "logits"]
    for key, tensor in full.items():
        axes = ACTIVATIONS[parse_key(key)[0]].axes
        assert tuple(tensor.shape) == tuple(sizes[axis] for axis in axes), key
    assert full.token_ids == tuple(IDS) and full.positions == tuple(range(6)) and full.layers == (0, 1, 2)


def test_traced_equals_untraced_to_the_bit(model: LlamaForCausalLM, full: Trace) -> None:
    torch.testing.assert_close(full["logits"], model(torch.tensor([IDS]))[0])
    assert torch.equal(full["logits"][-1], generation_logits(model, IDS))


def test_activations_stand_in_the_relations_that_define_them(model: LlamaForCausalLM, full: Trace) -> None:
    stream = full["embed"]
    assert torch.equal(stream, model.model.embed_tokens.weight[IDS])
    rotary = model.model.rotary_emb(torch.arange(6).unsqueeze(0), torch.float32)
    for i, layer in enumerate(model.model.layers):
        of = {name: full[f"layers.{i}.{name}"] for name in ACTIVATIONS if ACTIVATIONS[name].in_layer}
        assert torch.equal(of["attn_norm"], layer.input_layernorm(stream))
        assert torch.equal(of["q"].flatten(1), layer.self_attn.q_proj(of["attn_norm"]))
        assert torch.equal(of["k"].flatten(1), layer.self_attn.k_proj(of["attn_norm"]))
        assert torch.equal(of["v"].flatten(1), layer.self_attn.v_proj(of["attn_norm"]))
        assert torch.equal(of["q_rot"], rotary.rotate(of["q"].unsqueeze(0))[0])
        assert torch.equal(of["k_rot"], rotary.rotate(of["k"].unsqueeze(0))[0])
        scores = torch.einsum("tnh,snh->nts", of["q_rot"], of["k_rot"].repeat_interleave(2, dim=1)) / 32**0.5
        scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf"))
        torch.testing.assert_close(of["scores"], scores)
        torch.testing.assert_close(of["pattern"], scores.softmax(-1))
        gathered = torch.einsum("nts,snh->tnh", of["pattern"], of["v"].repeat_interleave(2, dim=1))
        torch.testing.assert_close(of["head_out"], gathered)
        assert torch.equal(of["attn_out"], layer.self_attn.o_proj(of["head_out"].flatten(1)))
        assert torch.equal(of["resid_mid"], stream + of["attn_out"])
        assert torch.equal(of["mlp_norm"], layer.post_attention_layernorm(of["resid_mid"]))
        assert torch.equal(of["gate"], layer.mlp.gate_proj(of["mlp_norm"]))
        assert torch.equal(of["up"], layer.mlp.up_proj(of["mlp_norm"]))
        assert torch.equal(of["act"], F.silu(of["gate"]))
        assert torch.equal(of["gated"], of["act"] * of["up"])
        assert torch.equal(of["mlp_out"], layer.mlp.down_proj(of["gated"]))
        stream = of["resid"]
        assert torch.equal(stream, of["resid_mid"] + of["mlp_out"])
    assert torch.equal(full["final_norm"], model.model.norm(stream))


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_scores_are_attentions_by_its_definition(num_tokens: int) -> None:
    draw = np.random.default_rng(num_tokens).standard_normal
    q_TNH, k_SKH = draw((num_tokens, 6, 16), np.float32), draw((40, 2, 16), np.float32)
    visible_TS = np.arange(40) <= np.arange(40 - num_tokens, 40)[:, None]
    scores = scores_of(q_TNH, k_SKH, visible_TS)
    k_1SKH, mask_1TS = torch.from_numpy(k_SKH)[None], torch.from_numpy(visible_TS)[None]
    expected = attend_eagerly(torch.from_numpy(q_TNH)[None], Context(k_1SKH, k_1SKH, mask_1TS))
    torch.testing.assert_close(torch.from_numpy(scores), expected.scores_BNTS[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.from_numpy(softmax(scores)), expected.pattern_BNTS[0], rtol=1e-6, atol=1e-6)
    assert scores.dtype == softmax(scores).dtype == np.float32


def test_a_trace_is_a_mapping_by_public_names_over_arrays(full: Trace) -> None:
    assert full["layers.1.q"].data_ptr() == full.arrays["q", 1].ctypes.data, "no copy"
    assert "layers.1.q" in full and "embed" in full and len(full) == len(full.arrays) == len(list(full))
    for name in ("q", "layers.1", "layers.x.q", "layers.9.q", "layers.1.q.", 3, ("q", 1)):
        assert name not in full
        with pytest.raises(KeyError):
            full[name]  # pyright: ignore[reportArgumentType]


def test_restriction_gives_the_same_numbers_and_nothing_else(model: LlamaForCausalLM, full: Trace) -> None:
    part = trace(
        ModuleRunner(model), IDS, names=["pattern", "k_rot", "logits", "resid"], layers=[-1, 0], positions=[-1, 2]
    )
    inner = [f"layers.{i}.{name}" for i in (0, 2) for name in ("k_rot", "pattern", "resid")]
    assert list(part) == [*inner, "logits"] and part.positions == (5, 2)
    assert torch.equal(part["layers.2.resid"], full["layers.2.resid"][[5, 2]])
    assert torch.equal(part["layers.0.k_rot"], full["layers.0.k_rot"])  # keys of all tokens: they are looked at
    torch.testing.assert_close(part["layers.0.pattern"], full["layers.0.pattern"][:, [5, 2]])
    torch.testing.assert_close(part["logits"], full["logits"][[5, 2]])


def test_select_equals_tracing_less(model: LlamaForCausalLM, full: Trace) -> None:
    wanted: dict[str, Any] = {"names": ["q", "v", "scores", "resid", "embed"], "layers": [1, 2], "positions": [4, 1]}
    selected, traced = full.select(**wanted), trace(ModuleRunner(model), IDS, **wanted)
    assert list(selected) == list(traced) and selected.positions == traced.positions
    for key in traced:
        torch.testing.assert_close(selected[key], traced[key])
    with pytest.raises(InputError, match=r"layers are \[0\]; this trace holds \[1, 2\]"):
        selected.select(layers=[0])
    with pytest.raises(InputError, match="positions"):
        selected.select(positions=[0])


def test_only_what_was_asked_for_is_computed(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    def counted(q: Any, *rest: Any) -> Any:
        rows.append(len(q))
        return scores_of(q, *rest)

    monkeypatch.setattr(trace_module, "scores_of", counted)
    heads: list[int] = []
    handle = model.lm_head.register_forward_hook(lambda _, args, out: heads.append(out.shape[-2]))
    try:
        trace(ModuleRunner(model), IDS, names=["q_rot", "resid"])
        assert rows == [] and heads == [1], "of the last token alone, as in generation"
        trace(ModuleRunner(model), IDS, names=["pattern"], layers=[1], positions=[3, 4])
        assert rows == [2] and heads == [1, 1]
        trace(ModuleRunner(model), IDS, names=["logits"], positions=[-1])
        assert rows == [2] and heads == [1, 1, 1]
    finally:
        handle.remove()


def test_the_budget_counts_what_is_kept(model: LlamaForCausalLM, full: Trace) -> None:
    plan = TracePlan.of(model.config, 6, is_row_exact=False)
    assert {key: plan.num_bytes(key) for key in plan.keys} == {key: array.nbytes for key, array in full.arrays.items()}
    working = {
        n: TracePlan.of(model.config, 6, [n], is_row_exact=False).working_bytes() for n in ("resid", "q_rot", "pattern")
    }
    assert working == {"resid": 0, "q_rot": 0, "pattern": (1 + 2 * 4 * 4) * 36 + 2 * 4 * 6 * 64}
    half = TracePlan.of(model.config, 6, ["q", "scores"], [0], [5])
    assert [half.num_bytes(key) for key in half.keys] == [4 * 32 * 4, 4 * 1 * 6 * 4]


def test_too_much_is_refused_before_anything_runs(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def must_not_run(*args: object, **kwargs: object) -> None:
        raise AssertionError("the model ran")

    with monkeypatch.context() as patch:
        patch.setattr(module_runner.ModuleRunner, "run", must_not_run)
        expected = (
            r"6 tokens needs \d\.\d MB and the budget is 0\.1 MB; the largest: .*Restrict names, layers or positions"
        )
        with pytest.raises(MemoryBudgetError, match=expected):
            trace(ModuleRunner(model), IDS, budget_mb=0.1)
        with pytest.raises(MemoryBudgetError):
            trace(ModuleRunner(model), IDS, names=["embed"], budget_mb=float("nan"))
        with pytest.raises(MemoryBudgetError, match="pattern"):
            trace(ModuleRunner(model), list(range(150)), names=["pattern"], layers=[0], budget_mb=0.4)
    trace(ModuleRunner(model), list(range(150)), names=["pattern"], layers=[0], positions=[-1], budget_mb=0.4)


@pytest.mark.parametrize(
    ("ids", "options", "error", "message"),
    [
        ([], {}, InputError, "at least one"),
        ([[1, 2]], {}, InputError, "flat"),
        ([0.5], {}, InputError, "float64"),
        ("text", {}, InputError, "whole numbers"),
        ([1, 200], {}, InputError, r"span 1\.\.200; the model's vocabulary is 0\.\.199"),
        ([-1], {}, InputError, r"span -1"),
        ([1] * 257, {}, ContextLengthError, "257 tokens; the model's context holds 256"),
        ([1], {"names": ["patern"]}, InputError, "unknown activations patern; there are: embed, attn_norm"),
        ([1], {"names": []}, InputError, "no activation was named"),
        ([1], {"layers": [3]}, InputError, r"layers are \[3\]; expected some within -3\.\.2"),
        ([1], {"positions": [1]}, InputError, r"positions are \[1\]; expected some within -1\.\.0"),
        ([1], {"positions": []}, InputError, "positions are"),
    ],
)
def test_refusals(model: LlamaForCausalLM, ids: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        trace(ModuleRunner(model), ids, **options)


def test_a_full_context_can_be_traced(model: LlamaForCausalLM) -> None:
    assert trace(ModuleRunner(model), [1] * 256, names=["final_norm"])["final_norm"].shape == (256, 128)


def test_to_dict_is_json_and_minus_infinity_becomes_null(model: LlamaForCausalLM) -> None:
    found = trace(ModuleRunner(model), IDS[:2], names=["scores", "embed"], layers=[0])
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    scores = data["activations"]["layers.0.scores"]
    assert scores["axes"] == ["N", "T", "S"] and scores["shape"] == [4, 2, 2] and scores["dtype"] == "float32"
    assert scores["values"][0][0][1] is None and scores["values"][0][1] == found["layers.0.scores"][0, 1].tolist()
    assert data["token_ids"] == IDS[:2] and data["positions"] == [0, 1]


def test_the_model_itself_gets_no_hook_and_keeps_its_own(model: LlamaForCausalLM) -> None:
    during: list[int] = []

    def own_hook(*_: object) -> None:
        during.append(sum(len(m._forward_hooks) for m in model.modules()))

    handle = model.model.layers[1].mlp.register_forward_hook(own_hook)
    try:
        trace(ModuleRunner(model), IDS)
    finally:
        handle.remove()
    assert during == [1]  # it ran in the trace, and saw no other hook on the model


def test_traces_and_requests_at_once_do_not_mix(model: LlamaForCausalLM) -> None:
    texts = [[1, 2, 3], [9, 8, 7, 6, 5], [100] * 4, [11, 12]]
    alone = [trace(ModuleRunner(model), ids) for ids in texts]
    logits = [model(torch.tensor([ids])) for ids in texts]
    wrong: list[str] = []
    start = threading.Barrier(2 * len(texts))

    def repeat(check: Callable[[], bool], what: str) -> None:
        start.wait()
        if not all(check() for _ in range(15)):
            wrong.append(what)

    jobs: list[tuple[Callable[[], bool], str]] = []
    for ids, seen, answer in zip(texts, alone, logits, strict=True):
        jobs.append((lambda i=ids, s=seen: same(trace(ModuleRunner(model), i), s), f"trace {ids}"))
        jobs.append((lambda i=ids, a=answer: torch.equal(model(torch.tensor([i])), a), f"request {ids}"))
    threads = [threading.Thread(target=repeat, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_weights_are_shared_and_not_copied(model: LlamaForCausalLM) -> None:
    shell = shell_of(model)
    assert [p.data_ptr() for p in shell.parameters()] == [p.data_ptr() for p in model.parameters()]
    assert shell.lm_head.weight is shell.model.embed_tokens.weight


def test_a_failing_run_leaves_the_model_as_it_was(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(trace_module, "scores_of", fail)
        trace(ModuleRunner(model), IDS)
    assert sum(len(m._forward_hooks) for m in model.modules()) == 0


def test_bfloat16_is_handed_out_as_float32() -> None:
    half = make_model().bfloat16()
    found = trace(ModuleRunner(half), IDS)
    assert {values.dtype for values in found.arrays.values()} == {np.dtype(np.float32)}
    q_rot = found["layers.0.q_rot"]
    assert torch.equal(q_rot, q_rot.bfloat16().float())  # nothing is rounded on the way, nor made up
    assert torch.equal(found["logits"][-1], generation_logits(half, IDS))


def test_other_linears_are_traced_alike() -> None:
    class Doubled(torch.nn.Module):
        """Stands for a packed Linear: a buffer, and a weight that exists only in use."""

        def __init__(self, linear: torch.nn.Linear) -> None:
            super().__init__()
            self.register_buffer("packed", linear.weight / 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.packed * 2)

    plain = make_model()
    expected = trace(ModuleRunner(plain), IDS)
    for name, module in list(plain.named_modules()):
        if isinstance(module, torch.nn.Linear):
            plain.set_submodule(name, Doubled(module))
    assert same(trace(ModuleRunner(plain), IDS), expected)


def test_the_lens_on_the_last_layer_says_what_the_model_says(model: LlamaForCausalLM, full: Trace) -> None:
    seen = lens(ModuleRunner(model), full, k=3)
    assert [(row.layer, row.after) for row in seen.layers] == [
        (i, half) for i in range(3) for half in ("attention", "mlp")
    ]
    probs = full["logits"].softmax(-1).topk(3)
    for candidates, ids, values in zip(seen.layers[-1].candidates, probs.indices, probs.values, strict=True):
        assert [c.token_id for c in candidates] == ids.tolist()
        assert [c.probability for c in candidates] == pytest.approx(values.tolist(), rel=1e-5)
    for place, name in enumerate(("resid_mid", "resid")):
        early = model.logits(model.model.norm(full[f"layers.0.{name}"])).argmax(-1)
        assert [row[0].token_id for row in seen.layers[place].candidates] == early.tolist()
        assert early.tolist() != probs.indices[:, 0].tolist()


def test_the_lens_tells_of_a_chosen_token_at_every_place(
    model: LlamaForCausalLM, full: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "CHUNK_BYTES", 4 * 4 * CONFIG.vocab_size)  # four positions at a time
    seen = lens(ModuleRunner(model), full, k=1, chosen_id=42)
    assert seen.chosen_id == 42 and len(seen.layers) == 6
    logprobs = full["logits"].log_softmax(-1)
    assert [c.logprob for c in seen.layers[-1].chosen] == pytest.approx(logprobs[:, 42].tolist(), rel=1e-5)
    ranks = logprobs.argsort(-1, descending=True).eq(42).nonzero()[:, 1] + 1
    assert [c.rank for c in seen.layers[-1].chosen] == ranks.tolist()
    mid = model.logits(model.model.norm(full["layers.1.resid_mid"])).softmax(-1)[:, 42]
    assert [c.probability for c in seen.layers[2].chosen] == pytest.approx(mid.tolist(), rel=1e-5)
    assert json.loads(json.dumps(seen.to_dict()))["layers"][2]["after"] == "attention"
    for wrong in (200, -1, True):
        with pytest.raises(InputError, match=rf"chosen_id is {wrong}; expected an id within 0\.\.199"):
            lens(ModuleRunner(model), full, chosen_id=wrong)


def test_positions_may_lie_in_some_batches_of_a_long_text_alone(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trace(ModuleRunner(model), IDS)
    monkeypatch.setattr(shapes, "PREFILL_CHUNK", 2)
    for positions in ([0], [-1], [3, 0]):
        part = trace(ModuleRunner(model), IDS, positions=positions)
        for key, tensor in whole.select(positions=[p % len(IDS) for p in positions]).items():
            assert torch.allclose(part[key], tensor, atol=1e-3), key  # PyTorch rounds other chunks otherwise


def test_the_lens_reads_the_layers_and_positions_of_its_trace(model: LlamaForCausalLM) -> None:
    seen = lens(ModuleRunner(model), trace(ModuleRunner(model), IDS, names=["resid"], layers=[1], positions=[-1]), k=2)
    assert seen.positions == (5,) and [row.layer for row in seen.layers] == [1]
    assert json.dumps(seen.to_dict())
    with pytest.raises(InputError, match="no residual stream"):
        lens(ModuleRunner(model), trace(ModuleRunner(model), IDS, names=["q"]))
    with pytest.raises(InputError, match=r"k is 0; expected a whole number within 1\.\.200"):
        lens(ModuleRunner(model), trace(ModuleRunner(model), IDS, names=["resid"]), k=0)
