"""An answer on a terminal: where lines end, and what is repetition."""

import random

import pytest

from llamarium.cli import answer
from llamarium.cli.answer import Wrapped, repeated


def wrapped(text: str, columns: int, sizes: list[int] | None = None) -> str:
    """Write a text in pieces of these sizes, over and over."""
    written: list[str] = []
    out = Wrapped(columns + 1, written.append)  # the last column stays empty
    place, turn = 0, 0
    while place < len(text):
        size = (sizes or [len(text)])[turn % len(sizes or [1])]
        out.write(text[place : place + size])
        place, turn = place + size, turn + 1
    out.finish()
    return "".join(written)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one two three", "one two\nthree"),
        ("one two\nthree fours", "one two\nthree\nfours"),
        ("exactly10c then", "exactly10c\nthen"),
        ("a word-that-is-too-long b", "a\nword-that-is-too-long\nb"),
        ("word-that-is-too-long", "word-that-is-too-long"),
        ("  indented text", "  indented\ntext"),
        ("a\tb\tc", "a\tb\nc"),
        ("日本語の文章", "日本語の文\n章"),
        ("ends with blanks   ", "ends with\nblanks   "),
        ("\x1b[2J", "\\x1b[2J"),
        ("```\nfor x in range(3): y\n```\nfor x in range", "```\nfor x in range(3): y\n```\nfor x in\nrange"),
        ("", ""),
    ],
)
def test_lines_end_between_words(text: str, expected: str) -> None:
    assert wrapped(text, 10) == expected


def test_the_pieces_it_comes_in_do_not_matter() -> None:
    rng = random.Random(0)
    words = ["a", "word", "another", "日本", "tab\t", "```", "x" * 30, "\n", "  ", "e\u0301"]
    for _ in range(200):
        text = " ".join(rng.choices(words, k=30))
        sizes = [rng.randint(1, 5) for _ in range(7)]
        assert wrapped(text, 20, sizes) == wrapped(text, 20)


def test_nothing_but_blanks_at_a_break_is_lost() -> None:
    text = "The quick brown fox\n\n  jumps over the lazy dog. " * 5
    assert wrapped(text, 13).split() == text.split()


def test_a_word_is_written_when_it_is_complete() -> None:
    written: list[str] = []
    out = Wrapped(80, written.append)
    out.write("Hel")
    assert "".join(written) == ""
    out.write("lo wor")
    assert "".join(written) == "Hello"
    out.finish()
    assert "".join(written) == "Hello wor"


@pytest.mark.parametrize("period", [1, 3, 16, 40, 128])
def test_repetition_is_four_times_and_64_tokens(period: int) -> None:
    unit = list(range(100, 100 + period))
    times = max(4, -(-64 // period))
    assert repeated([1, 2, 3, *unit * times]) == period
    assert repeated([*[1, 2, 3, *unit * times][:-1], 5]) is None
    assert repeated([1, 2, 3, *(unit * times)[1:]]) is None


def test_what_is_no_repetition() -> None:
    assert repeated([]) is None
    assert repeated(list(range(1000))) is None
    rows = [token for row in range(60) for token in (5, 6, row, 7)]  # a table, whose numbers differ
    assert repeated(rows) is None


@pytest.mark.parametrize(("no_color", "dim", "plain"), [("", "\x1b[2m", "\x1b[0m"), ("1", "", "")])
def test_of_a_prompt_that_is_too_long_the_end_is_shown_dimmed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_color: str, dim: str, plain: str
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    most = answer._PROMPT_SHOWN  # pyright: ignore[reportPrivateUsage]
    for text, shown in (("x" * most, "x" * most), ("ab" + "x" * (most - 1), "…b" + "x" * (most - 1))):
        out = Wrapped(10 * most)
        out.write_prompt(text)
        out.write(" and on")
        out.finish()
        assert capsys.readouterr().out == f"{dim}{shown}{plain} and on"
