"""Text around control tokens has the ids that `tokenizers` gives the whole string, and no text becomes a control token.

The oracle reads the same contents of a `tokenizer.json`, under every combination of normalizer, pre-tokenizer and flags
of added tokens.
"""

import json
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Package
from tokenizers import decoders, models, pre_tokenizers, trainers

from llamarium.errors import TokenizerError
from llamarium.tokenizer.backends.huggingface import HuggingFaceBackend
from llamarium.tokenizer.special import split_control

CORPUS = ["the cat sat on the mat, and the rat sat on the hat; hi hi high", "naïve Übung 日本 12 345"] * 9
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Prepend", "prepend": "▁"}
NORMALIZERS: dict[str, Any] = {
    "none": None,
    "llama 2": {"type": "Sequence", "normalizers": [PREPEND, REPLACE]},
    "replace": REPLACE,
    "lower case": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, REPLACE]},
    "nfkc": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, PREPEND, REPLACE]},
}
SPLIT = {"type": "Split", "pattern": {"Regex": r" ?\w+| ?[^\s\w]+|\s+"}, "behavior": "Isolated", "invert": False}
CUTTERS: dict[str, Any] = {
    "none": None,
    **{
        f"metaspace {scheme} {split}": {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": scheme,
            "split": split,
        }
        for scheme, split in product(("first", "always", "never"), (True, False))
    },
}
BYTE_CUTTERS: dict[str, Any] = {
    f"bytes {prefix} {regex}": {
        "type": "Sequence",
        "pretokenizers": [
            *([SPLIT] if not regex else []),
            {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": regex},
        ],
    }
    for prefix, regex in product((True, False), repeat=2)
}
FLAGS = [
    dict(zip(("lstrip", "rstrip", "single_word", "normalized"), f, strict=True))
    for f in product((False, True), repeat=4)
]
CONTROL = ("<s>", "</s>", "<|end|>", "BOS", "<\uff5cUser\uff5c>")
PLAIN = ("<think>", "  ", "cat")
TEXTS = [
    *("hi", " hi", "hi ", "  hi  ", "hi\nhi", "\n", " ", "", "the cat sat", "naïve 日本 😀", "▁hi", "HI ﬁ"),
    *(f"{token}" for token in CONTROL),
    *(f"hi{token}hi" for token in CONTROL),
    *(f"hi {token} hi" for token in CONTROL),
    *(f"hi\n{token}\n\nhi" for token in CONTROL),
    *(f"{token} hi{token}" for token in CONTROL),
    *(f"<s>hi</s>{token}the cat <think>  x" for token in CONTROL),
    *(
        "<s><s>hi</s></s>",
        "<s> </s>",
        "<s>\n</s> \n <|end|>x",
        "cat<|end|>cat",
        "the<|end|>_",
        "é<|end|>é",
        "<|end|><s>é",
    ),
    *(
        "hi<think>hi",
        "<think></s><think>",
        "  </s>  ",
        "x  <s>  x",
        "<|end|",
        "<|en<|end|>d|>",
        "BOS BOSBOS",
        "xBOS BOSx",
    ),
    *(
        "<s>BOS<s>",
        "_BOS",
        "BOS</s>BOS",
        "1BOS1 BOS",
        "<\uff5cUser\uff5c>a<\uff5cUser\uff5c>",
        "<|end|> <|end|>",
        "hi </s>\t<s>\u3000hi",
    ),
]


@cache
def spm_model() -> dict[str, Any]:
    inner = Package(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    inner.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=380, special_tokens=special, show_progress=False))
    return json.loads(inner.to_str())["model"]


@cache
def byte_model() -> dict[str, Any]:
    inner = Package(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(CORPUS, trainer)
    return json.loads(inner.to_str())["model"]


def contents(
    normalizer: Any, cutter: Any, flags: dict[str, bool], *, byte_level: bool, whole_pieces: bool = False
) -> dict[str, Any]:
    """Return the contents of a `tokenizer.json`; the flags are those of every second added token."""
    model = byte_model() if byte_level else spm_model()
    vocab, added = model["vocab"], list[dict[str, Any]]()
    plain = dict.fromkeys(flags, False)
    for i, content in enumerate((*CONTROL, *PLAIN)):
        token_id = vocab.get(content, len(vocab) + sum(token["id"] >= len(vocab) for token in added))
        added.append({"id": token_id, "content": content, "special": content in CONTROL, **(plain if i % 2 else flags)})
    decoder = decoders.ByteLevel() if byte_level else decoders.Metaspace()
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": cutter,
        "post_processor": None,
        "decoder": json.loads(decoder.__getstate__()),
        "model": {**model, "ignore_merges": whole_pieces},
    }


def pair(raw: dict[str, Any]) -> tuple[HuggingFaceBackend, Package, dict[str, int]]:
    """Return the backend, the oracle, and the control tokens."""
    control = {token["content"]: token["id"] for token in raw["added_tokens"] if token["special"]}
    byte_level = raw["decoder"]["type"] == "ByteLevel"
    return (
        HuggingFaceBackend(raw, control, byte_level=byte_level, source="x"),
        Package.from_str(json.dumps(raw)),
        control,
    )


