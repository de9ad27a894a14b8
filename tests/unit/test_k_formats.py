"""GGUF's K formats in the kernels: nothing is lost in packing, and the products are the definition's."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

import llamarium
from llamarium.checkpoints.modules import round_inputs
from llamarium.checkpoints.packed.save import PackedWeight, save_packed
from llamarium.checkpoints.save import array_of
from llamarium.inspect.forward import Memory, advance
from llamarium.kernels import native
from llamarium.kernels.native import InputBits
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.quant.formats import PACKED_FORMATS, block_format
from llamarium.quant.ggml.blocks import dequantize
from llamarium.quant.packed import EmbeddingPacked, LinearPacked
from llamarium.quant.packing import count_nonfinite_tiles
from llamarium.runtime.batch import Span, pack
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.runtime.native.runner import NativeRunner
from llamarium.runtime.runner import Runner
from native_models import product, weights_of
from reference_tiles import pack_ggml, pack_reference, product_reference, quantize_inputs
from swapping import swap_linears

pytestmark = [pytest.mark.torch, pytest.mark.alone]  # with as many threads as there are cores

K_FORMATS = [name for name, item in PACKED_FORMATS.items() if item.is_super]
HALVES_AT = {
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_XS": [0],
    "IQ3_S": [0], "IQ3_XXS": [0], "IQ2_S": [0], "IQ2_XS": [0], "IQ2_XXS": [0], "IQ1_S": [0],
}  # fmt: skip
"""Where a block's halves are, in bytes from its start."""


