"""The face that every tokenizer shows: BOS, control tokens, batches, ids and their bytes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llamarium.checkpoints.gguf.file import read_gguf
from llamarium.checkpoints.tokenizers import load_tokenizer
from llamarium.errors import ContextLengthError, TokenizerError
from llamarium.tokenizer.backends.characters import CharacterTokenizer
from llamarium.tokenizer.backends.gguf import from_gguf_metadata
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.load import load_tokenizer_file


@pytest.fixture(scope="module")
def llama3(llama3_tokenizer_path: Path) -> Tokenizer:
    return load_tokenizer_file(llama3_tokenizer_path)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return from_gguf_metadata(read_gguf(smollm2_path).metadata, smollm2_path.name)


def test_the_cat_sat(llama3: Tokenizer, smollm2: Tokenizer):
    assert llama3.encode("The cat sat", add_special_tokens=False) == [791, 8415, 7731]
    assert smollm2.encode("The cat sat") == [504, 2644, 2643]


def test_what_the_files_say(llama3: Tokenizer, smollm2: Tokenizer):
    assert (llama3.vocab_size, llama3.bos_token_id, llama3.pad_token_id) == (128256, 128000, 128004)
    assert llama3.eos_token_ids == (128001, 128008, 128009)
    assert len(llama3.special_tokens) == 256
    assert llama3.special_tokens["<|reserved_special_token_245|>"] == 128255
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.pad_token_id) == (49152, 1, 2)
    assert smollm2.eos_token_ids == (2,)
    assert len(smollm2.special_tokens) == 17


def test_bos_once(llama3: Tokenizer, smollm2: Tokenizer):
    assert llama3.encode("x") == [128000, 87]
    assert llama3.encode("") == [128000]
    assert llama3.encode("<|begin_of_text|>x", parse_special=True) == [128000, 87]
    assert llama3.encode("<|begin_of_text|>x").count(128000) == 1
    assert smollm2.encode("x") == smollm2.encode("x", add_special_tokens=False)


def test_control_tokens_in_text_are_text_unless_asked(llama3: Tokenizer, smollm2: Tokenizer):
    for tokenizer in (llama3, smollm2):
        special = set(tokenizer.special_tokens.values())
        for spelling, token_id in tokenizer.special_tokens.items():
            assert special.isdisjoint(tokenizer.encode(f"a {spelling} b", add_special_tokens=False))
            parsed = tokenizer.encode(f"a{spelling}b", add_special_tokens=False, parse_special=True)
            assert [i for i in parsed if i in special] == [token_id]


def test_decoding_skips_or_spells_control_tokens(llama3: Tokenizer):
    ids = [128000, 791, 128009]
    assert llama3.decode(ids) == "The"
    assert llama3.decode(ids, skip_special_tokens=False) == "<|begin_of_text|>The<|eot_id|>"
    assert llama3.decode([]) == ""


@pytest.mark.parametrize("text", ["\ud800", "ab\udfff", "\udc00\ud800"])
def test_lone_surrogates_are_refused(llama3: Tokenizer, smollm2: Tokenizer, text: str):
    for tokenizer in (llama3, smollm2, CharacterTokenizer.from_text("ab")):
        for parse_special in (False, True):
            with pytest.raises(TokenizerError, match="lone surrogate U\\+D"):
                tokenizer.encode(text, parse_special=parse_special)
        with pytest.raises(TokenizerError, match="lone surrogate"):
            tokenizer.explain(text)


def test_no_text(llama3: Tokenizer):
    for value in (None, b"bytes", 3):
        with pytest.raises(TokenizerError, match=type(value).__name__):
            llama3.encode(value)  # type: ignore[arg-type]


def test_a_byte_without_a_token_is_an_error_not_a_loss(smollm2: Tokenizer):
    with pytest.raises(TokenizerError, match=r"U\+0004, character 2"):
        smollm2.encode("ab\x04c")


@pytest.mark.parametrize("token_id", [-1, 128256, 2**70])
def test_unknown_ids(llama3: Tokenizer, token_id: int):
    for call in (llama3.token_bytes, llama3.token_text, llama3.stream().push, lambda i: llama3.decode([i])):
        with pytest.raises(TokenizerError, match="128255"):
            call(token_id)


def test_ids_of_a_wrong_type(llama3: Tokenizer):
    with pytest.raises(TokenizerError, match="whole number"):
        llama3.decode(["a"])  # type: ignore[list-item]


def test_every_id_has_bytes(llama3: Tokenizer, smollm2: Tokenizer):
    assert b"".join(llama3.token_bytes(i) for i in range(256)) and llama3.token_bytes(8415) == b" cat"
    assert llama3.token_bytes(128009) == b"<|eot_id|>"
    for tokenizer in (llama3, smollm2):
        assert all(tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size))
    assert len({smollm2.token_bytes(i) for i in range(49152)}) == 49152


def test_token_text_cannot_drive_a_terminal(llama3: Tokenizer):
    assert all(llama3.token_text(i).isprintable() for i in range(0, 128256, 7))
    (escape_id,) = llama3.encode("\x1b", add_special_tokens=False)
    assert llama3.token_text(escape_id) == "\\x1b"


def test_explain_follows_a_text(smollm2: Tokenizer):
    explanation = smollm2.explain("hello cat")
    assert explanation.utf8 == b"hello cat"
    assert [(piece.text, piece.start, piece.ids) for piece in explanation.pieces] == [
        ("hello", 0, (28120,)),
        (" cat", 5, (2644,)),
    ]
    steps = [(m.rank, m.left, m.right, m.result, m.start) for m in explanation.pieces[0].merges]
    assert steps == [
        (3, b"h", b"e", b"he", 0),
        (512, b"l", b"l", b"ll", 2),
        (14533, b"he", b"ll", b"hell", 0),
        (27868, b"hell", b"o", b"hello", 0),
    ]
    assert [(t.id, t.bytes, t.start, t.end) for t in explanation.tokens] == [
        (28120, b"hello", 0, 5),
        (2644, b" cat", 5, 9),
    ]


def test_explanation_is_json(llama3: Tokenizer):
    data = json.loads(json.dumps(llama3.explain("naïve 😀\n").to_dict()))
    assert data["ids"] == llama3.encode("naïve 😀\n", add_special_tokens=False)
    assert data["utf8"] == list("naïve 😀\n".encode())
    assert [token["id"] for token in data["tokens"]] == data["ids"]
    assert [byte for token in data["tokens"] for byte in token["bytes"]] == data["utf8"]
    merges = [merge for piece in data["pieces"] for merge in piece["merges"]]
    assert merges and all(m["result"]["bytes"] == m["left"]["bytes"] + m["right"]["bytes"] for m in merges)


def test_explain_of_a_huge_piece_takes_no_square(llama3: Tokenizer, smollm2: Tokenizer):
    for tokenizer in (llama3, smollm2):
        assert tokenizer.explain("a" * 30_000).ids == tokenizer.encode("a" * 30_000, add_special_tokens=False)


def test_explain_refuses_to_show_other_ids_than_encode(smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(smollm2.backend, "encode", lambda text: [1])
    with pytest.raises(TokenizerError, match="other ids"):
        smollm2.explain("hello")


def test_more_blanks_than_the_regular_expression_stacks(llama3: Tokenizer):
    """Rust's fancy-regex, which tiktoken uses, gives up at a million."""
    for blank, after in ((" ", ""), (" ", "x"), (" ", "\n"), ("\u3000", "1")):
        text = "a" + blank * 1_000_100 + after
        ids = llama3.encode(text, add_special_tokens=False)
        assert llama3.decode(ids) == text
        assert ids[-1] == llama3.encode("a" + blank * 100 + after)[-1] or not after


