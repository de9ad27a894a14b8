"""The SentencePiece vocabulary in a GGUF file (`tokenizer.ggml.model` is "llama"), with the same ids as llama.cpp.

Differences from the `sentencepiece` library: user-defined tokens are extracted from the text first, the longest first,
and the dummy prefix is added after each of them; unused pieces are normal pieces; there are no normalization rules.

Source: llama.cpp, `src/llama-vocab.cpp` (`llm_tokenizer_spm_session`, `tokenizer_st_partition`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from llamarium.errors import TokenizerError, counted, show_value
from llamarium.tokenizer.backends.sentencepiece import AddedToken, SentencePieceBackend
from llamarium.tokenizer.sentencepiece.model import SentencePieceModel, byte_piece, check_model
from llamarium.tokenizer.sentencepiece.piece_type import PieceType

_KEY = "tokenizer.ggml."
_KEPT = (PieceType.UNKNOWN, PieceType.CONTROL, PieceType.BYTE)
_NAMES = {"bos": "<s>", "eos": "</s>", "pad": "<pad>"}


def sentencepiece_backend(
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    types: Sequence[int],
    control: Mapping[str, int],
    named: Mapping[str, int | None],
    source: str,
) -> SentencePieceBackend:
    """Build the backend.

    Args:
        metadata: Metadata of the file, with scores and flags.
        tokens: Token of each id.
        types: Type of each id.
        control: Control tokens, spelling to id.
        named: Ids of "bos", "eos" and "pad".
        source: The file, for messages.

    Raises:
        TokenizerError: If the lists are inconsistent.
    """
    pieces = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    spelled = {pieces[i] for i, kind in enumerate(types) if kind == PieceType.BYTE}
    model = SentencePieceModel(
        kind="bpe",
        pieces=pieces,
        scores=_scores(metadata, len(tokens), source),
        types=[PieceType(kind) if kind in _KEPT else PieceType.NORMAL for kind in types],
        byte_fallback=all(byte_piece(byte) in spelled for byte in range(256)),
        add_dummy_prefix=_flag(metadata, "add_space_prefix", True, source),
        remove_extra_whitespaces=_flag(metadata, "remove_extra_whitespaces", False, source),
        names={name: pieces[i] if (i := named[name]) is not None else default for name, default in _NAMES.items()},
    )
    check_model(model, source)
    added = [AddedToken(content=pieces[i], id=i) for i, kind in enumerate(types) if kind == PieceType.USER_DEFINED]
    return SentencePieceBackend(model, control, source, added=added, longest_first=True)


def _scores(metadata: Mapping[str, Any], count: int, source: str) -> list[float]:
    """Return the scores as floats; all are 0 if the file has none."""
    scores: Any = metadata.get(_KEY + "scores")
    if scores is None:
        return [0.0] * count
    if not isinstance(scores, Sequence) or isinstance(scores, str | bytes) or len(scores) < count:
        raise TokenizerError(f"{source}: {_KEY}scores is {show_value(scores)}; expected {counted(count, 'number')}")
    if set(map(type, scores)) - {int, float}:
        wrong = next(score for score in scores if type(score) not in (int, float))
        raise TokenizerError(f"{source}: {_KEY}scores holds {show_value(wrong)}; expected numbers")
    return list(map(float, scores[:count]))


def _flag(metadata: Mapping[str, Any], name: str, default: bool, source: str) -> bool:
    value = metadata.get(_KEY + name, default)
    if not isinstance(value, bool):
        raise TokenizerError(f"{source}: {_KEY}{name} is {show_value(value)}; expected true or false")
    return value
