"""Train a tokenizer on texts: byte-level BPE, words, or characters.

Byte-pair encoding starts with the 256 bytes as tokens, and repeatedly merges the most frequent pair of adjacent tokens
until the vocabulary has the requested size. No token crosses the splits of Llama 3's pre-tokenizer: roughly words with
the preceding space, and numbers of up to three digits. As in Llama 3, control tokens come last.

Training keeps only the counts of distinct words, so larger texts cost time, not memory. Pieces of more than 1,024
bytes, as in text without spaces, are counted in parts of 1,024, as the time grows with the square of their length.
Words of ordinary text are shorter, so this does not change their vocabulary; encoding has no such limit.

Source: Sennrich, Haddow, Birch 2016, "Neural Machine Translation of Rare Words with Subword Units", section 3.2. The
`tokenizers` package does the work.
"""

import json
from collections.abc import Callable, Iterable, Iterator

from llamarium.errors import TrainingError
from llamarium.tokenizer.backends.files import MAX_TOKENS, guard_rust
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.pieces import line_parts
from llamarium.tokenizer.special import SpecialTokens, check_text

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
SMALLEST_VOCAB = 256 + 2
"""One token per byte, and the two control tokens."""

Counted = Callable[[int], None]
"""Called with the number of characters counted so far, about every million."""

_LONGEST_PIECE = 1024  # bytes
_PART = 4096  # characters per part, at least; `tokenizers` takes 256 texts at once
_MIN_FREQUENCY = 2  # a pair that occurs once is not merged


def train_bpe(texts: Iterable[str], vocab_size: int, counted: Counted | None = None) -> Tokenizer:
    """Train a byte-level BPE tokenizer; the same texts in the same order give the same tokenizer.

    `vocab_size` includes the 256 bytes, the merges and the two control tokens. TrainingError if it is out of range, or
    if the texts are too small for that many merges; TokenizerError if a text is not valid Unicode.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Inner

    from llamarium.tokenizer.backends.huggingface import HuggingFaceBackend
    from llamarium.tokenizer.backends.pipeline import llama3_cutter

    if not SMALLEST_VOCAB <= vocab_size <= MAX_TOKENS:
        raise TrainingError(
            f"a vocabulary of {vocab_size} tokens; expected {SMALLEST_VOCAB} (the 256 bytes, {BEGIN} and {END}) to "
            f"{MAX_TOKENS}"
        )
    inner = Inner(models.BPE())
    parts = pre_tokenizers.Split(Regex(rf"[\s\S]{{1,{_LONGEST_PIECE}}}"), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([llama3_cutter(), parts])
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 2,
        min_frequency=_MIN_FREQUENCY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    guard_rust(lambda: inner.train_from_iterator(_pieces(texts, counted), trainer), "learning the vocabulary")
    inner.pre_tokenizer = llama3_cutter()
    learned = inner.get_vocab_size()
    if learned < vocab_size - 2:
        raise TrainingError(
            f"the texts repeat too little for a vocabulary of {vocab_size}: it ends at {learned + 2} tokens; ask for "
            "at most as many, or give more text"
        )
    inner.add_special_tokens([BEGIN, END])
    ids = {text: learned + i for i, text in enumerate((BEGIN, END))}
    special = SpecialTokens(ids=ids, bos=ids[BEGIN], eos=(ids[END],), add_bos=True)
    source = "the learned vocabulary"
    backend = HuggingFaceBackend(json.loads(inner.to_str()), ids, byte_level=True, source=source)
    return Tokenizer(backend, special, vocab_size=vocab_size, source=source)


def train_words(texts: Iterable[str], vocab_size: int, counted: Counted | None = None) -> Tokenizer:
    """Train a word-level tokenizer on the most frequent words.

    `vocab_size` is an upper bound, including `<|unknown|>` and the space. TrainingError if it is out of range;
    TokenizerError if a text is not valid Unicode.
    """
    from tokenizers import Tokenizer as Inner
    from tokenizers import models, trainers

    from llamarium.tokenizer.backends.words import UNKNOWN, make_words, words_cutter, words_pipeline

    if not 3 <= vocab_size <= MAX_TOKENS:
        raise TrainingError(f"a vocabulary of {vocab_size} words; expected 3 ({UNKNOWN}, the space, a word) or more")
    inner = Inner(models.WordLevel({}, unk_token=UNKNOWN))
    inner.pre_tokenizer = words_cutter()
    trainer = trainers.WordLevelTrainer(vocab_size=vocab_size, min_frequency=1, show_progress=False)
    spaced = _pieces((f" {text}" for text in texts), counted)
    guard_rust(lambda: inner.train_from_iterator(spaced, trainer), "learning the vocabulary")
    ids = inner.get_vocab()
    words = [word for word in sorted(ids, key=ids.__getitem__) if word != " "]
    return make_words(words_pipeline(words[: vocab_size - 2]), "the learned vocabulary")


def train_characters(texts: Iterable[str], counted: Counted | None = None) -> Tokenizer:
    """Train a character tokenizer: every distinct character is a token, in code point order.

    TokenizerError if the texts have no characters.
    """
    from llamarium.tokenizer.backends.characters import CharacterTokenizer

    alphabet: set[str] = set()
    for part in _pieces(texts, counted):
        alphabet.update(part)
    return CharacterTokenizer.from_text("".join(sorted(alphabet)))


def _pieces(texts: Iterable[str], counted: Counted | None) -> Iterator[str]:
    """Split long texts without changing any counts, as the memory of `tokenizers` grows with the longest text."""
    done = 0
    for text in texts:
        check_text(text)
        for part in line_parts(text, _PART):
            yield part
            done += len(part)
            if counted is not None:
                counted(done)