def random_blocks(type_name: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    """Any codes and small integers, with halves such that weights are of size 0.1: (rows, bytes of a row)."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(
        256, (rows, columns // 256, block_format(type_name).block_bytes), generator=generator, dtype=torch.uint8
    )
    for start, size in zip(HALVES_AT[type_name], (2.0**-11, 2.0**-8), strict=False):
        halves = (size * (0.5 + torch.rand(rows, columns // 256, 1, generator=generator))).half()
        blocks[..., start : start + 2] = halves.view(torch.uint8)
    return blocks.flatten(1)


def with_halves(type_name: str, values: list[float]) -> LinearPacked:
    """A row of 256 for each value, of which all halves are that value; codes and integers are random, but not zero."""
    blocks = random_blocks(type_name, len(values), 256) | 0x11
    for start in HALVES_AT[type_name]:
        blocks[:, start : start + 2] = torch.tensor(values).half().unsqueeze(1).view(torch.uint8)
    return pack_ggml(blocks, type_name)


# --- the layout -------------------------------------------------------------------------------------------------------


def test_bits_per_weight_contain_the_scales() -> None:
    found = {name: round(format.bits_per_weight, 4) for name, format in PACKED_FORMATS.items()}
    assert found == {
        "Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5.0, "IQ4_NL": 4.5, "Q5_0": 5.5, "Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625,
        "IQ4_XS": 4.25,
    }  # fmt: skip


@pytest.mark.parametrize("type_name", K_FORMATS)
@pytest.mark.parametrize("rows", [1, 16, 40])
@pytest.mark.parametrize("unpacks", ["C", "PyTorch"])
def test_packing_loses_nothing(type_name: str, rows: int, unpacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_blocks(type_name, rows, 512)
    expected = dequantize(blocks, type_name)
    linear = pack_ggml(blocks, type_name)
    if unpacks == "PyTorch":
        monkeypatch.setattr(native, "library", lambda: None)
    assert torch.equal(linear.dequantize(), expected) and linear.in_features == 512
    assert torch.equal(linear.dequantize_rows(rows // 2, rows, torch.float32), expected[rows // 2 :])
    assert linear.weight.numel() == -(-rows // 16) * 16 * blocks.shape[1], "no byte more than in the file"


@pytest.mark.parametrize("type_name", PACKED_FORMATS)
@pytest.mark.parametrize("rows", [1, 16, 300])
def test_c_packs_what_pytorch_does(type_name: str, rows: int) -> None:
    blocks = torch.randint(256, (block_format(type_name).row_bytes(768), rows), dtype=torch.uint8).T
    found = pack_ggml(blocks, type_name).weight  # of blocks that do not lie one after the other
    assert torch.equal(found, pack_reference(blocks, type_name))


def test_every_code_and_integer_has_its_place() -> None:
    """Any byte of a block, changed alone, changes the weights as it does in the file's own format."""
    for type_name in K_FORMATS:
        blocks = random_blocks(type_name, 2, 256)
        size = blocks.shape[1]  # bytes of a block
        changed = blocks[1].repeat(size, 1)
        changed[range(size), range(size)] ^= 1 << torch.arange(size, dtype=torch.uint8) % 8
        assert torch.equal(pack_ggml(changed, type_name).dequantize(), dequantize(changed, type_name))


# --- one product ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_name", K_FORMATS)
def test_the_definition_is_the_weights_times_the_rounded_inputs(type_name: str) -> None:
    blocks, x = random_blocks(type_name, 20, 512), torch.randn(3, 512)
    linear = pack_ggml(blocks, type_name)
    linear.input_bits = 8
    codes, scale = quantize_inputs(x)
    rounded = (codes.double() * scale.double().unsqueeze(-1)).flatten(1)
    expected = rounded @ dequantize(blocks, type_name).double().T
    found = product_reference(x, linear).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("type_name", K_FORMATS)
@pytest.mark.parametrize("extreme", [0, 255, None])
@pytest.mark.parametrize("bits", [8, 16])
def test_product_equals_its_definition(kernels: str, type_name: str, extreme: int | None, bits: InputBits) -> None:
    for rows, columns, num_inputs in ((16, 256, 1), (1, 256, 2), (33, 512, 13), (48, 2048, 9)):
        blocks, x = random_blocks(type_name, rows, columns), torch.randn(num_inputs, columns)
        if extreme is not None:  # all codes and integers are the least or the largest, and so are the inputs
            changed = torch.full_like(blocks, extreme).view(rows, -1, block_format(type_name).block_bytes)
            if type_name == "Q6_K":
                changed[..., 192:208] = 128 - (extreme > 0)  # -128, or 127
            for start in HALVES_AT[type_name]:
                changed[..., start : start + 2] = blocks.view(changed.shape)[..., start : start + 2]
            blocks, x = changed.view(blocks.shape), 3e4 * x.sign()
            x[::2].abs_()
        linear = pack_ggml(blocks, type_name)
        linear.input_bits = bits
        expected, found = product_reference(x, linear), product(linear.matrix, x, bits)
        # The integer parts are exact; what is left is the order in which the groups are added.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("type_name", K_FORMATS)
def test_a_row_is_the_same_alone_among_others_and_on_any_number_of_threads(
    kernels: str, type_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear, x = pack_ggml(random_blocks(type_name, 200, 512), type_name), torch.randn(70, 512)
    monkeypatch.setattr(native, "num_threads", lambda: 1)
    together = product(linear.matrix, x)
    for count in (2, 3, 7):
        monkeypatch.setattr(native, "num_threads", lambda count=count: count)
        assert torch.equal(product(linear.matrix, x), together)
    alone = torch.cat([product(linear.matrix, row.unsqueeze(0)) for row in x])
    assert torch.equal(alone, together)


@pytest.mark.parametrize("type_name", K_FORMATS)
def test_halves_that_are_zero_subnormal_infinite_or_nan(kernels: str, type_name: str) -> None:
    values = [0.0, 2.0**-24, -(2.0**-15), 65504.0, float("inf"), float("nan")]
    linear, x = with_halves(type_name, values), torch.randn(2, 256)
    y = product(linear.matrix, x)
    assert (y[:, 0] == 0).all() and y[:, 5].isnan().all() and not y[:, 4].isfinite().any()
    size = x.abs() @ linear.dequantize()[1:4].abs().T
    assert ((y - product_reference(x, linear))[:, 1:4].abs() <= 1e-6 * size).all() and (y[:, 1:4] != 0).all()
    finite = with_halves(type_name, values[:4])
    assert count_nonfinite_tiles(linear.weight.numpy(), linear.format) > 0
    assert count_nonfinite_tiles(finite.weight.numpy(), finite.format) == 0


@pytest.mark.parametrize("type_name", K_FORMATS)
def test_inputs_that_are_zero_or_not_finite(kernels: str, type_name: str) -> None:
    linear, x = pack_ggml(random_blocks(type_name, 16, 512), type_name), torch.randn(4, 512)
    x[0], x[1, 3], x[2, 400] = 0, float("nan"), float("inf")
    y = product(linear.matrix, x)
    assert (y[0] == 0).all() and y[1:3].isnan().all() and y[3].isfinite().all()


@pytest.mark.parametrize("type_name", K_FORMATS)
def test_an_embedding_looks_up_rows(kernels: str, type_name: str) -> None:
    blocks = random_blocks(type_name, 100, 512)
    table, ids = EmbeddingPacked(pack_ggml(blocks, type_name), torch.float32), torch.tensor([[0, 99, 17], [16, 15, 99]])
    expected = dequantize(blocks, type_name)[ids]
    assert torch.equal(table(ids), expected)
    assert torch.equal(table(ids.int()), expected), "without the kernels"


# --- whole models -----------------------------------------------------------------------------------------------------


def test_a_pass_equals_the_modules(kernels: str) -> None:
    config = replace(
        preset("tiny"), vocab_size=300, hidden_size=256, intermediate_size=512, num_hidden_layers=3,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32,
    )  # fmt: skip
    kinds = {"q_proj": "Q4_K", "v_proj": "Q6_K", "gate_proj": "Q5_K", "down_proj": "Q6_K", "lm_head": "Q6_K"}

    def pack(name: str, linear: torch.nn.Linear) -> LinearPacked:
        kind = kinds.get(name.split(".")[-1], "Q4_K")
        return pack_ggml(random_blocks(kind, linear.out_features, linear.in_features, len(name)), kind)

    model = init_weights(LlamaForCausalLM(config), seed=1).requires_grad_(False)
    swap_linears(model, pack, skip=())
    lm_head = model.lm_head
    assert isinstance(lm_head, LinearPacked)
    model.model.embed_tokens = EmbeddingPacked(lm_head, torch.float32)
    round_inputs(model, 16)
    logits = []
    for runner in (ModuleRunner(model), NativeRunner(config, weights_of(model), input_bits=16)):
        memory = Memory(runner, 20)
        sequence, rows = memory.begin((), 20), list[np.ndarray]()
        for i in range(20):
            sequence.ids.append(7 * i)
            rows.append(advance(runner, memory.cache, [sequence]))
        logits.append(np.stack(rows))
    # An input near the middle of two codes may be rounded the other way: with 16 bits that is little.
    assert np.linalg.norm(logits[1] - logits[0]) / np.linalg.norm(logits[0]) < 1e-3


@torch.no_grad()
@pytest.mark.parametrize(
    ("type_name", "held"),
    [
        ("Q4_K", "Q4_K"),
        ("Q6_K", "Q6_K"),
        ("Q3_K", "BF16"),
        ("IQ4_XS", "IQ4_XS"),
        ("IQ3_S", "BF16"),
        ("IQ2_XXS", "BF16"),
    ],
)
def test_a_file_is_kept_as_it_is_where_the_kernels_know_its_format(
    type_name: str, held: str, model_files: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def any_blocks(values: Any, kind: gguf.GGMLQuantizationType) -> Any:  # gguf-py only reads the K formats
        if values.ndim == 1:
            return values.astype(np.float32)
        return random_blocks(kind.name, *values.shape).numpy()

    monkeypatch.setattr(gguf, "quantize", any_blocks)
    path: Path = model_files(hidden_size=256, intermediate_size=512, head_dim=32).gguf_file(type_name)
    llama, exact = (llamarium.load(path, device="cpu", **given) for given in ({}, {"dtype": "float32"}))
    matrices = {s.dtype for s in llama.sources if len(s.shape) == 2}
    assert matrices == {held}
    assert isinstance(llama.runner, NativeRunner) and isinstance(exact.runner, NativeRunner)
    if held != "BF16":
        assert llama.model.lm_head.weight is llama.model.model.embed_tokens.weight, "a tied head is the same storage"
        for key in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"):
            weight = llama.model.get_submodule(key).dequantize()
            assert torch.equal(weight, exact.model.get_parameter(f"{key}.weight")), "nothing is lost"
    ids = [1, 5, 17, 200, 3]
    for answer in (llama.model(torch.tensor([ids]))[0].float(), torch.from_numpy(all_logits(llama.runner, ids))):
        expected = exact.model(torch.tensor([ids]))[0]
        assert (answer - expected).norm() / expected.norm() < 0.05


def all_logits(runner: Runner, ids: list[int]) -> np.ndarray:
    return runner.run(pack([Span(ids, 0, [0], num_logits=len(ids))]), runner.new_cache(1))


@torch.no_grad()
def test_a_packed_folder_keeps_them(model_files: Callable[..., Any], tmp_path: Path) -> None:
    files, kinds = model_files(hidden_size=256, intermediate_size=512, head_dim=32), ["Q4_K", "Q5_K", "Q6_K"]
    made: dict[str, Any] = dict(files.weights)
    for i, (key, weight) in enumerate(files.weights.items()):
        if weight.ndim == 2:
            kind = kinds[i % 3]
            made[key] = pack_ggml(random_blocks(kind, *weight.shape, seed=i), kind)

    def described(key: str, weight: Tensor) -> PackedWeight:
        held = made[key]
        name = held.format.name if isinstance(held, LinearPacked) else None
        return PackedWeight(key, tuple(weight.shape), name, lambda: array_of(getattr(held, "weight", held)))

    weights = [described(key, weight) for key, weight in files.weights.items()]
    save_packed(weights, files.config, tmp_path / "packed", recipe={})
    llama = llamarium.load(tmp_path / "packed", device="cpu")
    assert isinstance(llama.runner, NativeRunner)
    for key, held in made.items():
        if isinstance(held, LinearPacked):
            module = llama.model.get_submodule(key.removesuffix(".weight"))
            assert torch.equal(module.weight, held.weight) and module.format is held.format
