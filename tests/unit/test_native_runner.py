"""The runner in C against the modules, and against itself: alone, in company, in chunks, tapped."""

import copy
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from llamarium.config import HEAD
from llamarium.errors import InputError, OptionError
from llamarium.inspect.forward import KeptSequence, Memory, advance, batches
from llamarium.kernels import native
from llamarium.kernels.native import InputBits
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.quant.packed import LinearPacked
from llamarium.runtime.batch import BLOCK_SIZE, Span, pack
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.runtime.native.runner import NativeRunner
from llamarium.runtime.runner import CacheDtype, Runner
from llamarium.runtime.taps import ACTIVATIONS, FROM_CACHE, Taps
from native_models import CONFIG, build, native_runner, weights_of
from reference_tiles import pack_ggml, quantize
from swapping import swap_linears

pytestmark = pytest.mark.torch

TAPPED = [name for name in ACTIVATIONS if name not in (*FROM_CACHE, "logits")]
KEYS = [(name, layer) for name in TAPPED for layer in (range(3) if ACTIVATIONS[name].in_layer else (None,))]


def begin(
    runner: Runner, prompts: list[list[int]], room: int, dtype: str = "auto"
) -> tuple[Memory, list[KeptSequence]]:
    memory = Memory(runner, sum(-(-room // BLOCK_SIZE) * BLOCK_SIZE for _ in prompts), dtype)
    return memory, [memory.begin(prompt, room) for prompt in prompts]


def last_logits(runner: Runner, prompts: list[list[int]], chunk: int = 2048, dtype: CacheDtype = "auto") -> np.ndarray:
    memory, sequences = begin(runner, prompts, max(map(len, prompts)), dtype)
    return advance(runner, memory.cache, sequences, chunk)


def both(type_name: str | None, dtype: torch.dtype = torch.float32, head_dim: int = 32) -> tuple[Runner, Runner]:
    """The same weights through the modules and through C."""
    model = build(type_name, dtype, head_dim)
    return ModuleRunner(model), native_runner(model)


def test_inputs_of_16_bits_are_nearer_to_float32_and_each_setting_is_row_exact(kernels: str) -> None:
    model = build("Q8_0", torch.float32, 32)
    prompts = [list(range(1, 90)), [7, 8, 9]]
    exact = last_logits(unrounded(model), prompts)
    distance: dict[int, float] = {}
    for bits in get_args(InputBits):
        runner = NativeRunner(model.config, weights_of(model), input_bits=bits)
        found = last_logits(runner, prompts)
        distance[bits] = float(np.linalg.norm(found - exact))
        for row, prompt in enumerate(prompts):
            assert (last_logits(runner, [prompt], chunk=7)[0] == found[row]).all(), "alone, and in pieces"
    assert 0 < distance[16] < distance[8] / 50


def unrounded(model: LlamaForCausalLM) -> Runner:
    """The modules of the same weights, whose products do not round."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if isinstance(module, LinearPacked):
            module.uses_kernels = False
    return ModuleRunner(plain)


@pytest.mark.parametrize(("type_name", "head_dim"), [("Q8_0", 32), ("Q4_1", 64), ("Q8_0", 16)])
def test_a_pass_equals_the_modules(kernels: str, type_name: str, head_dim: int) -> None:
    prompts = [list(range(1, 290)), [7, 8, 9]]  # beyond one chunk of 256 slots, and of different lengths
    logits = []
    for runner in both(type_name, head_dim=head_dim):
        memory, sequences = begin(runner, prompts, 8200)
        first = advance(runner, memory.cache, sequences)
        far = sequences[0]
        far.ids += [*[0] * (8192 - len(far.ids)), 5]  # what lies between is zeros, in both
        far.num_computed = 8192
        sequences[1].ids.append(6)
        logits.append((first, advance(runner, memory.cache, sequences)))
    for expected, found in zip(*logits, strict=True):
        # An input near the middle of two codes may be rounded the other way: 1/254 of the largest of its group.
        np.testing.assert_allclose(found, expected, rtol=0, atol=5e-2 * float(expected.std()))


ODD = replace(CONFIG, hidden_size=100, intermediate_size=173, vocab_size=301, num_key_value_heads=1)
"""With heads of 24 no matrix has whole groups of 32 columns, and the last 16 rows of some are not all there."""


@pytest.mark.parametrize("is_odd", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_pass_over_plain_weights_equals_the_modules_in_float32(
    kernels: str, dtype: torch.dtype, is_odd: bool
) -> None:
    shape = (24, ODD) if is_odd else (32, CONFIG)
    exact, runner = ModuleRunner(build(None, dtype, *shape).float()), native_runner(build(None, dtype, *shape))
    for ids in ([11], list(range(1, 100)), list(range(1, 298))):
        expected, found = last_logits(exact, [ids]), last_logits(runner, [ids])
        share = 2e-2 if dtype == torch.bfloat16 else 1e-5  # whose cache is in bfloat16
        np.testing.assert_allclose(found, expected, rtol=0, atol=share * float(expected.std()))


@pytest.mark.parametrize(
    ("type_name", "dtype"),
    [("Q4_0", torch.bfloat16), (None, torch.bfloat16), (None, torch.float16), (None, torch.float32)],
    ids=str,
)
def test_tokens_have_the_same_bits_chunked_batched_and_on_any_number_of_threads(
    kernels: str, type_name: str | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(type_name, dtype) if type_name else build(None, dtype, 24, ODD)
    runner = native_runner(model)
    ids = torch.randint(300, (1, 600), generator=torch.Generator().manual_seed(0)).tolist()[0]

    def last(chunk: int, count: int, others: int) -> np.ndarray:
        monkeypatch.setattr(native, "num_threads", lambda: count)
        return last_logits(runner, [ids, *([[3] * 600] * others)], chunk)[0]

    expected = last(600, 1, 0)
    for chunk, count, others in ((600, 2, 0), (1000, 3, 2), (7, 1, 0), (1, 2, 1), (13, 1, 1), (333, 2, 0)):
        assert (last(chunk, count, others) == expected).all()


@pytest.mark.parametrize("window", [1, 5, 16, 40, 255, 256, 257, 599, 600])
def test_a_pass_within_a_window_equals_the_modules(kernels: str, window: int) -> None:
    model = build(None, config=replace(CONFIG, sliding_window=window))
    ids = torch.randint(300, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = [last_logits(ModuleRunner(model), [ids[:end]]) for end in (3, 300, 600)]
    for end, exact in zip((3, 300, 600), expected, strict=True):
        found = last_logits(native_runner(model), [ids[:end]])
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-5 * float(exact.std()))


@pytest.mark.parametrize("window", [1, 5, 40, 257, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_within_a_window_tokens_have_the_same_bits_however_they_come(
    kernels: str, dtype: torch.dtype, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    runner = native_runner(build(None, kept, 24, replace(ODD, sliding_window=window)))
    ids = torch.randint(300, (1, 600), generator=torch.Generator().manual_seed(0)).tolist()[0]

    def last(chunk: int, count: int, others: int) -> np.ndarray:
        monkeypatch.setattr(native, "num_threads", lambda: count)
        prompts = [ids, *([[3] * 600, ids[:300]] * others)]
        return last_logits(runner, prompts, chunk, "int8" if dtype == torch.int8 else "auto")[0]

    expected = last(600, 1, 0)
    for chunk, count, others in ((600, 2, 0), (1000, 2, 1), (7, 1, 0), (1, 2, 1), (333, 2, 0)):
        assert (last(chunk, count, others) == expected).all()


def test_a_window_of_the_whole_context_changes_no_bit(kernels: str) -> None:
    ids = list(range(290))
    plain, wide = (
        last_logits(native_runner(build(None, config=replace(CONFIG, sliding_window=window))), [ids])
        for window in (None, 290)
    )
    assert (plain == wide).all()


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 7, 9])
def test_beside_a_huge_score_the_others_weigh_nothing(kernels: str, num_tokens: int) -> None:
    model = init_weights(LlamaForCausalLM(CONFIG), seed=3).bfloat16().eval().requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj"):
            layer.self_attn.get_submodule(name).get_parameter("weight").fill_(1e6)  # all slots score alike
    ids = [7] * num_tokens
    expected, found = last_logits(ModuleRunner(model), [ids]), last_logits(native_runner(model), [ids])
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 32), (6, 3, 16), (3, 1, 64), (4, 1, 72), (5, 1, 32), (2, 1, 48)]
)
def test_rows_that_are_taken_together_see_what_each_sees_alone(
    kernels: str, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    config = replace(
        CONFIG, num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = init_weights(LlamaForCausalLM(config), seed=1).requires_grad_(False)
    swap_linears(model, lambda _, linear: pack_ggml(quantize(linear.weight, "Q8_0"), "Q8_0"), skip=())
    model.to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32).eval()
    runner = native_runner(model)
    ids = torch.randint(300, (301,), generator=torch.Generator().manual_seed(3)).tolist()

    def run(chunk: int) -> np.ndarray:
        memory, (sequence,) = begin(runner, [ids], 301, "int8" if dtype == torch.int8 else "auto")
        blocks = sequence.table.blocks
        spans = [
            Span(ids[at : at + chunk], at, blocks, num_logits=len(ids[at : at + chunk])) for at in range(0, 301, chunk)
        ]
        return np.concatenate([runner.run(pack([span]), memory.cache) for span in spans])

    alone = run(1)  # 8 rows of a sequence are the fewest that are taken together, 32 the most
    assert all((run(chunk) == alone).all() for chunk in (8, 45, 301))


@pytest.mark.parametrize(
    ("type_name", "dtype"), [("Q4_0", torch.bfloat16), (None, torch.bfloat16), (None, torch.float32)]
)
def test_taps_and_logits_have_the_same_bits_for_every_subset(type_name: str | None, dtype: torch.dtype) -> None:
    model = build(None, dtype, 24, ODD) if dtype == torch.float32 else build(type_name, dtype)
    runner, ids = native_runner(model), list(range(3, 80))
    expected = last_logits(runner, [ids])
    every: dict[tuple[str, int | None], np.ndarray] = {}
    for wanted in [KEYS, *([key] for key in KEYS), KEYS[::2], []]:
        memory, (sequence,) = begin(runner, [ids], 80)
        (batch,) = batches([sequence])
        taps = Taps(wanted)
        assert (runner.run(batch, memory.cache, taps) == expected).all()
        found = {key: np.asarray(part) for key, (part,) in taps.kept.items()}
        every = every or found
        assert set(found) == set(wanted) and all((found[key] == every[key]).all() for key in wanted)
        assert all(len(part) == len(ids) for part in found.values())


@pytest.mark.parametrize("is_odd", [False, True])
def test_taps_are_what_the_modules_compute(is_odd: bool) -> None:
    model = build(None, torch.float32, 24, ODD) if is_odd else build(None)
    exact, runner = ModuleRunner(model), native_runner(model)
    ids, seen = list(range(3, 40)), list[dict[tuple[str, int | None], np.ndarray]]()
    for one in (exact, runner):
        memory, (sequence,) = begin(one, [ids], 40)
        taps = Taps(KEYS)
        for batch in batches([sequence], 20):
            one.run(batch, memory.cache, taps)
        seen.append({key: np.concatenate([np.asarray(part) for part in kept]) for key, kept in taps.kept.items()})
    for key in KEYS:
        expected, found = seen[0][key], seen[1][key]
        assert found.shape == expected.shape, key
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()), err_msg=str(key))


def test_a_step_of_decoding_is_tapped_from_its_own_cache() -> None:
    exact, runner = both(None, torch.float32)
    seen = []
    for one in (exact, runner):
        memory, (sequence,) = begin(one, [[5, 6, 7]], 8)
        advance(one, memory.cache, [sequence])
        sequence.ids.append(8)
        taps = Taps([("head_out", 2)])
        (batch,) = batches([sequence])
        one.run(batch, memory.cache, taps)
        seen.append(np.asarray(taps.kept["head_out", 2][0]))
    assert seen[0].shape == (1, 4, 32)
    np.testing.assert_allclose(seen[1], seen[0], rtol=0, atol=1e-5)


def test_a_row_that_is_not_finite_harms_no_other() -> None:
    model = build(None, torch.bfloat16, config=replace(CONFIG, tie_word_embeddings=False))
    model.model.embed_tokens.weight[9] = float("nan")
    runner = native_runner(model)
    expected = last_logits(runner, [[1, 2, 3]])[0]
    bad, good = last_logits(runner, [[1, 9, 3], [1, 2, 3]])
    assert np.isnan(bad).all() and (good == expected).all()


def test_another_models_cache_is_refused() -> None:
    runner = both("Q8_0")[1]
    other = NativeRunner(replace(CONFIG, num_hidden_layers=1), weights_of(build("Q8_0")))
    for cache in (other.new_cache(1), ModuleRunner(build("Q8_0")).new_cache(1)):
        with pytest.raises(InputError, match="the KV cache belongs to another model"):
            runner.run(pack([Span([1], 0, [0])]), cache)


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_1", None])
def test_both_runners_answer_about_the_same_weights(kernels: str, type_name: str | None) -> None:
    modules, in_c = both(type_name, head_dim=32)
    assert {(w.key, w.type_name, w.shape, w.num_bytes) for w in modules.weights.values()} == {
        (w.key, w.type_name, w.shape, w.num_bytes) for w in in_c.weights.values()
    }
    x_MI = np.random.default_rng(0).standard_normal((3, CONFIG.hidden_size), np.float32)
    for key in ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", HEAD, "model.norm.weight"):
        whole = in_c.dequantize(key)
        np.testing.assert_array_equal(whole, modules.dequantize(key))
        if whole.ndim == 2:
            np.testing.assert_array_equal(in_c.dequantize(key, [3, 1, 3]), whole[[3, 1, 3]])
            np.testing.assert_array_equal(modules.dequantize(key, [3, 1, 3]), whole[[3, 1, 3]])
            found, other, exact = in_c.product(key, x_MI), modules.product(key, x_MI), x_MI @ whole.T
            assert found.shape == other.shape == exact.shape
            tolerance = 0.05 if type_name else 1e-4  # packed products round their inputs
            assert np.abs(found - exact).max() < tolerance * np.abs(exact).max()
            assert np.abs(other - exact).max() < tolerance * np.abs(exact).max()
    for runner in (modules, in_c):
        with pytest.raises(KeyError):
            runner.dequantize("model.layers.99.mlp.up_proj.weight")
        assert runner.fresh() is not runner and runner.fresh().weights.keys() == runner.weights.keys()
    with pytest.raises(OptionError, match="llamarium doctor"):
        modules.with_adapters([])
    assert in_c.input_bits == modules.input_bits == (None if type_name is None else 8)
