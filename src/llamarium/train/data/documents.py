"""How a document becomes ids, in pretraining and as a raw text among examples; without torch."""

from collections.abc import Iterator

from llamarium.tokenizer.backends.words import WordBackend
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.pieces import encode_pieces


def document_ids(tokenizer: Tokenizer, document: str) -> Iterator[list[int]]:
    """Yield a document's ids part by part, with what begins and ends it; TokenizerError if it cannot be encoded."""
    yield ids_before(tokenizer)
    words = tokenizer.backend if isinstance(tokenizer.backend, WordBackend) else None
    yield from words.encode_with_unknown(document) if words else encode_pieces(tokenizer, document)
    yield ids_after(tokenizer)


def ids_before(tokenizer: Tokenizer) -> list[int]:
    """Return the ids before each document, by the tokenizer's own rule."""
    return [tokenizer.special.bos] if tokenizer.special.add_bos and tokenizer.special.bos is not None else []


def ids_after(tokenizer: Tokenizer) -> list[int]:
    """Return the ids after each document: the first of the end-of-text tokens."""
    return list(tokenizer.eos_token_ids[:1])
