"""Bodies as strict JSON: what Python's reader takes and JSON does not have is refused, and nothing else."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarium.server.errors import ApiError
from llamarium.server.http.body import MAX_LEVELS, MAX_VALUES, check_json_type, read_json

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=20,
)


@given(VALUES, st.booleans())
def test_what_is_json_is_read_as_python_reads_it(value: object, ascii_only: bool) -> None:
    assert read_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary())
def test_anything_else_is_refused(body: bytes) -> None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        with pytest.raises(ApiError) as error:
            read_json(body)
        assert error.value.status_code == 400
    else:
        try:
            assert read_json(body) == value
        except ApiError as refused:
            assert refused.code == "invalid_json"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"a": NaN}', "NaN"),
        (b"[Infinity]", "Infinity"),
        (b"[-Infinity]", "Infinity"),
        (b"[1e999]", "too large"),
        (b"[-1e999]", "too large"),
        (b"[" + b"9" * 309 + b"]", "308 digits"),
        (b"[-" + b"9" * 5000 + b"]", "308 digits"),
        (b'{"a": 1, "a": 1}', "twice"),
        (b'{"a": 1, "\\u0061": 1}', "twice"),
        (b'["\\ud800"]', "surrogate"),
        (b'["\\uDFFF x"]', "surrogate"),
        (b'{"\\ud800": 1}', "surrogate"),
        (b'["\xff"]', "UTF-8"),
        (b'["\xed\xa0\x80"]', "UTF-8"),
        ("[1]".encode("utf-16"), "UTF-8"),
        (b"\xef\xbb\xbf[1]", "BOM"),
        (b"[" * 100_000, "deep|Expecting"),
        (b'{"a":' * 100_000, "deep"),
        (b"[" * (MAX_LEVELS + 1) + b"]" * (MAX_LEVELS + 1), "deep"),
        (b"[" + b"[]," * MAX_VALUES + b"[]]", "values"),
        (b"[1] [2]", "Extra data"),
        (b"{'a': 1}", "Expecting"),
        (b'["\x00"]', "control"),
        (b"", "Expecting"),
    ],
)
def test_each_kind_of_refusal_says_why(body: bytes, why: str) -> None:
    with pytest.raises(ApiError, match=r"^400: the body is not valid JSON: .*") as error:
        read_json(body)
    assert any(word in error.value.message for word in why.split("|"))


def test_what_is_at_the_edge_is_read() -> None:
    assert read_json(b"[18446744073709551615, -9223372036854775809]") == [2**64 - 1, -(2**63) - 1]
    assert read_json(b"-" + b"9" * 308) == -(10**308) + 1
    assert read_json(b"[" * MAX_LEVELS + b"]" * MAX_LEVELS) is not None
    assert read_json(b'["\\ud83e\\udd99"]') == ["🦙"]
    assert read_json(b"[1e308, 1e-999]") == [1e308, 0.0]
    assert math.copysign(1, read_json(b"[-0.0]")[0]) == -1
    wide = [[] for _ in range(1000)]
    assert read_json(json.dumps(wide).encode()) == wide


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", 'Application/JSON;charset="UTF-8"']
)
def test_json_is_taken_as_json(kind: str) -> None:
    check_json_type(kind, "")
    check_json_type(kind, "identity")


@pytest.mark.parametrize(
    ("kind", "encoding"),
    [
        ("", ""),
        ("text/plain", ""),
        ("application/x-www-form-urlencoded", ""),
        ("multipart/form-data; boundary=x", ""),
        ("application/json; charset=latin-1", ""),
        ("application/jsonp", ""),
        ("text/plain; application/json", ""),
        ("application/json", "gzip"),
    ],
)
def test_nothing_else_is_taken(kind: str, encoding: str) -> None:
    with pytest.raises(ApiError) as error:
        check_json_type(kind, encoding)
    assert error.value.status_code == 415
