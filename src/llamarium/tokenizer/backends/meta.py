"""Meta's `tokenizer.model` for Llama 3, run by the `tiktoken` package.

A text file with 128,000 lines, `base64(token) rank`. The rank is the token's id and at the same time the order of its
merge: two neighbours join if their concatenation is a token, the lowest rank first. 256 control tokens follow, whose
names are not in the file. Llama 2's file of the same name is another format, SentencePiece's.

Source: llama-models, `llama3/tokenizer.py`.
"""

import binascii
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from llamarium.errors import TokenizerError, escape
from llamarium.tokenizer.backends.files import read_bytes, save_huggingface
from llamarium.tokenizer.backends.pipeline import LLAMA3_PATTERN, byte_level_json, llama3_cutter
from llamarium.tokenizer.base import Backend, Tokenizer
from llamarium.tokenizer.bpe import ByteLevelBPE, spell
from llamarium.tokenizer.special import SpecialTokens

if TYPE_CHECKING:
    import tiktoken

NUM_RANKS = 128_000
NUM_SPECIAL_TOKENS = 256
_NAMED_SPECIAL_TOKENS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
    "<|python_tag|>", "<|image|>",
)  # fmt: skip
_MAX_FILE_BYTES = 16 * 2**20  # Llama 3's has 2.2 MB

# Unicode's White_Space without \r and \n, as the pattern's \s reads it. A run is tried from its beginning only and
# never given back (`+`), so that looking for long ones takes one pass.
_BLANK = "[\t\x0b\x0c \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
_LONG_BLANK = re.compile(f"(?<!{_BLANK}){_BLANK}{{100000,}}+(?![\r\n])")


def load_meta(path: Path) -> Tokenizer:
    """Read Llama 3's `tokenizer.model`; TokenizerError if it is damaged, or of another format."""
    source = str(path)
    tokens = _read_ranks(read_bytes(path, _MAX_FILE_BYTES), source)
    names = [*_NAMED_SPECIAL_TOKENS]
    names += [f"<|reserved_special_token_{2 + i}|>" for i in range(NUM_SPECIAL_TOKENS - len(names))]
    ids = {name: NUM_RANKS + i for i, name in enumerate(names)}
    special = SpecialTokens(
        ids=ids,
        bos=ids["<|begin_of_text|>"],
        eos=(ids["<|end_of_text|>"], ids["<|eom_id|>"], ids["<|eot_id|>"]),
        pad=ids["<|finetune_right_pad_id|>"],
        add_bos=True,
    )
    backend = MetaBackend(tokens, [name.encode() for name in names], source)
    return Tokenizer(backend, special, vocab_size=NUM_RANKS + NUM_SPECIAL_TOKENS, source=source)


class MetaBackend(Backend):
    """Ranks that the `tiktoken` package runs."""

    def __init__(self, tokens: list[bytes], names: list[bytes], source: str) -> None:
        """Take the tokens in the order of their ranks, and the control tokens that follow them."""
        self._tokens = tokens
        self._names = names
        self._source = source

    @cached_property
    def _ranks(self) -> dict[bytes, int]:
        return {token: rank for rank, token in enumerate(self._tokens)}

    @cached_property
    def _encoding(self) -> "tiktoken.Encoding":
        import tiktoken

        return tiktoken.Encoding("llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=self._ranks, special_tokens={})

    def encode(self, text: str) -> list[int]:
        r"""Encode ordinary text.

        The regular expression engine keeps a stack entry per character of `\s+(?!\S)` and gives up at a million.
        That alternative takes a run of blanks without line ends up to the last one, which goes with the next word, so
        such a long run is cut out here and encoded as the one piece that it is.
        """
        encoding = self._encoding
        ids: list[int] = []
        done = 0
        for run in _LONG_BLANK.finditer(text):
            end = run.end() if run.end() == len(text) else run.end() - 1
            ids += encoding.encode_ordinary(text[done : run.start()])
            ids += encoding._encode_single_piece(text[run.start() : end])  # pyright: ignore[reportPrivateUsage]
            done = end
        return ids + encoding.encode_ordinary(text[done:] if done else text)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of one token."""
        if token_id < NUM_RANKS:
            return self._tokens[token_id]
        return self._names[token_id - NUM_RANKS]

    def byte_level_bpe(self) -> ByteLevelBPE:
        """Return the readable twin. The rank of a merge is the id of the token that it makes."""
        import regex

        pattern = regex.compile(LLAMA3_PATTERN)
        ranks = self._ranks
        return ByteLevelBPE(
            ids=ranks, rank=lambda left, right: ranks.get(left + right), cut=pattern.findall, whole_pieces=True
        )

    def save(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Write `tokenizer.json`, whose merges are derived from the ranks, and `tokenizer_config.json`."""
        contents = byte_level_json(
            vocab={spell(token): rank for token, rank in self._ranks.items()},
            merges=[(spell(left), spell(right)) for left, right in self._merges()],
            special=tokenizer.special.ids,
            cutter=llama3_cutter(),
            whole_pieces=True,
        )
        save_huggingface(folder, tokenizer, contents)

    def _merges(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the merges in order: every way to cut a token into two tokens, the better known halves first."""
        ranks = self._ranks
        for token in self._tokens:
            cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
            halves = [(ranks[left], ranks[right]) for left, right in cuts if left in ranks and right in ranks]
            yield from ((self._tokens[left], self._tokens[right]) for left, right in sorted(halves))


def _read_ranks(data: bytes, source: str) -> list[bytes]:
    lines = data.splitlines()
    if len(lines) != NUM_RANKS:
        _read_line(lines[0], 0, source)
        raise TokenizerError(
            f"{source}: {len(lines)} lines; expected {NUM_RANKS}, as Llama 3's tokenizer.model has (cut off in "
            "a download, or another model's?)"
        )
    tokens = [_read_line(line, rank, source) for rank, line in enumerate(lines)]
    first: dict[bytes, int] = {}
    for rank, token in enumerate(tokens):
        if first.setdefault(token, rank) != rank:
            raise TokenizerError(
                f"{source}: lines {first[token] + 1} and {rank + 1} hold the same token {escape(token)}"
            )
    missing = [byte for byte in range(256) if bytes([byte]) not in first]
    if missing:
        raise TokenizerError(f"{source}: no token for the bytes {missing[:10]}; expected one for each of the 256")
    return tokens


def _read_line(line: bytes, rank: int, source: str) -> bytes:
    encoded, _, number = line.partition(b" ")
    try:
        token = binascii.a2b_base64(encoded, strict_mode=True)
    except binascii.Error:
        token = b""
    if not token or number != b"%d" % rank:
        raise TokenizerError(
            f"{source}: line {rank + 1} is {escape(line.decode('utf-8', 'backslashreplace'), 80)!r}; "
            f"expected a token in base64, a space and the rank {rank}"
        )
    return token
