"""Measure the effect of chance: the same run with several seeds."""

import statistics
from collections.abc import Mapping, Sequence

SINGLE = (
    "Each was trained once. Another seed moves a loss, often by as much as such runs differ; --seeds 3 trains each "
    "three times and tells."
)


def spread_of(losses: Sequence[float]) -> str:
    """Return mean and standard deviation of losses, as text."""
    return f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}"


def verdict(losses: Mapping[str, Sequence[float]]) -> str:
    """Name the runs that differ by more than seeds do.

    Two count as different if their means are further apart than twice the standard error of that difference.
    """
    means = {name: statistics.mean(values) for name, values in losses.items()}
    errors = {name: statistics.variance(values) / len(values) for name, values in losses.items()}
    order = sorted(means, key=means.__getitem__)
    close = [
        f"{one} and {other}"
        for i, one in enumerate(order)
        for other in order[i + 1 :]
        if means[other] - means[one] <= 2 * (errors[one] + errors[other]) ** 0.5
    ]
    count = len(next(iter(losses.values())))
    if not close:
        return f"Over {count} seeds all differences are larger than what seeds do: {', '.join(order)}, the best first."
    return f"Over {count} seeds these differ by no more than seeds do, so this does not rank them: {'; '.join(close)}."
