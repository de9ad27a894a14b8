"""Two models over one text: against plain arithmetic on their traces; variants are what their names say."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

import llamarium
from llamarium.api import Llama
from llamarium.checkpoints.modules import weights_of
from llamarium.errors import InputError, OptionError
from llamarium.inspect import forward
from llamarium.inspect.interventions.experiments import Experiment
from llamarium.inspect.interventions.variants import (
    VariantName,
    variant_bytes,
    variant_in_c,
    variant_of,
    without_rope_scaling,
)
from llamarium.inspect.measures.comparison import NAMES, compare_passes
from llamarium.inspect.trace import Trace, trace
from llamarium.kernels import native
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.quant.linears import quantize_linear
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.runtime.native.runner import NativeRunner
from serving import small_llama

pytestmark = pytest.mark.torch

CONFIG = replace(
    preset("tiny"), hidden_size=128, head_dim=32, intermediate_size=192, num_hidden_layers=3, vocab_size=200,
    initializer_range=0.2,
)  # fmt: skip
IDS = [7, 3, 150, 3, 42, 199]
TEXT = "The capital of France is"


def made(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    return init_weights(LlamaForCausalLM(replace(CONFIG, **changes)), seed).requires_grad_(False)


def traced(model: LlamaForCausalLM, ids: list[int] = IDS) -> Trace:
    return trace(ModuleRunner(model), ids, names=NAMES)


@pytest.fixture(scope="module")
def small(smollm2_path: Path) -> Llama:
    return small_llama(smollm2_path)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return made()


@pytest.mark.parametrize("rows", [1, 4, 100])
def test_every_number_is_plain_arithmetic(model: LlamaForCausalLM, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few rows of logits are there at a time."""
    monkeypatch.setattr(forward, "CHUNK_BYTES", 8 * CONFIG.vocab_size * rows)
    here, there = traced(made(1)), traced(model)
    found = compare_passes(here, there, k=2)
    for layer, told in enumerate(found.layers):
        x_TD, y_TD = (one[f"layers.{layer}.resid"].double() for one in (here, there))
        assert told.relative == pytest.approx(((x_TD - y_TD).norm(dim=1) / y_TD.norm(dim=1)).tolist())
        angles = (x_TD * y_TD).sum(1) / x_TD.norm(dim=1) / y_TD.norm(dim=1)
        assert told.cosine == pytest.approx(angles.tolist())
    p_TV, q_TV = (one["logits"].double().softmax(-1) for one in (there, here))
    for t, one in enumerate(found.tokens):
        assert (one.position, one.token_id) == (t, IDS[t])
        assert one.kl == pytest.approx(
            sum(p * math.log(p / q) for p, q in zip(p_TV[t].tolist(), q_TV[t].tolist(), strict=True))
        )
        for table_TV, surprise, best in (
            (q_TV, one.surprise, one.candidates),
            (p_TV, one.surprise_against, one.candidates_against),
        ):
            assert surprise == (None if t == 0 else pytest.approx(-math.log(table_TV[t - 1, IDS[t]])))
            top = table_TV[t].topk(2)
            assert [c.token_id for c in best] == top.indices.tolist()
            assert [c.probability for c in best] == pytest.approx(top.values.tolist(), rel=1e-5)
        assert one.same_top == (p_TV[t].argmax() == q_TV[t].argmax())
    assert found.kl == pytest.approx(sum(one.kl for one in found.tokens) / len(IDS))
    assert found.same_top == sum(one.same_top for one in found.tokens) / len(IDS)
    assert json.loads(json.dumps(found.to_dict()))["tokens"][1]["surprise"] == found.tokens[1].surprise


def test_the_divergence_is_measured_from_the_one_to_the_other(model: LlamaForCausalLM) -> None:
    pair = traced(made(1)), traced(model)
    there, back = compare_passes(*pair), compare_passes(*reversed(pair))
    assert there.tokens[2].kl != pytest.approx(back.tokens[2].kl, rel=1e-3)
    assert there.tokens[2].surprise == back.tokens[2].surprise_against


