"""What a run learns from: documents, the corpus of ids on disk, and the rows cut from it."""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import llamarium
from llamarium.datasets import sources
from llamarium.datasets.sources import read_documents, source_stamp
from llamarium.errors import DownloadError, OptionError, OutputError, TrainingError
from llamarium.io import file_sha256
from llamarium.tokenizer import pieces as pieces_module
from llamarium.tokenizer.backends.characters import CharacterTokenizer
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.pieces import encode_pieces
from llamarium.train.data import corpus as corpus_module
from llamarium.train.data import dialog_rows, dialogs
from llamarium.train.data.batch import IGNORED, join
from llamarium.train.data.bpe import train_bpe, train_characters
from llamarium.train.data.corpus import Corpus, Learner, tokenize_corpus, tokenizer_fingerprint
from llamarium.train.data.order import Cursor, Order
from llamarium.train.data.packing import PackedRows

pytestmark = pytest.mark.torch

LINES = "The cat sat on the mat.\nThe rat sat on the hat, 1234 times.\n\n  So it goes\n"


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    return CharacterTokenizer.from_text(LINES)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe([LINES * 5], 280)


def corpus_of(documents: list[list[int]]) -> Corpus:
    ids = torch.tensor([i for document in documents for i in document], dtype=torch.int32)
    starts = torch.tensor([sum(map(len, documents[:n])) for n in range(len(documents))])
    return Corpus("a test", ids, starts, CharacterTokenizer.from_text(LINES), "0" * 64, {})


def corpus_folder(folder: Path) -> Path:
    """Return where the only corpus lies."""
    (inside,) = folder.glob("corpus-*")
    return inside


def characters() -> Learner:
    return Learner("characters", train_characters)


