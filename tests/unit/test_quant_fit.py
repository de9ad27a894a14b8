"""Scales fitted to the error, and GPTQ: never worse than rounding to nearest, exact where they can be."""

import numpy as np
import pytest
import torch
from torch import Tensor

from closeness import output_error
from llamarium.calibration import fit as fitting
from llamarium.calibration import gptq as feeding_back
from llamarium.calibration.fit import FITTED_FORMATS
from llamarium.errors import CheckpointError, OptionError
from llamarium.quant.formats import PACKED_FORMATS, PackedFormat
from llamarium.quant.packed import LinearPacked
from llamarium.quant.packing import count_nonfinite_tiles
from reference_tiles import pack_ggml, packed_codes, parts, quantize

pytestmark = pytest.mark.torch

FOUR_BITS = ("Q4_0", "Q4_1", "IQ4_NL")


def fit(weight: Tensor, format: PackedFormat, *, importance: Tensor | None = None, search: bool = True) -> LinearPacked:
    costs = None if importance is None else importance.numpy()
    tiles = fitting.fit(weight.numpy(), format, importance=costs, search=search)
    return LinearPacked(torch.from_numpy(tiles), len(weight), format)


def gptq(weight: Tensor, gram: Tensor, format: PackedFormat) -> LinearPacked:
    return LinearPacked(torch.from_numpy(feeding_back.gptq(weight.numpy(), gram.numpy(), format)), len(weight), format)


def random_weight(rows: int = 48, columns: int = 192, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def inputs(columns: int = 192, tokens: int = 600, seed: int = 1) -> Tensor:
    """Inputs that go along with each other, some columns a hundred times larger than others."""
    random = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, 40, generator=random) @ torch.randn(40, columns, generator=random)
    mixed += 0.5 * torch.randn(tokens, columns, generator=random)
    return mixed * torch.rand(columns, generator=random) ** 3


def group_errors(weight: Tensor, packed: LinearPacked, importance: Tensor | None = None) -> Tensor:
    off = (weight.double() - packed.dequantize().double()).square()
    return (off if importance is None else off * importance.double()).view(-1, 32).sum(-1)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_without_search_it_is_gguf_to_the_byte(type_name: str, rows: int):
    weight = random_weight(rows)
    weight[0, :32] = 0
    packed = fit(weight, PACKED_FORMATS[type_name], search=False)
    assert torch.equal(packed.weight, pack_ggml(quantize(weight, type_name), type_name).weight)


def test_rows_of_many_pieces_are_those_of_one(monkeypatch: pytest.MonkeyPatch):
    weight = random_weight(100)
    whole = fit(weight, PACKED_FORMATS["Q4_1"])
    monkeypatch.setattr("llamarium.calibration.fit._PIECE_WEIGHTS", 16 * 192)
    assert torch.equal(fit(weight, PACKED_FORMATS["Q4_1"]).weight, whole.weight)


@pytest.mark.parametrize("name", FITTED_FORMATS)
@pytest.mark.parametrize("weighted", [False, True])
def test_no_group_is_worse_than_rounded_to_nearest(name: str, weighted: bool):
    weight = random_weight()
    weight[3] *= 1e-4  # scales below float16's normal numbers
    weight[4] = (150 * weight[4]).exp()  # a few large ones
    weight[5] = weight[5].sign()
    importance = inputs().square().mean(0) if weighted else None
    nearest = group_errors(weight, fit(weight, PACKED_FORMATS[name], search=False), importance)
    found = group_errors(weight, fit(weight, PACKED_FORMATS[name], importance=importance), importance)
    assert bool((found <= nearest * (1 + 1e-5) + 1e-12).all())
    assert found.sum() < nearest.sum()


@pytest.mark.parametrize("name", FOUR_BITS)
def test_on_normal_weights_an_eighth_of_the_error_goes_at_least(name: str):
    weight = random_weight(256, 512)
    nearest, found = (
        float(group_errors(weight, fit(weight, PACKED_FORMATS[name], search=s)).sum()) for s in (False, True)
    )
    assert found < 0.9 * nearest


def test_importance_moves_the_error_to_where_it_costs_little():
    weight, x = random_weight(), inputs()
    importance = x.square().mean(0)
    plain, weighted = fit(weight, PACKED_FORMATS["Q4_0"]), fit(weight, PACKED_FORMATS["Q4_0"], importance=importance)
    assert group_errors(weight, weighted, importance).sum() < 0.9 * group_errors(weight, plain, importance).sum()
    assert output_error(weight, weighted, x.T @ x) < output_error(weight, plain, x.T @ x)
    again = fit(weight, PACKED_FORMATS["Q4_0"], importance=importance * 1000)
    assert torch.equal(again.weight, weighted.weight)  # only ratios count


@pytest.mark.parametrize("name", FITTED_FORMATS)
def test_what_a_format_can_say_it_says_exactly(name: str):
    format = PACKED_FORMATS[name]
    codes = torch.randint(0, 256 if name == "Q8_0" else 16, (20, 64), generator=torch.Generator().manual_seed(2))
    codes[:, ::32], codes[:, 1::32] = 0, codes.max()  # both ends are there
    minimum = torch.full((20, 2), -0.5, dtype=torch.float16) if format.has_minimum else None
    exact = packed_codes(
        codes.to(torch.uint8), torch.full((20, 2), 0.0625, dtype=torch.float16), format, minimum
    ).dequantize()
    assert torch.equal(fit(exact, format).dequantize(), exact)


