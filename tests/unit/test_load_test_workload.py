"""What the load generator asks: lengths, synthetic prompts, files."""

import json
import random
import statistics
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import llamarium
from llamarium.errors import InputError, OptionError
from llamarium.load_test.workload import WORDS, Lengths, LoadRequest, from_file, synthetic

FOUR, TEN = Lengths.parse("4"), Lengths.parse("10")


def drawn(spelling: str, number: int = 4000) -> list[int]:
    lengths, source = Lengths.parse(spelling), random.Random(0)
    return [lengths.draw(source) for _ in range(number)]


def test_a_fixed_length() -> None:
    assert set(drawn("128")) == {128}


def test_a_uniform_length_takes_every_number_with_both_ends() -> None:
    assert set(drawn("uniform:3:6")) == {3, 4, 5, 6}


def test_a_lognormal_length_has_the_mean_that_is_asked_for() -> None:
    found = drawn("lognormal:300:0.5", 20_000)
    assert statistics.mean(found) == pytest.approx(300, rel=0.02)
    assert statistics.median(found) == pytest.approx(300 / 2.718281828 ** (0.5**2 / 2), rel=0.02)
    assert set(drawn("lognormal:300:0")) == {300}
    assert min(drawn("lognormal:1:3")) == 1


@pytest.mark.parametrize(
    "spelling",
    "0 -1 x 1.5 uniform:5 uniform:6:3 uniform:0:3 uniform:1:2:3 lognormal:0:1 lognormal:10:-1 lognormal:inf:1 "
    "lognormal:10:nan normal:10:1 3:4 :".split(),
)
def test_what_is_no_length_is_refused(spelling: str) -> None:
    with pytest.raises(OptionError, match="expected N, uniform:LOW:HIGH or lognormal:MEAN:SIGMA"):
        Lengths.parse(spelling)


def prompts(number: int = 20, **options: Any) -> list[str]:
    return [str(request.prompt) for request in islice(synthetic(TEN, FOUR, **options), number)]


def test_the_same_seed_asks_the_same_and_another_something_else() -> None:
    first = list(islice(synthetic(Lengths.parse("uniform:5:50"), Lengths.parse("uniform:1:9"), seed=7), 20))
    assert first == list(islice(synthetic(Lengths.parse("uniform:5:50"), Lengths.parse("uniform:1:9"), seed=7), 20))
    assert len({request.prompt for request in first}) == 20
    assert len({request.max_tokens for request in first}) > 1
    assert not set(prompts(seed=1)) & set(prompts(seed=2))


def test_a_shared_prefix_comes_before_each_prompts_own_words() -> None:
    found = [prompt.split(" ") for prompt in prompts(shared_prefix=30, seed=3)]
    assert {len(words) for words in found} == {40}
    assert len({tuple(words[:30]) for words in found}) == 1
    assert len({tuple(words[30:]) for words in found}) == 20
    assert (
        len({tuple(words[:30]) for seed in range(4) for words in [prompts(1, shared_prefix=30, seed=seed)[0].split()]})
        == 4
    )


@pytest.mark.parametrize("vocabulary", ["llama3", "smollm2-135m"])
def test_so_many_words_are_so_many_tokens(vocabulary: str, llama3_tokenizer_path: Path, smollm2_path: Path) -> None:
    tokenizer = llamarium.load_tokenizer(vocabulary)
    for text in (" ".join(WORDS), " ".join(reversed(WORDS)), *prompts()):
        assert len(tokenizer.encode(text, add_special_tokens=False)) == len(text.split(" "))


def test_a_text_can_be_what_a_user_says() -> None:
    assert LoadRequest("hello", 3).as_chat() == LoadRequest(({"role": "user", "content": "hello"},), 3)
    dialog = LoadRequest(({"role": "user", "content": "hello"},), 3)
    assert dialog.as_chat() is dialog
    with pytest.raises(InputError, match="token ids cannot be sent as a dialog"):
        LoadRequest((1, 2), 3).as_chat()


def test_a_files_lines_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    messages = [{"role": "user", "content": "line\u2028end"}]
    lines = [{"prompt": "one"}, {"prompt": [1, 2], "max_tokens": 7}, {"messages": messages, "id": 3}]
    path.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n", encoding="utf-8")
    one, two, three = from_file(path, FOUR)
    assert one == LoadRequest("one", 4) and not one.is_chat
    assert two == LoadRequest((1, 2), 7) and not two.is_chat
    assert three == LoadRequest(tuple(messages), 4) and three.is_chat


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "line 2 is not JSON"),
        ("[" * 100_000, "line 2 is not JSON"),
        ('["a"]', r"line 2 is \['a'\]; expected an object with prompt or messages"),
        ('{"text": "a"}', "line 2: expected a prompt"),
        ('{"prompt": ""}', "line 2: expected a prompt"),
        ('{"prompt": []}', "line 2: expected a prompt"),
        ('{"prompt": [1, "a"]}', "line 2: expected a prompt"),
        ('{"prompt": [true]}', "line 2: expected a prompt"),
        ('{"messages": ["a"]}', "line 2: expected a prompt"),
        ('{"prompt": "a", "messages": [{}]}', "line 2: expected a prompt"),
        ('{"prompt": "a", "max_tokens": 0}', "line 2: max_tokens is 0; expected an integer of at least 1"),
        ('{"prompt": "a", "max_tokens": "3"}', "line 2: max_tokens is '3'"),
        ('{"prompt": "a", "max_tokens": null}', "line 2: max_tokens is None"),
    ],
)
def test_a_wrong_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(InputError, match=message):
        from_file(path, FOUR)


def test_a_file_without_requests_or_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text("\n\n")
    with pytest.raises(InputError, match="contains no requests"):
        from_file(path, FOUR)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="not UTF-8"):
        from_file(path, FOUR)