PIPELINES = [
    *(pytest.param(n, c, False, id=f"{i}-{j}") for (i, n), (j, c) in product(NORMALIZERS.items(), CUTTERS.items())),
    *(pytest.param(None, cutter, True, id=name) for name, cutter in BYTE_CUTTERS.items()),
]


def check(backend: HuggingFaceBackend, oracle: Package, control: dict[str, int], text: str) -> None:
    right = oracle.encode(text, add_special_tokens=False).ids
    assert backend.encode_parsed(text, control) == right, text
    assert backend.encode_parts(split_control(text, control)) == right, text


@pytest.mark.parametrize(("normalizer", "cutter", "byte_level"), PIPELINES)
def test_ids_around_control_tokens_are_the_packages(normalizer: Any, cutter: Any, byte_level: bool):
    for i, flags in enumerate(FLAGS):
        raw = contents(normalizer, cutter, flags, byte_level=byte_level, whole_pieces=i >= 8)
        backend, oracle, control = pair(raw)
        for text in TEXTS:
            check(backend, oracle, control, text)
            assert set(backend.encode(text)).isdisjoint(control.values()), text


def test_a_word_beside_a_token_of_whole_words():
    """A control token is as much a word's end for its neighbours as its own spelling is."""
    flags = dict(zip(FLAGS[0], (False, False, True, False), strict=True))
    backend, oracle, control = pair(contents(None, None, flags, byte_level=False))
    for text in ("BOS<s>BOS", "BOSBOS</s>", "<think>BOS", "BOS<think>BOS<think>"):
        check(backend, oracle, control, text)


BITS = st.sampled_from(
    [*CONTROL, *PLAIN, " ", "  ", "\n", "\t", "\u3000", "hi", "cat", "_", "1", "\u00e9", "\u2581", "<|"]
)
TEXT = st.lists(st.one_of(BITS, st.text(max_size=3)), max_size=12).map("".join)
SMALL = [
    (None, CUTTERS["metaspace first False"], False),
    (None, CUTTERS["metaspace always True"], False),
    (NORMALIZERS["llama 2"], None, False),
    (NORMALIZERS["nfkc"], None, False),
    (None, BYTE_CUTTERS["bytes False True"], True),
]


@cache
def some_pair(which: int, flags: int) -> tuple[HuggingFaceBackend, Package, dict[str, int]]:
    normalizer, cutter, byte_level = SMALL[which]
    return pair(contents(normalizer, cutter, FLAGS[flags], byte_level=byte_level))


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(which=st.integers(0, len(SMALL) - 1), flags=st.integers(0, len(FLAGS) - 1), text=TEXT)
def test_any_text_around_control_tokens(which: int, flags: int, text: str):
    backend, oracle, control = some_pair(which, flags)
    try:
        right = oracle.encode(text, add_special_tokens=False).ids
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        with pytest.raises(TokenizerError):  # the package gives up on overlapping flags
            backend.encode_parsed(text, control)
        return
    assert backend.encode_parsed(text, control) == right
    if which != 3:  # NFKC could make a control token of what is none
        assert backend.encode_parts(split_control(text, control)) == right


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(which=st.integers(0, len(SMALL) - 1), flags=st.integers(0, 15), data=st.data())
def test_no_text_becomes_a_control_token(which: int, flags: int, data: st.DataObject):
    """Whatever stands in the texts, the control tokens are those that were put there, or fewer by their flags."""
    backend, _, control = some_pair(which, flags)
    ids = sorted(set(control.values()))
    assert set(backend.encode(data.draw(TEXT))).isdisjoint(ids)
    texts = data.draw(st.lists(TEXT, min_size=1, max_size=4))
    parts: list[str | int] = []
    for text in texts:
        parts += [data.draw(st.sampled_from(ids)), *([text] if text else [])]
    result = [i for i in backend.encode_parts(parts) if i in ids]
    put = [part for part in parts if not isinstance(part, str)]
    if FLAGS[flags]["single_word"] or FLAGS[flags]["normalized"]:
        rest = iter(put)
        assert all(i in rest for i in result)
    else:
        assert result == put


def test_merges_to_a_control_token_are_not_taken():
    """A vocabulary whose merges make a control token's spelling, as some GGUF files have it."""
    raw = contents(None, None, FLAGS[0], byte_level=False)
    vocab = {text: i for i, text in enumerate(("<unk>", "h", "i", "hi", "hihi"))}
    raw["model"] |= {"vocab": vocab, "merges": [["h", "i"], ["hi", "hi"]], "byte_fallback": False}
    raw["added_tokens"] = [{"id": 4, "content": "hihi", "special": True, **FLAGS[0]}]
    backend, oracle, control = pair(raw)
    assert control["hihi"] not in backend.encode("hihi")
    assert backend.encode_parsed("hihi", control) == oracle.encode("hihi").ids == [control["hihi"]]
    assert backend.token_bytes(control["hihi"]) == b"hihi"
