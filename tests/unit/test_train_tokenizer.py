"""Learned vocabularies, and `llamarium train-tokenizer`."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import llamarium
from llamarium.cli import train_tokenizer
from llamarium.cli.main import Parser
from llamarium.cli.options import UsageError
from llamarium.datasets.sources import read_documents
from llamarium.errors import LlamariumError, OutputError, TokenizerError, TrainingError
from llamarium.tokenizer.backends.words import UNKNOWN
from llamarium.tokenizer.base import Tokenizer
from llamarium.train.data import bpe as bpe_module
from llamarium.train.data.bpe import train_bpe, train_characters, train_words

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"


@pytest.fixture(scope="module")
def manual() -> list[str]:
    return list(read_documents(None))[:20]


@pytest.fixture(scope="module")
def learned(manual: list[str]) -> Tokenizer:
    return train_bpe(manual, 600)


def run(*words: str) -> int:
    parser = Parser(prog="llamarium train-tokenizer")
    train_tokenizer.add_arguments(parser)
    return train_tokenizer.run(parser.parse_args(list(words)))


# --- byte-level BPE ---------------------------------------------------------------------------------------------------


def test_bytes_come_first_then_merges_then_control_tokens(learned: Tokenizer):
    assert learned.vocab_size == 600
    assert {learned.token_bytes(i) for i in range(256)} == {bytes([byte]) for byte in range(256)}
    assert all(len(learned.token_bytes(i)) > 1 for i in range(256, 598))
    assert (learned.bos_token_id, learned.eos_token_ids) == (598, (599,))
    assert dict(learned.special_tokens) == {BEGIN: 598, END: 599}


def test_the_most_frequent_pair_is_merged_first_and_never_over_a_cut():
    text = "low low low low lower lower newest newest newest newest newest newest widest widest widest"
    tokenizer = train_bpe([text], 268)
    assert [tokenizer.token_bytes(i) for i in range(256, 258)] == [b"es", b"est"]  # Sennrich's example: 9 times
    assert all(b" " not in tokenizer.token_bytes(i)[1:] for i in range(256, 266))


def test_words_and_numbers_are_cut_as_llama_3_cuts_them():
    tokenizer = train_bpe(["we'll 123456 12345\n" * 9], 265)
    pieces = [piece.text for piece in tokenizer.explain("we'll 123456").pieces]
    assert pieces == ["we", "'ll", " ", "123", "456"]


def test_learning_is_deterministic(manual: list[str], learned: Tokenizer, tmp_path: Path):
    train_bpe(iter(manual), 600).save(tmp_path / "a")
    learned.save(tmp_path / "b")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.torch
def test_saved_it_is_what_llamarium_and_transformers_read(learned: Tokenizer, manual: list[str], tmp_path: Path):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    learned.save(tmp_path)
    again = llamarium.load_tokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    direct = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert (theirs.bos_token_id, theirs.eos_token_id, len(theirs)) == (598, 599, 600)
    for text in [manual[0], "", "Ünïcödé 🙂 12345\r\n\t x  ", "   \n\n a"]:
        ids = learned.encode(text)
        assert ids[0] == 598 and ids == again.encode(text) == theirs(text).input_ids == direct(text).input_ids
        assert learned.decode(ids) == again.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == text


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=60))
def test_any_text_survives(learned: Tokenizer, text: str):
    ids = learned.encode(text)
    assert learned.decode(ids) == text
    assert max(ids[1:], default=0) < 598  # no text can spell a control token


def test_control_tokens_in_the_texts_are_texts():
    tokenizer = train_bpe([f"{BEGIN} {END}" * 20], 270)
    assert tokenizer.bos_token_id == 268
    assert 269 not in tokenizer.encode(END)


def test_long_texts_are_learned_piece_by_piece(manual: list[str], learned: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bpe_module, "_PART", 500)
    cut = train_bpe(manual, 600)
    assert len(list(bpe_module._pieces(manual, None))) > 3 * len(manual)
    assert [cut.token_bytes(i) for i in range(600)] == [learned.token_bytes(i) for i in range(600)]


def test_a_text_without_blanks_is_learned_in_linear_time(manual: list[str], monkeypatch: pytest.MonkeyPatch):
    """A piece of 300,000 letters took 26 s and one of 2,000,000 did not end; ordinary texts are learned as before."""
    random = Random(5)
    seconds: list[float] = []
    for length in (40_000, 160_000):
        text = "".join(random.choices("ACGT", k=length))
        begun = time.process_time()
        tokenizer = train_bpe([text], 600)
        seconds.append(time.process_time() - begun)
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert seconds[1] < 9 * seconds[0], "4 is linear, 16 quadratic"
    bounded = train_bpe(manual, 600)
    monkeypatch.setattr(bpe_module, "_LONGEST_PIECE", 1 << 16)
    whole = train_bpe(manual, 600)
    assert [bounded.token_bytes(i) for i in range(600)] == [whole.token_bytes(i) for i in range(600)]


def test_sizes_that_cannot_be_are_refused(manual: list[str]):
    for size in (0, 257, 1 << 22):
        with pytest.raises(TrainingError, match=f"a vocabulary of {size} tokens; expected 258"):
            train_bpe(manual, size)
    assert train_bpe(manual, 258).vocab_size == 258
    with pytest.raises(TrainingError, match="a vocabulary of 300: it ends at 259 tokens; ask for at most as many"):
        train_bpe(["ab ab cd"], 300)
    with pytest.raises(TrainingError, match="ends at 258 tokens"):
        train_bpe([], 300)
    with pytest.raises(TokenizerError, match="lone surrogate"):
        train_bpe(["\ud800"], 258)


def test_characters():
    tokenizer = train_characters(iter(["cab", "", "bad"]))
    assert tokenizer.vocab_size == 4
    assert tokenizer.encode("abcd") == [0, 1, 2, 3]
    with pytest.raises(TokenizerError, match="empty"):
        train_characters([])


# --- words ------------------------------------------------------------------------------------------------------------

LINES = "I love dogs\nI love cats, you know\nIt's 42 -- caf\u00e9, na\u0308ive\t\u4f60!\n"


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return train_words([LINES, "I love dogs"], 100)


def test_a_word_has_the_space_before_it_and_the_most_frequent_come_first(words: Tokenizer):
    texts = [words.token_bytes(i).decode() for i in range(words.vocab_size)]
    assert texts[:2] == [UNKNOWN, " "] and {",", " I", " love", " 42", " caf\u00e9", "It's", "-"} < {*texts}
    assert texts.index(" love") < texts.index(" cats")
    assert [words.decode([i]) for i in words.encode("I love dogs")] == ["I", "love", "dogs"]
    explained = words.explain("I love")
    assert [(token.bytes, token.start) for token in explained.tokens] == [(b" I", 0), (b" love", 2)]
    assert explained.utf8 == b" I love" and words.explain("").ids == []
    assert words.encode("I")[0] == words.encode("love I")[1]


@given(st.text(max_size=30) | st.text(alphabet=" \n\tIyou'\u2019,.1\u0301", max_size=30))
@settings(max_examples=300, deadline=None)
def test_what_a_vocabulary_of_words_encodes_is_the_text(text: str):
    learned = train_words([text], 1000)
    assert learned.decode(learned.encode(text)) == text
    decoder = learned.stream()
    assert "".join([decoder.push(i) for i in learned.encode(text)]) + decoder.finish() == text


def test_an_unknown_word_is_an_error_that_names_it_and_training_reads_it_as_unknown(words: Tokenizer):
    with pytest.raises(TokenizerError, match=r"2 of 5 tokens .*' quokkas', 'm'; as <\|unknown\|>"):
        words.encode("I love quokkas,m")
    assert next(words.backend.encode_with_unknown("I love quokkas")) == [*words.encode("I love"), 0]
    assert words.decode([*words.encode("I love"), 0]) == f"I love{UNKNOWN}"
    with pytest.raises(TokenizerError):  # its spelling is no way to it
        words.encode(UNKNOWN)


@pytest.mark.torch
def test_other_programs_read_it(words: Tokenizer, tmp_path: Path):
    words.save(tmp_path)
    again, theirs = llamarium.load_tokenizer(tmp_path), tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    transformers = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path)
    for text in (LINES, " I love", "\nI love", "", "  you know\n"):
        ids = words.encode(text)
        assert again.encode(text) == theirs.encode(text).ids == transformers(text)["input_ids"] == ids
        assert again.decode(ids) == theirs.decode(ids) == transformers.decode(ids) == text
    assert theirs.encode("I love quokkas").ids == [*words.encode("I love"), 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, r"other rules \(pre_tokenizer\)"),
        ({"normalizer": None, "decoder": None}, r"other rules \(normalizer, decoder\)"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}, r"other rules \(unk_token\)"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": UNKNOWN}}, "has no <.unknown.>"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 0}, "unk_token": UNKNOWN}}, "share the id 0"),
        ({"model": {"type": "WordLevel", "vocab": []}}, "model.vocab is list|vocab is list"),
        ({"decoder": {"type": "Never"}}, "the tokenizers package refuses it"),
    ],
)
def test_a_vocabulary_of_words_with_other_rules_is_refused(
    change: dict[str, object], message: str, words: Tokenizer, tmp_path: Path
):
    words.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(TokenizerError, match=message):
        llamarium.load_tokenizer(tmp_path)


def test_the_command_says_how_much_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "text").write_text("a b a b a c")
    assert run("--kind", "words", "--data", str(tmp_path / "text"), "--vocab-size", "4", "--out", str(tmp_path)) == 0
    assert capsys.readouterr().out.endswith("a token is 1.83 bytes long, 16.7% of them <|unknown|>\n")
    with pytest.raises(TrainingError, match="expected 3"):
        train_words(["a"], 2)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> str:
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "the cat sat on the mat, the end. " * 20, "other": "ab"}))
    return str(tmp_path / "data.jsonl")


def test_it_learns_and_says_how_well_it_fits(tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "new" / "vocabulary"
    assert run("--data", data, "--vocab-size", "270", "--out", str(out)) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{out}: 270 tokens; in {data} a token is ") and printed.count("\n") == 1
    tokenizer = llamarium.load_tokenizer(out)
    text = "the cat sat on the mat, the end. " * 20
    assert f" {len(text) / len(tokenizer.encode(text, add_special_tokens=False)):.2f} bytes long" in printed


def test_json(tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]):
    words = ["--data", data, "--kind", "chars", "--text-field", "other", "--json"]
    assert run(*words, "--out", str(tmp_path / "out")) == 0
    assert json.loads(capsys.readouterr().out) == {
        "path": str(tmp_path / "out"),
        "kind": "chars",
        "data": data,
        "vocab_size": 2,
        "bytes_per_token": 1.0,
    }


def test_the_manual_is_the_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run("--out", str(tmp_path / "out")) == 0
    assert "4,096 tokens; in the Python manual a token is" in capsys.readouterr().out


def test_what_is_there_needs_force(tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    assert run("--data", data, "--vocab-size", "270", "--out", str(out)) == 0
    before = (out / "tokenizer.json").read_bytes()
    (out / "chat_template.jinja").write_text("old")
    with pytest.raises(OutputError, match=r"tokenizer.json is here; .*--force"):
        run("--data", data, "--kind", "chars", "--out", str(out))
    assert (out / "tokenizer.json").read_bytes() == before
    (out / "notes.txt").write_text("mine")
    assert run("--data", data, "--kind", "chars", "--out", str(out), "--force") == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "characters.json", "notes.txt", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert llamarium.load_tokenizer(out).vocab_size == 13
    assert run("--data", data, "--vocab-size", "260", "--out", str(out), "--force") == 0
    assert sorted(path.name for path in out.iterdir()) == ["notes.txt", "tokenizer.json", "tokenizer_config.json"]


def test_a_model_keeps_its_tokenizer(tmp_path: Path, data: str):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(OutputError, match="a model is here"):
        run("--data", data, "--kind", "chars", "--out", str(tmp_path), "--force")


def test_a_target_that_cannot_be_made_is_refused_before_any_work(tmp_path: Path, data: str):
    with pytest.raises(OutputError, match=r"data.jsonl/out: cannot be made"):
        run("--data", "a source that is never looked at", "--out", f"{data}/out")


def test_nothing_is_written_when_learning_fails(tmp_path: Path, data: str):
    with pytest.raises(LlamariumError, match="it ends at"):
        run("--data", data, "--vocab-size", "9999", "--out", str(tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == []
    for content, words, message in (
        (b"\xff", [], r"^[^:]*bad.txt: no UTF-8 at byte 0"),
        (b"", [], r"^[^:]*bad.txt: no text in it"),
        (b"", ["--kind", "chars"], r"^[^:]*bad.txt: no text in it"),
    ):
        (tmp_path / "bad.txt").write_bytes(content)
        with pytest.raises(LlamariumError, match=message):
            run("--data", str(tmp_path / "bad.txt"), *words, "--out", str(tmp_path / "out"))


def test_contradicting_options_are_a_usage_error(tmp_path: Path):
    with pytest.raises(UsageError, match="of no effect with --kind chars"):
        run("--kind", "chars", "--vocab-size", "300", "--out", str(tmp_path))


def test_text_needs_no_torch():
    code = """
import sys
from llamarium.train.data.bpe import train_bpe
from llamarium.datasets.sources import read_documents
train_bpe(list(read_documents(None))[:3], 300)
print(sorted({"torch", "numpy", "pyarrow", "datasets"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "learn", [partial(train_bpe, vocab_size=600), partial(train_words, vocab_size=99), train_characters]
)
def test_learning_tells_how_far_it_is_and_is_the_same(
    learn: Callable[..., Tokenizer], manual: list[str], tmp_path: Path
) -> None:
    told: list[int] = []
    learn(manual, counted=told.append).save(tmp_path / "told")
    learn(manual).save(tmp_path / "silent")
    for file in (tmp_path / "told").iterdir():
        assert file.read_bytes() == (tmp_path / "silent" / file.name).read_bytes()
    assert told == sorted(told) and len(told) > 20, "some thousand characters at a time"
    assert sum(map(len, manual)) <= told[-1] <= sum(len(text) + 1 for text in manual)
