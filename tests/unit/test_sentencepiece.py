"""SentencePiece vocabularies, held equal to the `sentencepiece` library: files, ids, added tokens, what is refused."""

import itertools
import json
import random
import time
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarium.errors import LlamariumError, TokenizerError, UnsupportedTokenizerError
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.load import load_tokenizer_file
from llamarium.tokenizer.sentencepiece.encoder import Encoder
from llamarium.tokenizer.sentencepiece.model import SentencePieceModel, read_model, write_model
from llamarium.tokenizer.sentencepiece.piece_type import PieceType
from llamarium.tokenizer.sentencepiece.wire import write_field
from sentencepiece_models import TEXT, TEXTS, USER_DEFINED, library, trained

LLAMA: dict[str, Any] = {
    "byte_fallback": True,
    "remove_extra_whitespaces": False,
    "normalization_rule_name": "identity",
}


def random_texts(count: int) -> list[str]:
    choices = [
        *"abcde the\n\t",
        " ",
        "  ",
        "\u2581",
        "é",
        "\uff46",
        "①",
        "ﬁ",
        "\u0301",
        "한",
        "日",
        "😀",
        "<x>",
        "foo",
        "</s>",
    ]
    rng = random.Random(count)
    mixed = ["".join(rng.choices(choices, k=rng.randrange(1, 40))) for _ in range(count)]
    starts = [rng.randrange(len(TEXT)) for _ in range(count)]
    return mixed + [TEXT[start : start + rng.randrange(1, 80)] for start in starts]


VARIANTS = list(
    itertools.product(
        ("bpe", "unigram"),
        (False, True),
        (False, True),
        (False, True),
        ("identity", "nmt_nfkc", "nfkc_cf"),
        ((), USER_DEFINED),
    )
)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("rules", ["identity", "nmt_nfkc", "nfkc_cf"])
def test_ids_equal_the_librarys_in_every_variant(kind: str, rules: str):
    for variant in VARIANTS:
        name, fallback, dummy, extra, normalization, user_defined = variant
        if (name, normalization) != (kind, rules):
            continue
        data = trained(
            kind,
            byte_fallback=fallback,
            add_dummy_prefix=dummy,
            remove_extra_whitespaces=extra,
            normalization_rule_name=rules,
            user_defined_symbols=user_defined,
        )
        theirs, ours = library(data), Encoder(read_model(data, "m"), "m")
        for text in [*TEXTS, *random_texts(25)]:
            assert ours.encode(text) == theirs.encode(text), (variant, text)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_whitespace_as_suffix_and_pieces_over_spaces(kind: str):
    for options in (
        {"treat_whitespace_as_suffix": True},
        {"treat_whitespace_as_suffix": True, **LLAMA},
        {"split_by_whitespace": False, "allow_whitespace_only_pieces": True, **LLAMA},
    ):
        data = trained(kind, **options)
        theirs, ours = library(data), Encoder(read_model(data, "m"), "m")
        for text in [*TEXTS, *random_texts(25)]:
            assert ours.encode(text) == theirs.encode(text), (options, text)


def changed(data: bytes, **changes: Any) -> bytes:
    """Return a model with some pieces' scores or types changed, by their text."""
    model = read_model(data, "m")
    for piece, score in changes.get("scores", {}).items():
        model.scores[model.pieces.index(piece)] = score
    for piece, kind in changes.get("types", {}).items():
        model.types[model.pieces.index(piece)] = kind
    return write_model(model)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("seed", range(6))
