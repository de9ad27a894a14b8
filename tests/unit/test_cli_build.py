"""`llamarium build`, `build check`, `build hint` and `build pack`: what they print, keep and refuse."""

import io
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from learners import STYLES, check_source
from llamarium import course
from llamarium.cli.main import main
from llamarium.course.check import Result
from llamarium.course.folder.page import shown_at
from llamarium.course.folder.progress import progress
from llamarium.course.folder.source import solution
from llamarium.course.outline import Course, file_of, step_named
from llamarium.course.steps import STEPS
from llamarium.course.whole import Whole

pytestmark = pytest.mark.usefixtures("own_folders_list")

LEARN = Path(__file__).parents[2] / "docs/learn"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run a command beside the folders, its checks in this process on a small model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(course, "check_in_process", in_this_process)
    monkeypatch.setattr(course, "whole_in_process", lambda *_, **__: WHOLE)

    def call(*args: str) -> tuple[int, str, str]:
        code = main(["build", *args])
        out, err = capsys.readouterr()
        return code, out, err

    return call


WHOLE = Whole(" Paris", " Paris", 1.5, 90.0, 4e-6)


def in_this_process(folder: Path, steps: tuple[str, ...], *_: Any, **__: Any) -> Iterator[Result]:
    for name in steps:
        path = folder / file_of(step_named(name))
        yield check_source(folder, name, path.read_text().removeprefix("import numpy as np\n"))


def fill(folder: str, *names: str) -> None:
    for name in names:
        (Path(folder) / file_of(step_named(name))).write_text(solution(step_named(name)))


def test_a_folder_is_written_once_and_shows_how_far_it_is(run: Run) -> None:
    code, out, err = run()
    assert code == 0
    assert "wrote 18 files to my_llama; begin with step01_merge.py" in err
    rows = {line.split()[1]: line for line in out.splitlines()[2:]}
    assert list(rows) == [step.name for step in STEPS]
    assert all("open" in row for row in rows.values())
    assert max(map(len, out.splitlines())) <= 80
    fill("my_llama", "embed")
    mine = Path("my_llama/step02_embed.py").read_text()
    Path("my_llama/step04_project.py").unlink()
    _, _, err = run()
    assert "wrote 1 file to my_llama; begin with step04_project.py" in err
    assert Path("my_llama/step02_embed.py").read_text() == mine


def test_a_check_leads_from_step_to_step(run: Run) -> None:
    run()
    code, out, _ = run("check")
    assert code == 1
    assert out.splitlines() == [
        "step 1, merge: is still empty",
        "  Next hint: `llamarium build hint merge`",
        '  See docs/learn/1-from-text-to-vectors.md, "Text becomes ids"',
    ]
    fill("my_llama", "merge")
    code, out, _ = run("check")
    assert code == 0 and out.startswith("step 1, merge: right (33 random cases, ")
    _, out, _ = run("check")
    assert out.startswith("step 2, embed: is still empty")
    entry = progress(Path("my_llama"))["merge"]
    assert entry.is_right and entry.tries == 2
    path = Path("my_llama/step01_merge.py")
    path.write_text(path.read_text() + "\n# changed\n")
    _, out, _ = run("check")
    assert out.startswith("step 1, merge: right"), "a file that was changed is open again"


def test_a_mistake_is_shown_in_four_lines_and_a_link(run: Run) -> None:
    run("mine")
    source = STYLES["rotate"]["numbers"].replace("turned(k), v", "turned(k), turned(v)")
    Path("mine/step05_rotate.py").write_text(source)
    code, out, _ = run("check", "5", "--folder", "mine")
    place, cause, hint, section = out.splitlines()
    assert code == 1
    assert place.startswith(
        "step 5, rotate: differs in v at layer 0, position 1, head 0, number 0 (inside the model): yours "
    )
    assert cause == "  The values are rotated too; only queries and keys are."
    assert hint == "  Next hint: `llamarium build hint rotate --folder mine`"
    assert section == '  See docs/learn/3-where-order-comes-from.md, "A position is a rotation"'
    with shown_at(Path("mine"), "http://127.0.0.1:8765"):
        assert run("check", "5", "--folder", "mine")[1].splitlines()[-1] == (
            "  http://127.0.0.1:8765/#stage=where-order-comes-from&section=a-position-is-a-rotation"
        )
    for noted in ('{"url": "http://example.org:80", "pid": 1}', '{"url": "http://localhost:80", "pid": 0}', "[1]"):
        Path("mine/page.json").write_text(noted)
        assert "http" not in run("check", "5", "--folder", "mine")[1], noted


def test_sections_are_headings_of_the_course() -> None:
    """The file and the heading that a message ends with are there."""
    for step in STEPS:
        for section in {step.section, *(mistake.section for mistake in step.mistakes if mistake.section)}:
            chapter, _, heading = section.partition("#")
            assert f"## {heading}\n" in (LEARN / f"{chapter}.md").read_text(), (step.name, section)