def test_importing_and_characters_need_no_library():
    code = (
        "import sys, llamarium.tokenizer.load, llamarium.tokenizer.chat.choose, llamarium.tokenizer.streaming\n"
        "from llamarium.tokenizer.backends.characters import CharacterTokenizer\n"
        "CharacterTokenizer.from_text('ab').encode('ba')\n"
        "print(sorted({'torch', 'tokenizers', 'jinja2', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_how_numbers_are_cut(llama3: Tokenizer, smollm2: Tokenizer):
    assert [piece.text for piece in smollm2.explain("a 1234 ½").pieces] == ["a", " ", "1", "2", "3", "4", " ", "½"]
    assert [piece.text for piece in llama3.explain("a 1234 ½").pieces] == ["a", " ", "123", "4", " ", "½"]


def test_a_text_that_is_far_too_long_is_refused_after_a_part_of_it(smollm2_path: Path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    seen: list[int] = []
    encode = tokenizer.backend.encode

    def counting(text: str) -> list[int]:
        seen.append(len(text))
        return encode(text)

    tokenizer.backend.encode = counting  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ContextLengthError, match=r"of its 6,000,000 characters .* length is 8192 tokens: use a"):
        tokenizer.check_length("x y\nz " * 1_000_000, 8192)
    assert sum(seen) < 200_000
    with pytest.raises(ContextLengthError, match=r"too long: its 5,000 characters are 4,000 tokens; this"):
        tokenizer.check_length("x y\n1" * 1_000, 200)
    seen.clear()
    tokenizer.check_length("x y " * 8192, 8192)  # as many characters as are encoded at once: counted by who runs them
    assert not seen
    tokenizer.check_length(" " * 64 * 8192, 8192)  # many characters, few tokens
    assert len(seen) > 1


def test_millions_of_blanks_are_refused_without_a_panic(smollm2_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TokenizerError, match=r"10,000,001 blanks in a row, .*; expected at most 9,900,000"):
        load_tokenizer(smollm2_path).encode("a" + " " * 10_000_001)
    assert capfd.readouterr() == ("", "")
