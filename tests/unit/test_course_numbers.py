"""Every number in a sentence of the course is printed by the code beside it, or computed here from the models.

What the code prints is compared with the real models by `tests/integration/test_docs.py`.
"""

# ruff: noqa: RUF001  (the chapters write minus signs)

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from course_numbers import CHAPTERS, COURSE, is_backed, sections, stated_without_code, value
from llamarium.checkpoints.open import open_model
from llamarium.cost import count_parameters, kv_bytes_per_token
from llamarium.hub.resolve import packaged_path
from llamarium.presets import preset

LETTERS = packaged_path("shakespeare-char")
CARD = (LETTERS / "README.md").read_text(encoding="utf-8")


def letters_size() -> float:
    return count_parameters(open_model(LETTERS).config).total / 1e6


def printed(chapter: int, section: str, pattern: str) -> list[float]:
    """The numbers that a section's code has printed, by a pattern with groups."""
    path = next(path for path in CHAPTERS if path.name.startswith(f"{chapter}-"))
    (body,) = (body for heading, body in sections(path) if heading == section)
    found = re.search(pattern, body)
    assert found is not None, pattern
    return [value(one) for one in found.groups()]


def softmax(scores: list[float]) -> list[float]:
    powers = [math.exp(score) for score in scores]
    return [power / sum(powers) for power in powers]


def lost() -> list[float]:
    """By how much the lead of Paris falls without each of two heads."""
    section = "Direct logit attribution"
    (whole,) = printed(4, section, r"Paris leads by (\d\.\d+)\n")
    gave = printed(4, section, r"head 4 gives (\S+);[^\n]+ by (\S+)\n[^\n]+head 1 gives (\S+);[^\n]+ by (\S+)\n")
    return [gave[0], whole - gave[1], gave[2], whole - gave[3]]


ONE_B = preset("llama-3.2-1b")
C = preset("smollm2-135m")  # the course's model

