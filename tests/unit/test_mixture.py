"""Mixtures: what a weight means, what is drawn when, and what is refused."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarium.datasets.sources import parse_data
from llamarium.errors import TrainingError
from llamarium.tokenizer.backends.characters import CharacterTokenizer
from llamarium.train.config import DPOConfig, FinetuneConfig, GRPOConfig, PretrainConfig
from llamarium.train.data.bpe import train_characters
from llamarium.train.data.corpus import Learner, tokenize_corpus
from llamarium.train.data.dialog_rows import DialogRows
from llamarium.train.data.dialogs import Example
from llamarium.train.data.mixture import Mixture
from llamarium.train.data.order import Order
from llamarium.train.data.packing import MixedRows, PackedRows
from llamarium.train.data.pairs import PairRows
from llamarium.train.data.prompts import PromptRows

pytestmark = pytest.mark.torch

LETTERS = CharacterTokenizer.from_text("abcdefghijklmnopqrstuvwxyz \n")


def test_a_text_is_a_path_where_there_is_one_and_else_names_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_data("a.jsonl=2, org/name:sub=0.5") == {"a.jsonl": 2.0, "org/name:sub": 0.5}
    assert parse_data("lr=3.jsonl=1e-1,b=1") == {"lr=3.jsonl": 0.1, "b": 1.0}
    for plain in ("a.jsonl", "org/name", None, "", 5):
        assert parse_data(plain) == plain
    Path("a=2,b=1").write_text("")
    assert parse_data("a=2,b=1") == "a=2,b=1"
    assert parse_data({"a=2,b=1": 2, "c, d.txt": 1}) == {"a=2,b=1": 2.0, "c, d.txt": 1.0}
    Path("a.jsonl").write_text("")
    Path("link").symlink_to("a.jsonl")
    with pytest.raises(TrainingError, match="data names link twice"):
        parse_data("a.jsonl=2,link=1")
    assert parse_data("a.jsonl=7") == parse_data({"a.jsonl": 1}) == "a.jsonl", "one source alone has no weight"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("a=0,b=1", "the weight of a is 0.0; expected a number from 1e-9 to 1e9"),
        ("a=-1,b=1", "the weight of a is -1.0; expected"),
        ("a=nan,b=1", "the weight of a is nan; expected"),
        ("a=inf,b=1", "the weight of a is inf; expected"),
        ("a=much,b=1", "the weight of a is 'much'; expected"),
        ("a=1_0,b=1", "the weight of a is '1_0'; expected"),
        ("a=٣,b=1", "the weight of a is '٣'; expected"),
        ("a=,b=1", "the weight of a is ''; expected"),
        ("a.txt,b.txt", r"no file or folder, and no mixture, as 'a.txt' has no weight; expected NAME=WEIGHT"),
        ("a=1,b=2,", "as '' has no weight"),
        ("a=1,a=2", "data names a twice; give it once, with the sum of both weights"),
        ("a=1,b=1,./a=2", r"data names ./a twice"),
        ({}, "data has no source"),
        ({"": 1, "b": 1}, "data names the source ''"),
        ({3: 1, "b": 1}, "data names the source 3"),
        ({"a": True, "b": 1}, "the weight of a is True"),
        ({"a": "1", "b": 1}, "the weight of a is '1'"),
        ({"a": 1e-310, "b": 1e-310}, "the weight of a is 1e-310; expected a number from 1e-9"),
        ({"a": 10**400, "b": 1}, "the weight of a is 1000"),
    ],
)
def test_what_is_no_mixture_is_refused_by_every_kind_of_run(data: Any, words: str) -> None:
    for kind in (PretrainConfig, FinetuneConfig, DPOConfig, GRPOConfig):
        with pytest.raises(TrainingError, match=words):
            kind(data=data)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.01, 100)), min_size=1, max_size=5),
    st.none() | st.integers(0, 99),
)
def test_nothing_is_drawn_again_before_all_else_of_its_source(
    sources: list[tuple[int, float]], seed: int | None
) -> None:
    sizes = [size for size, _ in sources]
    mixture = Mixture({str(i): weight for i, (_, weight) in enumerate(sources)}, sizes, seed)
    drawn = [tuple(draw) for epoch in range(4) for draw in mixture.draws(epoch).tolist()]
    assert len(set(drawn)) == len(drawn) == 4 * sum(mixture.counts), "a pass has each unit once"
    for source, (size, count) in enumerate(zip(sizes, mixture.counts, strict=True)):
        passes = Counter(done for s, done, _ in drawn if s == source)
        assert sum(passes.values()) == 4 * count
        assert all(passes[done] == size for done in range(4 * count // size)), "and the next begins after its end"
        share = mixture.weights[str(source)] / sum(mixture.weights.values())
        assert abs(count - max(1.0, share * sum(sizes))) <= 0.5 + 1e-9
    again = Mixture(mixture.weights, sizes, seed)
    assert again.draws(3).equal(mixture.draws(3)), "an epoch follows from its number alone"


def test_sources_are_spread_over_the_epoch_and_a_seed_draws_how() -> None:
    mixture = Mixture({"a": 3, "b": 1}, [1000, 1000], 7)
    sources = mixture.draws(0)[:, 0]
    assert mixture.counts == [1500, 500] and abs(float(sources[:200].double().mean()) - 0.25) < 0.1
    other = Mixture(mixture.weights, mixture.sizes, 8)
    assert not other.draws(0).equal(mixture.draws(0)) and not mixture.draws(1).equal(mixture.draws(0))
    held = Mixture(mixture.weights, mixture.sizes, None).draws(0).tolist()
    assert held == [[0, i // 1000, i % 1000] for i in range(1500)] + [[1, 0, i] for i in range(500)]
    about = mixture.about([10_000, 20])["sources"]
    assert about[0] == {"source": "a", "weight": 3, "share": 0.75, "passes": 1.5, "tokens": 10_000}
    assert Mixture({"": 1.0}, [3], 0).about([5]) == {}


def test_the_last_share_of_each_source_is_held_out() -> None:
    (units, train), (held_units, held) = Mixture({"a": 2, "b": 1}, [10, 4], 3).split(0.2)
    assert units == [*range(8), 10, 11, 12] and held_units == [8, 9, 13]
    assert (train.sizes, train.seed, held.sizes, held.seed) == ([8, 3], 3, [2, 1], None)
    with pytest.raises(TrainingError, match=r"b: of 1 example, validation 0.2 takes 1; .*--validation 0"):
        Mixture({"a": 2, "b": 1}, [10, 1], 3).split(0.2)


def examples(letter: int, count: int, length: int = 4) -> list[Example]:
    learned = np.array([False, *[True] * (length - 1)])
    return [Example(np.array([letter, i, *[0] * (length - 2)], dtype=np.int32), learned) for i in range(count)]


@pytest.mark.parametrize("packing", [True, False])
def test_examples_of_all_sources_share_rows_in_their_shares(packing: bool) -> None:
    mixture = Mixture({"a": 3, "b": 1}, [30, 50], 5)
    rows = DialogRows([*examples(1, 30), *examples(2, 50)], 7, packing=packing, mixture=mixture)
    batch = rows.batch(0, range(rows.num_rows(0)))
    assert rows.num_rows(0) == (40 if packing else 80)
    drawn = Counter(batch.ids_BT[batch.positions_BT == 0].tolist())
    assert drawn[1] == 60 and drawn[2] == 20, "each of a's examples twice, and two of five of b's"
    mixed = batch.ids_BT[:, 0] != batch.ids_BT[:, 3]
    assert not packing or mixed.any(), "one row holds examples of both"
    heavier, same = (Mixture({"a": a, "b": b}, [30, 50], 5) for a, b in ((4, 1), (6, 2)))
    assert DialogRows(rows.examples, 7, packing=packing, mixture=same).fingerprint == rows.fingerprint
    prints = {DialogRows(rows.examples, 7, packing=packing, mixture=m).fingerprint for m in (mixture, heavier, None)}
    assert len(prints) == 3, "weights are a part of what a run has learned from"


def test_several_processes_take_the_rows_of_one() -> None:
    rows = DialogRows([*examples(1, 9), *examples(2, 5)], 3, mixture=Mixture({"a": 1, "b": 2}, [9, 5], 5))
    alone = Order(rows, 1)
    shards = [Order(rows, 1, shard_idx=i, num_shards=2) for i in range(2)]
    for _ in range(6):
        whole, parts = alone.take(4), [shard.take(4) for shard in shards]
        assert sorted(whole.ids_BT.tolist()) == sorted([*parts[0].ids_BT.tolist(), *parts[1].ids_BT.tolist()])


def lines(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("kind", "row"), [(DialogRows, {"text": "abc"}), (PairRows, {"prompt": "a", "chosen": "b", "rejected": "c"})]
)
def test_sources_are_read_each_in_its_forms_and_named_where_they_hold_nothing(
    kind: type[DialogRows], row: dict[str, str], tmp_path: Path
) -> None:
    tokenizer = train_bpe_of()
    a, b = lines(tmp_path / "a.jsonl", [row] * 3), lines(tmp_path / "b.jsonl", [row] * 2)
    rows = kind.from_file({a: 1, b: 4}, tokenizer, 24, seed=1)
    assert rows.mixture.sizes == [3, 2] and rows.mixture.counts == [1, 4]
    assert [source["tokens"] for source in rows.about["sources"]] == [
        sum(len(e.ids) for e in rows.examples[: 3 * kind.together]),
        sum(len(e.ids) for e in rows.examples[3 * kind.together :]),
    ]
    for text, words in (("", "holds no example"), ("{}\n", r"b.jsonl:1: has the keys")):
        (tmp_path / "b.jsonl").write_text(text)
        with pytest.raises(TrainingError, match=rf"^{b}.*{words}|^{tmp_path}/{words}"):
            kind.from_file({a: 1, b: 4}, tokenizer, 24)
    Path(b).unlink()
    with pytest.raises(TrainingError, match=r"no data called .*/b\."):
        kind.from_file({a: 1, b: 4}, tokenizer, 24)
    with pytest.raises(TrainingError, match=r"a.jsonl: 3 of 3 .* longer than a row of 2 tokens"):
        kind.from_file({a: 1}, tokenizer, 2)


def train_bpe_of() -> Any:
    from llamarium.train.data.bpe import train_bpe

    return train_bpe(["abc abc abc"], 258)


def test_prompts_are_drawn_by_weight(tmp_path: Path) -> None:
    a = lines(tmp_path / "a.jsonl", [{"prompt": "a" * i} for i in range(1, 5)])
    b = lines(tmp_path / "b.jsonl", [{"prompt": "b" * i} for i in range(1, 9)])
    rows = PromptRows.from_file({a: 2, b: 1}, LETTERS, 24, 8, truncate="error", chat=False, seed=3)
    drawn = Counter(rows.prompt(0, i).text for i in range(rows.num_rows(0)))
    assert rows.num_rows(0) == 12 and {drawn["a" * i] for i in range(1, 5)} == {2}
    assert sum(count for text, count in drawn.items() if text[0] == "b") == 4
    train, held = rows.split(0.25)
    assert [prompt.text for prompt in held.prompts] == ["aaaa", "b" * 7, "b" * 8]
    assert {train.prompt(e, i).text for e in range(3) for i in range(train.num_rows(e))} == {
        *("a" * i for i in range(1, 4)), *("b" * i for i in range(1, 7))
    }  # fmt: skip


def test_texts_are_drawn_in_rows_and_learn_one_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc" * 50)
    lines(tmp_path / "b.jsonl", [{"text": "xy" * 40}, {"text": "zx" * 60}])
    names = {str(tmp_path / "a.txt"): 1, str(tmp_path / "b.jsonl"): 3}
    corpus = tokenize_corpus(names, Learner("characters", train_characters), tmp_path / "ids")
    a, b = corpus.by_source(names)
    assert corpus.tokenizer.vocab_size == 6 and corpus.tokenizer.decode(a.ids.tolist()) == "abc" * 50
    assert (b.name, b.num_documents, b.num_tokens) == (str(tmp_path / "b.jsonl"), 2, 200)
    parts = [PackedRows(part, 8, 1) for part in (a, b)]
    rows = MixedRows(parts, names, 1)
    assert rows.num_rows(0) == sum(rows.mixture.counts) == 17 + 24 and rows.mixture.counts == [10, 31]
    batch = rows.batch(0, range(41))
    letters = [set(corpus.tokenizer.decode(row)) for row in batch.ids_BT.tolist()]
    assert sum("a" in row for row in letters) == 10 and all(row <= set("abc") or row <= set("xyz") for row in letters)
    seen = {bytes(row) for epoch in range(9) for row in rows.batch(epoch, range(41)).positions_BT.numpy().astype("u1")}
    assert len(seen) > 1, "documents within a row count from their beginning"
    assert rows.batch(4, [3, 5, 3]).ids_BT.shape == (3, 8)
    assert {part.offset(done) for part in parts for done in range(9)} != {0}, "each pass is cut elsewhere"
    for epoch in range(4):
        for i, (source, done, row) in enumerate(rows.mixture.draws(epoch).tolist()):
            assert rows.batch(epoch, [i]).ids_BT.equal(parts[source].batch(done, [row]).ids_BT)
    assert rows.batch(4, [7]).ids_BT.equal(MixedRows(parts, names, 1).batch(4, [7]).ids_BT)
    assert [source["tokens"] for source in rows.about["sources"]] == [150, 200]

    again = tokenize_corpus(names, Learner("characters", train_characters), tmp_path / "ids")
    assert again.fingerprint == corpus.fingerprint and again.about == corpus.about
    heavier = MixedRows(parts, {**names, str(tmp_path / "a.txt"): 2}, 1)
    assert heavier.fingerprint != rows.fingerprint != MixedRows([parts[1], parts[0]], names, 1).fingerprint
    (tmp_path / "c.txt").write_text("")
    with pytest.raises(TrainingError, match=r"^[^,]*c.txt: no text in it"):
        tokenize_corpus(
            {**names, str(tmp_path / "c.txt"): 1}, Learner("characters", train_characters), tmp_path / "ids"
        )


def test_sources_whose_names_are_shown_alike_are_two(tmp_path: Path) -> None:
    long = "x" * 200
    folder = tmp_path / long
    folder.mkdir()
    names = {str(folder / f"{letter}.jsonl"): 1 for letter in "ab"}
    for name in names:
        lines(Path(name), [{"text": "abc"}, {"text": "abd"}])
    corpus = tokenize_corpus(names, LETTERS, tmp_path / "ids")
    assert [part.num_documents for part in corpus.by_source(names)] == [2, 2]
    assert all(len(part.name) == 200 for part in corpus.by_source(names))
    assert DialogRows.from_file(names, train_bpe_of(), 24).mixture.sizes == [2, 2]


def test_the_same_text_in_other_sources_is_another_mixture(tmp_path: Path) -> None:
    """Documents and their order are the same; where a source begins is not."""
    for name, documents in (("a", ["one", "two"]), ("b", ["three"]), ("c", ["one"]), ("d", ["two", "three"])):
        lines(tmp_path / f"{name}.jsonl", [{"text": text} for text in documents])
    found = []
    for pair in ("ab", "cd"):
        names = {str(tmp_path / f"{name}.jsonl"): 1 for name in pair}
        corpus = tokenize_corpus(names, LETTERS, tmp_path / "ids")
        found.append([part.num_tokens for part in corpus.by_source(names)])
    assert found == [[6, 5], [3, 8]] and torch.equal(corpus.ids, tokenize_corpus(names, LETTERS, tmp_path / "ids").ids)