@pytest.mark.parametrize("name", FITTED_FORMATS)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.75, 1e-30, 1e-45, 60000.0, -65504.0])
def test_groups_of_one_value(name: str, value: float):
    weight = torch.full((17, 64), value)
    for packed in (fit(weight, PACKED_FORMATS[name]), fit(weight, PACKED_FORMATS[name], importance=torch.zeros(64))):
        assert count_nonfinite_tiles(packed.weight.numpy(), packed.format) == 0
        assert torch.allclose(packed.dequantize(), weight, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("name", FITTED_FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e6])
def test_weights_that_no_code_stands_for_are_refused(name: str, value: float):
    weight = random_weight()
    weight[7, 100] = value
    what = "reach from" if value == 1e6 else "1 weights are NaN or infinite"
    for make in (fit, lambda weight, format: gptq(weight, torch.eye(192), format)):
        with pytest.raises(CheckpointError, match=what):
            make(weight, PACKED_FORMATS[name])


def test_shapes_and_importances_that_cannot_be_are_refused():
    with pytest.raises(OptionError, match="rows of 40 weights"):
        fit(torch.zeros(4, 40), PACKED_FORMATS["Q4_0"])
    for bad in (torch.ones(64), torch.full((192,), -1.0), torch.full((192,), float("nan"))):
        with pytest.raises(OptionError, match="importance has"):
            fit(random_weight(), PACKED_FORMATS["Q4_0"], importance=bad)
    with pytest.raises(OptionError, match=r"gram has shape \(64, 64\)"):
        gptq(random_weight(), torch.eye(64), PACKED_FORMATS["Q4_0"])
    with pytest.raises(OptionError, match="NaN or infinite"):
        gptq(random_weight(), torch.full((192, 192), float("inf")), PACKED_FORMATS["Q4_0"])


@pytest.mark.parametrize("name", FOUR_BITS)
def test_gptq_has_less_error_in_its_outputs_than_fitted_scales(name: str):
    weight, x = random_weight(), inputs()
    gram = x.T @ x
    found = output_error(weight, gptq(weight, gram, PACKED_FORMATS[name]), gram)
    best = output_error(weight, fit(weight, PACKED_FORMATS[name], importance=gram.diagonal()), gram)
    assert found < 0.6 * best < output_error(weight, fit(weight, PACKED_FORMATS[name], search=False), gram)
    scaled = gptq(weight, gram * 4, PACKED_FORMATS[name])  # 4 and its root change no number's rounding
    assert output_error(weight, scaled, gram) == pytest.approx(found, rel=1e-3)


def test_the_output_error_is_that_of_the_outputs():
    weight, x = random_weight(), inputs()
    packed = fit(weight, PACKED_FORMATS["Q4_0"])
    off = x.double() @ (weight.double() - packed.dequantize().double()).T
    expected = off.square().sum() / (x.double() @ weight.double().T).square().sum()
    assert output_error(weight, packed, x.double().T @ x.double()) == pytest.approx(float(expected), rel=1e-4)


def test_gptq_with_inputs_that_are_apart_only_rounds():
    weight = random_weight()
    assert torch.equal(
        gptq(weight, torch.eye(192), PACKED_FORMATS["Q4_0"]).weight, fit(weight, PACKED_FORMATS["Q4_0"]).weight
    )


def test_gptq_follows_the_paper_column_by_column():
    """The definition, without Cholesky: after each column the others are moved by the inverse of what is left of G."""
    weight, x = random_weight(5, 32), inputs(32)
    gram = (x.T @ x).double()
    gram += 0.01 * gram.diagonal().mean() * torch.eye(32)
    packed = gptq(weight, x.T @ x, PACKED_FORMATS["Q8_0"])
    _, scale, _ = parts(packed, torch.arange(5))
    left, expected = weight.double(), torch.empty(5, 32).double()
    for j in range(32):
        inverse = torch.linalg.inv(gram[j:, j:])
        step = scale[:, 0].double()
        expected[:, j] = (left[:, j] / step).round().clamp(-128, 127) * step
        left[:, j:] -= ((left[:, j] - expected[:, j]) / inverse[0, 0]).unsqueeze(1) * inverse[0]
    difference = (packed.dequantize().double() - expected).abs() / scale.double()
    assert float((difference < 0.01).double().mean()) > 0.98  # a value in the middle of two codes may go either way


def test_few_tokens_and_dead_columns_are_damped():
    x = inputs(tokens=10)
    x[:, 5] = 0
    weight = random_weight()
    packed = gptq(weight, x.T @ x, PACKED_FORMATS["Q4_0"])
    assert count_nonfinite_tiles(packed.weight.numpy(), packed.format) == 0
    assert output_error(weight, packed, x.T @ x) < output_error(weight, fit(weight, PACKED_FORMATS["Q4_0"]), x.T @ x)
    assert np.isfinite(feeding_back.inverse_factor(np.zeros((32, 32), np.float32), 0.01)).all()


def test_more_damping_where_it_is_needed_and_an_error_where_it_does_not_help():
    gram = torch.eye(32)
    gram[0, 1] = gram[1, 0] = 1.05  # no X has it: the smallest eigenvalue is -0.05
    assert np.isfinite(feeding_back.inverse_factor(gram.numpy(), 0.01)).all()
    gram[0, 1] = gram[1, 0] = 5.0
    with pytest.raises(OptionError, match="cannot be inverted"):
        feeding_back.inverse_factor(gram.numpy(), 0.01)
