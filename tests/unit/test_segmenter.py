"""The segmentation of SentencePiece vocabularies: in C, in Python and by the library, which give the same ids."""

import itertools
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from llamarium.errors import MemoryBudgetError
from llamarium.kernels.native import library as native_library
from llamarium.kernels.segmenter import Segmenter
from llamarium.tokenizer.sentencepiece.encoder import Encoder
from llamarium.tokenizer.sentencepiece.model import SentencePieceModel, byte_piece, read_model, write_model
from llamarium.tokenizer.sentencepiece.normalize import KeptTexts, Normalizer, split_matches
from llamarium.tokenizer.sentencepiece.segment import PythonSegmenter, make_segmenter
from sentencepiece_models import TEXT, TEXTS, USER_DEFINED, library, trained

pytestmark = [
    pytest.mark.skipif(native_library() is None, reason="the C library is not used here"),
    pytest.mark.timeout(600),
]

NATIVE = Path(__file__).parents[2] / "native"
KINDS = ("bpe", "unigram")
NAMES = {"bos": "<s>", "eos": "</s>", "pad": "<pad>"}


def vocabulary(
    kind: str,
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int] | None = None,
    *,
    byte_fallback: bool = False,
) -> SentencePieceModel:
    """Return a vocabulary of these pieces, with control pieces before them and bytes behind."""
    fallback = [byte_piece(byte) for byte in range(256)] if byte_fallback else []
    return SentencePieceModel(
        kind=kind,
        pieces=["<unk>", "<s>", "</s>", *pieces, *fallback],
        scores=[0.0] * 3 + [float(np.float32(score)) for score in scores] + [0.0] * len(fallback),
        types=[2, 3, 3, *(types or [1] * len(pieces)), *[6] * len(fallback)],
        byte_fallback=byte_fallback,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        names=NAMES,
    )


def check(data: bytes, texts: Sequence[str]) -> None:
    """Compare the three on texts."""
    model = read_model(data, "m")
    native, python, theirs = Encoder(model, "m"), PythonSegmenter(model), library(data)
    normalizer = Normalizer(model, "m")
    for text in texts:
        ids = native.encode(text)
        assert ids == theirs.encode(text), text
        assert ids == python.ids(normalizer.normalize(text)), text


@pytest.mark.parametrize("kind", KINDS)
def test_trained_vocabularies(kind: str):
    for fallback, user_defined in itertools.product((False, True), ((), USER_DEFINED)):
        data = trained(kind, byte_fallback=fallback, user_defined_symbols=user_defined)
        check(data, [*TEXTS, TEXT, TEXT[::-1], TEXT.replace(" ", "")])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alphabet", ["ab", "abc", "a\u00e9\u2581\u65e5\U0001f600", "a\1 \n"])
@pytest.mark.parametrize("seed", range(12))
def test_random_vocabularies_with_ties(kind: str, alphabet: str, seed: int):
    """Few scores, so that many are equal; unused, user-defined and missing characters, parts of every length."""
    rng = random.Random(seed)
    pieces = set(alphabet if seed % 3 else alphabet[:1])
    for _ in range(rng.randrange(40)):
        pieces.add("".join(rng.choices(alphabet, k=rng.randrange(2, 8))).replace(" ", "\u2581"))
    listed = sorted(pieces - {" "})
    scores = rng.choices((-1.1, -2.2, -2.3, -3.3, -4.05, -4.4, 0), k=len(listed))
    types = rng.choices((1, 1, 1, 4, 5) if seed % 2 else (1, 1, 4), k=len(listed))
    data = write_model(vocabulary(kind, listed, scores, types, byte_fallback=seed % 4 < 2))
    texts = ["", "a" * 100, alphabet * 40]
    for longest in (20, 200):
        texts += ["".join(rng.choices(alphabet * 8 + "d \u6f22\0", k=rng.randrange(1, longest))) for _ in range(30)]
    check(data, texts)


def test_scores_of_one_rank_and_infinite_ones():
    for scores in itertools.product((0.0, -0.0, -1e-45, float("-inf"), float("inf")), repeat=3):
        data = write_model(vocabulary("bpe", ["a", "b", "ab", "ba", "aba"], [0, 0, *scores]))
        check(data, ["ab" * 50, "ba" * 50, "abba" * 9, "bab"])


@pytest.mark.parametrize("seed", range(20))
def test_sums_that_begin_again_and_again(seed: int):
    """A sum above 100,000 is brought back to 0, and those of the ways that reach over this place with it."""
    rng = random.Random(seed)
    pieces = sorted({*"ab", *("".join(rng.choices("ab", k=rng.randrange(2, 12))) for _ in range(40))})
    scores = [-rng.choice((9.1, 999.7, 33_333.3, 70_000.1, 100_000.7)) * len(piece) for piece in pieces]
    texts = ["".join(rng.choices("aabbc", k=rng.randrange(1, 300))) for _ in range(40)]
    check(write_model(vocabulary("unigram", pieces, scores, byte_fallback=seed % 2 == 0)), texts)


