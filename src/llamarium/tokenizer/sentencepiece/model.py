"""A SentencePiece vocabulary: the pieces and the normalization options in its file."""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from llamarium.errors import TokenizerError, UnsupportedTokenizerError, counted, escape, show_value
from llamarium.tokenizer.backends.files import MAX_TOKENS
from llamarium.tokenizer.sentencepiece.piece_type import PieceType
from llamarium.tokenizer.sentencepiece.wire import BYTES, FIXED32, VARINT, read_fields, write_field

_TEXT_TYPES = frozenset({PieceType.NORMAL, PieceType.USER_DEFINED, PieceType.UNUSED})
_UNIGRAM, _BPE = 1, 2
_KINDS = {_UNIGRAM: "unigram", _BPE: "bpe"}
_OTHER_KINDS = {3: "words", 4: "characters"}

# Numbers of the fields that are read (sentencepiece_model.proto).
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _SUFFIX, _BYTE_FALLBACK = 3, 24, 35
_NAMES = {"bos": (46, "<s>"), "eos": (47, "</s>"), "pad": (48, "<pad>")}
_CHARSMAP, _DUMMY_PREFIX, _REMOVE_SPACES, _ESCAPE_SPACES = 2, 3, 4, 5


def byte_piece(byte: int) -> str:
    """Return the spelling of a byte's piece."""
    return f"<0x{byte:02X}>"


@dataclass(frozen=True, kw_only=True)
class SentencePieceModel:
    """A vocabulary.

    Attributes:
        kind: "bpe" or "unigram".
        pieces: Text of each id, with spaces written as ▁.
        scores: Score of each id, float32 values: merge order for BPE, log-probability for Unigram.
        types: Type of each id.
        byte_fallback: Encode a character without a piece as bytes instead of the unknown piece.
        charsmap: Precompiled normalization rules; empty if there are none.
        add_dummy_prefix: Add a space before a text.
        remove_extra_whitespaces: Strip spaces at a text's ends, and collapse repeated ones.
        escape_whitespaces: Write spaces as ▁.
        whitespace_as_suffix: Add the space of `add_dummy_prefix` after the text instead of before it.
        names: Spelling of the control pieces "bos", "eos" and "pad", whether or not they exist.
    """

    kind: str
    pieces: list[str]
    scores: list[float]
    types: list[int]
    byte_fallback: bool = False
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True
    whitespace_as_suffix: bool = False
    names: Mapping[str, str]

    @cached_property
    def ids(self) -> dict[str, int]:
        """Id of each piece that matches text, i.e. without control, unknown and byte pieces."""
        return {piece: i for i, piece in enumerate(self.pieces) if self.types[i] in _TEXT_TYPES}

    @cached_property
    def unknown_id(self) -> int | None:
        """Id for characters that the vocabulary lacks, or None (possible in a GGUF file)."""
        return next(iter(self.of_type(PieceType.UNKNOWN)), None)

    @cached_property
    def byte_ids(self) -> list[int]:
        """Ids of the 256 bytes in order; empty without byte fallback."""
        ids = {self.pieces[i]: i for i in self.of_type(PieceType.BYTE)}
        spelled = [byte_piece(byte) for byte in range(256)]
        return [ids[piece] for piece in spelled] if self.byte_fallback else []

    def of_type(self, kind: PieceType) -> list[int]:
        """Return the ids of one type."""
        return [i for i, other in enumerate(self.types) if other == kind]

    def named_id(self, name: str) -> int | None:
        """Return the id of the control piece that is "bos", "eos" or "pad", or None if there is none."""
        return next((i for i in self.of_type(PieceType.CONTROL) if self.pieces[i] == self.names[name]), None)


def read_model(data: bytes, source: str) -> SentencePieceModel:
    """Parse the bytes of a `tokenizer.model`; TokenizerError if they are damaged or inconsistent."""
    parts: dict[int, list[bytes]] = {_PIECES: [], _TRAINER: [], _NORMALIZER: []}
    for number, kind, value in read_fields(data, source):
        if number in parts and kind == BYTES and isinstance(value, bytes):
            parts[number].append(value)
    if not 0 < len(parts[_PIECES]) <= MAX_TOKENS:
        raise TokenizerError(f"{source}: {counted(len(parts[_PIECES]), 'piece')}; expected 1 to {MAX_TOKENS}")
    pieces, scores, types = _read_pieces(parts[_PIECES], source)
    # If a message occurs twice, later fields win, so the concatenated parts are the message.
    trainer = _scalars(b"".join(parts[_TRAINER]), source)
    normalizer = _scalars(b"".join(parts[_NORMALIZER]), source)
    kind = _number(trainer, _MODEL_TYPE, _UNIGRAM)
    if kind not in _KINDS:
        shown = _OTHER_KINDS.get(kind, show_value(kind))
        raise UnsupportedTokenizerError(
            f"{source}: a SentencePiece model of type {shown}; supported are BPE and Unigram, which Llama models have"
        )
    model = SentencePieceModel(
        kind=_KINDS[kind],
        pieces=pieces,
        scores=scores,
        types=types,
        byte_fallback=bool(_number(trainer, _BYTE_FALLBACK, 0)),
        charsmap=_bytes(normalizer, _CHARSMAP),
        add_dummy_prefix=bool(_number(normalizer, _DUMMY_PREFIX, 1)),
        remove_extra_whitespaces=bool(_number(normalizer, _REMOVE_SPACES, 1)),
        escape_whitespaces=bool(_number(normalizer, _ESCAPE_SPACES, 1)),
        whitespace_as_suffix=bool(_number(trainer, _SUFFIX, 0)),
        names={
            name: _bytes(trainer, number).decode("utf-8", "replace") or default
            for name, (number, default) in _NAMES.items()
        },
    )
    check_model(model, source)
    return model


