"""Numbers in bulk: what the bytes and their headers say."""

import numpy as np
import pytest

from llamarium.errors import QuestionError
from llamarium.page import binary
from llamarium.page.binary import Numbers, respond
from llamarium.server.errors import of_library

pytestmark = pytest.mark.quick

VALUES = np.array([[0.1, -2.0, 3.25], [1e-30, 65504.0, 0.0]], np.float32)


def test_float32_travels_to_the_bit() -> None:
    answer = respond(Numbers(VALUES[:, ::-1], "TD", 4))
    assert np.array_equal(np.frombuffer(answer.body, "<f4").reshape(2, 3), VALUES[:, ::-1])
    assert (
        dict(answer.headers).items()
        >= {"x-dtype": "float32", "x-shape": "2,3", "x-axes": "TD", "x-stride": "4"}.items()
    )


def test_float16_is_rounded_once_and_refused_where_it_does_not_fit() -> None:
    answer = respond(Numbers(VALUES, "TD", dtype="float16"))
    assert np.array_equal(np.frombuffer(answer.body, "<f2").reshape(2, 3), VALUES.astype(np.float16))
    masked = np.array([-np.inf, 1.0], np.float32)
    assert np.frombuffer(respond(Numbers(masked, "S", dtype="float16")).body, "<f2")[0] == -np.inf
    with pytest.raises(QuestionError, match="too large for float16") as refused:
        respond(Numbers(np.array([65520.0], np.float32), "D", dtype="float16"))
    assert refused.value.param == "dtype"


def test_uint8_has_its_range_and_a_code_for_what_is_not_finite() -> None:
    values = np.array([-1.0, 0.0, 3.0, -np.inf, np.nan], np.float32)
    answer = respond(Numbers(values, "S", dtype="uint8"))
    low, high = float(answer.headers["x-min"]), float(answer.headers["x-max"])
    codes = np.frombuffer(answer.body, np.uint8)
    assert (low, high) == (-1.0, 3.0)
    assert list(codes[3:]) == [255, 255]
    assert np.abs(low + codes[:3] * (high - low) / 254 - values[:3]).max() <= (high - low) / 254 / 2
    assert codes[0] == 0 and codes[2] == 254


@pytest.mark.parametrize("values", [np.full(3, 2.5, np.float32), np.full(3, -np.inf, np.float32)])
def test_uint8_of_one_value_or_of_none(values: np.ndarray) -> None:
    answer = respond(Numbers(values, "S", dtype="uint8"))
    assert answer.headers["x-min"] == answer.headers["x-max"]
    assert set(answer.body) == ({0} if np.isfinite(values).all() else {255})


def test_an_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary, "MAX_BYTES", 23)
    with pytest.raises(QuestionError, match="24 bytes, and 23") as refused:
        respond(Numbers(VALUES, "TD"))
    assert (of_library(refused.value).status_code, refused.value.code) == (400, "too_many_numbers")
    assert len(respond(Numbers(VALUES, "TD", dtype="float16")).body) == 12