def test_rules_of_all_characters():
    """Normalization looks only where a rule may match; it is the library's on every pair of these."""
    for rules in ("nmt_nfkc", "nfkc_cf", "nmt_nfkc_cf"):
        data = trained("unigram", normalization_rule_name=rules, byte_fallback=True)
        ours, theirs = Encoder(read_model(data, "m"), "m"), library(data)
        characters = [
            *map(chr, range(1, 0x250)),
            *"\u0300\u0301\u0327\u0338\u0345\u1100\u1161\u11a8\uac00\u304b\u3099\uff76\uff9e\u2126",
        ]
        rng = random.Random(0)
        for _ in range(40):
            text = "".join(rng.choices(characters, k=300))
            assert ours.encode(text) == theirs.encode(text), rules


def test_zeros_within_pieces_and_texts():
    """The library cannot read such pieces, so Python's are the oracle."""
    for kind in KINDS:
        model = vocabulary(kind, ["\0", "a", "\0a", "a\0", "\0\0"], [-3, -3, -4, -4, -5], byte_fallback=True)
        for text in ("\0", "a\0", "\0a\0\0", "\0" * 99, "b\0a"):
            assert make_segmenter(model).ids(text) == PythonSegmenter(model).ids(text)


@pytest.mark.parametrize("kind", KINDS)
def test_many_threads_at_once(kind: str):
    segmenter = make_segmenter(read_model(trained(kind, user_defined_symbols=USER_DEFINED), "m"))
    texts = [TEXT[start:] * 3 for start in range(64)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(segmenter.ids, texts)) == list(map(segmenter.ids, texts))


def seconds(segmenter: Segmenter, text: str) -> float:
    """Return the processor's time, the best of three."""
    taken: list[float] = []
    for _ in range(3):
        start = time.process_time()
        segmenter.ids(text)
        taken.append(time.process_time() - start)
    return min(taken)


