"""Meta's `tokenizer.model` for Llama 3: a table of ranks, run as byte-level BPE.

It is a text file with 128,000 lines, `base64(token) rank`. The rank is both the token's id and the order of its merge:
adjacent parts are merged if their concatenation is a token, the lowest rank first. The `tokenizers` package needs a
list of merges, which is derived from the ranks (`kernels/ranks.py`). 256 control tokens follow, whose names are not in
the file. Llama 2's file of the same name is in SentencePiece's format.

Source: llama-models, `llama3/tokenizer.py`.
"""

import binascii
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NoReturn

from llamarium.errors import TokenizerError, counted, escape
from llamarium.kernels.ranks import find_merges
from llamarium.tokenizer.backends.files import guard_rust, read_bytes
from llamarium.tokenizer.backends.huggingface import HuggingFaceBackend
from llamarium.tokenizer.backends.pipeline import byte_level_json, llama3_cutter
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.bpe import BYTE_TO_CHARACTER
from llamarium.tokenizer.special import SpecialTokens

NUM_RANKS = 128_000
NUM_SPECIAL_TOKENS = 256
_NAMED_SPECIAL_TOKENS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
    "<|python_tag|>", "<|image|>",
)  # fmt: skip
_MAX_FILE_BYTES = 8 * 2**20  # Llama 3's has 2.2 MB
_MAX_TOKEN_BYTES = 256  # twice Llama 3's longest; deriving the merges takes quadratic time


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
    backend = _byte_level(tokens, special, source)
    return Tokenizer(backend, special, vocab_size=NUM_RANKS + NUM_SPECIAL_TOKENS, source=source)


def _byte_level(tokens: list[bytes], special: SpecialTokens, source: str) -> HuggingFaceBackend:
    spelled = _spell_all(tokens)
    contents = byte_level_json(
        vocab={token: rank for rank, token in enumerate(spelled)},
        merges=_merges(tokens, spelled),
        special=special.ids,
        cutter=llama3_cutter(),
        whole_pieces=True,
    )
    return guard_rust(lambda: HuggingFaceBackend(contents, special.ids, byte_level=True, source=source), source)


def _spell_all(tokens: list[bytes]) -> list[str]:
    """Convert all tokens to GPT-2's printable characters; one translation takes a third of the time of 128,000."""
    spelling = {byte: ord(character) for byte, character in BYTE_TO_CHARACTER.items()}
    joined = b"".join(tokens).decode("latin-1").translate(spelling)
    ends = list(accumulate(map(len, tokens)))
    return [joined[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _merges(tokens: list[bytes], spelled: list[str]) -> list[tuple[str, str]]:
    """Return the merges in order, in printable characters."""
    merges = find_merges(tokens)
    if merges is None:
        return _all_merges(spelled)
    lefts, rights = merges.T.tolist()
    return [(spelled[left], spelled[right]) for left, right in zip(lefts, rights, strict=True)]


def _all_merges(tokens: list[str]) -> list[tuple[str, str]]:
    """Return every split of a token into two tokens, without the C library; this takes a second.

    `find_merges` leaves out merges that no text uses; the ids are the same.
    """
    rank_of = {token: rank for rank, token in enumerate(tokens)}.get
    merges: list[tuple[str, str]] = []

    for token in tokens:
        halves = [
            (left, right)
            for cut in range(1, len(token))
            if (left := rank_of(token[:cut])) is not None and (right := rank_of(token[cut:])) is not None
        ]
        halves.sort()
        merges += [(tokens[left], tokens[right]) for left, right in halves]
    return merges


def _read_ranks(data: bytes, source: str) -> list[bytes]:
    """Read all tokens, by rank."""
    tokens = _decode(data) or _read_lines(data.splitlines(), source)
    longest = max(range(NUM_RANKS), key=lambda rank: len(tokens[rank]))
    if len(tokens[longest]) > _MAX_TOKEN_BYTES:
        raise TokenizerError(
            f"{source}: line {longest + 1} holds a token of {len(tokens[longest])} bytes; "
            f"expected up to {_MAX_TOKEN_BYTES}"
        )
    token_set = set(tokens)
    if len(token_set) < NUM_RANKS:
        _refuse_twice(tokens, source)
    missing = [byte for byte in range(256) if bytes([byte]) not in token_set]
    if missing:
        raise TokenizerError(f"{source}: no token for the bytes {missing[:10]}; expected one for each of the 256")
    return tokens


def _decode(data: bytes) -> list[bytes] | None:
    """Decode a well-formed file at once; None if a line may be malformed or out of order."""
    words = data.split()
    if len(words) != 2 * NUM_RANKS or b" ".join(words[1::2]) != b" ".join(b"%d" % rank for rank in range(NUM_RANKS)):
        return None
    try:
        tokens = [*map(partial(binascii.a2b_base64, strict_mode=True), words[::2])]
    except binascii.Error:
        return None
    return tokens if all(tokens) else None


def _read_lines(lines: list[bytes], source: str) -> list[bytes]:
    """Read a file line by line, to report the malformed line."""
    if len(lines) != NUM_RANKS:
        _read_line(lines[0], 0, source)
        raise TokenizerError(
            f"{source}: {counted(len(lines), 'line')}; expected {NUM_RANKS}, as Llama 3's tokenizer.model has (cut off "
            "in a download, or another model's?)"
        )
    return [_read_line(line, rank, source) for rank, line in enumerate(lines)]


def _refuse_twice(tokens: list[bytes], source: str) -> NoReturn:
    first: dict[bytes, int] = {}
    rank = next(rank for rank, token in enumerate(tokens) if first.setdefault(token, rank) != rank)
    token = tokens[rank]
    raise TokenizerError(f"{source}: lines {first[token] + 1} and {rank + 1} hold the same token {escape(token)}")


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
