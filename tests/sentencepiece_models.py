"""SentencePiece vocabularies in all variants, trained in a moment by the library itself."""

import functools
import io
from typing import Any

import sentencepiece

TEXT = """\
The quick brown fox jumps over the lazy dog, and the dog sleeps on.
A llama is a quiet animal of the Andes; llamas carry loads, and hum when they are content.
def main(argv):
    return [int(x) for x in argv if x.isdigit()]
Zürich, Köln und Ærø: größer, schöner, weiter. Ελληνικά, русский язык, 日本語の文章です。
The price was 12,345.67 in 2024 -- was it not? Yes: 100% of it!
"""
USER_DEFINED = ("foo", "<x>", "  ", "foofoo", "a\u2581b", "hello world")

# Texts on which implementations differ: edges, runs of spaces, ▁ itself, NUL, pieces' spellings, composed characters.
TEXTS = [
    "", " ", "  ", "\u2581", "\u2581\u2581 ", "\n", "\t\t", "\0", "a\0b", " a", "a ", "  the   dog  ", "the dog",
    "the\u2581dog", "the dog\n", "\n\n  the\r\n\tdog ", "<s>", "</s>the", "<unk>", "<0x41>", "<ctl>", "foo", "foofoo",
    "xfoo bar", "fo o", "foofoofoo", "<x>", "the<x>dog", "hello world", "say hello world now", "a b", "xa b", "aab",
    "\ufb01ne \u2460 \uff21 \u2167", "e\u0301\u0301", "\u00e9", "\uac00\u11a8", "\u1100\u1161\u11a8",
    "\u00a0a\u3000b\u200bc",
    "\ufeffa", "日本語", "😀👨‍👩‍👧", "\U0010ffff", "ab" * 40, "a" * 97, " " * 33, "the " * 9, "\u00ad", "1234567890",
    "def f(x):\n    return x", "Llama llamas LLAMA", "größer", "\u2028\u2029\x85", "~`^|\\", "ﷺ",
]  # fmt: skip


@functools.cache
def trained(kind: str = "bpe", **options: Any) -> bytes:
    """Return a `tokenizer.model`: 400 pieces, or as many bytes more."""
    out = io.BytesIO()
    settings: dict[str, Any] = {
        "vocab_size": 400 + 256 * bool(options.get("byte_fallback")),
        "hard_vocab_limit": False,
        "control_symbols": ["<ctl>"],
        "minloglevel": 2,
        "num_threads": 1,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines() * 8), model_writer=out, model_type=kind, **settings | options
    )
    return out.getvalue()


def library(data: bytes) -> Any:
    """Return the library's own reader of a model."""
    return sentencepiece.SentencePieceProcessor(model_proto=data)
