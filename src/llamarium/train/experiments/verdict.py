"""Statistical comparison of an experiment's variants.

Each pair is compared by Welch's t-test, as variances may differ, and the p-values are corrected for the number of pairs
by Holm's method: if no two variants differ, at most 5 % of experiments report a difference.

Source: Welch 1947; Holm 1979, "A simple sequentially rejective multiple test procedure".
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

LEVEL = 0.05
SINGLE = (
    "Each was trained once. Another seed moves a loss, often by as much as such runs differ; --seeds 3 trains each "
    "three times and shows it."
)
_POINTS = 2000  # of the numerical integral below, accurate to three digits


def verdict(losses: Mapping[str, Sequence[float]]) -> str:
    """Describe which pairs of variants have significantly different mean losses, and which do not."""
    count = len(next(iter(losses.values())))
    if count == 1:
        return SINGLE
    means = {name: statistics.mean(values) for name, values in losses.items()}
    order = sorted(means, key=means.__getitem__)
    pairs = {pair: welch(losses[pair[0]], losses[pair[1]]) for pair in combinations(order, 2)}
    corrected = holm(pairs)
    apart = [
        f"{one} is below {other} by {means[other] - means[one]:.4f} (p = {corrected[one, other]:.2g})"
        for one, other in pairs
        if corrected[one, other] <= LEVEL
    ]
    close = [f"{one} and {other} (p = {p:.2g})" for (one, other), p in corrected.items() if p > LEVEL]
    test = "Welch's t-test" + (f", corrected for {len(pairs)} pairs" if len(pairs) > 1 else "")
    lines = [f"Mean validation losses over {count} seeds, at {LEVEL:.0%} ({test})."]
    if apart:
        lines.append(f"Different: {'; '.join(apart)}.")
    if close:
        lines.append(f"Not told apart, so this does not rank them: {'; '.join(close)}.")
    return " ".join(lines)


def spread_of(losses: Sequence[float]) -> str:
    """Format the mean of losses, with their standard deviation if they differ."""
    deviation = f" ± {statistics.stdev(losses):.4f}" if len(set(losses)) > 1 else ""
    return f"{statistics.mean(losses):.4f}{deviation}"


def welch(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the p-value of Welch's t-test for two samples of two or more values; 0 or 1 if both are constant."""
    difference = statistics.mean(one) - statistics.mean(other)
    errors = [statistics.variance(values) / len(values) for values in (one, other)]
    error = sum(errors)
    if error == 0:
        return float(difference == 0)
    freedom = error**2 / sum(e**2 / (len(values) - 1) for e, values in zip(errors, (one, other), strict=True))
    return two_sided(difference / math.sqrt(error), freedom)


def two_sided(t: float, freedom: float) -> float:
    """Return P(|T| > |t|) for Student's t-distribution with at least one degree of freedom.

    Substituting t = sqrt(freedom) / tan(x) gives an integral of sin(x)^(freedom - 1), which is computed over sqrt(x),
    where it is smooth.
    """
    end = math.sqrt(math.atan2(math.sqrt(freedom), abs(t)))
    roots = (np.arange(_POINTS) + 0.5) * (end / _POINTS)
    area = float((np.sin(roots**2) ** (freedom - 1) * 2 * roots).sum()) * end / _POINTS
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return min(1.0, 2 * scale * area)


def holm(pairs: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """Return the p-values of all pairs, corrected for multiple comparisons by Holm's method."""
    corrected: dict[tuple[str, str], float] = {}
    largest = 0.0
    for position, pair in enumerate(sorted(pairs, key=pairs.__getitem__)):
        largest = max(largest, min(1.0, (len(pairs) - position) * pairs[pair]))
        corrected[pair] = largest
    return {pair: corrected[pair] for pair in pairs}