def test_a_model_is_as_itself(model: LlamaForCausalLM) -> None:
    same = compare_passes(traced(model), traced(model))
    assert same.kl == 0 and same.same_top == 1
    assert {x for layer in same.layers for x in layer.relative} == {0.0}


def test_what_cannot_be_compared_is_refused(model: LlamaForCausalLM) -> None:
    seen = traced(model)
    for other, why in (
        (traced(model, [1, 2]), "not of the same tokens and layers"),
        (traced(made(num_hidden_layers=4)), "not of the same tokens and layers"),
        (traced(made(num_hidden_layers=2)), "not of the same tokens and layers"),
        (traced(made(hidden_size=64, head_dim=16)), "expected one model's shape"),
        (traced(made(vocab_size=201)), "the vocabularies have 200 and 201 tokens"),
        (trace(ModuleRunner(model), IDS, names=["resid"]), "do not hold the logits of all tokens"),
    ):
        with pytest.raises(InputError, match=why):
            compare_passes(seen, other)
    part = trace(ModuleRunner(model), IDS, names=NAMES, positions=[-1])
    with pytest.raises(InputError, match="logits of all tokens"):
        compare_passes(part, part)
    with pytest.raises(InputError, match="k is 201"):
        compare_passes(seen, seen, k=201)


def test_inspector_compares_variants_edits_and_other_models(small: Llama) -> None:
    packed = small.inspect.variant("NF4")
    found = packed.inspect.compare(TEXT, small, k=1)
    pair = [trace(one.runner, small.encode(TEXT), names=NAMES) for one in (packed, small)]
    assert found == compare_passes(*pair, k=1, tokenizer=small.tokenizer)
    assert found.kl > 0 and found.tokens[-1].candidates_against[0].text == small.next_tokens(TEXT, k=1)[0].chosen.text
    with small.inspect.edited(experiment=Experiment(rotation=False)) as other:
        assert small.inspect.compare(small.encode(TEXT), other).kl > 0
    with pytest.raises(InputError, match="against is 'NF4'; expected another Llama"):
        small.inspect.compare(TEXT, "NF4")  # pyright: ignore[reportArgumentType]


def test_models_of_other_vocabularies_are_refused(small: Llama) -> None:
    with pytest.raises(InputError, match="different vocabularies and cannot be compared"):
        small.inspect.compare(TEXT, llamarium.load("shakespeare-char", device="cpu"))