CHECKED: dict[tuple[int, str], Callable[[], list[float]]] = {
    (1, "a Llama with 2.4M parameters"): lambda: [letters_size()],
    (1, "with 49,152 tokens and 576 numbers"): lambda: [C.vocab_size, C.hidden_size],
    (1, "of 49,152 [tokens"): lambda: [C.vocab_size],
    (1, "has 128,256 tokens"): lambda: [ONE_B.vocab_size],
    (1, "of 65 rows"): lambda: [open_model(LETTERS).config.vocab_size],
    (1, "have 0.46 in the mean"): lambda: printed(1, "Ids become vectors", r"rows, 1 apart: (\d\.\d+),"),
    (1, "So the 0.58 of"): lambda: printed(1, "Directions mean something", r'" dog" +\d+ +(\S+)'),
    (1, "24, 50 and −25; the cosines 0.96"): lambda: [3 * 4 + 4 * 3, 3 * 6 + 4 * 8, -25, 24 / 25],
    (1, "vectors (4, 3), (6, 8) and (−3, −4)"): lambda: [4, 3, 6, 8, -3, -4],
    (1, "(6, 8) points"): lambda: [6, 8],
    (2, "by 8 for the 64 numbers"): lambda: [math.sqrt(C.head_dim), C.head_dim],
    (2, "(512 in the paper of was the width of that model, whose 8 heads had 64"): lambda: [512, 512 / 64, 64],
    (2, "There are 9 query heads and 3 key"): lambda: [C.num_attention_heads, C.num_key_value_heads],
    (2, "gets 0.70 of"): lambda: printed(2, "The sink", r"weight on the first token, [^\n{]+: (\d\.\d+)"),
    (2, "1 + 7.39 = 8.39"): lambda: [1, math.exp(2), 1 + math.exp(2)],
    (3, "Turn each by 90°"): lambda: [math.degrees(math.pi / 2)],
    (3, "has 32 such hands"): lambda: [C.head_dim / 2],
    (3, "theta is 100,000"): lambda: [C.rope_theta],
    (3, "of 8,192 tokens"): lambda: [C.max_position_embeddings],
    (3, "texts of 8,192"): lambda: [preset("llama-3-8b").max_position_embeddings],
    (3, "texts of 3.1 and 3.2"): lambda: [3.1, 3.2],  # names of models
    (3, "30 layers, 30 rotations"): lambda: [C.num_hidden_layers] * 2,
    (3, "131,072 tokens take them as far as 4,096"): lambda: [131_072, 131_072 / 32],
    (4, "(9 + 16 + 0 + 0) / 4 = 6.25"): lambda: [3**2, 4**2, 0, 0, 4, (3**2 + 4**2) / 4],
    (4, "2 · 0.88 = 1.76"): lambda: [2, 1 / (1 + math.exp(-2)), 2 / (1 + math.exp(-2))],
    (4, "−2 · 0.12 = −0.24"): lambda: [-2, 1 / (1 + math.exp(2)), -2 / (1 + math.exp(2))],
    (4, "D = 576 numbers to F = 1536"): lambda: [C.hidden_size, C.intermediate_size],
    (4, "row plus 60 contributions"): lambda: [2 * C.num_hidden_layers],
    (4, "nothing before layer 26"): lambda: printed(2, "Subject and object", r"layer (\d+), head 0: 0\.\d+ of the way"),
    (4, "gives 3.01, and 5.40 are"): lambda: lost()[:2],
    (4, "gives 2.14, and 0.82 are"): lambda: lost()[2:],
    (4, "gives 3.01 to the lead of"): lambda: lost()[:1],
    (4, "lead falls by 5.40"): lambda: lost()[1:2],
    (4, "Are 30 layers 30 steps"): lambda: [C.num_hidden_layers] * 2,
    (4, "22 of the 30"): lambda: [
        *printed(4, "Which layers are needed", r"less: the other (\d+),"),
        C.num_hidden_layers,
    ],
    (5, "e² = 7.39, e¹ = 2.72 and e⁰ = 1, divided by their sum 11.11"): lambda: [
        math.exp(2),
        math.exp(1),
        1,
        1 + math.exp(1) + math.exp(2),
    ],
    (5, "they are 4, 2 and 0"): lambda: [2 / 0.5, 1 / 0.5, 0],
    (5, "−ln 0.245 = 1.41"): lambda: [softmax([2, 1, 0])[1], -math.log(softmax([2, 1, 0])[1])],
    (5, "(0.67, −0.76, 0.09)"): lambda: [p - (i == 1) for i, p in enumerate(softmax([2, 1, 0]))],
    (5, "of the 49,148 others"): lambda: [C.vocab_size - 4],
    (5, "take 4.7 MB in 16 bits, for a text of 1.1 MB"): lambda: [
        2 * letters_size(),
        16,
        value(re.findall(r"Shakespeare, ([\d,]+) characters", CARD)[0]) / 1e6,
    ],
    (5, "The cache saves 66 %"): lambda: [66],  # a quotation
    (5, "key-value heads instead of 9"): lambda: [C.num_attention_heads],
    (5, "A weight in 16 bits"): lambda: [16],
    (5, "scale in 16 bits that makes 4.5 bits"): lambda: [16, 4 + 16 / 32],
    (5, "e² = 7.39 against 1, which is 0.88 and 0.12"): lambda: [math.exp(2), 1, *softmax([2, 0])],
    (5, "2.72 against 1, 0.73 and 0.27"): lambda: [math.exp(1), 1, *softmax([1, 0])],
    (5, "46,080 bytes for each token, so 46 MB"): lambda: [
        kv_bytes_per_token(C, "float32"),
        1000 * kv_bytes_per_token(C, "float32") / 1e6,
    ],
}
"""Numbers that no code of their section prints, by chapter and fragment, and what they are."""


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.name[0])
def test_every_number_of_a_chapter_is_printed_or_computed(path: Path) -> None:
    fragments = [fragment for chapter, fragment in CHECKED if path.name.startswith(f"{chapter}-")]
    unknown = [
        one
        for one in stated_without_code(path)
        if not any(one.number in fragment and fragment in one.sentence for fragment in fragments)
    ]
    assert unknown == []


@pytest.mark.parametrize(("chapter", "fragment"), CHECKED)
def test_a_number_without_code_is_right(chapter: int, fragment: str) -> None:
    path = next(path for path in CHAPTERS if path.name.startswith(f"{chapter}-"))
    assert any(fragment in one.sentence for one in stated_without_code(path)), "the sentence is gone"
    numbers = re.findall(r"(?<![\w.,])[−-]?\d+(?:,\d{3})*(?:\.\d+)?", fragment)
    computed = CHECKED[chapter, fragment]()
    assert len(numbers) == len(computed)
    for number, right in zip(numbers, computed, strict=True):
        assert is_backed(number, [right]) and (value(number) < 0) == (right < 0), (number, right)


def test_a_wrong_number_is_found(tmp_path: Path) -> None:
    text = (COURSE / "4-what-a-layer-does.md").read_text(encoding="utf-8")
    changed = tmp_path / "4-changed.md"
    changed.write_text(text.replace('that "/" leads after layer 0 with 0.77', 'that "/" leads after layer 0 with 0.79'))
    assert [one.number for one in stated_without_code(changed) if one.number == "0.79"] == ["0.79"]
