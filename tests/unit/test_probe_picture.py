"""The far view of a pass: each of its numbers is one of the trace's, or a mean of them."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llamarium.inspect.probes.picture import OF_A_TOKEN, OF_ALL, far_view, tokens_of
from llamarium.inspect.trace import Trace, trace
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.runtime.module_runner import ModuleRunner

pytestmark = pytest.mark.torch

CONFIG = replace(
    preset("tiny"), num_hidden_layers=3, vocab_size=200, initializer_range=0.2, max_position_embeddings=2048
)
IDS = [7, 3, 150, 3, 42, 199, 8]
LAYERS = range(3)


def read(numbers: NDArray[Any], num_layers: int, columns: int, first: int = 0) -> Mapping[str, NDArray[Any]]:
    """The parts of a far view by name; attention as (L, C, columns of all), 0 where there is no pair."""
    rows = {"lengths": num_layers + 1} | dict.fromkeys(("attention_added", "mlp_added", "keys", "values"), num_layers)
    found, at = dict[str, NDArray[Any]](), 0
    for name, count in rows.items():
        found[name] = numbers[at : at + count * columns].reshape(count, columns)
        at += count * columns
    shares = np.zeros((num_layers, columns, first + columns), np.float32)
    shares[:, np.tri(columns, first + columns, first, np.bool_)] = numbers[at:].reshape(num_layers, -1)
    return found | {"attention": shares}


@pytest.fixture(scope="module")
def runner() -> ModuleRunner:
    return ModuleRunner(init_weights(LlamaForCausalLM(CONFIG), seed=0).requires_grad_(False))


def seen(runner: ModuleRunner, columns: range = range(7), chunk: int = 7) -> Mapping[str, NDArray[Any]]:
    """A far view of `IDS`, from traces of so many columns each."""
    kept = [trace(runner, IDS, names=OF_ALL, layers=[layer]) for layer in LAYERS]
    parts = [
        trace(runner, IDS, names=OF_A_TOKEN, positions=[*columns[at : at + chunk]])
        for at in range(0, len(columns), chunk)
    ]
    return read(far_view(kept, parts, columns), len(LAYERS), len(columns), columns.start // columns.step)


@pytest.fixture(scope="module")
def whole(runner: ModuleRunner) -> Trace:
    return trace(runner, IDS)


def length(trace: Trace, name: str) -> NDArray[Any]:
    return trace[name].double().norm(dim=-1).numpy()


def test_every_number_is_of_the_trace(runner: ModuleRunner, whole: Trace) -> None:
    found = seen(runner)
    np.testing.assert_allclose(found["lengths"][0], length(whole, "embed"), rtol=1e-6)
    for layer in LAYERS:
        at = f"layers.{layer}."
        resid, middle = length(whole, at + "resid"), length(whole, at + "resid_mid")
        np.testing.assert_allclose(found["lengths"][layer + 1], resid, rtol=1e-6)
        np.testing.assert_allclose(found["attention_added"][layer], length(whole, at + "attn_out") / middle, rtol=1e-6)
        np.testing.assert_allclose(found["mlp_added"][layer], length(whole, at + "mlp_out") / resid, rtol=1e-6)
        np.testing.assert_allclose(found["keys"][layer], length(whole, at + "k").mean(-1), rtol=1e-6)
        np.testing.assert_allclose(found["values"][layer], length(whole, at + "v").mean(-1), rtol=1e-6)
        np.testing.assert_allclose(found["attention"][layer], whole[at + "pattern"].mean(0).numpy(), atol=1e-7)


def test_pieces_of_a_text_give_the_same(runner: ModuleRunner) -> None:
    """Where a long text is traced in pieces, and where only its end is asked for."""
    every, end = seen(runner), seen(runner, range(4, 7), chunk=2)
    for name, values in seen(runner, chunk=3).items():
        np.testing.assert_allclose(values, every[name], rtol=1e-5, atol=1e-7)
    for name, values in end.items():
        expected = every[name][:, 4:] if name == "attention" else every[name][..., 4:]
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("start", [0, 2])
def test_every_third_token_and_what_it_takes_of_those_between(runner: ModuleRunner, start: int) -> None:
    every, found, columns = seen(runner), seen(runner, range(start, 7, 3), chunk=2), range(start, 7, 3)
    for name in ("lengths", "attention_added", "mlp_added", "keys", "values"):
        np.testing.assert_allclose(found[name], every[name][:, columns], rtol=1e-5)
    for q, row in enumerate(columns):
        for k, key in enumerate(columns[: q + 1]):
            expected = every["attention"][:, row, max(0, key - 2) : key + 1].sum(-1)
            np.testing.assert_allclose(found["attention"][:, q, k], expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found["attention"].sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize(("num_tokens", "start", "step"), [(1500, 1499 % 24, 24), (7, 0, 3), (7, 2, 3)])
def test_a_block_has_the_means_of_its_tokens_and_the_largest_share(
    runner: ModuleRunner, num_tokens: int, start: int, step: int
) -> None:
    """Of a long text, from traces of some columns each; only the first block may be smaller."""
    ids = [(7 * i) % 200 for i in range(num_tokens)]
    columns, layer = range(start, num_tokens, step), 1
    borders = [max(0, start - step + 1), *(end + 1 for end in columns)]
    whole = trace(runner, ids, names=[*OF_ALL, *OF_A_TOKEN], budget_mb=4096)
    parts = [whole.select(positions=tokens_of(columns[at : at + 9])) for at in range(0, len(columns), 9)]
    numbers = far_view([whole], parts, columns, in_blocks=True)
    found = read(numbers, len(LAYERS), len(columns), start // step)
    blocks = list(pairwise(borders))
    of = {"lengths": length(whole, "layers.1.resid"), "keys": length(whole, "layers.1.k").mean(-1)}
    for name, values in of.items():
        means = [values[a:b].mean() for a, b in blocks]
        np.testing.assert_allclose(found[name][layer + (name == "lengths")], means, rtol=1e-5)
    shares_SS = whole["layers.1.pattern"].numpy().mean(0)
    keys = [0, *borders] if borders[0] else borders
    for q, (begin, end) in enumerate(blocks):
        for k, (a, b) in enumerate(pairwise(keys[: len(keys) - len(blocks) + q + 1])):
            expected = shares_SS[begin:end, a:b].sum(-1).max()
            np.testing.assert_allclose(found["attention"][layer, q, k], expected, rtol=1e-4, atol=1e-7)


def test_rows_are_whole_where_tokens_look_ahead(whole: Trace) -> None:
    """An experiment without the mask."""
    pattern = np.full((4, 7, 7), 1 / 7, np.float32)
    edited = dict(whole.arrays) | {("pattern", layer): pattern for layer in LAYERS}
    kept = [whole.select(names=OF_ALL)]
    numbers = far_view(kept, [Trace(whole.token_ids, whole.positions, edited)], range(7))
    assert len(numbers) == (5 * len(LAYERS) + 1) * 7 + len(LAYERS) * 49
