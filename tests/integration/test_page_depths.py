"""The picture's depths below the whole: what the table of each says are the numbers of `llama.trace`."""

import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from playwright.sync_api import Page, expect

from llamarium.api import Llama
from llamarium.inspect.probes.heads import heads_joined
from llamarium.inspect.probes.neurons import top_neurons
from llamarium.inspect.probes.rope import rope_pairs
from llamarium.inspect.trace import Trace
from page_browser import TEXT, as_shown, link, settled
from serving import Running

LAYER, HEAD, POS = 1, 1, 4
DIGITS = 6
MINUS = "\u2212"

pytest_plugins = ["page_browser"]
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

Floats = NDArray[np.float64]


@pytest.fixture(scope="module")
def trace(llama: Llama) -> Trace:
    return llama.trace(TEXT)


def numbers(trace: Trace, name: str, layer: int | None = LAYER) -> Floats:
    return trace.arrays[name, layer].astype(float)


def table(page: Page, served: Running, **view: Any) -> dict[str, str]:
    """The table of a place, by the marks' ids."""
    page.goto(link(served, **{"layer": LAYER, "head": HEAD, "pos": POS, **view}))
    settled(page)
    details = page.locator(".picture details").first
    if details.get_attribute("open") is None:
        page.locator(".picture summary").click()
    expect(details.locator("tr[data-mark]").first).to_be_visible()
    settled(page)
    rows = details.locator("tr[data-mark]").evaluate_all(
        "all => all.map((row) => [row.dataset.mark, row.querySelector('td').innerText])"
    )
    return dict(rows)


def check(found: dict[str, str], expected: dict[str, float]) -> None:
    """Hold numbers of a table to what they are in the trace."""
    shown = {key: number(found[key]) for key in expected}
    assert shown == {key: as_shown(value, DIGITS) for key, value in expected.items()}


def number(text: str) -> float:
    match = re.match(r"-?[\d.]+(e[-+]?\d+)?", text.replace(MINUS, "-"))
    assert match, text
    return float(match[0])


def length(values: Floats) -> float:
    return float(np.linalg.norm(values))


def cells(mark: str, values: Floats, count: int = 5) -> dict[str, float]:
    """The first cells of a strip of one row."""
    return {f"{mark}.0.{i}": float(value) for i, value in enumerate(values.reshape(-1)[:count])}


def test_a_layer(page: Page, served: Running, llama: Llama, trace: Trace) -> None:
    before, middle, after = numbers(trace, "resid", LAYER - 1), numbers(trace, "resid_mid"), numbers(trace, "resid")
    pattern_NTS, q_TNH = numbers(trace, "pattern"), numbers(trace, "q")
    found = table(page, served, stage="residual")
    expected: dict[str, float] = {}
    for t in range(len(trace.token_ids)):
        expected |= {
            f"n.t{t}.before": length(before[t]),
            f"n.t{t}.middle": length(middle[t]),
            f"n.t{t}.after": length(after[t]),
            f"n.t{t}.a.adds": length(numbers(trace, "attn_out")[t]) / length(middle[t]),
            f"n.t{t}.m.adds": length(numbers(trace, "mlp_out")[t]) / length(after[t]),
            f"n.t{t}.a.norm": float(np.sqrt(np.square(before[t]).mean() + llama.config.rms_norm_eps)),
            f"n.t{t}.q.0.{HEAD}": float(np.float32(length(q_TNH[t, HEAD]))),  # a cell of a strip
            f"n.h{HEAD}.q{t}.k{t}": float(pattern_NTS[HEAD, t, t]),
        }
    expected |= {f"n.h{HEAD}.q{t}.k{s}": float(pattern_NTS[HEAD, t, s]) for t in range(POS + 1) for s in range(t)}
    check(found, expected)


@pytest.mark.parametrize(
    ("block", "names"), [("norm", ("resid", "attn_norm")), ("mlp_norm", ("resid_mid", "mlp_norm"))]
)
def test_a_norm(page: Page, served: Running, llama: Llama, trace: Trace, block: str, names: tuple[str, str]) -> None:
    before = numbers(trace, names[0], LAYER - 1 if block == "norm" else LAYER)[POS]
    root = float(np.sqrt(np.square(before).mean() + llama.config.rms_norm_eps))
    found = table(page, served, stage="norm", block=block)
    check(found, {f"b.{block}.root": root, f"b.{block}.before": length(before)})
    check(found, cells(f"b.{block}.after", numbers(trace, names[1])[POS]))


def test_queries_keys_and_values(page: Page, served: Running, trace: Trace) -> None:
    found = table(page, served, stage="qkv")
    for what in ("q", "k", "v"):
        for head, values in enumerate(numbers(trace, what)[POS]):
            check(found, {f"b.qkv.{what}{head}": length(values), **cells(f"b.qkv.{what}{head}", values)})