def test_equal_scores_and_unused_pieces(kind: str, seed: int):
    """Of equal scores the leftmost pair is joined; unused pieces are steps to others only."""
    rng = random.Random(seed)
    data = trained(kind, user_defined_symbols=("foo",), **LLAMA)
    model = read_model(data, "m")
    ordinary = [model.pieces[i] for i in model.of_type(PieceType.NORMAL)]
    scores = {piece: float(rng.choice((-1, -2, -3))) for piece in rng.sample(ordinary, len(ordinary) // (1 + seed % 3))}
    types = {piece: int(PieceType.UNUSED) for piece in rng.sample(ordinary, len(ordinary) // 4)}
    data = changed(data, scores=scores, types=types)
    theirs, ours = library(data), Encoder(read_model(data, "m"), "m")
    for text in [*TEXTS, *random_texts(100)]:
        assert ours.encode(text) == theirs.encode(text), text


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_small_alphabet_with_many_ties(kind: str):
    """Sums in float32 decide, what user-defined pieces count, and which of equal cuts is found first."""
    rng = random.Random(3)
    for _ in range(60):
        pieces = [*"abc", *{"".join(rng.choices("abc", k=rng.randrange(2, 5))) for _ in range(20)}]
        types = [rng.choice((1, 1, 1, 1, 4, 5)) for _ in pieces]
        scores = [float(np.float32(-rng.choice((1.1, 2.2, 2.3, 3.3, 4.05, 4.4)))) for _ in pieces]
        data = write_model(
            SentencePieceModel(
                kind=kind,
                pieces=["<unk>", "<s>", "</s>", *pieces],
                scores=[0.0, 0.0, 0.0, *scores],
                types=[2, 3, 3, *types],
                names={"bos": "<s>", "eos": "</s>", "pad": "<pad>"},
            )
        )
        theirs, ours = library(data), Encoder(read_model(data, "m"), "m")
        for text in ["".join(rng.choices("abcd ", k=rng.randrange(1, 60))) for _ in range(40)]:
            assert ours.encode(text) == theirs.encode(text), text


def test_sums_of_a_long_text_begin_again():
    data = trained("unigram", **LLAMA)
    text = "".join(random.Random(0).choices(TEXT, k=60_000))
    assert Encoder(read_model(data, "m"), "m").encode(text) == library(data).encode(text)


def test_what_is_written_is_read_again_by_both():
    for kind, options in itertools.product(("bpe", "unigram"), (LLAMA, {"user_defined_symbols": USER_DEFINED})):
        data = trained(kind, **options)
        model = read_model(data, "m")
        again = write_model(model)
        assert read_model(again, "m") == model
        theirs, copy = library(data), library(again)
        assert [copy.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]
        ends = [(one.bos_id(), one.eos_id(), one.unk_id(), one.pad_id()) for one in (theirs, copy)]
        assert ends[0] == ends[1]


def folder_of(folder: Path, data: bytes, **files: Any) -> Path:
    (folder / "tokenizer.model").write_bytes(data)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


def loaded(folder: Path) -> Tokenizer:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_tokenizer_file(folder)


def test_a_llama_2_folder_reads_and_writes_text(tmp_path: Path):
    data = trained("bpe", **LLAMA)
    theirs, tokenizer = library(data), loaded(folder_of(tmp_path, data))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.pad_token_id) == (1, (2,), None)
    assert set(tokenizer.special_tokens) == {"<unk>", "<s>", "</s>", "<ctl>"}
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == [1, *theirs.encode(text)]
        assert tokenizer.decode(ids) == text.replace("\u2581", " ")
        stream = tokenizer.stream()
        assert "".join([*map(stream.push, ids), stream.finish()]) == text.replace("\u2581", " ")
    with pytest.raises(TokenizerError, match="SentencePiece"):
        tokenizer.explain("hello")
    with pytest.raises(TokenizerError, match="no token has the id"):
        tokenizer.decode([tokenizer.vocab_size])


@pytest.mark.parametrize("legacy", [None, True, False])
def test_text_after_control_tokens(tmp_path: Path, legacy: bool | None):
    """A space is put before each text between control tokens, unless the files say `legacy: false`."""
    data = trained("bpe", **LLAMA)
    theirs = library(data)
    config = {} if legacy is None else {"legacy": legacy}
    tokenizer = loaded(folder_of(tmp_path, data, tokenizer_config=config))
    ids = tokenizer.encode("the</s>dog", parse_special=True)
    after = theirs.encode("dog")
    if legacy is False:
        after = after[1:] if theirs.id_to_piece(after[0]) == "\u2581" else tokenizer.encode_parts([2, "dog"])[1:]
        assert theirs.decode(after) == "dog"
        assert not theirs.id_to_piece(after[0]).startswith("\u2581")
    assert ids == [1, *theirs.encode("the"), 2, *after]
    assert tokenizer.encode_parts(["the", 2, "dog"]) == ids[1:]
    assert tokenizer.encode_parts(["the</s>", "dog"]) == theirs.encode("the</s>dog")
    assert 2 not in theirs.encode("the</s>dog")


def test_tokens_beside_the_pieces(tmp_path: Path):
    data = trained("bpe", **LLAMA)
    theirs = library(data)
    size = len(theirs)
    files: dict[str, Any] = {
        "tokenizer_config": {
            "eos_token": {"content": "<|im_end|>"},
            "add_bos_token": False,
            "added_tokens_decoder": {
                "2": {"content": "</s>", "special": True, "rstrip": True},
                str(size): {"content": "<|im_end|>", "special": False},
                str(size + 1): {"content": "<tool>", "special": False, "lstrip": True},
            },
        },
        "special_tokens_map": {"pad_token": "<pad>", "eos_token": "</s>"},
        "added_tokens": {"<pad>": size + 3, "<tool>": size + 1},
    }
    tokenizer = loaded(folder_of(tmp_path, data, **files))
    assert tokenizer.vocab_size == size + 4
    assert tokenizer.eos_token_ids == (size,)
    assert tokenizer.pad_token_id == size + 3
    assert tokenizer.encode("the <tool>dog<|im_end|>") == [
        *theirs.encode("the"), size + 1, *theirs.encode("dog<|im_end|>"),
    ]  # fmt: skip
    assert tokenizer.encode_parts(["the", 2, " \n dog"]) == [*theirs.encode("the"), 2, *theirs.encode("dog")]
    assert tokenizer.decode([size, size + 1]) == "<tool>"
    with pytest.raises(TokenizerError, match="no token has the id"):
        tokenizer.decode([size + 2])
    tokenizer.save(tmp_path / "saved")
    again = loaded(tmp_path / "saved")
    assert again.special == tokenizer.special
    assert (tmp_path / "saved" / "tokenizer.model").read_bytes() == data
    for text in ("the <tool>dog<|im_end|>", "  a</s>  b"):
        assert again.encode(text, parse_special=True) == tokenizer.encode(text, parse_special=True)


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({"added_tokens": {"<pad>": 5}}, "<pad>"),
        ({"added_tokens": {"<pad>": "5"}}, "<pad>"),
        ({"added_tokens": {"<pad>": 10**9}}, "<pad>"),
        ({"tokenizer_config": {"added_tokens_decoder": {"-1": {"content": "x"}}}}, "-1"),
        ({"tokenizer_config": {"added_tokens_decoder": {"7": "x"}}}, "added_tokens_decoder"),
        ({"tokenizer_config": {"bos_token": "<nowhere>"}}, "<nowhere>"),
        ({"tokenizer_config": {"bos_token": 5}}, "bos_token"),
    ],
)
def test_files_beside_it_that_contradict_are_refused(tmp_path: Path, files: dict[str, Any], word: str):
    folder = folder_of(tmp_path, trained("bpe", **LLAMA), **files)
    with pytest.raises(TokenizerError, match=word):
        load_tokenizer_file(folder)


def test_rules_that_change_text_are_named_once(tmp_path: Path):
    folder = folder_of(tmp_path, trained("unigram"))
    with pytest.warns(UserWarning) as caught:
        tokenizer = load_tokenizer_file(folder)
    assert len(caught) == 3  # normalization, spaces, characters without a piece
    assert tokenizer.decode(tokenizer.encode("  the \uff44og ")) == "the dog"


def test_kinds_that_are_not_read_say_so(tmp_path: Path):
    for kind in ("word", "char"):
        (tmp_path / "tokenizer.model").write_bytes(trained(kind))
        with pytest.raises(UnsupportedTokenizerError, match="BPE and Unigram"):
            load_tokenizer_file(tmp_path)


PIECE = write_field(1, "<unk>") + write_field(3, 2)


@pytest.mark.parametrize(
    "data",
    [
        b"\n",
        b"\n\xff",
        b"\n\xff\xff\xff\xff\x0f",
        b"\n" + b"\xff" * 20,
        write_field(1, PIECE) + b"\x0b",
        write_field(1, PIECE) * 2,
        write_field(1, write_field(1, "a")),
        write_field(1, PIECE) + write_field(1, b""),
        write_field(1, PIECE) + write_field(1, write_field(1, b"\xff")),
        write_field(1, PIECE) + write_field(1, write_field(1, "a") + write_field(3, 9)),
        write_field(1, PIECE) + write_field(1, write_field(1, "a") + write_field(2, float("nan"))),
        write_field(1, PIECE) + write_field(2, write_field(3, 2) + write_field(35, True)),
        write_field(1, PIECE) + write_field(3, write_field(2, b"\x04\0\0\0")),
        write_field(1, PIECE) + write_field(3, write_field(2, b"\xff\xff\xff\xff" + b"\0" * 100)),
        write_field(1, PIECE) + write_field(3, write_field(2, b"\x04\0\0\0\0\0\0\0abc")),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, data: bytes):
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(TokenizerError, match=r"tokenizer\.model"):
        load_tokenizer_file(tmp_path)


@pytest.mark.parametrize("rules", ["identity", "nmt_nfkc"])
def test_mutated_files_are_read_or_refused_in_time(tmp_path: Path, rules: str):
    data = trained("bpe", byte_fallback=True, normalization_rule_name=rules)
    rng = random.Random(0)
    path = tmp_path / "tokenizer.model"
    for _ in range(60):
        mutated = bytearray(data)
        for _ in range(rng.choice((1, 1, 8))):
            mutated[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            del mutated[rng.randrange(len(data)) :]
        path.write_bytes(mutated)
        began = time.monotonic()
        tracemalloc.start()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tokenizer = load_tokenizer_file(path)
            for text in TEXTS:
                assert all(0 <= i < tokenizer.vocab_size for i in tokenizer.encode(text))
        except LlamariumError as error:
            assert "tokenizer.model" in str(error)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 * 2**20
        assert time.monotonic() - began < 10


def test_a_tokenizer_json_of_unigram(tmp_path: Path):
    """Through `tokenizers`, with its ids; the library's on texts without ties."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    model = read_model(trained("unigram", byte_fallback=True), "m")
    scored = list(zip(model.pieces, model.scores, strict=True))
    inner = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    inner.normalizer = normalizers.Precompiled(model.charsmap)
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    metaspace = decoders.Metaspace(prepend_scheme="always")
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), metaspace])
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = with_warnings(tmp_path)
    for text in ("the dog", " the  llama\n", "größer 日本", "hum</s>hum", ""):
        assert tokenizer.encode(text, parse_special=True) == inner.encode(text).ids
    assert tokenizer.decode(tokenizer.encode("the quick brown fox")) == "the quick brown fox"
    assert 2 not in tokenizer.encode("a</s>")
    tokenizer.save(tmp_path / "saved")
    again = with_warnings(tmp_path / "saved")
    assert again.encode("the llama</s>") == tokenizer.encode("the llama</s>")
    raw = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    for broken in ({}, [["a"]], [["a", "b"]], [["a", 0], ["a", 1]], [["a", float("inf")]]):
        raw["model"]["vocab"] = broken
        (tmp_path / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
        with pytest.raises(TokenizerError):
            load_tokenizer_file(tmp_path)


def with_warnings(folder: Path) -> Tokenizer:
    """Load a tokenizer whose normalizer changes texts, and says so."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tokenizer = load_tokenizer_file(folder)
    assert any("Precompiled" in str(warning.message) for warning in caught)
    return tokenizer