class Reads:
    """Counts how often documents are read and vocabularies learned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_read = self.num_learned = 0
        monkeypatch.setattr(corpus_module, "read_documents", self._read)
        self.learner = Learner("bpe 280", self._learn)

    def _read(self, source: str | None, *, text_field: str) -> Iterator[str]:
        self.num_read += 1
        return read_documents(source, text_field=text_field)

    def _learn(self, documents: Iterable[str], counted: None) -> Tokenizer:
        self.num_learned += 1
        return train_bpe(documents, 280)


def refused(source: Path | str, *words: str, **options: str) -> None:
    """Expect reading to end in a `TrainingError` with all `words`, on one printable line."""
    with pytest.raises(TrainingError) as caught:
        list(read_documents(str(source), **options))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert str(caught.value).isprintable()


# --- sources ----------------------------------------------------------------------------------------------------------


def test_without_a_source_it_is_the_manual_of_this_python():
    from pydoc_data.topics import topics

    documents = list(read_documents(None))
    assert documents == [topics[name] for name in sorted(topics)]
    assert sum(map(len, documents)) > 100_000


def test_a_python_without_its_manual_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(TrainingError, match="name a text file"):
        read_documents(None)


def test_text_is_read_exactly(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes("\ufeffä\r\nb\n".encode())
    assert list(read_documents(str(tmp_path / "a.txt"))) == ["ä\r\nb\n"]
    (tmp_path / "odd name").write_text("no suffix")
    assert list(read_documents(str(tmp_path / "odd name"))) == ["no suffix"]


def test_jsonl_and_parquet_and_folders(tmp_path: Path):
    rows = [{"text": "one", "id": 1}, {"text": "", "id": 2}, {"text": "two ä", "id": 3}]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    pq.write_table(pa.Table.from_pylist([{"text": "three"}, {"text": "four"}]), tmp_path / "c.parquet")
    (tmp_path / "a.txt").write_text("zero")
    (tmp_path / "b.md").write_text("half")
    (tmp_path / ".hidden.txt").write_text("no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.txt").write_text("no")
    assert list(read_documents(str(tmp_path))) == ["zero", "half", "one", "two ä", "three", "four"]


def test_the_text_may_be_in_another_field(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}')
    pq.write_table(pa.table({"id": [1], "body": ["y"]}), tmp_path / "b.parquet")
    assert list(read_documents(str(tmp_path), text_field="body")) == ["x", "y"]
    refused(tmp_path / "a.jsonl", "a.jsonl:1", "no field 'text'", "'body'")
    (tmp_path / "twice.jsonl").write_text('{"text": "x", "text": "y"}')
    refused(tmp_path / "twice.jsonl", "twice.jsonl:1", "the key 'text' twice")
    refused(tmp_path / "b.parquet", "b.parquet", "no field 'text'", "'id', 'body'")


def test_files_that_are_no_data_are_left_out_with_a_warning(tmp_path: Path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.png").write_bytes(b"\x89PNG\0")
    (tmp_path / "b.png").write_bytes(b"\x89PNG\0")
    with pytest.warns(UserWarning, match=r"left out 2 other files \(2 .png\)"):
        assert list(read_documents(str(tmp_path))) == ["text"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"abc\0def", ("NUL byte at byte 3", "UTF-8")),
        (b"abc\xffdef", ("no UTF-8 at byte 3 (0xff)", "iconv")),
        ("text".encode("utf-16"), ("NUL byte",)),
    ],
)
def test_binary_junk_is_refused(tmp_path: Path, data: bytes, words: tuple[str, ...]):
    (tmp_path / "junk.txt").write_bytes(data)
    refused(tmp_path / "junk.txt", "junk.txt", *words)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "cut off', ("no JSON",)),
        ("[" * 200_000, ("no JSON",)),
        ('["a"]', ("['a']", "no JSON object")),
        ('{"text": 3}', ("'text' is 3", "expected a text")),
        ('{"text": null}', ("None", "expected a text")),
        ('{"text": "\\ud800"}', ("U+D800 at character 0",)),
        ('{"te\\u001bxt": "a"}', ("no field 'text'",)),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, words: tuple[str, ...]):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n\n' + line)
    refused(tmp_path / "a.jsonl", "a.jsonl:3", *words)


def test_no_changed_byte_of_parquet_is_our_bug(tmp_path: Path):
    pq.write_table(pa.table({"text": ["one", "two"] * 20}), tmp_path / "whole.parquet")
    whole, damaged = (tmp_path / "whole.parquet").read_bytes(), tmp_path / "damaged.parquet"
    for place in range(len(whole) - 400, len(whole) - 8, 2):
        damaged.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with contextlib.suppress(TrainingError):  # or the byte says nothing about the texts
            list(read_documents(str(damaged)))


def test_malformed_parquet_is_refused(tmp_path: Path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no more")
    refused(tmp_path / "a.parquet", "a.parquet", "no parquet file")
    pq.write_table(pa.table({"text": ["a", None]}), tmp_path / "b.parquet")
    refused(tmp_path / "b.parquet", "b.parquet: row 2", "None")
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "c.parquet")
    refused(tmp_path / "c.parquet", "c.parquet: row 1", "expected a text")


def test_folders_without_data_and_names_without_files(tmp_path: Path):
    refused(tmp_path, "nothing to read", "no files at all")
    (tmp_path / "a.png").write_bytes(b"x")
    refused(tmp_path, "nothing to read", "1 .png", ".jsonl")
    refused(Path("none.txt"), "no data called", "none.txt", "org/name")
    refused("", "no data called")
    refused("a\x1b[2Jb", "no data called")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "neither a file nor a folder")


def test_runs_are_no_data(tmp_path: Path):
    (tmp_path / "a.txt").write_text("a")
    for name, files in (("b", (".lock",)), ("c", ("train.toml",))):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        for file in (*files, "metrics.jsonl"):
            (run / file).write_text('{"event": "start", "step": 0}')
    with pytest.warns(UserWarning, match=r"left out 2 other files \(2 run\)"):
        assert list(read_documents(str(tmp_path))) == ["a"]
    before = source_stamp(str(tmp_path))
    (tmp_path / "runs" / "b" / "metrics.jsonl").write_text("grows")
    assert source_stamp(str(tmp_path)) == before


def test_links_are_followed_but_not_in_circles(tmp_path: Path):
    (tmp_path / "data").mkdir()
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "b.txt").write_text("b")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "more")
    assert list(read_documents(str(tmp_path / "data"))) == ["b"]
    (tmp_path / "more" / "back").symlink_to(tmp_path / "data")
    refused(tmp_path / "data", "back", "a link back to")
    (tmp_path / "more" / "back").unlink()
    (tmp_path / "more" / "self.txt").symlink_to(tmp_path / "more" / "self.txt")
    refused(tmp_path / "data", "self.txt", "cannot be read")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_an_unreadable_folder_is_named(tmp_path: Path):
    (tmp_path / "closed").mkdir(mode=0)
    refused(tmp_path, "closed", "cannot be read")


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def scandir(path: str) -> Iterator[os.DirEntry[str]]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", scandir)
    refused(tmp_path, "the folder cannot be read: Permission denied")


# --- packages that may be missing -------------------------------------------------------------------------------------


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(OptionError, match=r"pyarrow: pip install 'llamarium\[data\]'"):
        list(read_documents(str(tmp_path / "a.parquet")))
    with pytest.raises(OptionError, match=r"datasets: pip install 'llamarium\[hub-data\]'"):
        list(read_documents("org/name"))


def test_hub_data_sets_are_streamed(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[object, ...]] = []

    def load_dataset(repo: str, subset: str | None, *, split: str, streaming: bool) -> Iterator[dict[str, str]]:
        asked.append((repo, subset, split, streaming))
        if repo == "org/none":
            raise FileNotFoundError("Dataset 'org/none' doesn't exist\x1b")
        yield {"text": "one", "id": "1"}
        yield {"id": "2"} if repo == "org/ragged" else {"text": "two"}

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert list(read_documents("org/name")) == ["one", "two"]
    assert list(read_documents("org/name:sub-10BT")) == ["one", "two"]
    assert asked == [("org/name", None, "train", True), ("org/name", "sub-10BT", "train", True)]
    refused("org/ragged", "org/ragged: row 2", "no field 'text'")
    refused("org/none", "org/none could not be read", "doesn't exist")


# --- Tiny Shakespeare -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sources.BUNDLED)
def test_shakespeare_lies_in_the_package(name: str):
    (text,) = read_documents(name)
    # The input.txt of karpathy/char-rnn.
    assert hashlib.sha256(text.encode()).hexdigest().startswith("86c4e6aa9db7c042ec79f339dcb96d42")
    assert source_stamp(name) == source_stamp("shakespeare") != source_stamp(None)


def test_a_file_of_that_name_wins_and_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("shakespeare").write_text("mine")
    assert source_stamp("shakespeare") != source_stamp("tiny-shakespeare")
    with pytest.warns(UserWarning, match="also a text in the package"):
        assert list(read_documents("shakespeare")) == ["mine"]
    assert list(read_documents(str(tmp_path / "shakespeare"))) == ["mine"]


def test_an_unknown_name_lists_what_the_package_has():
    with pytest.raises(TrainingError, match=r"no data called 'hamlet'.*there is shakespeare"):
        read_documents("hamlet")


def test_the_usual_split_of_the_real_file(tmp_path: Path):
    (text,) = read_documents("shakespeare")
    tokenizer = CharacterTokenizer.from_text(text)
    corpus = tokenize_corpus("shakespeare", tokenizer, tmp_path)
    training, validation = corpus.split(0.1)
    assert (tokenizer.vocab_size, corpus.num_tokens) == (65, 1_115_394)
    assert (training.num_tokens, validation.num_tokens) == (1_003_854, 111_540)  # nanoGPT's train.bin and val.bin
    assert tokenizer.decode(validation.ids[:3].tolist()) == text[1_003_854:1_003_857]


# --- the corpus -------------------------------------------------------------------------------------------------------


def lines_file(folder: Path, text: str = LINES) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "lines.txt").write_text(text)
    return str(folder / "lines.txt")


def files_below(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_ino for path in folder.rglob("*") if path.is_file()}


def test_documents_stand_between_begin_and_end_tokens(tmp_path: Path, bpe: Tokenizer):
    (tmp_path / "a.jsonl").write_text('{"text": "The cat"}\n{"text": ""}\n{"text": "So it goes <|end_of_text|>"}\n')
    corpus = tokenize_corpus(str(tmp_path / "a.jsonl"), bpe, tmp_path / "ids")
    begin, end = bpe.bos_token_id, bpe.eos_token_ids[0]
    first = [*bpe.encode("The cat"), end]
    assert first[0] == begin
    assert corpus.starts.tolist() == [0, len(first)]
    assert corpus.ids.tolist() == [*first, *bpe.encode("So it goes <|end_of_text|>"), end]
    assert corpus.ids.tolist().count(end) == 2  # a control token's spelling in a text is text
    assert (corpus.num_tokens, corpus.num_documents) == (len(corpus.ids), 2)
    counts = {"documents": 2, "bytes": 7 + 26, "tokens": len(corpus.ids), "tokenizer": tokenizer_fingerprint(bpe)}
    assert {key: value for key, value in corpus.about.items() if key != "text"} == counts | {"documents_of": [2]}


def test_characters_have_no_control_tokens(tmp_path: Path, letters: Tokenizer):
    corpus = tokenize_corpus(lines_file(tmp_path), letters, tmp_path / "ids")
    assert letters.decode(corpus.ids.tolist()) == LINES
    assert corpus.ids.dtype == torch.uint16
    assert (corpus_folder(tmp_path / "ids") / "ids.bin").stat().st_size == 2 * len(LINES)


def test_large_vocabularies_take_four_bytes(tmp_path: Path):
    alphabet = "".join(map(chr, [*range(0x20, 0xD800), *range(0xE000, 0x11000)]))
    tokenizer = CharacterTokenizer.from_text(alphabet)
    text = alphabet[-1] + alphabet[0]
    corpus = tokenize_corpus(lines_file(tmp_path, text), tokenizer, tmp_path / "ids")
    assert tokenizer.vocab_size > 1 << 16 and corpus.ids.dtype == torch.int32
    assert corpus.ids.tolist() == [len(alphabet) - 1, 0]


def test_it_is_tokenized_once(tmp_path: Path, letters: Tokenizer):
    told: list[tuple[str, float | None]] = []
    source = lines_file(tmp_path)
    first = tokenize_corpus(source, letters, tmp_path / "ids", progress=lambda *done: told.append(done))
    assert told[0] == ("documents read: 1", None) and told[-1] == (f"1 document, {len(LINES)} tokens", None)
    before = files_below(tmp_path / "ids")
    again = tokenize_corpus(source, letters, tmp_path / "ids")
    assert again.fingerprint == first.fingerprint and again.ids.equal(first.ids)
    assert files_below(tmp_path / "ids") == before and len(before) == 3


def test_other_documents_or_another_tokenizer_are_another_corpus(tmp_path: Path, letters: Tokenizer, bpe: Tokenizer):
    def fingerprint(text: str, tokenizer: Tokenizer) -> str:
        return tokenize_corpus(lines_file(tmp_path, text), tokenizer, tmp_path / "ids").fingerprint

    changed = LINES.replace("rat", "cat")
    wider = CharacterTokenizer.from_text(LINES + "x")
    other_bpe = train_bpe([LINES * 5], 279)
    prints = [
        *(fingerprint(LINES, tokenizer) for tokenizer in (letters, wider, bpe, other_bpe)),
        fingerprint(changed, letters),
    ]
    assert len(set(prints)) == 5
    assert fingerprint(LINES, letters) == prints[0]  # all five lie side by side
    jsonl = tmp_path / "same.jsonl"
    jsonl.write_text(json.dumps({"text": LINES}))
    assert tokenize_corpus(str(jsonl), letters, tmp_path / "ids").fingerprint == prints[0]  # what counts is the text
    jsonl.write_text("\n".join(json.dumps({"text": part}) for part in (LINES[:9], LINES[9:])))
    assert tokenize_corpus(str(jsonl), letters, tmp_path / "ids").fingerprint not in prints


def test_a_file_that_changes_later_changes_nothing(tmp_path: Path, letters: Tokenizer):
    source = lines_file(tmp_path)
    corpus = tokenize_corpus(source, letters, tmp_path / "ids")
    Path(source).write_text("gone")
    assert letters.decode(corpus.ids.tolist()) == LINES
    file = corpus_folder(tmp_path / "ids") / "ids.bin"
    data = file.read_bytes()
    corpus.ids[:4] = 0  # nor does the file follow the tensor
    assert file.read_bytes() == data
    Path(source).write_text(LINES)
    assert letters.decode(tokenize_corpus(source, letters, tmp_path / "ids").ids.tolist()) == LINES


def test_nothing_is_read_or_learned_again_where_nothing_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reads, source = Reads(monkeypatch), lines_file(tmp_path, LINES * 5)

    def corpus() -> Corpus:
        return tokenize_corpus(source, reads.learner, tmp_path / "ids")

    first = corpus()
    assert (reads.num_read, reads.num_learned) == (1, 1)
    assert first.tokenizer.decode(first.ids.tolist()) == LINES * 5
    monkeypatch.setattr(corpus_module, "file_sha256", None)
    again = corpus()
    monkeypatch.setattr(corpus_module, "file_sha256", file_sha256)
    assert (reads.num_read, reads.num_learned) == (1, 1)
    assert (again.fingerprint, again.about) == (first.fingerprint, first.about) and again.ids.equal(first.ids)

    os.utime(source, (1, 1))  # its time has changed, its text has not
    before = files_below(tmp_path / "ids")
    assert corpus().fingerprint == first.fingerprint and (reads.num_read, reads.num_learned) == (2, 1)
    assert corpus().fingerprint == first.fingerprint and (reads.num_read, reads.num_learned) == (2, 1)
    after = files_below(tmp_path / "ids")
    assert [k for k in before if before[k] != after.get(k)] == [f"{corpus_folder(tmp_path / 'ids').name}/corpus.json"]

    lines_file(tmp_path, LINES * 6)
    assert corpus().about["bytes"] == 6 * len(LINES) and (reads.num_read, reads.num_learned) == (3, 2)


def test_the_vocabulary_is_that_of_the_documents_that_are_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    texts = iter(["abc", "xyz"])  # the file changes whenever it was read
    monkeypatch.setattr(corpus_module, "read_documents", lambda *_, **__: iter([next(texts)]))
    corpus = tokenize_corpus(lines_file(tmp_path), characters(), tmp_path / "ids")
    assert corpus.tokenizer.decode(corpus.ids.tolist()) == "abc" and corpus.tokenizer.vocab_size == 3
    assert next(texts) == "xyz"


def test_a_stamp_moves_with_what_it_stands_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a.txt", "b.jsonl", "left-out.png"):
        (folder / name).write_text("{}")
    stamps = [source_stamp(str(folder))]
    for change in (
        lambda: (folder / "a.txt").write_text("{ }"),
        lambda: os.utime(folder / "a.txt", (5, 5)),
        lambda: (folder / "b.jsonl").rename(folder / "c.jsonl"),
        lambda: (folder / "d.md").write_text(""),
    ):
        change()
        stamps.append(source_stamp(str(folder)))
    (folder / "left-out.png").write_text("more")
    assert source_stamp(str(folder)) == stamps[-1] and len(set(stamps)) == 5
    assert source_stamp(None) == source_stamp(None) != source_stamp("shakespeare") != stamps[-1]

    commits = {"org/name": "1"}
    monkeypatch.setattr(sources, "data_commit", commits.__getitem__)
    hub = source_stamp("org/name"), source_stamp("org/name:subset")
    commits["org/name"] = "2"
    assert len({*hub, source_stamp("org/name"), source_stamp("org/name:subset")}) == 4

    def unreachable(repo: str) -> str:
        raise DownloadError("no way there")

    monkeypatch.setattr(sources, "data_commit", unreachable)
    with pytest.raises(TrainingError, match=r"org/name could not be read from the hub.*: no way there"):
        source_stamp("org/name")
    with pytest.raises(TrainingError, match="no data called"):
        source_stamp(str(tmp_path / "none.txt"))


@pytest.mark.parametrize("name", ["ids.bin", "starts.bin", "corpus.json", "tokenizer/characters.json"])
@pytest.mark.parametrize("damage", [lambda data: data[:-2], lambda data: b"\x07" + data[1:], None])
def test_a_damaged_corpus_is_made_again(tmp_path: Path, name: str, damage):
    source = lines_file(tmp_path)
    tokenize_corpus(source, characters(), tmp_path / "ids")
    file = corpus_folder(tmp_path / "ids") / name
    data = file.read_bytes()
    file.unlink() if damage is None else file.write_bytes(damage(data))
    again = tokenize_corpus(source, characters(), tmp_path / "ids")
    assert corpus_folder(tmp_path / "ids") == file.parents[name.count("/")]
    assert file.read_bytes() == data or name == "corpus.json"  # which tells when the others were written
    assert again.tokenizer.decode(again.ids.tolist()) == LINES


@pytest.mark.parametrize("name", ["ids.bin", "starts.bin"])
def test_bytes_that_changed_under_an_old_time_are_refused(tmp_path: Path, letters: Tokenizer, name: str):
    def corpus():
        return tokenize_corpus(source, letters, tmp_path / "ids")

    source = lines_file(tmp_path)
    corpus()
    (file,) = (tmp_path / "ids").glob(f"corpus-*/{name}")
    time, data = file.stat().st_mtime_ns, bytearray(file.read_bytes())
    data[-1] = 0x7F
    file.write_bytes(data)
    os.utime(file, ns=(time, time))
    with pytest.raises(TrainingError, match=rf"{name}: is damaged: .*Remove .*corpus-"):
        corpus()


def test_a_copy_of_a_corpus_is_as_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reads, source = Reads(monkeypatch), lines_file(tmp_path, LINES * 5)
    first = tokenize_corpus(source, reads.learner, tmp_path / "ids")
    shutil.copytree(tmp_path / "ids", tmp_path / "copy", copy_function=shutil.copyfile)
    assert tokenize_corpus(source, reads.learner, tmp_path / "copy").fingerprint == first.fingerprint
    assert (reads.num_read, reads.num_learned) == (1, 1)


def test_a_tokenizer_keeps_its_fingerprint_over_saving(tmp_path: Path, letters: Tokenizer, bpe: Tokenizer):
    for i, tokenizer in enumerate((letters, bpe)):
        tokenizer.save(tmp_path / str(i))
        again = llamarium.load_tokenizer(tmp_path / str(i))
        assert tokenizer_fingerprint(again) == tokenizer_fingerprint(tokenizer)
        again.save(tmp_path / "again" / str(i))
        assert tokenizer_fingerprint(llamarium.load_tokenizer(tmp_path / "again" / str(i))) == tokenizer_fingerprint(
            tokenizer
        )


def test_what_cannot_be_tokenized_is_named(tmp_path: Path, letters: Tokenizer):
    source = lines_file(tmp_path, "")
    with pytest.raises(TrainingError, match=r"lines.txt: no text in it"):
        tokenize_corpus(source, letters, tmp_path / "ids")
    (tmp_path / "a.jsonl").write_text('{"text": "cat"}\n{"text": "ca\\u00e9"}\n')
    with pytest.raises(TrainingError, match=r"a.jsonl: document 2: .* 'é' \(U\+00E9\) is not among the 22"):
        tokenize_corpus(str(tmp_path / "a.jsonl"), letters, tmp_path / "ids")
    assert files_below(tmp_path / "ids") == {}
    assert list((tmp_path / "ids").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, letters: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    source = lines_file(tmp_path)
    with pytest.raises(OutputError, match=r"lines.txt/ids: .* cannot be kept here"):
        tokenize_corpus(source, letters, Path(source) / "ids")

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(corpus_module, "sync_tree", full)
    with pytest.raises(OutputError, match="No space left on device"):
        tokenize_corpus(source, letters, tmp_path / "ids")
    assert list((tmp_path / "ids").iterdir()) == []


def test_of_two_processes_the_first_to_finish_wins(tmp_path: Path, letters: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    source, folder, synced = lines_file(tmp_path), tmp_path / "ids", corpus_module.sync_tree
    others: list[dict[str, int]] = []

    def finish_first(fresh: Path) -> None:
        """Let another process tokenize the same, between our last write and our rename."""
        monkeypatch.setattr(corpus_module, "sync_tree", synced)
        tokenize_corpus(source, letters, folder)
        others.append({k: v for k, v in files_below(folder).items() if k.startswith("corpus-")})
        synced(fresh)

    monkeypatch.setattr(corpus_module, "sync_tree", finish_first)
    corpus = tokenize_corpus(source, letters, folder)
    assert letters.decode(corpus.ids.tolist()) == LINES
    assert files_below(folder) == others[0]


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path: Path, letters: Tokenizer):
    for name, age_s in (("old", 25 * 3600), ("new", 60)):
        (tmp_path / "ids" / f".corpus-{name}").mkdir(parents=True)
        then = (tmp_path / "ids").stat().st_mtime - age_s
        os.utime(tmp_path / "ids" / f".corpus-{name}", (then, then))
    tokenize_corpus(lines_file(tmp_path), letters, tmp_path / "ids")
    assert sorted(path.name[:11] for path in (tmp_path / "ids").iterdir())[0] == ".corpus-new"
    assert not (tmp_path / "ids" / ".corpus-old").exists()


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet="ab \n\t1'.\u00e9\u4e2d\U0001f642\r", max_size=200), st.integers(1, 20))
def test_pieces_give_the_ids_of_the_whole(bpe: Tokenizer, text: str, num_characters: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces_module, "_PIECE_CHARACTERS", num_characters)
        pieces = list(encode_pieces(bpe, text))
    assert [i for piece in pieces for i in piece] == bpe.encode(text, add_special_tokens=False)


def test_long_texts_are_cut_but_not_where_an_id_would_change(bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pieces_module, "_PIECE_CHARACTERS", 10)
    assert len(list(encode_pieces(bpe, LINES))) == 2  # not before the line that begins with spaces

    class Joining:
        """A tokenizer with a token for a line end and the letter after it."""

        strip_first_space = False

        @staticmethod
        def encode(text: str, *, add_special_tokens: bool) -> list[int]:
            return [len(part) for part in text.replace("\nT", "\0").split("\0")]

    assert len(list(encode_pieces(Joining(), LINES))) == 1  # pyright: ignore[reportArgumentType]


def test_the_last_part_is_for_validation():
    corpus = corpus_of([[1, 2, 3], [4, 5, 6, 7], [8, 9, 10]])
    training, validation = corpus.split(0.5)
    assert (training.ids.tolist(), training.starts.tolist()) == ([1, 2, 3, 4, 5], [0, 3])
    assert (validation.ids.tolist(), validation.starts.tolist()) == ([6, 7, 8, 9, 10], [0, 2])
    assert len({corpus.fingerprint, training.fingerprint, validation.fingerprint}) == 3
    at_border = corpus.split(0.3)
    assert (at_border[0].starts.tolist(), at_border[1].starts.tolist()) == ([0, 3], [0])
    assert at_border[0].fingerprint != training.fingerprint


def test_splits_that_leave_too_little_are_refused():
    corpus = corpus_of([list(range(10))])
    for share in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(TrainingError, match="expected above 0 and below 1"):
            corpus.split(share)
    with pytest.raises(TrainingError, match=r"10 tokens leaves 1 for validation; expected at least 5"):
        corpus.split(0.1, at_least=5)
    with pytest.raises(TrainingError, match=r"leaves 1 for training; expected at least 5"):
        corpus.split(0.9, at_least=5)
    with pytest.raises(TrainingError, match=r"leaves 0 for training"):
        corpus.split(0.95)


# --- rows -------------------------------------------------------------------------------------------------------------


def by_hand(documents: list[list[int]], first: int, context: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """One row, token by token: ids, labels, positions, segments."""
    stream = [(token, number, place) for number, d in enumerate(documents) for place, token in enumerate(d)]
    row = stream[first : first + context + 1]
    labels = [b[0] if b[1] == a[1] else IGNORED for a, b in itertools.pairwise(row)]
    offset = {row[0][1]: row[0][2]}  # the first document of a row counts from where the row begins
    positions = [place - offset.get(number, 0) for _, number, place in row[:-1]]
    return [token for token, _, _ in row[:-1]], labels, positions, [number - row[0][1] for _, number, _ in row[:-1]]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=2, max_size=8),
    st.integers(1, 7),
    st.none() | st.integers(0, 2**63),
    st.integers(0, 3),
)
def test_rows_are_what_one_would_cut_by_hand(documents, context: int, seed: int | None, epoch: int):
    corpus = corpus_of([*documents, [1, 2]])
    if corpus.num_tokens <= context:
        return
    rows = PackedRows(corpus, context, seed)
    indices = list(range(rows.num_rows(epoch)))[::-1]
    batch = rows.batch(epoch, indices)
    assert len(indices) >= 1 and (batch.segments_BT is None or batch.segments_BT.any())
    segments_BT = torch.zeros_like(batch.ids_BT) if batch.segments_BT is None else batch.segments_BT
    for row, index in enumerate(indices):
        expected = by_hand([*documents, [1, 2]], rows.offset(epoch) + index * context, context)
        found = (batch.ids_BT, batch.labels_BT, batch.positions_BT, segments_BT)
        assert tuple(tensor[row].tolist() for tensor in found) == expected


def test_one_document_is_one_segment():
    batch = PackedRows(corpus_of([list(range(10))]), 4, None).batch(0, [1, 0])
    assert batch.segments_BT is None
    assert batch.ids_BT.tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert batch.labels_BT.tolist() == [[5, 6, 7, 8], [1, 2, 3, 4]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 3]] * 2
    tensors = (batch.ids_BT, batch.labels_BT, batch.positions_BT)
    assert all(tensor.dtype == torch.int64 and tensor.is_contiguous() for tensor in tensors)


def test_each_epoch_cuts_elsewhere_and_always_the_same():
    corpus = corpus_of([list(range(100)) * 10])
    rows, again, other = PackedRows(corpus, 50, 7), PackedRows(corpus, 50, 7), PackedRows(corpus, 50, 8)
    offsets = [rows.offset(epoch) for epoch in range(300)]
    assert set(offsets) == set(range(50))
    assert offsets == [again.offset(epoch) for epoch in range(300)]
    assert offsets != [other.offset(epoch) for epoch in range(300)]
    assert all(rows.num_rows(epoch) == (1000 - offset - 1) // 50 for epoch, offset in enumerate(offsets))
    before = torch.random.get_rng_state()
    assert rows.batch(3, [2, 5]).ids_BT.equal(again.batch(3, [2, 5]).ids_BT)
    assert torch.random.get_rng_state().equal(before)
    fixed = PackedRows(corpus, 50, None)
    assert {fixed.offset(epoch) for epoch in range(20)} == {0}
    assert len({rows.fingerprint, other.fingerprint, fixed.fingerprint, PackedRows(corpus, 49, 7).fingerprint}) == 4
    assert rows.fingerprint == again.fingerprint


def test_the_shortest_corpus_has_one_row_in_every_epoch():
    rows = PackedRows(corpus_of([list(range(9))]), 8, 1)
    assert {(rows.offset(epoch), rows.num_rows(epoch)) for epoch in range(20)} == {(0, 1)}
    rows = PackedRows(corpus_of([list(range(11))]), 8, 1)
    assert {(rows.offset(epoch), rows.num_rows(epoch)) for epoch in range(50)} == {(0, 1), (1, 1), (2, 1)}


def test_data_that_cannot_fill_a_row_is_refused():
    with pytest.raises(TrainingError, match=r"a test: 8 tokens, .* a context of 8 needs 9"):
        PackedRows(corpus_of([list(range(8))]), 8, 1)
    with pytest.raises(TrainingError, match="at least 1"):
        PackedRows(corpus_of([list(range(8))]), 0, 1)
    with pytest.raises(TrainingError, match="12 documents is a single token"):
        PackedRows(corpus_of([[1]] * 12), 8, 1)


def test_rows_within_one_document_have_no_segments_and_join_those_that_have():
    rows = PackedRows(corpus_of([list(range(20)), list(range(9))]), 4, None)
    alone, both = rows.batch(0, [0, 2]), rows.batch(0, [1, 4])
    assert alone.segments_BT is None and alone.positions_BT.tolist() == [[0, 1, 2, 3]] * 2
    assert both.segments_BT is None  # the last label is another document's, but no token is
    rows = PackedRows(corpus_of([list(range(18)), list(range(11))]), 4, None)
    both = rows.batch(0, [1, 4])
    assert both.segments_BT is not None and both.segments_BT.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]
    joined = join([rows.batch(0, [0]), both])
    assert joined.segments_BT is not None and joined.segments_BT.tolist() == [[0] * 4, [0] * 4, [0, 0, 1, 1]]


def test_dialogs_are_packed_once_an_epoch_where_a_batch_is_of_two(monkeypatch: pytest.MonkeyPatch):
    packed: list[int] = []
    pack = dialog_rows._pack
    monkeypatch.setattr(dialog_rows, "_pack", lambda *args: packed.append(1) or pack(*args))
    example = dialogs.Example(np.arange(5, dtype=np.int32), np.array([False, *[True] * 4]))
    order = Order(dialog_rows.DialogRows([example] * 3, 4), 0)
    for _ in range(4):
        order.take(2)
    assert (order.cursor, len(packed)) == (Cursor(2, 2), 3)


def test_rows_come_from_the_file(tmp_path: Path, letters: Tokenizer):
    corpus = tokenize_corpus(lines_file(tmp_path), letters, tmp_path / "ids")
    batch = PackedRows(corpus, 10, None).batch(0, [0, 3])
    assert [letters.decode(row) for row in batch.ids_BT.tolist()] == [LINES[:10], LINES[30:40]]


def test_each_epoch_has_an_order_that_follows_from_seed_and_epoch() -> None:
    rows = types.SimpleNamespace(num_rows=lambda _: 50, context=4)

    def epochs(seed: int) -> list[list[int]]:
        places = Order(rows, seed).places(150)  # type: ignore[arg-type]
        assert [epoch for epoch, _ in places] == [0] * 50 + [1] * 50 + [2] * 50
        return [[row for _, row in places[first : first + 50]] for first in (0, 50, 100)]

    first, second, third = epochs(7)
    assert sorted(first) == sorted(second) == sorted(third) == list(range(50))
    assert first != second != third != first
    assert epochs(7) == [first, second, third] and epochs(8)[0] != first
