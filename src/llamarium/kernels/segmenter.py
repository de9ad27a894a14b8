"""Encode text with a SentencePiece vocabulary, in C: `lm_segment` of `native/llamarium.h`."""

import ctypes
import secrets
import weakref
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p

import numpy as np
from numpy.typing import NDArray

from llamarium.errors import MemoryBudgetError
from llamarium.kernels.native import library


class CVocabulary(Structure):
    """`lm_vocabulary`."""

    _fields_ = (
        ("kind", c_int32), ("num_pieces", c_int32), ("text", c_char_p), ("ends", c_void_p), ("types", c_void_p),
        ("ranks", c_void_p), ("scores", c_void_p), ("byte_ids", c_void_p), ("unknown_id", c_int32),
        ("unknown_score", c_float), ("seed", c_uint64),
    )  # fmt: skip


class Segmenter:
    """The tables of a vocabulary; thread-safe."""

    def __init__(
        self,
        pieces: Sequence[str],
        types: Sequence[int],
        *,
        ranks: NDArray[np.int32] | None = None,
        scores: NDArray[np.float32] | None = None,
        unknown_score: float = 0,
        unknown_id: int | None = None,
        byte_ids: Sequence[int] = (),
    ) -> None:
        """Build the tables of a validated vocabulary; requires `library()`.

        Args:
            pieces: The text of each id; pieces that encoding can produce are unique.
            types: The type of each id, as numbered in the file format.
            ranks: For BPE, the rank of each id by score, 0 the highest; equal scores have equal ranks.
            scores: For Unigram, the score of each id.
            unknown_score: For Unigram, the score of a character without a piece.
            unknown_id: The unknown piece, or None.
            byte_ids: Ids of the 256 bytes, for byte fallback of unknown characters; empty to use `unknown_id`.

        Raises:
            MemoryBudgetError: If there is not enough memory.
        """
        self._lib = lib = _declared()
        encoded = [piece.encode("utf-8") for piece in pieces]
        ends = np.cumsum(list(map(len, encoded)), dtype=np.int64)
        kinds = np.array(types, np.uint8)
        fallback = np.array(byte_ids, np.int32)
        vocabulary = CVocabulary(
            kind=0 if scores is None else 1,
            num_pieces=len(encoded),
            text=b"".join(encoded),
            ends=ends.ctypes.data,
            types=kinds.ctypes.data,
            ranks=None if ranks is None else ranks.ctypes.data,
            scores=None if scores is None else scores.ctypes.data,
            byte_ids=fallback.ctypes.data if len(fallback) else None,
            unknown_id=-1 if unknown_id is None else unknown_id,
            unknown_score=unknown_score,
            seed=secrets.randbits(64),
        )
        self._handle = lib.lm_make_segmenter(ctypes.byref(vocabulary))
        if not self._handle:
            raise MemoryBudgetError(f"not enough memory for the tables of a vocabulary with {len(encoded)} pieces")
        # Not at exit: a daemon thread may still be encoding, and the system frees the memory anyway.
        weakref.finalize(self, lib.lm_free_segmenter, self._handle).atexit = False

    def ids(self, text: str) -> list[int]:
        """Return the ids of a normalized text; MemoryBudgetError if there is not enough memory."""
        data = text.encode("utf-8")
        ids = np.empty(len(data), np.int32)
        count = self._lib.lm_segment(self._handle, data, len(data), ids.ctypes.data)
        if count < 0:
            raise MemoryBudgetError(f"not enough memory to encode {len(data)} bytes of text; encode it in parts")
        return ids[:count].tolist()


def _declared() -> ctypes.CDLL:
    """Return the library with the types of the segmenter's functions declared."""
    lib = library()
    assert lib is not None
    lib.lm_make_segmenter.argtypes, lib.lm_make_segmenter.restype = [POINTER(CVocabulary)], c_void_p
    lib.lm_free_segmenter.argtypes, lib.lm_free_segmenter.restype = [c_void_p], None
    lib.lm_segment.argtypes, lib.lm_segment.restype = [c_void_p, c_char_p, c_int64, c_void_p], c_int64
    return lib
