"""The kernels in C against their definitions in PyTorch, and the whole pass against the modules."""

import copy
import pickle
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llamarium.attention import CachedAttend
from llamarium.config import RopeScaling
from llamarium.errors import InputError, OptionError
from llamarium.generation.loop import decode_one, new_cache, prefill
from llamarium.inspect.trace import trace
from llamarium.kernels import native, threads
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.quant.formats import PACKED_FORMATS
from llamarium.quant.ggml import quantize
from llamarium.quant.ggml_blocks import dequantize
from llamarium.quant.int4 import LinearInt4
from llamarium.quant.int8 import Linear8bit
from llamarium.quant.packed import (
    EmbeddingPacked,
    LinearPacked,
    pack_ggml,
    pack_integers,
    product_reference,
    quantize_inputs,
)
from llamarium.quant.swap import swap_linears
from llamarium.runtime import plan as plans
from llamarium.runtime.plan import NativeLlamaModel, make_deterministic, use_kernels

pytestmark = pytest.mark.alone  # with as many threads as there are cores

GROUPED = [
    name for name, format in PACKED_FORMATS.items() if not format.is_super
]  # the K formats have tests of their own
SHAPES = [(16, 32, 1), (1, 32, 2), (65, 96, 3), (33, 64, 13), (160, 576, 9), (48, 2048, 17)]


