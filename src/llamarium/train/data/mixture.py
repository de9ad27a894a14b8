"""Mixtures of data: several sources, each with a weight.

    a.jsonl=2,b.parquet=0.5             in the shell
    {"a.jsonl": 2, "b.parquet": 0.5}    in Python and TOML, for any name

A source is drawn with its weight over the sum of the weights: a.jsonl four times out of five. What is drawn is an
example, a pair or a prompt; for pretraining it is a row, so that shares are of tokens. An epoch has as many draws as
the sources hold together, in an order that the seed draws. Within a source one pass follows the other, each in another
order, and nothing is drawn again before all else of the source was. A source that runs out is repeated within the
epoch; one that does not is continued in the next.

Source: Megatron-LM's blends of data sets, and `probabilities` of `interleave_datasets` in Hugging Face's datasets.
"""

import os
from collections.abc import Mapping
from typing import Any, cast

from llamarium.errors import TrainingError, escape, show_value

Data = str | Mapping[str, float]
"""A source, or several and their weights."""

_HEAVIEST = 1e9


def parse_data(data: Any) -> Any:
    """Return a source's name, or the weights of several by name; a text that is an existing path is that path.

    Values of other types are returned as they are. TrainingError for a weight that is none, a source without one, or
    one that is named twice.
    """
    if isinstance(data, Mapping):
        found = [*cast("Mapping[Any, Any]", data).items()]
    elif isinstance(data, str) and ("," in data or "=" in data) and not os.path.exists(os.path.expanduser(data)):  # noqa: PTH110, PTH111 - Path's raise on odd names
        found = [_pair(part.strip(), data) for part in data.split(",")]
    else:
        return data
    if not found:
        raise TrainingError("data has no source; expected at least one, with its weight")
    seen: set[str] = set()
    for name, weight in found:
        _check(name, weight, seen)
    return found[0][0] if len(found) == 1 else {name: float(weight) for name, weight in found}


def _check(name: Any, weight: Any, seen: set[str]) -> None:
    if not isinstance(name, str) or not name:
        raise TrainingError(f"data names the source {show_value(name)}; expected a file, a folder or a name")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= _HEAVIEST:
        raise TrainingError(
            f"data: the weight of {escape(name)} is {show_value(weight)}; expected a number above 0, up to 1e9"
        )
    path = os.path.expanduser(name)  # noqa: PTH111 - Path's raise on odd names, as realpath does
    if (path := os.path.realpath(path) if os.path.exists(path) else os.path.abspath(path)) in seen:  # noqa: PTH100, PTH110
        raise TrainingError(f"data names {escape(name)} twice; give it once, with the sum of both weights")
    seen.add(path)


def _pair(part: str, data: str) -> tuple[str, Any]:
    name, _, weight = part.rpartition("=")
    if not name:
        raise TrainingError(
            f"data is {show_value(data)}, which is no file or folder, and no mixture, as {show_value(part)} has no "
            "weight; expected NAME=WEIGHT,NAME=WEIGHT (names with commas as a table in --config or Python)"
        )
    try:
        return name, float(weight) if weight.isascii() and "_" not in weight else weight
    except ValueError:
        return name, weight
