"""The setting `reward`: one reward function, or several with weights. Torch-free."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from llamarium.errors import TrainingError, counted, show_value

_LARGEST = 1e6

RewardNames = str | Sequence[str] | Mapping[str, float]
"""A reward function by name, several with weight 1, or several with their weights."""


def parse_rewards(reward: Any, weights: Any) -> Any:
    """Return the name of a single function with weight 1, else a dict of names and weights.

    `weights` are comma-separated numbers in the order of the names, which override those of a mapping; "" means none.
    Values that are not `RewardNames` are returned unchanged. TrainingError for a weight that is not a finite number, a
    wrong number of weights, or a repeated function.
    """
    numbers: list[Any]
    if isinstance(reward, Mapping):
        names, numbers = [*cast("Mapping[Any, Any]", reward)], [*cast("Mapping[Any, Any]", reward).values()]
    elif isinstance(reward, str):
        names, numbers = [reward], [1.0]
    elif isinstance(reward, Sequence):
        names = [*cast("Sequence[Any]", reward)]
        numbers = [1.0] * len(names)
    else:
        return reward
    if weights and not isinstance(weights, str):
        raise TrainingError(f"reward_weights is {show_value(weights)}; expected numbers with commas, such as '1,0.5'")
    if weights:
        numbers = [_number(part) for part in weights.split(",")]
        if len(numbers) != len(names):
            raise TrainingError(
                f"reward_weights has {counted(len(numbers), 'number')}; expected {len(names)}, one for each reward"
            )
    if wrong := [name for name in names if not isinstance(name, str) or not name] if len(names) != 1 else []:
        raise TrainingError(f"reward has {show_value(wrong[0])}; expected the name of a function")
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise TrainingError(f"reward names {show_value(twice[0])} twice; give it once, with the sum of the weights")
    for name, weight in zip(names, numbers, strict=True):
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not abs(weight) <= _LARGEST:
            raise TrainingError(
                f"the weight of reward {show_value(name)} is {show_value(weight)}; expected a number up to {_LARGEST:g}"
            )
    if len(names) == 1 and numbers == [1.0]:
        return names[0]
    return {name: float(weight) for name, weight in zip(names, numbers, strict=True)}


def _number(part: str) -> Any:
    try:
        return float(part)
    except ValueError:
        return part.strip()
