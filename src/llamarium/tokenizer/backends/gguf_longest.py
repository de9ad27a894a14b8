r"""Character and word vocabularies in a GGUF file (`tokenizer.ggml.model` is "rwkv").

llama.cpp has a kind of vocabulary without merges and scores: at each position it takes the longest matching token. For
characters, and for the pieces of the word pre-tokenizer, this gives the same ids as this package. It also needs no end
token, which character vocabularies lack.

Tokens are escaped bytes: tab, newline and carriage return as in C, other bytes as `\xff` if needed.

Source: llama.cpp, `src/llama-vocab.cpp` (`llm_tokenizer_rwkv`, `llama_unescape_rwkv_token`).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llamarium.errors import UnsupportedTokenizerError, escape
from llamarium.tokenizer.backends.characters import CharacterBackend, CharacterTokenizer
from llamarium.tokenizer.backends.words import UNKNOWN, WordBackend, make_words, words_pipeline
from llamarium.tokenizer.base import Backend, Tokenizer
from llamarium.tokenizer.chat.templates import ChatTemplates

LONGEST_MATCH = "rwkv"
"""Name of longest-match vocabularies in GGUF files."""

_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _UNUSED = 1, 2, 5
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_ESCAPED = re.compile(r"\\(x[0-9a-f]{2}|.)", re.DOTALL)
_NOT_TEXT = "\\xff"  # never occurs in UTF-8, so an unused row matches no text


def is_longest_match(backend: Backend) -> bool:
    """Return whether a vocabulary encodes by repeatedly taking the longest matching token."""
    return isinstance(backend, CharacterBackend | WordBackend)


def longest_match_metadata(tokenizer: Tokenizer, num_rows: int) -> dict[str, Any]:
    """Return a character or word vocabulary as GGUF metadata, padded to the model's number of rows."""
    is_words = isinstance(tokenizer.backend, WordBackend)
    tokens = [f"{_NOT_TEXT}[{i}]" for i in range(num_rows)]
    types = [_UNUSED] * num_rows
    for i in range(tokenizer.vocab_size):
        text = (tokenizer.backend.token_bytes(i) or b"").decode("utf-8")
        tokens[i] = "".join(_ESCAPES.get(character, character) for character in text)
        types[i] = _UNKNOWN if is_words and text == UNKNOWN else _NORMAL
    metadata = {
        _KEY + "model": LONGEST_MATCH,
        _KEY + "tokens": tokens,
        _KEY + "token_type": types,
        _KEY + "add_bos_token": False,
        _KEY + "add_space_prefix": is_words,
    }
    return metadata | ({_KEY + "unknown_token_id": tokens.index(UNKNOWN)} if is_words else {})


def longest_match_tokenizer(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], templates: ChatTemplates, source: str
) -> Tokenizer:
    """Read a longest-match vocabulary; UnsupportedTokenizerError unless it has characters, or words as written here."""
    texts = [_ESCAPED.sub(_unescape, token) for token, kind in zip(tokens, types, strict=True) if kind != _UNUSED]
    if metadata.get(_KEY + "add_space_prefix") is True and texts[:2] == [UNKNOWN, " "]:
        return make_words(words_pipeline(texts[2:]), source, templates)
    if not texts or len(set(texts)) != len(texts) or any(len(text) != 1 for text in texts):
        raise UnsupportedTokenizerError(
            f"{escape(source)}: {_KEY}model is {LONGEST_MATCH}, and its tokens are neither characters nor the words of "
            "`llamarium train-tokenizer`; expected one of these"
        )
    return CharacterTokenizer.from_characters(texts, source)


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) == 3:
        return chr(int(code[1:], 16))
    return {"n": "\n", "r": "\r", "t": "\t"}.get(code, code)