def test_texts_of_a_course_may_come_from_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b" one two three four \n\n")))
    assert run("pack", "course.json", "--texts", "-")[0] == 0
    assert Course.read(Path("course.json")).texts == ("one two three four",)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"short\n")))
    assert "standard input: the text 'short' is too short" in run("pack", "other.json", "--texts", "-")[2]


def test_results_as_json_and_as_a_table_of_folders(run: Run) -> None:
    run("pack", "course.json", "--steps", "lora", "3")
    for folder in ("anna", "ben"):
        assert run(folder, "--course", "course.json")[0] == 0
    fill("anna", "rms_norm", "lora")
    fill("ben", "lora")
    source = STYLES["rms_norm"]["numbers"].replace("/ x.shape[1] + eps)", "/ x.shape[1]) + eps")
    Path("ben/step03_rms_norm.py").write_text(source)
    code, out, _ = run("check", "--all", "--folder", "anna", "ben")
    assert code == 1
    assert max(map(len, out.splitlines())) <= 80
    assert "anna     2 of 2" in out and "ben      1 of 2   rms_norm: eps is added outside" in out
    code, out, _ = run("check", "--all", "--folder", "anna", "ben", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["folder"], row["step"], row["status"]) for row in rows] == [
        ("anna", "rms_norm", "passed"), ("anna", "lora", "passed"), ("ben", "rms_norm", "differs"),
        ("ben", "lora", "passed"),
    ]  # fmt: skip
    assert rows[2]["place"]["yours"] != rows[2]["place"]["right"] and rows[2]["cause"].startswith("eps is added")
    assert run("check", "--all", "--folder", "anna")[0] == 0


def test_all_steps_end_with_the_whole_model(run: Run) -> None:
    run()
    fill("my_llama", *(step.name for step in STEPS))
    code, out, _ = run("check", "--all")
    assert code == 0
    assert out.count(": right (") == 18
    assert "1.5 tokens/s (the library's: 90), 4e-06 nats a token apart." in out


