"""What the suite itself rests on: a comparison that lets no fault through, and a look at what tests leave behind."""

import os
import signal
import sys

import pytest
import torch
from hypothesis import settings

import leftovers
from closeness import assert_close_to_reference, reference_of
from conftest import is_left_out

pytestmark = pytest.mark.torch

X, W = torch.linspace(-1, 2, 300), torch.linspace(3, 1, 600).reshape(2, 300)


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return w @ x


def test_a_product_in_any_order_is_close() -> None:
    reference = reference_of(product, X, W)
    backwards = product(X.flip(0), W.flip(1))
    parts = sum(product(x, w) for x, w in zip(X.split(7), W.split(7, dim=1), strict=True))
    assert_close_to_reference(backwards, parts, reference)


@pytest.mark.parametrize("fault", ["a term is missing", "a term is rounded to bfloat16", "NaN", "another shape"])
def test_a_fault_is_seen(fault: str) -> None:
    good, bad = product(X, W), product(X, W)
    if fault == "a term is missing":
        bad = bad - X[102] * W[:, 102]
    elif fault == "a term is rounded to bfloat16":
        bad = bad - X[250] * W[:, 250] + (X[250] * W[:, 250]).bfloat16()
    elif fault == "NaN":
        bad[1] = torch.nan
    else:
        bad = bad[None]
    reference = reference_of(product, X, W)
    for pair, which in (((good, bad), "second"), ((bad, good), "first")):
        with pytest.raises(AssertionError, match=f"the {which} is"):
            assert_close_to_reference(*pair, reference)


def test_what_is_left_behind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before, threads = leftovers.state(), torch.get_num_threads()
    assert leftovers.difference(before, leftovers.state()) == []
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(threads + 1)
    monkeypatch.setitem(os.environ, "LEFT", "here")
    monkeypatch.setattr(sys, "path", [*sys.path, "nowhere"])
    try:
        changed = leftovers.difference(before, leftovers.state())
    finally:
        torch.set_num_threads(threads)
        signal.signal(signal.SIGTERM, handler)
    assert [line.split(" is ")[0] for line in changed] == [
        "PyTorch's threads", "os.environ['LEFT']", "sys.path", "the handler of SIGTERM",
    ]  # fmt: skip
    assert changed[0] == f"PyTorch's threads is {threads + 1}, was {threads}"


@pytest.mark.parametrize(
    ("source", "chosen"),
    [
        ("def test_a():\n    assert True\n", {"not torch"}),
        ("@pytest.mark.alone\ndef test_a():\n    assert True\n", {"alone", "not torch"}),
        ("import pytest\n\npytestmark = pytest.mark.alone  # it measures time\n", {"alone"}),
        ("import pytest\n\npytestmark = [pytest.mark.timeout(9), pytest.mark.torch]\n", {"torch", "there"}),
        ('pytestmark = [\n    pytest.mark.torch("late"),\n    pytest.mark.alone,\n]\n', {"alone", "there"}),
        ("@pytest.mark.torch\ndef test_a():\n    assert True\n", {"not torch", "torch"}),
    ],
)
def test_a_file_is_left_out_if_it_has_no_test_of_those_marks(source: str, chosen: set[str]) -> None:
    marks = {"alone": "alone", "torch": "torch and not alone", "not torch": "not torch and not alone"}
    assert {name for name, marks in marks.items() if not is_left_out(source, marks)} == chosen - {"there"}
    assert not is_left_out(source, "") and not is_left_out(source, "asyncio and not torch")
    assert is_left_out(source, "", has_torch=False) == ("there" in chosen)


def test_no_example_has_a_time_in_which_a_busy_machine_must_answer() -> None:
    assert settings().deadline is None
