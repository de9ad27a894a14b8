"""What reaches a terminal, a pipe and a JSON reader."""

import io
import json
import math
import sys
import unicodedata

import pytest
from rich.text import Text

from llamarium.cli import output
from llamarium.cli.output import table


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_printable_leaves_nothing_that_drives_a_terminal() -> None:
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    shown = output.printable(every)
    controls = {c for c in shown if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")}
    assert controls == {"\n", "\t"}
    assert not {c for c in shown if unicodedata.bidirectional(c) in ("LRO", "RLO", "LRE", "RLE", "PDF", "LRI", "RLI")}


@pytest.mark.parametrize("text", ["naïve\n\tcafé", "👩‍👩‍👧 flag 🏳️‍🌈", "می‌خواهم", "non\u00a0breaking\u3000space", "𝔘𐍈"])
def test_printable_leaves_text_alone(text: str) -> None:
    assert output.printable(text) == text


def test_printable_escapes() -> None:
    assert output.printable("a\x1b[2Jb\rc\x00\x9b\u202e\ud800") == "a\\x1b[2Jb\\rc\\x00\\x9b\\u202e\\ud800"


def test_notes_end_lines_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    for stream, num_lines in ((Terminal(), 4), (io.StringIO(), 2)):
        monkeypatch.setattr(sys, "stderr", stream)
        output.note(
            "the context of 8,192 tokens is full; /reset begins a new dialog\n  /a/path/" + "x" * 50 + " and more"
        )
        lines = stream.getvalue().splitlines()
        assert len(lines) == num_lines
        assert any("x" * 50 in line for line in lines)  # a path can still be copied


def test_a_command_is_never_broken_so_that_it_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    command = "llamarium pretrain --out '/a/long path/of a run' --resume"
    quoted = "`llamarium build check rotate --folder another`"
    output.note(f"go on with it, whenever you like, from here: {command}\nwhat remains is open: {quoted} leads to it")
    output.note(f"run it:     {command}")
    lines = stream.getvalue().splitlines()
    assert lines == ["go on with it, whenever you like, from", "here:", command, "what remains is open:", quoted,
                     "leads to it", "run it:", command]  # fmt: skip


def test_text_is_escaped_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, shown in ((Terminal(), "\\x1b[2J\n"), (io.StringIO(), "\x1b[2J\n")):
        monkeypatch.setattr(sys, "stdout", stream)
        output.write_text("\x1b[2J\n")
        assert stream.getvalue() == shown


def test_emit_writes_one_ascii_line_that_json_reads(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit({"text": "é\u2028\x1b\n", "values": (1.5, math.nan, [-math.inf]), 3: {"none": None}})
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert out.isascii() and "\x1b" not in out
    assert json.loads(out) == {"text": "é\u2028\x1b\n", "values": [1.5, None, [None]], "3": {"none": None}}


def test_warnings_and_notes_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    output.note("loaded\x07")
    output.warn("two\nlines")
    assert capsys.readouterr() == ("", "loaded\\x07\nllamarium: warning: two lines\n")


def test_progress_is_drawn_on_a_terminal_only_and_nothing_remains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with output.share_done("loading") as report:
        report(1, 2)
    assert capsys.readouterr() == ("", "")

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(ValueError), output.share_done("loading") as report:
        report(1, 3)
        report(1, 3)
        raise ValueError
    assert sys.stderr.getvalue() == "loading …\r\x1b[Kloading …  33 %\r\x1b[K"

    monkeypatch.setattr(sys, "stderr", Terminal())
    with output.share_done("merging", "comparing") as report:
        report(2, 3)
        report(3, 3)  # at once, as the last tensor may come, and then nothing for long
    assert sys.stderr.getvalue() == "merging …\r\x1b[Kmerging …  66 %\r\x1b[Kmerging … comparing\r\x1b[K"

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "dumb")
    with output.share_done("loading") as report:
        report(1, 3)
    assert sys.stderr.getvalue() == ""


def test_tables_end_no_line_with_blanks_and_take_text_literally(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    shown = table("name", "size", right=("size",))
    shown.add_row("[bold]x[/bold] :smile:", "1")
    shown.add_row("word " * 12, "22")
    output.show(shown)
    lines = capsys.readouterr().out.splitlines()
    assert all(line == line.rstrip() and len(line) <= 40 for line in lines)
    assert lines[2].split() == ["[bold]x[/bold]", ":smile:", "1"]
    assert "".join(lines).count("word") == 12  # folded, not cut


def test_colour_on_a_terminal_unless_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for value, coloured in ((None, True), ("1", False)):
        monkeypatch.delenv("NO_COLOR", raising=False)
        if value:
            monkeypatch.setenv("NO_COLOR", value)
        monkeypatch.setattr(sys, "stdout", Terminal())
        output.show(Text("red", style="red"))
        assert ("\x1b[31m" in sys.stdout.getvalue()) == coloured


def test_stopwatch_reports_when_asked_or_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def report(wanted: bool | None, num_tokens: int = 3) -> None:
        watch = output.Stopwatch(wanted)
        watch.count(num_tokens)
        watch.report("seed 7")

    report(None)
    report(False)
    report(True, num_tokens=0)
    assert capsys.readouterr() == ("", "")
    report(True)
    err = capsys.readouterr().err
    assert err.startswith("[3 tokens in 0.00 s, ")
    assert err.endswith(", seed 7]\n")
    monkeypatch.setattr(sys, "stderr", Terminal())
    report(None)
    assert "tokens/s" in sys.stderr.getvalue()


@pytest.mark.parametrize(("columns", "width"), [("0", 80), ("19", 80), ("20", 20), ("100", 100)])
def test_a_width_too_small_to_be_meant(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    output.show(Text("a " * 200))
    assert width - 2 <= max(map(len, capsys.readouterr().out.splitlines())) <= width


def test_a_bar_grows_on_a_terminal_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with output.progress("preparing") as report:
        report("2 documents read", None)
        report("learning", 0.5)  # too soon to be drawn
        report("learning", 1.0)
    shown = sys.stderr.getvalue()
    assert "preparing … 2 documents read" in shown and "████ learning" in shown and shown.endswith("\r\x1b[K")
    assert shown.count("learning") == 1
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with output.progress("preparing") as report:
        report("2 documents read", 0.5)
    assert sys.stderr.getvalue() == ""


def test_a_warning_takes_the_place_of_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    output.warn("before")
    with output.share_done("merging") as progress:
        progress(1, 2)
        output.warn("rounded")
    output.warn("after")
    shown = terminal.getvalue()
    assert "50 %\r\x1b[Kllamarium: warning: rounded\n" in shown
    assert shown.startswith("llamarium: warning: before\n") and shown.endswith("\r\x1b[Kllamarium: warning: after\n")
