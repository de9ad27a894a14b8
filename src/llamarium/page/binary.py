"""Binary responses for arrays: little-endian bytes, described by headers.

| header             | content                                                                               |
|--------------------|---------------------------------------------------------------------------------------|
| `x-dtype`          | float32, float16 or uint8                                                             |
| `x-shape`          | the sizes of the axes, as in `9,12,12`                                                |
| `x-axes`           | a letter for each axis, as in `NTS`; see the project's legend                         |
| `x-stride`         | stride of the tokens on the axes T and S; 1 is all of them                            |
| `x-min`, `x-max`   | for uint8: code c is min + c · (max - min) / 254; 255 is a non-finite value (-inf)    |
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response

from llamarium.errors import QuestionError
from llamarium.page.schema.base import Dtype

MAX_BYTES = 64 * 2**20
"""Maximum size of a response."""

_STEPS, _NOT_FINITE = 254, 255


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """An array with named axes.

    Attributes:
        values: float32.
        axes: A letter for each axis.
        stride: Stride of the token axes.
        dtype: Data type of the response.
    """

    values: NDArray[np.float32]
    axes: str
    stride: int = 1
    dtype: Dtype = "float32"


def respond(numbers: Numbers) -> Response:
    """Return the binary response; QuestionError if it is too large, or if a value overflows float16."""
    values, dtype = np.ascontiguousarray(numbers.values, "<f4"), numbers.dtype
    check_size(values.size, dtype)
    body, range_ = _encode(values, dtype)
    headers = {
        "x-dtype": dtype,
        "x-shape": ",".join(map(str, values.shape)),
        "x-axes": numbers.axes,
        "x-stride": str(numbers.stride),
        "cache-control": "no-store",
        **range_,
    }
    return Response(body, media_type="application/octet-stream", headers=headers)


def check_size(count: int, dtype: Dtype) -> None:
    """Raise a QuestionError if `count` numbers of a dtype are more than `MAX_BYTES`."""
    size = count * np.dtype("u1" if dtype == "uint8" else dtype).itemsize
    if size > MAX_BYTES:
        smaller = "one layer, head or position, for a larger stride, or for a smaller dtype"
        message = f"these are {size:,} bytes, and {MAX_BYTES:,} are sent at most; ask for {smaller}"
        raise QuestionError(message, code="too_many_numbers", param="stride")


def _encode(values: NDArray[np.float32], dtype: Dtype) -> tuple[bytes, Mapping[str, str]]:
    if dtype == "float32":
        return values.tobytes(), {}
    if dtype == "float16":
        return _halves(values), {}
    low, high, codes = _codes(values)
    return codes.tobytes(), {"x-min": repr(low), "x-max": repr(high)}


def _halves(values: NDArray[np.float32]) -> bytes:
    with np.errstate(over="ignore"):
        halves = values.astype("<f2")
    if np.isinf(halves[np.isfinite(values)]).any():
        raise QuestionError("a number is too large for float16; ask for float32", param="dtype")
    return halves.tobytes()


def _codes(values: NDArray[np.float32]) -> tuple[float, float, NDArray[Any]]:
    finite = np.isfinite(values)
    finite_values = values[finite]
    low, high = (float(finite_values.min()), float(finite_values.max())) if finite_values.size else (0.0, 0.0)
    scaled = (np.where(finite, values, low) - low) / ((high - low) or 1.0) * _STEPS
    return low, high, np.where(finite, np.rint(scaled), _NOT_FINITE).astype(np.uint8)