@pytest.mark.parametrize(
    ("whole", "words"),
    [
        (Whole(error="layer raises KeyError"), "layer raises KeyError"),
        (replace(WHOLE, nats=0.02), "0.02 nats a token apart at 'The capital of France is'; right is at most 0.0001"),
        (
            replace(WHOLE, nats=math.nan),
            "nan nats a token apart at 'The capital of France is'; right is at most 0.0001",
        ),
    ],
)
def test_a_whole_model_that_is_not_the_librarys_is_not_right(
    run: Run, whole: Whole, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(course, "check_in_process", lambda _, steps, *__, **___: passed(steps))
    run("anna")
    run("ben")
    monkeypatch.setattr(course, "whole_in_process", lambda folder, *_, **__: whole if folder.name == "ben" else WHOLE)
    assert run("check", "--all", "--folder", "anna")[0] == 0
    code, out, _ = run("check", "--all", "--folder", "ben")
    assert code == 1 and words in out
    code, out, _ = run("check", "--all", "--folder", "anna", "ben")
    assert code == 1 and words.split()[0] in out.splitlines()[3] and "18 of 18" in out
    code, out, _ = run("check", "--all", "--folder", "anna", "ben", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 1
    found = [(row["folder"], row["whole"]["passed"]) for row in rows if "whole" in row]
    assert found == [("anna", True), ("ben", False)]


def passed(steps: tuple[str, ...]) -> Iterator[Result]:
    return (Result(step, "passed", "is right") for step in steps)


def test_check_takes_a_folder_as_build_does(run: Run) -> None:
    run("mine")
    code, out, _ = run("check", "mine")
    assert code == 1 and out.startswith("step 1, merge: is still empty") and "--folder mine`" in out
    assert run("check", "mine", "--all")[1].count("is still empty") == 18
    Path("rotate").mkdir()  # no folder of this command: the step is meant
    assert ", rotate: is still empty" in run("check", "rotate", "--folder", "mine")[1]
    code, _, err = run("check", "nothing")
    assert code == 1 and "step nothing does not exist; expected 1 to 18 or a name: merge, embed" in err


def test_hints_come_one_by_one_and_are_counted(run: Run) -> None:
    run()
    first, second, last = (run("hint", "embed") for _ in range(3))
    assert first[1].strip() == step_named("embed").hints[0]
    assert "One more hint: `llamarium build hint embed`" in first[2]
    assert step_named("embed").hints[1] in second[1] and "The solution: `" in second[2]
    assert solution(step_named("embed")).strip() in last[1] and last[2] == ""
    assert progress(Path("my_llama"))["embed"].hints == 3
    assert run("hint", "embed", "--depth", "1")[1] == first[1]
    assert progress(Path("my_llama"))["embed"].hints == 3


def test_a_hint_without_a_step_is_for_the_next_one_that_is_open(run: Run) -> None:
    run()
    code, out, err = run("hint")
    first, second, *others = (step.name for step in STEPS)
    assert code == 0 and out.strip() == step_named(first).hints[0]
    assert err.startswith(f"The next step is {first}.") and f"`llamarium build hint {first}`" in err

    fill("my_llama", first)
    run("check", first)
    assert progress(Path("my_llama"))[first].is_right
    assert run("hint")[1].strip() == step_named(second).hints[0]
    assert run("hint", "--depth", "2")[2].startswith(f"The next step is {second}.")

    fill("my_llama", second, *others)
    assert run("check", "--all")[0] == 0
    assert run("hint")[2].startswith(f"The next step is {others[-1]}."), "the last, where none is open"


def test_a_damaged_folder_is_said_or_begun_anew(run: Run) -> None:
    run()
    broken = '{"merge": {"tries": "x", "hints": -1, "right": 3}}'
    for damaged in ("{", "[1]", '{"merge": 3, "no such step": {}}', broken, "[" * 100_000):
        Path("my_llama/progress.json").write_text(damaged)
        code, out, _ = run()
        assert code == 0 and out.count("open") == 18
    Path("my_llama/progress.json").unlink()
    Path("my_llama/progress.json").mkdir()
    code, out, err = run("check")
    assert code == 1 and out.startswith("step 1, merge: is still empty")
    assert "progress.json" in err and "Traceback" not in err
    for damaged, words in (
        ("{", "no course"), ('{"format": 9}', "no course of format 1"), ('{"format": 1}', "steps is None"),
        ('{"format": 1, "steps": ["embed"], "texts": ["a b c d"], "model": 3}', "model is 3; expected a name"),
        ('{"format": 1, "steps": ["fly"], "texts": ["a b c d"], "model": "x"}', "step fly does not exist"),
    ):  # fmt: skip
        Path("my_llama/course.json").write_text(damaged)
        code, out, err = run("check")
        assert (code, out, words in err) == (1, "", True), err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("full",), "full contains other files; choose a new directory"),
        (("file",), "file is a file; choose a directory"),
        (("check", "--folder", "full"), "full is no folder of `llamarium build`"),
        (("hint", "embed"), "my_llama is no folder of `llamarium build`"),
        (("hint", "walk"), "step walk does not exist; expected 1 to 18 or a name: merge, embed"),
        (("check", "19", "--folder", "mine"), "step 19 does not exist"),
        (("check", "lora", "--folder", "mine"), "the course of mine has no step lora; it has embed"),
        (("mine", "--course", "other.json"), "mine belongs to another course; choose a new directory"),
        (("pack", "new.json", "--steps", "embed", "walk"), "step walk does not exist"),
        (("pack", "new.json", "--texts", "short.txt"), "short.txt: the text 'too short' is too short"),
        (("pack", "new.json", "--texts", "empty.txt"), "empty.txt: empty; expected text"),
        (("pack", "new.json", "--texts", "blank.txt"), "blank.txt: texts is []; expected a list of texts"),
        (("pack", "new.json", "--texts", "none.txt"), "none.txt: cannot be read: No such file"),
        (("pack", "course.json"), "course.json exists; use --force to replace it, or choose another name"),
        (("again", "--course", "none.json"), "none.json: no course"),
    ],
)
def test_what_cannot_be_done_is_said(args: tuple[str, ...], words: str, run: Run) -> None:
    Path("full").mkdir()
    Path("full/notes.txt").touch()
    Path("file").touch()
    Path("short.txt").write_text("too short\n")
    Path("empty.txt").touch()
    Path("blank.txt").write_text(" \n\n")
    course.start(Path("mine"), Course.of(["embed"], ["one two three four"]))
    Course().write(Path("course.json"))
    Course.of(["lora"], ["one two three four"]).write(Path("other.json"))
    code, out, err = run(*args)
    assert (code, out) == (1, "")
    assert words in err
    assert not Path("new.json").exists()


def test_a_step_and_all_steps_are_not_asked_together(run: Run) -> None:
    run()
    code, _, err = run("check", "3", "--all")
    assert code == 2 and "name a step or give --all, not both" in err


def test_within_a_folder_that_folder_is_meant(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("pack", "course.json")
    run()
    assert Path("my_llama", "course.json").is_file(), "a course alone makes no folder"
    monkeypatch.chdir("my_llama")
    fill(".", "merge")
    code, out, _ = run("check")
    assert code == 0 and out.startswith("step 1, merge: right")
    assert run()[2].endswith("Next: embed in step02_embed.py, then `llamarium build check`\n")
    assert run("hint", "embed")[0] == 0
    assert not Path("my_llama").exists()
