"""Vocabularies of GGUF files, held equal to llama.cpp: SentencePiece, and every name of a pre-tokenizer."""

import importlib.util
import json
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarium.checkpoints.gguf.file import read_gguf, write_gguf
from llamarium.checkpoints.gguf.vocabulary import tokenizer_metadata
from llamarium.config import ModelConfig
from llamarium.errors import UnsupportedTokenizerError
from llamarium.tokenizer.backends.characters import CharacterTokenizer
from llamarium.tokenizer.backends.gguf import from_gguf_metadata
from llamarium.tokenizer.backends.gguf_cutters import cutter_names
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.load import load_tokenizer_file
from llamarium.tokenizer.sentencepiece.model import read_model
from llamarium.train.data.bpe import train_words
from sentencepiece_models import TEXTS, USER_DEFINED, library, trained

pytestmark = [
    pytest.mark.torch("llama.cpp, of the dev extra"),
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="no wheel of llama.cpp for this platform"),
]

# The wheel exports llama.cpp's C functions. The struct of parameters is passed as it was returned, whatever is in it.
LLAMA_CPP = """
import ctypes, json, os, sys
import xllamacpp.xllamacpp as wheel
library = ctypes.CDLL(wheel.__file__)
class Params(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint8 * 1024)]
library.llama_model_default_params.restype = Params
library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Params]
library.llama_model_load_from_file.restype = ctypes.c_void_p
library.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
library.llama_model_get_vocab.restype = ctypes.c_void_p
library.llama_tokenize.argtypes = [
    ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool, ctypes.c_bool,
]
library.llama_backend_init()
answers = []
for path, texts in json.load(sys.stdin):
    model = library.llama_model_load_from_file(path.encode(), library.llama_model_default_params())
    vocab, found = library.llama_model_get_vocab(model), []
    for text in texts:
        data = text.encode()
        ids = (ctypes.c_int32 * (4 * len(data) + 16))()
        found.append(ids[: library.llama_tokenize(vocab, data, len(data), ids, len(ids), True, True)])
    answers.append(found)
print("answers:" + json.dumps(answers), flush=True)
os._exit(0)
"""


