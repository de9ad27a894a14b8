"""Tokenizer files: what is read from them, and that every malformed one is refused quickly and by name."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from llamarium.checkpoints.gguf.file import read_gguf
from llamarium.errors import OutputError, TokenizerError
from llamarium.tokenizer.backends.characters import CharacterTokenizer
from llamarium.tokenizer.backends.gguf import from_gguf_metadata
from llamarium.tokenizer.load import load_tokenizer_file

pytestmark = pytest.mark.quick

BOS, EOS, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"


@pytest.fixture(scope="module")
def small_json() -> str:
    """A byte-level BPE of 400 tokens, as `tokenizers` trains and writes it."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["the cat sat on the mat, and the rat sat on the hat"] * 9, trainer)
    inner.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    inner.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return inner.to_str()


@pytest.fixture
def small(small_json: str) -> dict[str, Any]:
    return json.loads(small_json)


def write(folder: Path, raw: object, config: dict[str, Any] | None = None) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def refused(*words: str) -> Iterator[None]:
    """Expect a `TokenizerError` with all `words`, on one line, within two seconds."""
    began = time.process_time()
    with pytest.raises(TokenizerError) as caught:
        yield
    assert time.process_time() - began < 2
    message = str(caught.value)
    assert message.isprintable()
    for word in words:
        assert word in message, message


def test_huggingface_folder(tmp_path: Path, small: dict[str, Any]):
    config = {"bos_token": BOS, "eos_token": {"content": EOS}, "pad_token": PAD, "chat_template": "{{ 1 }}"}
    tokenizer = load_tokenizer_file(write(tmp_path, small, config))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.pad_token_id) == (0, (1,), 2)
    assert tokenizer.encode("the cat")[0] == 0 and tokenizer.encode("the cat", add_special_tokens=False)[0] != 0
    assert tokenizer.chat_template == "{{ 1 }}"
    assert tokenizer.vocab_size == max(t["id"] for t in small["added_tokens"]) + 1
    oracle = Tokenizer.from_str(json.dumps(small))
    for text in ("the cat sat", "naïve 日本 😀\n\n x", "<think>the</think>"):
        assert tokenizer.encode(text) == oracle.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.explain(text).ids == tokenizer.encode(text, add_special_tokens=False)


def test_bos_rules(tmp_path: Path, small: dict[str, Any]):
    def first(config: dict[str, Any] | None) -> int:
        return load_tokenizer_file(write(tmp_path, small, config)).encode("cat")[0]

    plain = load_tokenizer_file(write(tmp_path, small)).encode("cat", add_special_tokens=False)[0]
    assert first(None) == 0
    assert first({"bos_token": BOS, "add_bos_token": False}) == plain
    small["post_processor"] = None
    assert first({"bos_token": BOS}) == plain
    assert first({"bos_token": BOS, "add_bos_token": True}) == 0
    small["post_processor"] = {
        "type": "Sequence",
        "processors": [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}],
    }
    assert first({"bos_token": BOS}) == plain


@pytest.mark.parametrize("single", [[], ["B"], ["A", "A"]])
def test_a_template_holds_the_text_once(single: list[str], tmp_path: Path, small: dict[str, Any]):
    small["post_processor"]["single"] = [{"Sequence": {"id": name, "type_id": 0}} for name in single]
    with refused("post_processor", f"holds the texts {single}", "expected A, once"):
        load_tokenizer_file(write(tmp_path, small))


def test_a_control_spelling_without_its_flag_is_a_control_token(tmp_path: Path, small: dict[str, Any]):
    for token in small["added_tokens"]:
        token["special"] = False
    tokenizer = load_tokenizer_file(write(tmp_path, small))
    assert tokenizer.special_tokens == {BOS: 0, EOS: 1, PAD: 2}
    assert 1 not in tokenizer.encode(f"a{EOS}b")