def random_linear(name: str, rows: int, columns: int, seed: int = 0, extreme: bool = False) -> LinearPacked:
    generator = torch.Generator().manual_seed(seed)
    high = PACKED_FORMATS[name].num_levels
    codes = torch.randint(high, (rows, columns), generator=generator, dtype=torch.uint8)
    if extreme:
        codes = (codes % 2) * (high - 1)
    scale = torch.randn(rows, columns // 32, generator=generator).half()
    minimum = torch.randn(rows, columns // 32, generator=generator).half() if PACKED_FORMATS[name].has_minimum else None
    return LinearPacked.from_codes(codes, scale, PACKED_FORMATS[name], minimum)


# --- the layout -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_name", GROUPED)
@pytest.mark.parametrize("rows", [1, 16, 40])
def test_packing_loses_nothing(type_name: str, rows: int) -> None:
    source = "Q4_0" if type_name == "IQ4_NL" else type_name  # the same blocks; only the codes mean something else
    blocks = quantize(torch.randn(rows, 96), source)
    linear = pack_ggml(blocks, type_name)
    expected = dequantize(blocks, type_name)
    assert torch.equal(linear.dequantize(), expected)
    assert torch.equal(linear.dequantize_rows(rows // 2, rows, torch.float32), expected[rows // 2 :])
    assert linear.weight.numel() == -(-rows // 16) * 3 * PACKED_FORMATS[type_name].tile_bytes


@pytest.mark.parametrize("kind", [Linear8bit, LinearInt4])
def test_integers_are_packed_without_loss(kind: Any) -> None:
    linear = kind.from_weight(torch.randn(20, 96))
    packed = pack_integers(linear)
    assert packed is not None and torch.equal(packed.dequantize(), linear.dequantize())
    assert pack_integers(kind.from_weight(torch.randn(20, 48))) is None, "groups of 16"


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(OptionError, match="rows of 48 weights cannot be packed; expected a multiple of 32"):
        LinearPacked.from_codes(torch.zeros(2, 48, dtype=torch.uint8), torch.ones(2, 1).half(), PACKED_FORMATS["Q4_0"])


# --- one product ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("extreme", [False, True])
def test_product_equals_its_definition(kernels: str, name: str, extreme: bool) -> None:
    for rows, columns, num_inputs in SHAPES:
        linear = random_linear(name, rows, columns, extreme=extreme)
        x = torch.randn(num_inputs, columns)
        if extreme:
            x = x.sign() * 3e4
        expected = product_reference(x, linear)
        # The integer parts are exact; what is left is the order in which the groups are added.
        largest = float(expected.abs().max())
        torch.testing.assert_close(native.product(linear.matrix, x), expected, rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.parametrize("rows", [1, 3, 48, 65])
def test_a_product_of_bfloat16_equals_torchs(kernels: str, rows: int) -> None:
    weight, x = torch.randn(rows, 96).bfloat16(), torch.randn(70, 96)
    if kernels == "avx512_bf16":
        x = x.bfloat16().float()  # as it rounds them itself
    matrix = native.Matrix(native.Kind.BF16, rows, 96, weight.data_ptr(), None)
    for count in (1, 3, 70):
        torch.testing.assert_close(native.product(matrix, x[:count]), x[:count] @ weight.float().T, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", GROUPED)
def test_a_row_is_the_same_alone_among_others_and_on_any_number_of_threads(
    kernels: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear, x = random_linear(name, 200, 96), torch.randn(70, 96)
    monkeypatch.setattr(native, "num_threads", lambda: 1)
    together = native.product(linear.matrix, x)
    for count in (2, 3, 7):
        monkeypatch.setattr(native, "num_threads", lambda count=count: count)
        assert torch.equal(native.product(linear.matrix, x), together)
    alone = torch.cat([native.product(linear.matrix, row.unsqueeze(0)) for row in x])
    assert torch.equal(alone, together)


def test_inputs_that_are_zero_or_not_finite(kernels: str) -> None:
    linear = random_linear("Q4_0", 16, 64)
    x = torch.randn(4, 64)
    x[0], x[1, 3], x[2, 40] = 0, float("nan"), float("inf")
    y = native.product(linear.matrix, x)
    assert (y[0] == 0).all() and y[1:3].isnan().all() and y[3].isfinite().all()


def test_scales_that_are_subnormal_infinite_or_nan(kernels: str) -> None:
    codes = torch.full((16, 32), 9, dtype=torch.uint8)
    scale = torch.tensor([2.0**-24, -(2.0**-15), 65504.0, float("inf"), float("nan"), 0.0]).half()
    linear = LinearPacked.from_codes(codes[:6], scale.unsqueeze(1), PACKED_FORMATS["Q4_0"])
    y = native.product(linear.matrix, torch.ones(1, 32))[0]
    torch.testing.assert_close(y[:3], scale[:3].float() * 32)
    assert y[3].isinf() and y[4].isnan() and y[5] == 0
    assert not linear.has_finite_scales() and random_linear("Q4_1", 20, 32).has_finite_scales()


def test_rounding_of_inputs_is_the_definitions() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, *[0.0] * 28]])
    codes, scale = quantize_inputs(x)
    assert codes[0, 0, :4].tolist() == [127, 0, 2, -2] and scale.item() == 1.0  # ties to even


def test_a_linear_serves_every_dtype_shape_and_gradient() -> None:
    linear = random_linear("Q4_1", 33, 64)
    x = torch.randn(2, 3, 64)
    assert linear(x).shape == (2, 3, 33) and linear(x.bfloat16()).dtype is torch.bfloat16
    assert torch.equal(linear(x), native.product(linear.matrix, x.view(6, 64)).view(2, 3, 33))
    wanted = x.clone().requires_grad_()
    linear(wanted).sum().backward()
    torch.testing.assert_close(wanted.grad, linear.dequantize().sum(0).expand_as(x))
    copied = copy.deepcopy(linear)
    linear.weight.zero_()
    assert not torch.equal(copied(x), linear(x)), "a copy multiplies with its own weight"


def test_an_embedding_looks_up_rows() -> None:
    linear = random_linear("Q8_0", 100, 64)
    table = EmbeddingPacked(linear, torch.float32)
    ids = torch.tensor([[0, 99, 17], [16, 15, 99]])
    assert torch.equal(table(ids), linear.dequantize()[ids])
    assert torch.equal(table(ids.int()), table(ids)) and table.linear is linear
    assert table.to(torch.bfloat16)(ids).dtype is torch.bfloat16
    for bad in (-1, 100):
        with pytest.raises(IndexError, match=r"expected 0\.\.99"):
            table(torch.tensor([bad]))


# --- the whole pass ---------------------------------------------------------------------------------------------------

CONFIG = replace(
    preset("tiny"),
    vocab_size=300,
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=131072,
    rope_scaling=RopeScaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    ),
)


def build(type_name: str | None, dtype: torch.dtype, head_dim: int = 32) -> LlamaForCausalLM:
    config = replace(CONFIG, head_dim=head_dim, num_attention_heads=128 // head_dim)
    model = init_weights(LlamaForCausalLM(config), seed=1).requires_grad_(False)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.mul_(2)
    if type_name is not None:
        swap_linears(model, lambda _, linear: pack_ggml(quantize(linear.weight, type_name), type_name), skip=())
    return model.to(dtype).eval()


def both(
    type_name: str | None, dtype: torch.dtype = torch.float32, head_dim: int = 32
) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """The same model through its modules and through a plan."""
    made = [build(type_name, dtype, head_dim) for _ in range(2)]
    assert use_kernels(made[1])
    return made[0], made[1]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the passes that a plan ran, by their tokens."""
    seen: list[int] = []
    true = plans.Plan.run
    monkeypatch.setattr(plans.Plan, "run", lambda self, x, attend: seen.append(len(x)) or true(self, x, attend))
    return seen


@torch.no_grad()
@pytest.mark.parametrize(("type_name", "head_dim"), [("Q8_0", 32), ("Q4_1", 64), ("Q8_0", 16)])
def test_a_pass_equals_the_modules(kernels: str, type_name: str, head_dim: int, passes: list[int]) -> None:
    modules, planned = both(type_name, head_dim=head_dim)
    prompts = [list(range(1, 290)), [7, 8, 9]]  # beyond one chunk of 256 slots, and rows of different lengths
    logits = []
    for model in (modules, planned):
        cache = new_cache(model, 2, 8200)
        first = prefill(model, cache, prompts)
        far = CachedAttend(cache, [8192, 3], 1)  # what lies between is zeros, in both
        logits.append((first, model.logits(model.model(torch.tensor([[5], [6]]), far.positions_BT, far))))
    assert passes == [2 * 289, 2]
    for expected, found in zip(*logits, strict=True):
        # An input near the middle of two codes may be rounded the other way: 1/254 of the largest of its group.
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-2 * float(expected.std()))


@torch.no_grad()
def test_a_pass_over_bfloat16_weights_equals_the_modules_in_float32(kernels: str, passes: list[int]) -> None:
    exact = build(None, torch.bfloat16).float()
    _, planned = both(None, torch.bfloat16)
    cache, expected_cache = new_cache(planned, 1, 300), new_cache(exact, 1, 300)
    for position in range(4):
        found = decode_one(planned, cache, [11 + position], [position])
        expected = decode_one(exact, expected_cache, [11 + position], [position])
    assert passes == [1] * 4
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=2e-2 * float(expected.std()))


@torch.no_grad()
def test_a_deterministic_model_has_the_same_bits_in_any_batch_and_chunk(passes: list[int]) -> None:
    _, model = both(None, torch.bfloat16)
    assert make_deterministic(model)
    ids = torch.arange(24).view(1, -1) % 90
    exact = build(None, torch.bfloat16).float()(ids)
    torch.testing.assert_close(model(ids).float(), exact, rtol=0, atol=4e-2 * float(exact.std()))
    passes.clear()

    def last(chunk: int, others: int) -> Tensor:
        cache = new_cache(model, 1 + others, 32)
        return prefill(model, cache, [ids[0].tolist(), *([[3] * 24] * others)], chunk=chunk)[0]

    expected = last(24, 0)
    assert all(torch.equal(last(chunk, others), expected) for chunk, others in ((24, 3), (1, 0), (5, 2)))
    assert torch.equal(copy.deepcopy(model)(ids.expand(5, -1))[4, -1], expected), "a copy stays so"
    assert passes[0] == 24, "PyTorch took a prompt"


def test_a_deterministic_model_refuses_what_the_kernels_do_not_take() -> None:
    _, model = both(None, torch.bfloat16)
    assert make_deterministic(model) and not make_deterministic(build(None, torch.float32, 32))
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(InputError, match="load the model without deterministic"):
        model(ids)  # with a gradient
    model.model.layers[0].register_forward_hook(lambda *_: None)
    with torch.no_grad(), pytest.raises(InputError, match="load the model without deterministic"):
        model(ids)


@torch.no_grad()
def test_tokens_have_the_same_logits_cached_chunked_batched_and_on_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, model = both("Q4_0")
    ids = torch.randint(300, (1, 600)).tolist()[0]

    def last(chunk: int, count: int, others: int) -> Tensor:
        monkeypatch.setattr(native, "num_threads", lambda: count)
        cache = new_cache(model, 1 + others, 600)
        return prefill(model, cache, [ids, *([[3] * 600] * others)], chunk=chunk)[0]

    expected = last(600, 1, 0)
    for chunk, count, others in ((600, 2, 0), (600, 3, 2), (7, 1, 0), (1, 2, 1), (333, 2, 0)):
        assert torch.equal(last(chunk, count, others), expected)


def packed_whole(dtype: torch.dtype) -> LlamaForCausalLM:
    """A model whose embedding and head are packed too, as one from a GGUF file is."""
    _, model = both("Q4_0", dtype)
    model.lm_head = random_linear("Q8_0", CONFIG.vocab_size, CONFIG.hidden_size)
    model.model.embed_tokens = EmbeddingPacked(model.lm_head, dtype)
    return model


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_in_one_call_has_the_bits_of_its_parts(
    kernels: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, steps = packed_whole(dtype), list[int]()
    true = native.step
    monkeypatch.setattr(native, "step", lambda *args: steps.append(len(args[2])) or true(*args))
    logits = []
    for is_one_call in (True, False):
        cache = new_cache(model, 2, 40)
        prefill(model, cache, [[1, 2, 3], [4, 5, 6, 7, 8]])
        attend = CachedAttend(cache, [3, 5], 1)
        run = type(model).next_logits if is_one_call else LlamaForCausalLM.next_logits
        last_B1 = torch.tensor([[0, 7], [0, 8]])[:, 1:]  # not contiguous
        logits.append(run(model, last_B1, attend.positions_BT, attend).float())
    assert torch.equal(*logits) and steps == [2]
    with pytest.raises(IndexError, match="ids span 300"):
        decode_one(model, cache, [300, 300], [4, 6])


@torch.no_grad()
@pytest.mark.parametrize("name", ["", "lm_head", "model", "model.embed_tokens", "model.layers.1.mlp"])
def test_a_step_in_one_call_skips_no_hook_and_no_other_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = packed_whole(torch.float32), list[str]()
    cache = new_cache(model, 1, 40)
    expected = decode_one(model, cache, [5], [0])
    copied = copy.deepcopy(model)
    assert torch.equal(decode_one(copied, new_cache(copied, 1, 40), [5], [0]), expected)
    monkeypatch.setattr(native, "step", lambda *_: pytest.fail("a hook, or another module, was passed over"))
    if name:
        model.get_submodule(name).register_forward_hook(lambda *_: seen.append(name))
    else:
        model.lm_head = torch.nn.Linear(CONFIG.hidden_size, CONFIG.vocab_size, bias=False)
    assert decode_one(model, cache, [5], [0]).shape == expected.shape and seen == ([name] if name else [])


@torch.no_grad()
@pytest.mark.parametrize("whole", [True, False])
def test_a_cache_or_tokens_that_do_not_fit_are_refused(whole: bool) -> None:
    model = packed_whole(torch.float32) if whole else LlamaForCausalLM(CONFIG)
    if not whole:
        model = init_weights(model, seed=3).bfloat16().eval()
        assert use_kernels(model)
    other = replace(CONFIG, num_hidden_layers=1)
    with pytest.raises(InputError, match=r"the cache has 1 layers of \d+ heads of \d+; expected 3 layers"):
        decode_one(model, new_cache(LlamaForCausalLM(other).to(model.model.norm.weight.dtype), 1, 8), [1], [0])
    for rows, num_tokens in ((1, 5), (4, 1)):
        attend = CachedAttend(new_cache(model, rows, 8), [0] * rows, num_tokens)
        for run in (model, model.next_logits):
            with pytest.raises(InputError, match=f"ids are 1 rows of 1; expected {rows} of {num_tokens}"):
                run(torch.tensor([[1]]), torch.tensor([[0]]), attend)


@torch.no_grad()
def test_positions_of_ones_own_and_hooks_for_all_modules_go_through_the_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = packed_whole(torch.float32)
    ids, seen = torch.tensor([[1, 2, 3]]), list[nn.Module]()
    attends = [CachedAttend(new_cache(model, 1, 8), [0], 3) for _ in range(3)]
    expected = model(ids, attend=attends[0])
    monkeypatch.setattr(native, "forward", lambda *_: pytest.fail("the kernels know other positions"))
    assert not torch.allclose(model(ids, torch.tensor([[0, 2, 5]]), attends[1]), expected)
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        model(ids, attend=attends[2])
    finally:
        handle.remove()
    assert model.model.layers[1] in seen


@torch.no_grad()
def test_a_layer_more_is_noticed() -> None:
    model = packed_whole(torch.float32)
    ids = torch.tensor([[1, 2, 3]])
    before = model(ids)
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))
    for changed in (model, copy.deepcopy(model)):
        assert not torch.allclose(changed(ids), before)


@torch.no_grad()
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 7, 9])
def test_huge_scores_are_weighed_alone(kernels: str, num_tokens: int) -> None:
    model = init_weights(LlamaForCausalLM(CONFIG), seed=3).bfloat16().eval()
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj"):
            layer.self_attn.get_submodule(name).get_parameter("weight").fill_(1e6)  # all slots score alike
    ids = torch.tensor([[7] * num_tokens])
    attends = [CachedAttend(new_cache(model, 1, 16), [0], num_tokens) for _ in range(2)]
    expected = model(ids, attend=attends[0]).float()
    assert use_kernels(model)
    found = model(ids, attend=attends[1]).float()
    assert (found - expected).norm() / expected.norm() < 0.02


@torch.no_grad()
@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_what_was_moved_to_another_device_is_not_read_by_the_kernels(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = packed_whole(torch.float32)
    cache, read = new_cache(model, 1, 40), list[str]()
    model.lm_head = copy.deepcopy(model.lm_head)  # not the embedding's own weight
    (model if name == "lm_head" else model.model).get_submodule(name).to("meta")
    matrix = {"lm_head": "product", "embed_tokens": "lookup"}[name]
    for function in ("step", matrix):
        monkeypatch.setattr(native, function, lambda *_, function=function: read.append(function))
    with suppress(RuntimeError, NotImplementedError):  # PyTorch's, of two devices
        decode_one(model, cache, [5], [0])
    assert read == []


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 32), (6, 3, 16), (3, 1, 64), (4, 1, 72), (5, 1, 32), (2, 1, 48)]
)
def test_rows_that_are_taken_together_see_what_each_sees_alone(
    kernels: str, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    config = replace(
        CONFIG, num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim
    )
    model = init_weights(LlamaForCausalLM(config), seed=1).requires_grad_(False)
    swap_linears(model, lambda _, linear: pack_ggml(quantize(linear.weight, "Q8_0"), "Q8_0"), skip=())
    model.to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32).eval()
    assert use_kernels(model)
    ids = torch.randint(300, (1, 301), generator=torch.Generator().manual_seed(3))

    def run(chunk: int) -> Tensor:
        cache = new_cache(model, 1, 301, "int8" if dtype == torch.int8 else "auto")
        parts: list[Tensor] = []
        for first, part in zip(range(0, 301, chunk), ids.split(chunk, dim=1), strict=True):
            attend = CachedAttend(cache, [first], part.shape[1])
            parts.append(model.model(part, attend.positions_BT, attend))
        return torch.cat(parts, dim=1)

    alone = run(1)  # 8 rows of a sequence are the fewest that are taken together, 32 the most
    assert all(torch.equal(run(chunk), alone) for chunk in (8, 45, 301))


@torch.no_grad()
def test_without_a_cache_a_causal_pass_is_the_same(passes: list[int]) -> None:
    modules, planned = both("Q8_0")
    ids = torch.randint(300, (2, 40))
    cached = prefill(planned, new_cache(planned, 2, 40), ids.tolist())
    assert torch.equal(planned(ids)[:, -1], cached) and passes == [80, 80]
    shifted = torch.arange(5, 45).unsqueeze(0)
    torch.testing.assert_close(planned(ids, shifted), modules(ids, shifted))
    assert passes == [80, 80], "other positions go through the modules"


def test_what_a_plan_cannot_do_goes_through_the_modules(passes: list[int]) -> None:
    modules, planned = both("Q8_0")
    ids = torch.tensor([[1, 2, 3]])
    planned.model.embed_tokens.requires_grad_(True)
    planned(ids).sum().backward()  # a gradient
    assert planned.model.embed_tokens.weight.grad is not None and not passes
    with torch.no_grad():
        found, expected = (trace(model, [1, 2, 3])["layers.1.pattern"] for model in (planned, modules))
        torch.testing.assert_close(found, expected)
        assert not passes, "a trace"


CHANGES: dict[str, Callable[[LlamaForCausalLM], Any]] = {
    "a weight": lambda model: model.model.layers[1].mlp.up_proj.weight[..., :512].random_(0, 255),
    "a Linear": lambda model: setattr(model.model.layers[0].self_attn, "q_proj", random_linear("Q8_0", 128, 96)),
    "a weight's memory": lambda model: setattr(
        model.model.layers[0].mlp.down_proj, "weight", random_linear("Q8_0", 96, 160).weight
    ),
    "a block": lambda model: setattr(model.model.layers[2], "mlp", copy.deepcopy(model.model.layers[0].mlp)),
    "the layers": lambda model: model.model.layers.__delitem__(1),
    "a norm": lambda model: model.model.norm.weight.mul_(2),
    "a norm's memory": lambda model: setattr(
        model.model.norm.weight, "data", torch.full((96,), 3.0, dtype=model.dtype)
    ),
    "a hook": lambda model: model.model.layers[0].mlp.register_forward_hook(lambda module, given, made: made * 2),
    "the dtype": lambda model: model.to(torch.bfloat16),
}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_is_never_stale(change: str, dtype: torch.dtype) -> None:
    if (change, dtype) == ("the dtype", torch.bfloat16):
        dtype = torch.float32  # it becomes bfloat16
    ids = torch.tensor([[1, 2, 3]])
    results = []
    for model in both("Q8_0", dtype):
        before = model(ids)
        torch.manual_seed(0)
        CHANGES[change](model)
        after = model(ids)
        assert not torch.equal(after, before)
        results.append(after.float())
    share = 0.05 if dtype is torch.float32 else 0.15  # the modules round after each operation
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=share * float(results[0].std()))


@torch.no_grad()
def test_copies_have_plans_of_their_own() -> None:
    _, model = both("Q8_0")
    ids = torch.tensor([[1, 2, 3]])
    expected = model(ids)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(copied.model, NativeLlamaModel) and torch.equal(copied(ids), expected)
        copied.model.layers[0].mlp.down_proj.weight.zero_()
        assert not torch.equal(copied(ids), expected) and torch.equal(model(ids), expected)


@torch.no_grad()
def test_a_copy_that_the_kernels_cannot_run_goes_through_the_modules(passes: list[int]) -> None:
    modules, planned = both("Q8_0")
    ids = torch.tensor([[1, 2, 3]])
    found, expected = (copy.deepcopy(model).half()(ids).float() for model in (planned, modules))
    assert torch.equal(found, expected) and not passes


@torch.no_grad()
def test_a_pass_that_is_left_to_the_modules_makes_no_cache(monkeypatch: pytest.MonkeyPatch, passes: list[int]) -> None:
    _, planned = both(None, torch.bfloat16)
    monkeypatch.setattr(plans, "KVCache", None)
    assert planned(torch.tensor([[1, 2, 3, 4, 5]])).isfinite().all() and not passes


def test_the_tree_and_the_keys_stay() -> None:
    modules, planned = both("Q4_0")
    assert str(planned) == str(modules) and list(planned.state_dict()) == list(modules.state_dict())


# --- choosing and threads ---------------------------------------------------------------------------------------------


FOREIGN = "avx2" if platform.machine() in ("aarch64", "arm64") else "neon_i8mm"
CHOICES = [
    ("torch", None),
    ("avx9", "is 'avx9'; expected amx, avx512_bf16, avx512_vnni"),
    (FOREIGN, f"is {FOREIGN}, which this machine cannot run"),
]


@pytest.mark.parametrize(("value", "said"), CHOICES)
def test_the_environment_chooses(value: str, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, value)
    choose = native.library.__wrapped__
    if said is None:
        assert choose() is None
    else:
        with pytest.raises(OptionError, match=said):
            choose()


def test_a_missing_or_foreign_library_is_done_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    choose = native.library.__wrapped__
    monkeypatch.setattr(native, "_FILE", tmp_path / "none.so")
    assert choose() is None
    (tmp_path / "junk.so").write_bytes(b"junk")
    monkeypatch.setattr(native, "_FILE", tmp_path / "junk.so")
    with pytest.warns(UserWarning, match=r"cannot be loaded: .*; install a C compiler"):
        assert choose() is None
    monkeypatch.undo()
    monkeypatch.setattr(native, "INTERFACE", 99)
    with pytest.warns(UserWarning, match="expected 99"):
        assert choose() is None


def test_the_kernels_have_torchs_threads_and_torch_one_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_allowed_cpus", lambda: 2)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with threads.one_torch_thread():
            assert (torch.get_num_threads(), threads.num_threads()) == (1, 2)
            with threads.one_torch_thread():
                assert threads.num_threads() == 2
            assert (torch.get_num_threads(), threads.num_threads()) == (1, 2)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_threads_sleep_when_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x = random_linear("Q4_0", 64, 96), torch.randn(1, 96)
    monkeypatch.setattr(native, "num_threads", lambda: 3)
    native.product(linear.matrix, x)
    time.sleep(0.05)  # they wait for the next call for 3 ms
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.1