@pytest.mark.parametrize("kind", KINDS)
def test_any_text_takes_near_linear_time(kind: str):
    segmenter = make_segmenter(read_model(trained(kind, byte_fallback=True), "m"))
    for unit in ("a", "\u2581", "ab", "thequick", "\u65e5", "\U0001f600", "the\u2581dog\u2581"):
        short, long = unit * (50_000 // len(unit)), unit * (400_000 // len(unit))
        assert seconds(segmenter, long) < 24 * seconds(segmenter, short) + 0.02, unit


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_every_length(kind: str):
    """Each is one character longer than the one before: 600 places for a pair in the longest."""
    model = vocabulary(kind, ["a" * size for size in range(1, 601)], [-1 - size / 4096 for size in range(600)])
    start = time.process_time()
    segmenter = make_segmenter(model)
    assert time.process_time() - start < 5
    text = "a" * 600 + "b" + "a" * 37
    assert segmenter.ids(text) == PythonSegmenter(model).ids(text)


@pytest.mark.parametrize("kind", KINDS)
def test_the_time_of_a_text_does_not_depend_on_how_long_user_defined_pieces_are(kind: str):
    pieces, scores, types = ["a", "b", "aa"], [-2, -2, -1], [1, 1, 1]
    plain = make_segmenter(vocabulary(kind, pieces, scores, types))
    kept = ["a" * 1000 + "b", *("a" * size + "c" for size in range(1, 2000, 7))]
    model = vocabulary(kind, [*pieces, *kept], [*scores, *[0] * len(kept)], [*types, *[4] * len(kept)])
    segmenter, text = make_segmenter(model), "a" * 200_000
    assert isinstance(segmenter, Segmenter)
    assert seconds(segmenter, text) < 8 * seconds(plain, text) + 0.02
    for text in ("a" * 1999 + "c", "b" + "a" * 2500 + "b" + "a" * 701 + "ca", "a" * 1500 + "ba" * 9 + "aacc"):
        assert segmenter.ids(text) == PythonSegmenter(model).ids(text)


def test_normalization_takes_the_same_time_for_user_defined_pieces_of_many_lengths():
    texts = ["a" * size + "c" for size in range(1, 1001)]
    start = time.process_time()
    (plain,) = split_matches("a" * 20_000, (KeptTexts(texts),))
    assert time.process_time() - start < 2 and plain == ("a" * 20_000, None)


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_kept_text_is_found(seed: int):
    rng = random.Random(seed)
    texts = {"".join(rng.choices("ab", k=rng.randrange(1, 9))) for _ in range(rng.randrange(1, 60))}
    kept, text = KeptTexts(texts), "".join(rng.choices("aabbc", k=500))
    for start in range(len(text)):
        expected = max((one for one in texts if text.startswith(one, start)), key=len, default="")
        assert kept.longest(text, start) == (len(expected), expected)


HOSTILE = """
import random, resource, sys, time
from llamarium.tokenizer.sentencepiece.model import SentencePieceModel
from llamarium.tokenizer.sentencepiece.segment import make_segmenter

kind = sys.argv[1]
rng = random.Random(0)
pieces = [f"{i:x}" for i in range(10**6)] + ["z" * 10**6, "z" * 999_999, "y\\0" * 10**5]
scores = [-float(i % 1000) for i in range(len(pieces))]
model = SentencePieceModel(
    kind=kind, pieces=["<unk>", *pieces], scores=[0.0, *scores], types=[2, *[1] * len(pieces)],
    names={"bos": "<s>", "eos": "</s>", "pad": "<pad>"},
)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
segmenter = make_segmenter(model)
tables = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for text in ("", "z" * 10**7, "0123456789abcdef" * 62_500, "\\0" * 10**7, "\\U0001f600 " * 10**6):
    ids = segmenter.ids(text)
    assert all(0 <= i < len(model.pieces) for i in set(ids)), text[:9]
texts = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((tables - before) // 1024, (texts - tables) // 1024, time.process_time())
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_million_pieces_long_ones_and_ten_megabytes(kind: str):
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE, kind], capture_output=True, text=True, check=True, timeout=300
    )
    tables, texts, processor = map(float, done.stdout.split())
    assert tables < 600 and texts < 1200, (tables, texts)
    assert processor < 120


def test_no_memory_is_an_error():
    segmenter = make_segmenter(read_model(trained("bpe"), "m"))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    text = "a" * 10**7
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used + 90 * 2**20, limits[1]))
        with pytest.raises((MemoryBudgetError, MemoryError)):
            segmenter.ids(text)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert segmenter.ids("a")


SANITIZED = """
import ctypes, random, sys
from unittest import mock
from llamarium.kernels import segmenter
from llamarium.tokenizer.sentencepiece import segment
from llamarium.tokenizer.sentencepiece.model import SentencePieceModel

checked = ctypes.CDLL(sys.argv[1])
mock.patch.object(segmenter, "library", lambda: checked).start()
mock.patch.object(segment, "library", lambda: checked).start()
rng = random.Random(0)
for round in range(60):
    alphabet = rng.choice(("ab", "a\\u00e9\\u2581\\u65e5\\U0001f600", "\\0\\1a"))
    pieces = sorted({*alphabet[1:], *("".join(rng.choices(alphabet, k=rng.randrange(1, 12))) for _ in range(30))})
    kind = rng.choice(("bpe", "unigram"))
    model = SentencePieceModel(
        kind=kind, pieces=["<unk>", *pieces], scores=[0.0, *(-rng.choice((1.5, 2.5, 60_000.0)) for _ in pieces)],
        types=[2, *rng.choices((1, 1, 4, 5), k=len(pieces))], names={"bos": "<s>", "eos": "</s>", "pad": "<pad>"},
    )
    ours, python = segment.make_segmenter(model), segment.PythonSegmenter(model)
    for size in (0, 1, 2, 30, 300):
        text = "".join(rng.choices(alphabet + "z\\u6f22", k=size))
        assert ours.ids(text) == python.ids(text)
"""


def test_memory_is_respected(tmp_path: Path):
    """Compiled with sanitizers, which end the process at the first access outside, or what C leaves undefined."""
    if (gcc := shutil.which("gcc")) is None:
        pytest.skip("gcc is not here")
    found = [
        subprocess.run([gcc, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(map(os.path.isabs, found)):
        pytest.skip("gcc has no sanitizers here")
    sources = [str(NATIVE / f"{name}.c") for name in ("segment", "merge", "best_cut")]
    flags = ["-O1", "-g", "-std=gnu11", "-fPIC", "-shared", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    made = str(tmp_path / "checked.so")
    subprocess.run([gcc, *flags, *sources, "-lm", "-o", made], check=True)
    environment = os.environ | {"LD_PRELOAD": ":".join(found), "ASAN_OPTIONS": "detect_leaks=0"}
    subprocess.run([sys.executable, "-c", SANITIZED, made], env=environment, check=True, timeout=280)


ENDS = """
import threading, time
from llamarium.tokenizer.sentencepiece.model import SentencePieceModel
from llamarium.tokenizer.sentencepiece.segment import make_segmenter

pieces = ["a" * n for n in range(1, 600)]
model = SentencePieceModel(
    kind="unigram", pieces=["<unk>", *pieces], scores=[0.0] + [-1.0] * len(pieces), types=[2, *[1] * len(pieces)],
    names={"bos": "<s>", "eos": "</s>", "pad": "<pad>"},
)
made = make_segmenter(model)
threading.Thread(target=made.ids, args=("a" * 2_000_000,), daemon=True).start()
time.sleep(0.1)
"""


def test_a_program_may_end_while_a_thread_of_it_encodes():
    subprocess.run([sys.executable, "-c", ENDS], check=True, timeout=100)
