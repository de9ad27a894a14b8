"""The verdict of an experiment: identical arms are seldom called different, and the numbers are Student's."""

import random

import pytest

from llamarium.train.experiments.verdict import holm, spread_of, two_sided, verdict, welch

# Published two-sided 5 % and 0.1 % points of Student's distribution.
POINTS = {
    1: (12.7062, 636.619), 2: (4.3027, 31.5991), 3: (3.1824, 12.9240), 4: (2.7764, 8.6103), 10: (2.2281, 4.5869),
    30: (2.0423, 3.6460), 120: (1.9799, 3.3735),
}  # fmt: skip


@pytest.mark.parametrize("freedom", POINTS)
def test_the_p_value_is_students(freedom: int) -> None:
    for level, t in zip((0.05, 0.001), POINTS[freedom], strict=True):
        assert two_sided(t, freedom) == two_sided(-t, freedom) == pytest.approx(level, rel=2e-3)
    assert two_sided(0.0, freedom) == pytest.approx(1, abs=1e-4)
    assert two_sided(POINTS[freedom][0], freedom + 0.5) < 0.05


def test_welchs_test_against_a_worked_example() -> None:
    one, other = [30.02, 29.99, 30.11, 29.97, 30.01, 29.99], [29.89, 29.93, 29.72, 29.98, 30.02, 29.98]
    assert welch(one, other) == welch(other, one) == pytest.approx(0.09077, abs=2e-5)
    assert (welch([1.0, 1.0], [1.0, 1.0]), welch([1.0, 1.0], [2.0, 2.0])) == (1.0, 0.0)
    assert welch([1.0, 1.0, 1.0], [1.1, 1.2, 1.3]) == pytest.approx(two_sided(0.2 / (0.01 / 3) ** 0.5, 2))


def test_holm_corrects_the_smallest_most_and_keeps_the_order() -> None:
    pairs = {("a", "b"): 0.03, ("a", "c"): 0.01, ("b", "c"): 0.04, ("b", "d"): 0.9}
    assert list(holm(pairs).values()) == pytest.approx([0.09, 0.04, 0.09, 0.9])
    assert list(holm(pairs)) == list(pairs)


@pytest.mark.parametrize(("num_seeds", "num_arms"), [(2, 2), (2, 3), (3, 3), (5, 4)])
def test_identical_arms_are_called_different_in_at_most_seven_percent(num_seeds: int, num_arms: int) -> None:
    draw, trials, wrong = random.Random(num_seeds * num_arms), 600, 0
    for _ in range(trials):
        losses = {str(i): [draw.gauss(2.0, 0.01) for _ in range(num_seeds)] for i in range(num_arms)}
        wrong += "Different" in verdict(losses)
    assert wrong / trials <= 0.07


def test_a_verdict_names_both_kinds_of_pairs() -> None:
    measured = {"mha": [2.091, 2.096, 2.061], "gqa": [2.061, 2.078, 2.065], "none": [2.9, 2.91, 2.92]}
    said = verdict(measured)
    assert "over 3 seeds, at 5% (Welch's t-test, corrected for 3 pairs)" in said
    assert "gqa is below none by 0.8420 (p = " in said and "mha is below none by" in said
    assert "Not told apart, so this does not rank them: gqa and mha (p = 0.3" in said
    assert "corrected" not in verdict({"a": [2.0, 2.01], "b": [3.0, 3.01]})
    assert verdict({"a": [2.0], "b": [3.0]}).startswith("Each was trained once.")
    assert (spread_of([2.0, 2.02]), spread_of([2.0]), spread_of([2.0, 2.0])) == ("2.0100 ± 0.0141", "2.0000", "2.0000")
