r"""A vocabulary of words: a token is a word or a number with the space before it, a punctuation mark, or a line's end.

    "I love dogs, you know"    " I" " love" " dogs" "," " you" " know"

A space is put before a text, so that its first word is the token that it is elsewhere; decoding takes it away. A word
that the vocabulary lacks has no spelling, unlike in vocabularies of bytes and merges. `encode` refuses it, as decoding
could not give it back; only training reads it as `<|unknown|>`.

The file is a `tokenizer.json` with a WordLevel model. The `tokenizers` package and transformers read it, and give
`<|unknown|>` where this module refuses.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarium.errors import TokenizerError, counted, escape
from llamarium.tokenizer.backends import huggingface_rules as rules
from llamarium.tokenizer.backends.files import guard_rust, save_huggingface
from llamarium.tokenizer.backends.template_files import read_templates
from llamarium.tokenizer.base import Backend, Tokenizer
from llamarium.tokenizer.bpe import ByteLevelBPE
from llamarium.tokenizer.chat.templates import ChatTemplates
from llamarium.tokenizer.pieces import line_parts
from llamarium.tokenizer.special import SpecialTokens

if TYPE_CHECKING:
    import tokenizers
    from tokenizers.pre_tokenizers import PreTokenizer

UNKNOWN = "<|unknown|>"
_WORD = "[\\p{L}\\p{M}]+(?:['\u2019][\\p{L}\\p{M}]+)*"
_PATTERN = rf" ?{_WORD}| ?\p{{N}}+| ?[^\s\p{{L}}\p{{M}}\p{{N}}]|\s"
_SHOWN = 5  # unknown words in an error


def words_cutter() -> "PreTokenizer":
    """Return the pre-tokenizer; its pieces, joined, are the text."""
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Split(Regex(_PATTERN), "isolated")


def words_pipeline(words: Iterable[str]) -> "tokenizers.Tokenizer":
    """Return the package's tokenizer: `<|unknown|>`, the space, and the words, in this order."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, normalizers

    vocab = {word: i for i, word in enumerate(dict.fromkeys((UNKNOWN, " ", *words)))}
    inner = Inner(models.WordLevel(vocab, unk_token=UNKNOWN))
    inner.normalizer = normalizers.Prepend(" ")
    inner.pre_tokenizer = words_cutter()
    inner.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return inner


def load_words(path: Path, raw: dict[str, Any], config: dict[str, Any]) -> Tokenizer:
    """Read a `tokenizer.json` with a WordLevel model; TokenizerError unless its rules are this module's."""
    from tokenizers import Tokenizer as Inner

    vocab = rules.check_vocabulary(raw, str(path))
    inner = guard_rust(lambda: Inner.from_str(json.dumps(raw)), str(path))
    found, expected = _rules_of(inner), _rules_of(words_pipeline([]))
    if wrong := [name for name, rule in expected.items() if found[name] != rule]:
        raise TokenizerError(
            f"{path}: a WordLevel vocabulary with other rules ({', '.join(wrong)}) than `train-tokenizer --kind words` "
            "writes, which keep every character; expected those, or a BPE vocabulary"
        )
    if UNKNOWN not in vocab:
        raise TokenizerError(f"{path}: model.vocab has no {UNKNOWN}; expected an id for it")
    return make_words(inner, str(path), read_templates(path.parent, config))


def make_words(inner: "tokenizers.Tokenizer", source: str, chat_template: ChatTemplates | None = None) -> Tokenizer:
    """Wrap a tokenizer of the package that `words_pipeline` built, or its like."""
    backend = WordBackend(inner, source)
    size = max(inner.get_vocab().values()) + 1
    return Tokenizer(
        backend, SpecialTokens(), vocab_size=size, source=source, chat_template=chat_template, strip_first_space=True
    )


class WordBackend(Backend):
    """One id per word. `unknown_id` is that of `<|unknown|>`, which is shown in a text and never skipped."""

    def __init__(self, inner: "tokenizers.Tokenizer", source: str) -> None:
        self._inner = inner
        self._ids = inner.get_vocab()
        self._words = {i: word for word, i in self._ids.items()}
        self._source = source
        self._cutter = words_cutter()
        self.unknown_id = self._ids[UNKNOWN]

    def encode(self, text: str) -> list[int]:
        """Encode a text whose words are all known."""
        pieces = self._pieces(f" {text}") if text else []
        if unknown := Counter(piece for piece in pieces if piece not in self._ids):
            shown = ", ".join(repr(escape(word)) for word, _ in unknown.most_common(_SHOWN))
            more = "" if len(unknown) <= _SHOWN else f" and {len(unknown) - _SHOWN} more"
            raise TokenizerError(
                f"{self._source}: {unknown.total()} of {counted(len(pieces), 'token')} of the text "
                f"{'is' if unknown.total() == 1 else 'are'} not among the "
                f"{len(self._ids)} that this vocabulary has: {shown}{more}; as {UNKNOWN} they could not be decoded "
                "again. Use other words, or a vocabulary of bytes and merges, which spells any text"
            )
        return [self._ids[piece] for piece in pieces]

    def encode_with_unknown(self, text: str) -> Iterator[list[int]]:
        """Encode a text of any length for training, part by part, with `unknown_id` for unknown words."""
        for part in line_parts(f" {text}" if text else ""):
            yield [self._ids.get(piece, self.unknown_id) for piece in self._pieces(part)]

    def _pieces(self, text: str) -> list[str]:
        cutter: Any = self._cutter
        return [piece for piece, _ in guard_rust(lambda: cutter.pre_tokenize_str(text), self._source)]

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the UTF-8 of one word."""
        word = self._words.get(token_id)
        return None if word is None else word.encode("utf-8")

    def byte_level_bpe(self) -> ByteLevelBPE:
        """Return the readable implementation: each word is a piece and a token, without merges."""
        return ByteLevelBPE(
            ids={word.encode("utf-8"): i for word, i in self._ids.items()},
            rank=lambda left, right: None,
            cut=self._pieces,
            whole_pieces=True,
            prefix=" ",
        )

    def save(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`."""
        save_huggingface(folder, tokenizer, json.loads(self._inner.to_str()))


def _rules_of(inner: "tokenizers.Tokenizer") -> dict[str, Any]:
    """Return all but the words, as the package writes it."""
    raw: dict[str, Any] = json.loads(inner.to_str())
    model: dict[str, Any] = raw.pop("model")
    return {**raw, "unk_token": model["unk_token"]}