def test_hands_turn(page: Page, served: Running, llama: Llama, trace: Trace) -> None:
    found = table(page, served, stage="rope")
    for pair in rope_pairs(llama.config, POS):
        check(found, {f"b.rope.q{pair.index}.after": pair.angle, f"b.rope.k{pair.index}.after": pair.angle})
    turned = numbers(trace, "q_rot")[POS, HEAD]
    name = page.locator('tr[data-mark="b.rope.q1.after"] th').inner_text()
    half = len(turned) // 2
    assert [as_shown(number(part), 4) for part in name.split("becomes (")[1].split("),")[0].split(", ")] == [
        as_shown(float(turned[1]), 4), as_shown(float(turned[1 + half]), 4),
    ]  # fmt: skip


def test_one_head_at_one_token(page: Page, served: Running, trace: Trace) -> None:
    found = table(page, served, stage="attention")
    scores, pattern = numbers(trace, "scores")[HEAD, POS], numbers(trace, "pattern")[HEAD, POS]
    for key in range(len(trace.token_ids)):
        if key <= POS:
            check(found, {f"b.attention.score{key}": scores[key], f"b.attention.share{key}": pattern[key]})
        else:
            assert found[f"b.attention.mask{key}"] == f"{MINUS}\u221e" and f"b.attention.share{key}" not in found
    check(found, cells("b.attention.out", numbers(trace, "head_out")[POS, HEAD]))


def test_heads_joined(page: Page, served: Running, llama: Llama, trace: Trace) -> None:
    found = table(page, served, stage="heads")
    told = heads_joined(
        llama.runner, llama.trace(TEXT, positions=[POS]), LAYER
    )  # a product of more rows rounds otherwise
    for head in range(llama.config.num_attention_heads):
        check(found, {f"b.heads.h{head}": told.norms_TN[0, head], f"b.heads.h{head}.share": told.shares_TN[0, head]})
        check(found, cells(f"b.heads.h{head}", told.added_TND[0, head].astype(float)))
    check(found, cells("b.heads.out", numbers(trace, "attn_out")[POS]))


def test_the_mlp(page: Page, served: Running, llama: Llama, trace: Trace) -> None:
    found = table(page, served, stage="mlp")
    for strip, name in (("gate", "gate"), ("act", "act"), ("up", "up"), ("gated", "gated"), ("out", "mlp_out")):
        values = numbers(trace, name)[POS]
        check(found, {f"b.mlp.{strip}": length(values)})
    for one in top_neurons(llama.config, trace, LAYER, position=POS, k=10).neurons:
        check(found, {f"b.mlp.n{one.index}": one.gated})


def test_text_and_row(page: Page, served: Running, trace: Trace) -> None:
    assert number(table(page, served, stage="tokens")["b.text.token"]) == trace.token_ids[POS]
    found = table(page, served, stage="embedding")
    row = numbers(trace, "embed", None)[POS]
    check(found, {"b.row.id": trace.token_ids[POS], "b.row.row": length(row), **cells("b.row.row", row)})


def test_logits_to_a_token(page: Page, served: Running, trace: Trace) -> None:
    found = table(page, served, stage="sampler")
    logits = numbers(trace, "logits", None)[POS]
    probabilities = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    for token_id in np.argsort(-logits)[:8].tolist():
        assert number(found[f"b.logits.c{token_id}.model"]) == pytest.approx(probabilities[token_id], rel=1e-5)


@pytest.mark.parametrize(
    ("stage", "product", "names"),
    [
        ("qkv", "q_proj", ("attn_norm", "q")), ("qkv", "v_proj", ("attn_norm", "v")),
        ("heads", "o_proj", ("head_out", "attn_out")), ("mlp", "gate_proj", ("mlp_norm", "gate")),
        ("mlp", "down_proj", ("gated", "mlp_out")), ("sampler", "lm_head", ("final_norm", "logits")),
    ],
)  # fmt: skip
def test_a_product_and_one_number_of_it(
    page: Page, served: Running, llama: Llama, trace: Trace, stage: str, product: str, names: tuple[str, str]
) -> None:
    row, layer = 11, None if product == "lm_head" else LAYER
    given, made = (numbers(trace, name, layer)[POS].reshape(-1) for name in names)
    part = "self_attn" if product in ("q_proj", "v_proj", "o_proj") else "mlp"
    key = "lm_head.weight" if layer is None else f"model.layers.{layer}.{part}.{product}.weight"
    weight = llama.runner.dequantize(key, [row])[0].astype(float)
    found = table(page, served, stage=stage, depth=3, product=product, row=row)
    first = row - 8
    assert {mark for mark in found if mark.startswith("p.output.")} == {f"p.output.{r}.0" for r in range(16)}
    check(found, {f"p.output.{r}.0": made[first + r] for r in range(16)} | {"p.number": made[row]})
    found = table(page, served, stage=stage, depth=4, product=product, row=row)
    terms = {mark: number(value) for mark, value in found.items() if re.fullmatch(r"s\.(term\d+|rest|rounding)", mark)}
    check(found, {"s.total": made[row]})
    largest = np.argsort(-np.abs(weight * given))[:6]
    check(found, {f"s.term{i}": weight[i] * given[i] for i in largest.tolist()})
    assert sum(terms.values()) == pytest.approx(made[row], abs=1e-5 * max(abs(one) for one in terms.values()))