@pytest.mark.parametrize("method", ["NF4", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_variant_has_its_linears_quantized_and_all_else_as_it_is(method: Any, tied: bool) -> None:
    model = made(tie_word_embeddings=tied)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    other = variant_of(model, method)
    linear = model.model.layers[1].mlp.up_proj
    expected = quantize_linear(linear.weight, method).dequantize()
    assert torch.equal(other.model.layers[1].mlp.up_proj.dequantize(), expected)  # pyright: ignore[reportCallIssue]
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)
    assert (other.lm_head.weight is other.model.embed_tokens.weight) == tied
    assert torch.equal(other.model.layers[2].input_layernorm.weight, model.model.layers[2].input_layernorm.weight)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    tables = 21 * 1088 if method == "NF4" else 0  # of each Linear: the codes' values, and those of the scales' codes
    assert variant_bytes(ModuleRunner(model), method, in_c=False) == pytest.approx(occupied(other) - tables, rel=0.02)


def occupied(model: LlamaForCausalLM) -> int:
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def test_unpacked_weights_are_those_that_were_multiplied(model: LlamaForCausalLM) -> None:
    """float32 of packed weights is what they mean, and of plain ones the very same pass."""
    packed = variant_of(model, "Q8_0")
    plain = variant_of(packed, "float32")
    assert type(plain.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert compare_passes(traced(plain), traced(packed)).layers[-1].relative == pytest.approx([0] * 6, abs=1e-5)
    assert torch.equal(traced(variant_of(model, "float32"))["logits"], traced(model)["logits"])
    assert variant_bytes(ModuleRunner(model), "float32", in_c=False) == occupied(plain)


def test_unpacked_weights_of_the_kernels() -> None:
    """What is packed in memory is unpacked to what loading it as float32 gives."""
    packed, plain = (llamarium.load("shakespeare-char", device="cpu", **how) for how in ({}, {"dtype": "float32"}))
    unpacked = packed.inspect.variant("float32").model.state_dict()
    for key, value in plain.model.state_dict().items():
        torch.testing.assert_close(unpacked[key], value, rtol=1e-5, atol=1e-6)


def test_a_head_of_its_own_changes_predictions_alone() -> None:
    for tied, name in ((True, "random-head"), (False, "tied-head")):
        model = made(tie_word_embeddings=tied)
        other = variant_of(model, name, seed=3)  # pyright: ignore[reportArgumentType]
        found = compare_passes(traced(other), traced(model))
        assert {x for layer in found.layers for x in layer.relative} == {0.0} and found.kl > 0.1
        assert other.config.tie_word_embeddings != tied and model.config.tie_word_embeddings == tied
        assert torch.equal(other.lm_head.weight, model.model.embed_tokens.weight) == (not tied)
        assert variant_bytes(ModuleRunner(model), name, in_c=False) == 200 * 128 * 4  # pyright: ignore[reportArgumentType]
        with pytest.raises(InputError, match="already"):
            variant_of(model, "tied-head" if tied else "random-head")
    rows = variant_of(made(), "random-head", seed=3).lm_head.weight
    assert rows.std().item() == pytest.approx(CONFIG.initializer_range, rel=0.02)
    assert torch.equal(rows, variant_of(made(), "random-head", seed=3).lm_head.weight)


@pytest.mark.skipif(native.library() is None, reason="these are variants for the C kernels")
@pytest.mark.parametrize("name", get_args(VariantName))
def test_c_runs_the_variants_that_the_modules_run(name: VariantName) -> None:
    model = made(tie_word_embeddings=name != "tied-head")
    runner = NativeRunner(model.config, weights_of(model) or {})
    other = variant_in_c(runner, name)
    found, expected = trace(other, IDS, names=NAMES), traced(variant_of(model, name))
    np.testing.assert_allclose(found.arrays["logits", None], expected.arrays["logits", None], rtol=0, atol=1e-4)
    with pytest.raises(InputError, match="already"):
        variant_in_c(runner, "random-head" if name == "tied-head" else "tied-head")


@pytest.mark.skipif(native.library() is None, reason="this is for the C kernels")
def test_rope_without_scaling_in_c() -> None:
    model = made(rope_scaling=preset("llama-3.2-1b").rope_scaling, rope_theta=500000.0)
    weights = weights_of(model) or {}
    found, scaled = without_rope_scaling(one := NativeRunner(model.config, weights)), trace(one, IDS, names=NAMES)
    expected = trace(NativeRunner(replace(model.config, rope_scaling=None), weights), IDS, names=NAMES)
    assert np.array_equal(trace(found, IDS, names=NAMES).arrays["logits", None], expected.arrays["logits", None])
    assert not np.array_equal(scaled.arrays["logits", None], expected.arrays["logits", None])


def test_an_unknown_variant_is_refused(model: LlamaForCausalLM) -> None:
    for ask in (lambda: variant_of(model, "Q2_K"), lambda: variant_bytes(ModuleRunner(model), "Q2_K", in_c=False)):  # pyright: ignore
        with pytest.raises(OptionError, match="name is 'Q2_K'; expected float32, NF4"):
            ask()


def test_a_model_without_a_tokenizer_is_compared_by_ids(model: LlamaForCausalLM) -> None:
    one = Llama("nameless", model, None)
    found = one.inspect.compare(IDS, one.inspect.variant("NF4"))
    assert found.kl > 0 and found.tokens[0].candidates[0].text is None