def test_chat_template_files(tmp_path: Path, small: dict[str, Any]):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert load_tokenizer_file(write(tmp_path, small, {"chat_template": named})).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert load_tokenizer_file(tmp_path).chat_template == "J"
    (tmp_path / "chat_template.jinja").unlink()
    for value in (3, {"a": 1}, {}, [], [3], [{"name": [], "template": "x"}]):
        with refused("chat_template"):
            load_tokenizer_file(write(tmp_path, small, {"chat_template": value}))


def test_truncation_and_padding_in_the_file_do_not_cut_texts(tmp_path: Path, small_json: str):
    inner = Tokenizer.from_str(small_json)
    inner.enable_truncation(2)
    inner.enable_padding(length=9, pad_id=2, pad_token=PAD)
    tokenizer = load_tokenizer_file(write(tmp_path, json.loads(inner.to_str())))
    assert tokenizer.decode(tokenizer.encode("the cat sat on the mat")) == "the cat sat on the mat"


def test_llama2_style_tokenizer_json(tmp_path: Path):
    alphabet = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"helo", "he", "ll", "▁he"]
    vocab = {token: i for i, token in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("▁", "he")]
    inner = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer = load_tokenizer_file(write(tmp_path, json.loads(inner.to_str()), {"bos_token": "<s>"}))
    for text in ("hello", " hello", "hello 😀\n", "</s>hello", "", "  "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        stream = tokenizer.stream()
        assert "".join([*map(stream.push, tokenizer.encode(text)), stream.finish()]) == text
    words = tokenizer.encode("hello hello")
    rest = tokenizer.stream(continuation=True)
    first, second = words[: len(words) // 2 + 1], words[len(words) // 2 + 1 :]
    assert tokenizer.decode(first) == "hello"
    assert "".join([*map(rest.push, second), rest.finish()]) == " hello"
    stream = tokenizer.stream()
    for _ in range(2):
        assert "".join([*map(stream.push, words), stream.finish()]) == "hello hello"
    assert tokenizer.encode("hello") == inner.encode("hello").ids
    assert 2 not in tokenizer.encode("</s>hello")
    with refused("byte-level"):
        tokenizer.explain("hello")
    inner.normalizer = normalizers.Sequence([inner.normalizer, normalizers.NFKC()])
    write(tmp_path, json.loads(inner.to_str()))
    with pytest.warns(UserWarning, match="text is changed: normalizer.*NFKC") as caught:
        load_tokenizer_file(tmp_path)
    assert len(caught) == 1


def set_at(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Return a change that puts the last of `path` at the place that the rest names."""

    def change(raw: dict[str, Any]) -> None:
        place: Any = raw
        for key in path[:-2]:
            place = place[key]
        place[path[-2]] = path[-1]

    return change


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


BROKEN_JSON: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no model": (lambda raw: raw.pop("model"), "model"),
    "a unigram": (set_at("model", "type", "Unigram"), "list of pieces"),
    "a word piece": (set_at("model", "type", "WordPiece"), "WordPiece"),
    "dropout": (set_at("model", "dropout", 0.1), "dropout"),
    "no vocab": (lambda raw: raw["model"].pop("vocab"), "vocab"),
    "empty": (lambda raw: (raw["model"].update(vocab={}, merges=[]), raw.update(added_tokens=[])), "no tokens"),
    "vocab is a list": (set_at("model", "vocab", []), "vocab"),
    "no merges": (lambda raw: raw["model"].pop("merges"), "merges"),
    "merges of nothing": (set_at("model", "merges", 0, ["zz", "qq"]), "refuses"),
    "merges of three": (set_at("model", "merges", 0, ["a", "b", "c"]), "merges holds ['a', 'b', 'c']; expected pairs"),
    "merges that are numbers": (set_at("model", "merges", [1, 2]), "merges holds 1; expected pairs"),
    "merges of numbers": (set_at("model", "merges", 0, [1, 2]), "refuses"),
    "merges of two kinds": (set_at("model", "merges", 1, "t h"), "merges holds 't h'; expected pairs"),
    "old merges of three": (set_at("model", "merges", ["t h", "t h e"]), "merges holds ['t', 'h', 'e']"),
    "old merges of nothing": (set_at("model", "merges", ["zz qq"]), "Token `zz` out of vocabulary at line 1"),
    "half a character in a merge": (set_at("model", "merges", 0, ["\ud800", "a"]), "refuses"),
    "half a character in a token": (lambda raw: raw["model"]["vocab"].update({"\ud800": 900}), "refuses"),
    "half a character in an added token": (set_at("added_tokens", 3, "content", "\ud800"), "refuses"),
    "an option of a wrong type": (set_at("model", "fuse_unk", "yes"), 'string "yes", expected a boolean at line 1'),
    "an unknown token that is a number": (set_at("model", "unk_token", 3), "integer `3`, expected a string"),
    "a special token without a rule": (lambda raw: raw["added_tokens"][2].pop("rstrip"), "missing field `rstrip`"),
    "a special token with a rule that is text": (set_at("added_tokens", 2, "rstrip", "no"), 'string "no"'),
    "a version to come": (set_at("version", "2.0"), "2.0"),
    "a negative id": (set_at("model", "vocab", "a", -1), "-1"),
    "a huge id": (set_at("model", "vocab", "a", 2**31), "2147483648"),
    "a fraction": (set_at("model", "vocab", "a", 1.5), "1.5"),
    "a true id": (set_at("model", "vocab", "a", True), "True"),
    "an id twice": (set_at("model", "vocab", "a", 77), "share the id 77"),
    "a special id out of range": (set_at("added_tokens", 0, "id", 2**40), "1099511627776"),
    "a special id of another": (set_at("added_tokens", 0, "id", 77), "share the id"),
    "a special token twice": (
        lambda raw: raw["added_tokens"].append(raw["added_tokens"][0] | {"lstrip": True}),
        "twice",
    ),
    "a special token without text": (set_at("added_tokens", 0, "content", ""), "added_tokens[0]"),
    "a special token that is a number": (set_at("added_tokens", 0, 7), "added_tokens[0]"),
    "a special id that the package would move": (set_at("added_tokens", 3, "id", 900_000), "900000"),
    "added_tokens is text": (set_at("added_tokens", "abc"), "added_tokens"),
    "no decoder": (set_at("decoder", None), "decoder"),
    "an unknown decoder": (set_at("decoder", {"type": "Evil\x1b[2J"}), "Evil\\x1b[2J"),
    "a word piece decoder": (set_at("decoder", {"type": "WordPiece", "prefix": "#", "cleanup": True}), "WordPiece"),
    "an unknown normalizer": (set_at("normalizer", {"type": "Nope"}), "refuses"),
    "another post-processor": (set_at("post_processor", {"type": "RobertaProcessing"}), "malformed"),
    "a post-processor that is none": (set_at("post_processor", {"type": "Nope"}), "Nope"),
    "two tokens before each text": (
        lambda raw: raw["post_processor"]["single"].insert(0, {"SpecialToken": {"id": BOS, "type_id": 0}}),
        "before",
    ),
    "decoders that are no list": (
        set_at("decoder", {"type": "Sequence", "decoders": 5}),
        "decoder.decoders is int",
    ),
    "a decoder of an odd type": (set_at("decoder", {"type": []}), "decoder is {'type': []}"),
    "a decoder that is text": (
        set_at("decoder", {"type": "Sequence", "decoders": [{"type": "Fuse"}, "x"]}),
        "decoder.decoders[1] is 'x'",
    ),
    "processors that are no list": (
        set_at("post_processor", {"type": "Sequence", "processors": 7}),
        "post_processor.processors is int",
    ),
    "a normalizer that is a number": (set_at("normalizer", 3), "normalizer is 3"),
    "a cutter that drops blanks": (
        set_at(
            "pre_tokenizer",
            {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, BYTE_LEVEL]},
        ),
        "pre_tokenizer.pretokenizers[0] (WhitespaceSplit) removes",
    ),
    "a cutter that drops what it finds": (
        set_at(
            "pre_tokenizer",
            {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": " "}, "behavior": "Removed", "invert": False},
                    BYTE_LEVEL,
                ],
            },
        ),
        "pre_tokenizer.pretokenizers[0] (Split) removes",
    ),
    "a template without tokens": (set_at("post_processor", "special_tokens", {}), "malformed"),
}


def old_merges(raw: dict[str, Any]) -> None:
    merges = raw["model"]["merges"]
    raw["model"]["merges"] = ["#version: 0.2", *(" ".join(pair) for pair in merges)]


def lower_case_and_tokens_beyond_the_vocabulary(raw: dict[str, Any]) -> None:
    first = len(raw["model"]["vocab"])
    raw.update(normalizer={"type": "Lowercase"}, post_processor=None)
    for i, token in enumerate(raw["added_tokens"]):
        token.update(content=token["content"].upper(), id=first + i, normalized=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: None,
        old_merges,
        set_at("model", "merges", []),
        lambda raw: raw["model"].pop("type"),
        lambda raw: raw["model"].update(ignore_merges=True, unk_token="a", fuse_unk=True, byte_fallback=True),
        lambda raw: raw["model"].update(continuing_subword_prefix="", end_of_word_suffix="", dropout=0, fuse_unk=None),
        lambda raw: raw["added_tokens"].reverse(),
        lambda raw: raw["added_tokens"].append(raw["added_tokens"][3]),
        lower_case_and_tokens_beyond_the_vocabulary,
    ],
)
@pytest.mark.filterwarnings("ignore:.*text is changed")
def test_the_vocabulary_is_the_one_that_the_package_reads(tmp_path: Path, small: dict[str, Any], change: Any):
    change(small)
    tokenizer = load_tokenizer_file(write(tmp_path, small))
    oracle = Tokenizer.from_str(json.dumps(small))
    text = "the cat <THINK> sat<think> on \x01é\n\nthe hat"
    assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text, add_special_tokens=False).ids
    tokenizer.save(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "tokenizer.json").read_text())
    assert saved | {"post_processor": None} == json.loads(oracle.to_str()) | {"post_processor": None}


@pytest.mark.parametrize("name", BROKEN_JSON)
def test_broken_tokenizer_json(tmp_path: Path, small: dict[str, Any], name: str):
    change, word = BROKEN_JSON[name]
    change(small)
    with refused("tokenizer.json", word):
        load_tokenizer_file(write(tmp_path, small))


@pytest.mark.parametrize(
    ("change", "item"),
    [
        (set_at("normalizer", {"type": "Lowercase"}), "normalizer (Lowercase)"),
        (
            set_at("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}]}),
            "normalizer.normalizers[0] (NFC)",
        ),
        (
            set_at("normalizer", {"type": "Replace", "pattern": {"Regex": "[0-9]"}, "content": "#"}),
            "normalizer (Replace)",
        ),
        (
            set_at("normalizer", {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}),
            "normalizer (Replace)",
        ),
        (set_at("added_tokens", 3, "lstrip", True), "added_tokens[3] ('<think>')"),
        (set_at("pre_tokenizer", "add_prefix_space", True), "pre_tokenizer (ByteLevel)"),
        (
            set_at(
                "pre_tokenizer",
                {
                    "type": "Sequence",
                    "pretokenizers": [
                        {"type": "Split", "pattern": {"Regex": "[a-z]+"}, "behavior": "Removed", "invert": True},
                        BYTE_LEVEL,
                    ],
                },
            ),
            "pre_tokenizer.pretokenizers[0] (Split)",
        ),
    ],
)
def test_a_file_that_changes_texts_says_so(tmp_path: Path, small: dict[str, Any], change: Any, item: str):
    change(small)
    with pytest.warns(UserWarning) as caught:
        tokenizer = load_tokenizer_file(write(tmp_path, small))
    (message,) = (str(warning.message) for warning in caught)
    assert message.startswith(f"{tmp_path / 'tokenizer.json'}: text is changed: {item}") and message.isprintable()
    text = "e\u0301 The CAT 1 <think>"
    assert tokenizer.decode(tokenizer.encode(text)) != text


def test_special_tokens_may_strip(tmp_path: Path, small: dict[str, Any]):
    small["added_tokens"][1]["lstrip"] = True
    tokenizer = load_tokenizer_file(write(tmp_path, small))
    assert tokenizer.decode(tokenizer.encode(f"a {EOS}")) == f"a {EOS}"


def test_a_pattern_that_explodes_is_named(tmp_path: Path, small: dict[str, Any], capfd: pytest.CaptureFixture[str]):
    split = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
    small["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL]}
    tokenizer = load_tokenizer_file(write(tmp_path, small))
    for call in (tokenizer.encode, tokenizer.explain):
        with refused("tokenizer.json", "regular expression", "nested repetition"):
            call("a" * 40)
    assert tokenizer.decode(tokenizer.encode("aab")) == "aab"
    capfd.readouterr()  # the package's panics write to stderr


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"bos_token": 3}, "bos_token"),
        ({"eos_token": {"content": ["x"]}}, "eos_token"),
        ({"bos_token": EOS}, "same"),
    ],
)
def test_broken_tokenizer_config(tmp_path: Path, small: dict[str, Any], config: dict[str, Any], word: str):
    with refused(word):
        load_tokenizer_file(write(tmp_path, small, config))


def test_a_begin_token_that_is_none_cannot_be_put_before_a_text(tmp_path: Path, small: dict[str, Any]):
    small["post_processor"] = None
    with refused("add_bos_token"):
        load_tokenizer_file(write(tmp_path, small, {"bos_token": "<nope>", "add_bos_token": True}))


@pytest.mark.parametrize(
    ("change", "config", "note"),
    [
        (None, {"bos_token": "<nope>"}, "bos_token '<nope>'"),
        (None, {"eos_token": "<nope>", "bos_token": BOS}, "eos_token '<nope>'"),
        (None, {"pad_token": {"content": "[PAD]"}}, "pad_token '[PAD]'"),
        (None, {"add_eos_token": True}, "add_eos_token"),
        (
            lambda raw: raw["post_processor"]["single"].append({"SpecialToken": {"id": BOS, "type_id": 0}}),
            None,
            "the post-processor",
        ),
        (
            set_at(
                "post_processor",
                {
                    "type": "RobertaProcessing",
                    "sep": [EOS, 1],
                    "cls": [BOS, 0],
                    "trim_offsets": True,
                    "add_prefix_space": False,
                },
            ),
            {"bos_token": BOS, "eos_token": EOS},
            "the post-processor",
        ),
    ],
)
def test_a_fault_of_the_config_is_named_and_stops_nothing(
    tmp_path: Path, small: dict[str, Any], change: Any, config: dict[str, Any] | None, note: str
):
    if change is not None:
        change(small)
    with pytest.warns(UserWarning) as caught:
        tokenizer = load_tokenizer_file(write(tmp_path, small, config))
    (message,) = (str(warning.message) for warning in caught)
    assert message.startswith(f"{tmp_path / 'tokenizer.json'}: ") and note in message and message.isprintable()
    inner = Tokenizer.from_str(json.dumps(small))
    assert tokenizer.encode("the cat") == [0, *inner.encode("the cat", add_special_tokens=False).ids]


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "0 bytes"),
        (b"{", "JSON"),
        (b"[]", "list"),
        (b"[" * 200_000, "JSON"),
        (b'{"a":' * 200_000, "JSON"),
        (b'{"model": {"vocab": {"a": 0, "a": 1}}}', "twice"),
        (b'{"model": "\xff"}', "UTF-8"),
        (b'{"model": {"vocab": {"a": ' + b"9" * 5000 + b"}}}", "JSON"),
        (b"\x00" * 100, "JSON"),
    ],
)
def test_what_is_no_json(tmp_path: Path, content: bytes, word: str):
    for name in ("tokenizer.json", "characters.json"):
        (tmp_path / name).write_bytes(content)
        with refused(name, word):
            load_tokenizer_file(tmp_path / name)


def test_every_truncation_is_refused(tmp_path: Path, small_json: str):
    for length in range(1, len(small_json), len(small_json) // 40):
        (tmp_path / "tokenizer.json").write_text(small_json[:length])
        with refused("tokenizer.json"):
            load_tokenizer_file(tmp_path)


def test_a_file_larger_than_any_tokenizer(tmp_path: Path):
    for name in ("tokenizer.json", "tokenizer.model", "characters.json"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(2**33)
        with refused("8589934592"):
            load_tokenizer_file(tmp_path / name)


def test_no_tokenizer(tmp_path: Path):
    with refused("tokenizer.model", "characters.json"):
        load_tokenizer_file(tmp_path)
    with refused("no such"):
        load_tokenizer_file(tmp_path / "tokenizer.json")
    (tmp_path / "notes.txt").write_text("x")
    with refused("no tokenizer"):
        load_tokenizer_file(tmp_path / "notes.txt")


@pytest.fixture(scope="module")
def meta_lines(llama3_tokenizer_path: Path) -> list[bytes]:
    return llama3_tokenizer_path.read_bytes().splitlines()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda lines: lines.pop(), "127,999 lines"),
        (lambda lines: lines.append(b"AAAA 128000"), "128,001 lines"),
        (lambda lines: lines.clear(), "bytes"),
        (lambda lines: lines.__setitem__(5, lines[6]), "line 6"),
        (lambda lines: lines.__setitem__(5, lines[6].split()[0] + b" 5"), "lines 6 and 7"),
        (lambda lines: lines.__setitem__(5, b"AAAAAAAA 5"), "bytes [38]"),
        (lambda lines: lines.__setitem__(500, b"!!!! 500"), "line 501"),
        (lambda lines: lines.__setitem__(500, b"AAA 500"), "line 501"),
        (lambda lines: lines.__setitem__(500, b" 500"), "line 501"),
        (lambda lines: lines.__setitem__(500, b"AAAA"), "line 501"),
        (lambda lines: lines.__setitem__(500, b"AAAA -1"), "line 501"),
        (lambda lines: lines.__setitem__(500, b"AAAA 500 7"), "line 501"),
        (lambda lines: lines.__setitem__(500, b"AAAA " + b"9" * 9999), "line 501"),
        (lambda lines: lines.__setitem__(500, b"\xff\x1b[2J"), "line 501"),
        (lambda lines: lines.__setitem__(500, b"AAAA" * 10_000 + b" 500"), "line 501"),
        (lambda lines: lines.__setitem__(slice(None), [b"hello"]), "line 1"),
    ],
)
def test_broken_tokenizer_model(tmp_path: Path, meta_lines: list[bytes], change: Any, word: str):
    lines = list(meta_lines)
    change(lines)
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(lines))
    with refused("tokenizer.model", word):
        load_tokenizer_file(tmp_path)


@pytest.fixture(scope="module")
def smollm2_metadata(smollm2_path: Path) -> dict[str, Any]:
    metadata = read_gguf(smollm2_path).metadata
    return {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}


K = "tokenizer.ggml."


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        (K + "model", "t5", "'t5'"),
        (K + "model", None, "missing"),
        (K + "pre", "kimi-k2", "kimi-k2"),
        (K + "tokens", None, "tokens"),
        (K + "tokens", "abc", "tokens"),
        (K + "tokens", [], "0 tokens"),
        (K + "tokens", ["a"] * 49152, "twice"),
        (K + "tokens", [1] * 49152, "tokens[0]"),
        (K + "token_type", [1, 2], "2 token types"),
        (K + "token_type", ["x"] * 49152, "token_type[0]"),
        (K + "merges", ["a"], "merges[0]"),
        (K + "merges", ["a b c"], "merges[0]"),
        (K + "merges", [" b"], "merges[0]"),
        (K + "merges", ["zzzzzzz qqqqqqqq"], "refuses"),
        (K + "merges", None, "merges"),
        (K + "bos_token_id", 49152, "49151"),
        (K + "eos_token_id", -1, "-1"),
        (K + "padding_token_id", "2", "'2'"),
        (K + "add_bos_token", 1, "add_bos_token"),
        ("tokenizer.chat_template", 7, "chat_template"),
    ],
)
def test_broken_gguf_vocabulary(smollm2_metadata: dict[str, Any], key: str, value: object, word: str):
    metadata = {**smollm2_metadata, key: value}
    if value is None:
        del metadata[key]
    with refused("x.gguf", word):
        from_gguf_metadata(metadata, "x.gguf")


def test_bos_of_a_gguf(smollm2_metadata: dict[str, Any]):
    def first(**changes: object) -> int:
        metadata = {**smollm2_metadata, **{K + key: value for key, value in changes.items()}}
        return from_gguf_metadata(metadata, "x.gguf").encode("The")[0]

    assert first() == 504
    assert first(add_bos_token=True) == 1
    metadata = {k: v for k, v in smollm2_metadata.items() if k != K + "add_bos_token"}
    assert from_gguf_metadata(metadata, "x.gguf").encode("The")[0] == 504
    assert from_gguf_metadata({**metadata, K + "pre": "llama-bpe"}, "x.gguf").encode("The")[0] == 1
    del metadata[K + "bos_token_id"]
    with refused("bos_token_id"):
        from_gguf_metadata({**metadata, K + "pre": "llama-bpe"}, "x.gguf")


def test_user_defined_tokens_of_a_gguf_are_ordinary_text(smollm2_metadata: dict[str, Any]):
    types = list(smollm2_metadata[K + "token_type"])
    types[3] = 4  # <repo_name>
    tokenizer = from_gguf_metadata({**smollm2_metadata, K + "token_type": types}, "x.gguf")
    assert 3 in tokenizer.encode("a <repo_name> b") and 3 not in tokenizer.special_tokens.values()
    assert tokenizer.explain("a <repo_name> b").ids == tokenizer.encode("a <repo_name> b")


def test_characters_are_saved_and_loaded(tmp_path: Path):
    tokenizer = CharacterTokenizer.from_text("to be\nor not 😀 ")
    tokenizer.save(tmp_path)
    again = load_tokenizer_file(tmp_path)
    assert again.encode("not 😀\n") == tokenizer.encode("not 😀\n")
    assert again.decode(again.encode("not 😀\n")) == "not 😀\n"
    assert (again.vocab_size, again.bos_token_id, again.chat_format) == (9, None, None)
    with refused("'z'", "U+007A"):
        again.encode("zoo")
    explanation = again.explain("t😀")
    assert explanation.ids == again.encode("t😀")
    assert [(piece.text, piece.start, piece.merges) for piece in explanation.pieces] == [("t", 0, ()), ("😀", 1, ())]


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"type": "characters", "version": 2, "characters": ["a"]},
        {"type": "characters", "version": 1, "characters": "ab"},
        {"type": "characters", "version": 1, "characters": []},
        {"type": "characters", "version": 1, "characters": ["a", "a"]},
        {"type": "characters", "version": 1, "characters": ["ab"]},
        {"type": "characters", "version": 1, "characters": ["a", 3]},
        {"type": "characters", "version": 1, "characters": ["\ud800"]},
    ],
)
def test_broken_characters_json(tmp_path: Path, raw: object):
    (tmp_path / "characters.json").write_text(json.dumps(raw))
    with refused("characters.json"):
        load_tokenizer_file(tmp_path)


def test_characters_of_nothing():
    with refused("empty"):
        CharacterTokenizer.from_text("")


def test_saving_where_nothing_can_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match=r"tokenizer\.json"):
        CharacterTokenizer.from_text("ab").save(tmp_path / "file")


def test_after_a_bad_file_the_next_good_one_loads(tmp_path: Path, small: dict[str, Any]):
    with refused():
        load_tokenizer_file(write(tmp_path, {}))
    assert load_tokenizer_file(write(tmp_path, small)).encode("cat")