def llama_cpp(jobs: list[tuple[Path, list[str]]]) -> list[list[list[int]]]:
    """Tokenize texts, with control tokens and BOS, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", LLAMA_CPP],
        input=json.dumps([(str(path), texts) for path, texts in jobs]),
        capture_output=True, check=True, text=True, timeout=200,
    )  # fmt: skip
    return json.loads(done.stdout.rpartition("answers:")[2])


def write_model_of(path: Path, vocabulary: dict[str, Any]) -> Path:
    """Write the smallest model that llama.cpp loads, with a vocabulary."""
    rows, width = len(vocabulary["tokenizer.ggml.tokens"]), 32
    numbers = {
        "context_length": 256, "embedding_length": width, "block_count": 1, "feed_forward_length": width,
        "vocab_size": rows, "rope.dimension_count": width, "attention.head_count": 1, "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    metadata = {"general.architecture": "llama", **{f"llama.{key}": value for key, value in numbers.items()}}
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (rows, width), "output_norm": (width,), "output": (rows, width)}
    shapes |= {f"blk.0.{name}": (width,) for name in ("attn_norm", "ffn_norm")}
    linears = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes |= {f"blk.0.{name}": (width, width) for name in linears}
    tensors: Any = {
        f"{name}.weight": ("F32", shape, np.zeros(shape, np.float32).tobytes()) for name, shape in shapes.items()
    }
    write_gguf(path, metadata | vocabulary, tensors)
    return path


LLAMA: dict[str, Any] = {
    "byte_fallback": True,
    "remove_extra_whitespaces": False,
    "normalization_rule_name": "identity",
}
ORDINARY = [text for text in TEXTS if "\0" not in text]
CONTROL = [f"<s>{text}</s>{text}" for text in ORDINARY[::3]] + ["<s>", "the<unk> dog", "</s></s> the"]


def vocabulary(data: bytes, **changes: Any) -> dict[str, Any]:
    model = read_model(data, "m")
    lists = {"tokens": model.pieces, "scores": model.scores, "token_type": list(map(int, model.types))}
    return {f"tokenizer.ggml.{key}": value for key, value in ({"model": "llama"} | lists | changes).items()}


def without_double_bos(ids: list[int]) -> list[int]:
    """llama.cpp puts BOS before a text that begins with it."""
    return ids[1:] if ids[:2] == [1, 1] else ids


def test_a_sentencepiece_vocabulary_has_llama_cpps_ids(tmp_path: Path):
    plain, user_defined = trained("bpe", **LLAMA), trained("bpe", user_defined_symbols=USER_DEFINED, **LLAMA)
    cases = [
        vocabulary(plain),
        vocabulary(user_defined),
        vocabulary(plain, add_space_prefix=False, add_bos_token=False),
        vocabulary(plain, scores=[-1.0] * len(library(plain))),
    ]
    texts = ORDINARY + CONTROL
    jobs = [(write_model_of(tmp_path / f"{i}.gguf", case), texts) for i, case in enumerate(cases)]
    for case, answers in zip(cases, llama_cpp(jobs), strict=True):
        tokenizer = from_gguf_metadata(case, "x.gguf")
        for text, ids in zip(texts, answers, strict=True):
            assert tokenizer.encode(text, parse_special=True) == without_double_bos(ids), text
    alone, theirs = from_gguf_metadata(cases[0], "x.gguf"), library(plain)
    for text in TEXTS:
        assert alone.encode(text, add_special_tokens=False) == theirs.encode(text)
        assert alone.decode(alone.encode(text)) == text.replace("\u2581", " ")


def test_an_exported_vocabulary_has_the_same_ids_in_llama_cpp(tmp_path: Path, config: ModelConfig):
    data = trained("bpe", **LLAMA)
    (tmp_path / "tokenizer.model").write_bytes(data)
    size = len(library(data))
    added = {"<|im_end|>": size, "<tool>": size + 1}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added), encoding="utf-8")
    tokenizer = load_tokenizer_file(tmp_path)
    metadata = tokenizer_metadata(tokenizer, config)
    assert metadata["tokenizer.ggml.token_type"][size : size + 3] == [3, 4, 5]
    texts = [*ORDINARY, "the<|im_end|>dog <tool>dog", "<s>hi</s>"]
    (answers,) = llama_cpp([(write_model_of(tmp_path / "m.gguf", metadata), texts)])
    again = from_gguf_metadata(metadata, "m.gguf")
    again.save(tmp_path / "saved")
    for read in (tokenizer, again, load_tokenizer_file(tmp_path / "saved")):
        for text, ids in zip(texts, answers, strict=True):
            assert read.encode(text, parse_special=True) == without_double_bos(ids), text


def test_characters_and_words_have_the_same_ids_in_llama_cpp(tmp_path: Path, config: ModelConfig):
    """Words begin with the space that this package puts before a text, and llama.cpp does not."""
    texts = [text for text in (*cut_texts(), "\\n \\ [PAD3]", "a\tb\r\n") if text]
    characters = CharacterTokenizer.from_text("".join(texts))
    words = train_words(texts, 600)
    with pytest.warns(UserWarning, match="begin prompts with a space"):
        of_words = tokenizer_metadata(words, config)
    of_characters = tokenizer_metadata(characters, config)
    jobs = [
        (write_model_of(tmp_path / "characters.gguf", of_characters), texts),
        (write_model_of(tmp_path / "words.gguf", of_words), [f" {text}" for text in texts]),
    ]
    cases = ((characters, of_characters), (words, of_words))
    for (tokenizer, metadata), answers in zip(cases, llama_cpp(jobs), strict=True):
        again = from_gguf_metadata(metadata, "m.gguf")
        for text, ids in zip(texts, answers, strict=True):
            assert tokenizer.encode(text) == again.encode(text) == ids, text
            assert again.decode(ids) == text
        assert (again.vocab_size, type(again.backend)) == (tokenizer.vocab_size, type(tokenizer.backend))


@pytest.mark.parametrize(
    "changes",
    [{"tokens": ["a", "bc"], "token_type": [1, 1]}, {"tokens": ["a"], "token_type": [5]}, {"tokens": ["a", "\\x61"]}],
)
def test_another_vocabulary_of_that_kind_is_refused(changes: dict[str, Any]):
    metadata = {f"tokenizer.ggml.{key}": value for key, value in ({"model": "rwkv"} | changes).items()}
    with pytest.raises(UnsupportedTokenizerError, match=r"m\.gguf: .* rwkv"):
        from_gguf_metadata(metadata, "m.gguf")


@pytest.fixture
def config() -> ModelConfig:
    return ModelConfig(
        vocab_size=700, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=10000.0,
        tie_word_embeddings=False,
    )  # fmt: skip


CUT = [
    "Hello world", "  a  b   c ", "it's IT'S don't we'Ll", "12345 6 78901", "a1b2c3", "x\n\n y\r\n  z\n", "\t\tfoo",
    "ÉCOLE école CamelCaseWord XMLHttp", "日本語のテキスト 한국어 中文,。!", "!!! ... -- (x) [y] {z} $100 €5 ~^`|",
    "e\u0301a\u0308 नमस्ते ไทย", "a\u00a0b\u3000c\u200b", "😀👨‍👩‍👧 ok", "foo_bar.baz/qux\n/path", "'s 't 'S \u2019s",
    "١٢٣ Ⅷ ½ ①", "\n", "  \n", "a \n b", "tail  ", "   ", "\r\r", "1", "12", "1234", "µm ǅ ʰ ª", "«q» “q”",
    "\u03b9\u1fbe \u1fd3\u0390 \u2126\u03a9 \u212aK \u1f7d\u03ce \u1fdb\u038a",
]  # fmt: skip


def cut_texts() -> list[str]:
    choices = [*"abAB12 3'\n\r\t.,!é日ÉЖж$+<~|`_/", "  ", "'s", "'LL", "\u00a0", "\u0301", "😀"]
    rng = random.Random(0)
    return CUT + ["".join(rng.choices(choices, k=rng.randrange(2, 30))) for _ in range(60)]


def test_every_name_of_a_pre_tokenizer_cuts_as_llama_cpp(smollm2_path: Path, tmp_path: Path):
    metadata = {key: value for key, value in read_gguf(smollm2_path).metadata.items() if key.startswith("tokenizer.")}
    del metadata["tokenizer.chat_template"], metadata["tokenizer.ggml.add_bos_token"]
    names = [*cutter_names(), None]
    cases = [metadata | {"tokenizer.ggml.pre": name} for name in names[:-1]]
    cases.append({key: value for key, value in metadata.items() if key != "tokenizer.ggml.pre"})
    texts, jobs = cut_texts(), []
    for i, case in enumerate(cases):
        jobs.append((write_model_of(tmp_path / f"{i}.gguf", case), texts))
    for name, case, answers in zip(names, cases, llama_cpp(jobs), strict=True):
        tokenizer = quietly(case)
        for text, ids in zip(texts, answers, strict=True):
            assert tokenizer.encode(text, parse_special=True) == without_double_bos(ids), (name, text)


def quietly(metadata: dict[str, Any]) -> Tokenizer:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tokenizer.ggml.pre is missing")
        return from_gguf_metadata(metadata, "x.gguf")


@pytest.mark.parametrize("pre", [None, "something-new", 7])
def test_an_unknown_pre_tokenizer_is_the_default_with_one_warning(smollm2_path: Path, pre: object):
    metadata = {**read_gguf(smollm2_path).metadata, "tokenizer.ggml.pre": pre}
    with pytest.warns(UserWarning, match=r"tokenizer\.ggml\.pre") as caught:
        tokenizer = from_gguf_metadata(metadata, "x.gguf")
    assert len(caught) == 1
    default = from_gguf_metadata(metadata | {"tokenizer.ggml.pre": "default"}, "x.gguf")
    assert [tokenizer.encode(text) for text in CUT] == [default.encode(text) for text in CUT]
