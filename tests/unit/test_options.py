"""Options: what one declaration makes of a field, and the files that are written from the declarations."""

import argparse
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Unpack

import pytest

from llamarium.cli.flags import add_flags, add_overrides, given_options
from llamarium.errors import OptionError
from llamarium.keywords import shows_options
from llamarium.options.declare import Options, declared, option, with_default
from llamarium.options.keywords import LoadKeywords
from llamarium.options.loading import LoadOptions
from llamarium.server.settings import Settings

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Sample(Options):
    rows: int = option(4, "rows of a batch", 1, 64)
    share: float | None = option(None, "share that is kept, 5 % or more", 0.05, 1.0, metavar="P")
    form: Literal["json", "text"] = option("text", "form of a line")
    bits: Literal[8, 16] | None = option(None, "bits of the inputs")
    type_name: str | None = option(None, "type of the weights", choices=("Q8_0", "NF4"), flag="type", ignores_case=True)
    strict: bool = option(False, "refuse NaN")
    drafts: bool | None = option(None, "draft tokens")
    hosts: tuple[str, ...] = option((), "host name", metavar="NAME", flag="host", repeats=True)
    folder: str | Path | None = option(None, "folder of the run")
    internal: bool = True


@dataclass(frozen=True, kw_only=True)
class Larger(Sample):
    rows: int = with_default(Sample, "rows", 32)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(exit_on_error=False)
    add_flags(made, Sample, parsers={"folder": Path})
    return made


def test_a_field_becomes_a_flag_and_comes_back_as_a_value() -> None:
    words = "--rows 8 --share 0.5 --form json --bits 16 --type nf4 --strict --no-drafts --host a --host b --folder x"
    args = parser().parse_args(words.split())
    expected = Sample(
        rows=8, share=0.5, form="json", bits=16, type_name="NF4", strict=True, drafts=False, hosts=("a", "b"),
        folder=Path("x"),
    )  # fmt: skip
    assert Sample(**given_options(args, Sample)) == expected
    assert Sample(**given_options(parser().parse_args([]), Sample)) == Sample()
    assert "internal" not in declared(Sample)


@pytest.mark.parametrize(
    "words", ["--rows 0", "--rows 65", "--rows 1.5", "--share nan", "--form xml", "--bits 4", "--type Q9", "--internal"]
)
def test_a_flag_refuses_what_the_field_does(words: str) -> None:
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parser().parse_args(words.split())


@pytest.mark.parametrize(
    "values",
    [
        {"rows": 0}, {"rows": 65}, {"rows": 1.0}, {"rows": True}, {"rows": None}, {"share": float("nan")},
        {"share": "1"}, {"form": "xml"}, {"bits": 8.0}, {"type_name": "Q9"}, {"strict": 1}, {"strict": None},
        {"hosts": "a"}, {"folder": 5},
    ],
)  # fmt: skip
def test_a_value_of_another_type_or_range_is_refused_by_the_name_of_its_flag(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(OptionError, match=rf"^{declared(Sample)[name].public_name} is "):
        Sample(**values)


def test_the_spelling_of_a_value_may_be_free() -> None:
    assert Sample(type_name="q8_0").type_name == "Q8_0"


def test_help_has_the_text_and_the_default() -> None:
    text = " ".join(parser().format_help().split())
    assert "--rows N rows of a batch (default: 4)" in text
    assert "--share P share that is kept, 5 % or more" in text and "(default: None)" not in text
    assert "--host NAME host name (repeatable)" in text
    command = argparse.ArgumentParser()
    add_flags(command, Sample, "rows", defaults={"rows": "the record's"})
    assert "(default: the record's)" in command.format_help() and command.parse_args([]).rows is None


def test_a_default_can_be_declared_anew() -> None:
    before, after = declared(Sample)["rows"], declared(Larger)["rows"]
    assert (before.default, after.default, Larger().rows) == (4, 32, 32)
    assert (after.help, after.low, after.high) == (before.help, before.low, before.high)
    assert [*declared(Larger)] == [*declared(Sample)]


def test_flags_over_a_file_are_absent_unless_they_are_given() -> None:
    command = argparse.ArgumentParser()
    add_overrides(command, Sample, "rows", "strict")
    assert vars(command.parse_args([])) == {}
    assert vars(command.parse_args(["--rows", "900", "--no-strict"])) == {"rows": 900, "strict": False}


def test_help_of_a_function_names_each_option() -> None:
    @shows_options(LoadOptions)
    def load(**options: Unpack[LoadKeywords]) -> None:
        """Load.

        Args:
            **options: As follows.
        """

    lines = (load.__doc__ or "").splitlines()
    assert f"            dtype: {declared(LoadOptions)['dtype'].help}." in lines
    names = [line.strip().partition(":")[0] for line in lines if line.startswith("            ") and line[12] != " "]
    assert names[1:] == [*declared(LoadOptions)]


@pytest.mark.parametrize("kind", [LoadOptions, Settings])
def test_every_option_says_what_it_is(kind: type) -> None:
    for one in declared(kind).values():
        assert one.help and one.accepts(one.default), one.name


def test_the_written_keywords_are_those_that_are_declared() -> None:
    spec = importlib.util.spec_from_file_location("options_tool", ROOT / "tools/options.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    for path, text in tool.files().items():
        assert path.read_text(encoding="utf-8") == text, "run python tools/options.py"
