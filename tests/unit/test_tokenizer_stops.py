"""Stop strings over token borders."""

import pytest

from llamarium.errors import SamplingError
from llamarium.tokenizer.streaming import StopStringFilter

pytestmark = pytest.mark.quick


def test_a_stop_string_over_two_pieces_is_never_shown():
    stops = StopStringFilter(["<end>"])
    assert [stops.push(piece) for piece in ("Hi <", "en", "d> more", "text")] == ["Hi ", "", "", ""]
    assert stops.stopped and stops.matched == "<end>" and stops.finish() == ""


def test_a_near_miss_is_shown():
    stops = StopStringFilter(["<end>"])
    assert [stops.push(piece) for piece in ("a<e", "n", "x", "<")] == ["a", "", "<enx", ""]
    assert not stops.stopped and stops.finish() == "<"
    assert stops.finish() == ""


def test_the_beginning_of_a_second_try_inside_a_near_miss():
    stops = StopStringFilter(["aab"])
    assert [stops.push(piece) for piece in ("a", "a", "a", "b")] == ["", "", "a", ""]
    assert stops.matched == "aab"


def test_the_match_that_begins_first_wins():
    stops = StopStringFilter(["b", "abc"])
    assert (stops.push("xab"), stops.stopped) == ("x", False)  # "abc" may still come, and would begin earlier
    assert (stops.push("c"), stops.matched) == ("", "abc")
    stops = StopStringFilter(["b", "abc"])
    assert stops.push("xab") + stops.push("d") == "xa"
    assert stops.matched == "b"


def test_the_end_decides_what_was_open():
    stops = StopStringFilter(["b", "abc"])
    assert stops.push("xab") + stops.finish() == "xa"
    assert stops.matched == "b"


def test_of_two_that_begin_together_the_shorter():
    stops = StopStringFilter(["abc", "ab"])
    assert stops.push("xabc") == "x"
    assert stops.matched == "ab"


def test_no_stop_strings_pass_everything():
    stops = StopStringFilter([])
    assert stops.push("abc") == "abc" and stops.finish() == "" and not stops.stopped


def test_one_string_is_one_stop_string():
    assert StopStringFilter("ab").push("a") == ""


@pytest.mark.parametrize("stop", ["", None, 3, b"x"])
def test_what_is_no_stop_string(stop: object):
    with pytest.raises(SamplingError, match="stop is"):
        StopStringFilter([stop])  # type: ignore[list-item]