def check_model(model: SentencePieceModel, source: str) -> None:
    """Validate the pieces; TokenizerError where `sentencepiece` fails, too."""
    texts: dict[str, int] = {}
    others: dict[str, int] = {}
    for i, (piece, kind) in enumerate(zip(model.pieces, model.types, strict=True)):
        if not piece:
            raise TokenizerError(f"{source}: piece {i} is empty; expected at least one character")
        first = (texts if kind in _TEXT_TYPES else others).setdefault(piece, i)
        if first != i:
            raise TokenizerError(f"{source}: pieces {first} and {i} are both {show_value(piece)}; expected each once")
    if len(unknown := model.of_type(PieceType.UNKNOWN)) > 1:
        raise TokenizerError(f"{source}: {len(unknown)} unknown pieces; expected one")
    missing = [byte for byte in range(256) if byte_piece(byte) not in others] if model.byte_fallback else []
    if missing:
        raise TokenizerError(f"{source}: byte_fallback is set, but {byte_piece(missing[0])} is missing")
    if not model.byte_fallback and not unknown:
        raise TokenizerError(f"{source}: neither an unknown piece nor byte_fallback; some texts could not be encoded")
    if any(map(math.isnan, model.scores)) or (model.kind == "unigram" and any(map(math.isinf, model.scores))):
        raise TokenizerError(f"{source}: the score of a piece is NaN or infinite; expected numbers")


def write_model(model: SentencePieceModel) -> bytes:
    """Serialize a model to the bytes of a `tokenizer.model`; `read_model` returns an equal model."""
    kind = next(number for number, name in _KINDS.items() if name == model.kind)
    trainer = [
        write_field(_MODEL_TYPE, kind),
        write_field(4, len(model.pieces)),
        write_field(_SUFFIX, model.whitespace_as_suffix),
        write_field(_BYTE_FALLBACK, model.byte_fallback),
        *(write_field(40 + i, _id_or_none(model, name)) for i, name in enumerate(("unk", "bos", "eos", "pad"))),
    ]
    if model.unknown_id is not None:
        trainer.append(write_field(45, model.pieces[model.unknown_id]))
    trainer += [write_field(number, model.names[name]) for name, (number, _) in _NAMES.items()]
    normalizer = [
        write_field(1, "user_defined" if model.charsmap else "identity"),
        write_field(_CHARSMAP, model.charsmap),
        write_field(_DUMMY_PREFIX, model.add_dummy_prefix),
        write_field(_REMOVE_SPACES, model.remove_extra_whitespaces),
        write_field(_ESCAPE_SPACES, model.escape_whitespaces),
    ]
    return b"".join(
        [
            *(write_field(_PIECES, piece) for piece in _written_pieces(model)),
            write_field(_TRAINER, b"".join(trainer)),
            write_field(_NORMALIZER, b"".join(normalizer)),
        ]
    )


def _written_pieces(model: SentencePieceModel) -> Iterator[bytes]:
    for piece, score, kind in zip(model.pieces, model.scores, model.types, strict=True):
        yield write_field(_PIECE, piece) + write_field(_SCORE, float(score)) + write_field(_TYPE, int(kind))


def _id_or_none(model: SentencePieceModel, name: str) -> int:
    token_id = model.unknown_id if name == "unk" else model.named_id(name)
    return -1 if token_id is None else token_id


def _read_pieces(messages: list[bytes], source: str) -> tuple[list[str], list[float], list[int]]:
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    for i, message in enumerate(messages):
        piece, score, kind = b"", 0.0, int(PieceType.NORMAL)
        for number, wire, value in read_fields(message, source):
            if number == _PIECE and wire == BYTES and isinstance(value, bytes):
                piece = value
            elif number == _SCORE and wire == FIXED32 and isinstance(value, bytes):
                (score,) = struct.unpack("<f", value)
            elif number == _TYPE and wire == VARINT and isinstance(value, int):
                kind = value
        try:
            pieces.append(piece.decode("utf-8"))
        except UnicodeDecodeError:
            raise TokenizerError(f"{source}: piece {i} is {escape(piece)}; expected UTF-8") from None
        if not 1 <= kind <= len(PieceType):
            raise TokenizerError(f"{source}: piece {i} has the type {kind}; expected 1 to {len(PieceType)}")
        scores.append(score)
        types.append(kind)
    return pieces, scores, types


def _scalars(message: bytes, source: str) -> dict[int, int | bytes]:
    """Return the last value of each field."""
    return {number: value for number, _, value in read_fields(message, source)}


def _number(fields: Mapping[int, int | bytes], number: int, default: int) -> int:
    value = fields.get(number)
    return value if isinstance(value, int) else default


def _bytes(fields: Mapping[int, int | bytes], number: int) -> bytes:
    value = fields.get(number)
    return value if isinstance(value, bytes) else b""
