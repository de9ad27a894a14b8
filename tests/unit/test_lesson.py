"""A lesson file: what it says as plain JSON, what it lacks by path and line, within two seconds."""

import json
import re
import time
from pathlib import Path

import pytest

from llamarium.errors import InputError
from llamarium.page.lesson import CARDS, MAX_BYTES, read_lesson

CARDS_OF_THE_PAGE = Path(__file__).parents[2] / "web" / "src" / "story" / "cards.ts"
LESSON = '''title = "Why pie?"
large = true

[[parts]]
text = "My grandmother baked a delicious apple"
question = "Which word comes next?"
answer = "<b>pie</b>"
answer_cards = ["guess"]

[[parts]]
question = """
Which word does apple look at?
cards = ["none"]"""
cards = "looking"
'''


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "lesson.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_lesson_is_plain_json_and_its_strings_are_as_written(tmp_path: Path) -> None:
    found = json.loads(read_lesson(written(tmp_path, LESSON)).model_dump_json())
    first = {
        "text": "My grandmother baked a delicious apple",
        "question": "Which word comes next?",
        "answer": "<b>pie</b>",
        "cards": [],
        "answer_cards": ["guess"],
    }
    second = {
        **first,
        "question": 'Which word does apple look at?\ncards = ["none"]',
        "answer": None,
        "cards": ["looking"],
        "answer_cards": [],
    }
    assert found == {"title": "Why pie?", "large": True, "parts": [first, second]}


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ('cards = "looking"', 'cards = ["lookin"]', 14),
        ('cards = "looking"', "cards = 3", 14),
        ("large = true", "large = 1", 2),
        ('title = "Why pie?"', "title Why", 1),
        ('answer = "<b>pie</b>"', 'answer = ""', 7),
        ('text = "My grandmother baked a delicious apple"', "", 4),
        ('question = "Which word comes next?"', "", 4),
        ("[[parts]]\ntext", "[[parts\ntext", 4),
        ('answer_cards = ["guess"]', 'answer = "twice"', 8),
        ('cards = "looking"\n', 'cards = "looking', 14),
    ],
)
def test_what_is_wrong_is_named_by_path_and_line(tmp_path: Path, before: str, after: str, line: int) -> None:
    assert before in LESSON
    path = written(tmp_path, LESSON.replace(before, after))
    with pytest.raises(InputError) as caught:
        read_lesson(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")


@pytest.mark.parametrize(
    "text",
    [
        "", "parts = [1]", "parts = []", "parts = 3", "[[" * 30_000, "a" + ".a" * 30_000 + " = 1", "x = " + "9" * 5000,
        "[a" + ".a" * 30_000 + "]", b"\xff\xfe", b"title = '\x00'", "#" * (MAX_BYTES + 1), "{" * 1000,
    ],
)  # fmt: skip
def test_what_is_no_lesson_is_refused_at_once(tmp_path: Path, text: str | bytes) -> None:
    begun = time.monotonic()
    path = written(tmp_path, text)
    with pytest.raises(InputError) as caught:
        read_lesson(path)
    assert str(caught.value).startswith(str(path)) and str(caught.value).isprintable()
    assert time.monotonic() - begun < 2
    with pytest.raises(InputError):
        read_lesson(tmp_path)


def test_unknown_keys_are_named_once_and_have_no_effect(tmp_path: Path) -> None:
    path = written(tmp_path, LESSON.replace("answer =", "answr =").replace("large", "author"))
    with pytest.warns(UserWarning) as caught:
        found = read_lesson(path)
    places = [re.match(rf"{re.escape(str(path))}:(\d+): (\w+)", str(one.message)) for one in caught]
    assert [(place[1], place[2]) for place in places if place] == [("2", "author"), ("7", "answr")]
    assert not found.large and found.parts[0].answer is None


def test_its_cards_are_those_of_the_story() -> None:
    assert tuple(re.findall(r'\{ id: "(\w+)", title:', CARDS_OF_THE_PAGE.read_text(encoding="utf-8"))) == CARDS
