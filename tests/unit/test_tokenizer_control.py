"""Text around control tokens has the ids that `tokenizers` gives the whole string, and no text becomes a control token.

The oracle reads the same contents of a `tokenizer.json`, under every combination of normalizer, pre-tokenizer and flags
of added tokens.
"""

import json
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
from tokenizers import Tokenizer as Package
from tokenizers import decoders, models, pre_tokenizers, trainers

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


def tokenizer_files() -> Iterator[Any]:
    for (normal, normalizer), (cut, cutter), i in product(NORMALIZERS.items(), CUTTERS.items(), range(len(FLAGS))):
        yield pytest.param(normalizer, cutter, i, False, id=f"{normal}-{cut}-{i}")
    for (cut, cutter), i in product(BYTE_CUTTERS.items(), range(len(FLAGS))):
        yield pytest.param(None, cutter, i, True, id=f"{cut}-{i}")


def check(backend: HuggingFaceBackend, oracle: Package, control: dict[str, int], text: str) -> None:
    right = oracle.encode(text, add_special_tokens=False).ids
    assert backend.encode_parsed(text, control) == right, text
    assert backend.encode_parts(split_control(text, control)) == right, text


@pytest.mark.parametrize(("normalizer", "cutter", "flags", "byte_level"), list(tokenizer_files()))
def test_ids_around_control_tokens_are_the_packages(normalizer: Any, cutter: Any, flags: int, byte_level: bool):
    backend, oracle, control = pair(
        contents(normalizer, cutter, FLAGS[flags], byte_level=byte_level, whole_pieces=flags > 7)
    )
    for text in TEXTS:
        check(backend, oracle, control, text)
        assert set(backend.encode(text)).isdisjoint(control.values()), text
