"""The functions of the C kernels, called through ctypes; `structs.py` has their structs.

The library is built with the package and has no dependencies at run time. If it is missing, because there was no
compiler when the package was installed, everything runs in PyTorch, and `llamarium doctor` says so. The environment
variable `LLAMARIUM_KERNELS` selects a set of kernels by name; `torch` means none.

All functions expect arrays that the caller has validated: C-contiguous, with the documented dtype and shape.
"""

import ctypes
import functools
import hashlib
import os
import platform
import sys
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_void_p
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamarium.errors import InputError, MemoryBudgetError, OptionError, show_value, warn_caller
from llamarium.kernels.input_bits import INPUT_BITS, InputBits
from llamarium.kernels.step_priority import pause
from llamarium.kernels.structs import (
    CBatch,
    CCache,
    CChoice,
    CFileMatrix,
    CMatrix,
    CModel,
    CPacking,
    CPointwise,
    CRowAttention,
    CTaps,
    FileMatrices,
    Kind,
)
from llamarium.kernels.threads import num_threads

INTERFACE = 27
"""The `LM_INTERFACE` of the header that this file matches."""

VARIABLE = "LLAMARIUM_KERNELS"
KERNELS = ("amx", "avx512_bf16", "avx512_vnni", "avx_vnni", "avx2", "neon_i8mm", "neon_dotprod", "portable")

_OFF = "torch"
_NO_SUCH_ROW, _BAD_BATCH, _UNREADABLE = 2, 3, 5
_FILE = Path(__file__).with_name("_native.dll" if sys.platform == "win32" else "_native.so")


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library, or None if PyTorch is used instead.

    Raises:
        OptionError: If `LLAMARIUM_KERNELS` is unknown, or names kernels that this machine cannot run.
    """
    name = os.environ.get(VARIABLE) or None
    if name not in (None, _OFF, *KERNELS):
        raise OptionError(f"{VARIABLE} is {show_value(name)}; expected {', '.join((*KERNELS, _OFF))}")
    if name == _OFF:
        return None
    lib = _open()
    if lib is None:
        if name is not None:
            raise OptionError(f"{VARIABLE} is {name}, but the package was installed without C kernels; {HOW_TO_BUILD}")
        return None
    if lib.lm_use_kernels(None if name is None else name.encode()):
        raise OptionError(
            f"{VARIABLE} is {name}, which this machine cannot run, or which the compiler of the package did not "
            "support; unset it"
        )
    return lib


HOW_TO_BUILD = "install a C compiler, then reinstall the package"


def _open() -> ctypes.CDLL | None:
    if not _FILE.exists():
        return None
    try:
        lib = ctypes.CDLL(str(_FILE))
        interface = int(lib.lm_interface())
    except (OSError, AttributeError) as error:
        warn_caller(f"the CPU kernels cannot be loaded: {error}; {HOW_TO_BUILD}")
        return None
    if interface != INTERFACE:
        warn_caller(f"{_FILE} has interface version {interface}; expected {INTERFACE}: {HOW_TO_BUILD}")
        return None
    lib.lm_kernels.restype = c_char_p
    lib.lm_use_kernels.argtypes = [c_char_p]
    lib.lm_run.argtypes = [POINTER(CModel), POINTER(CCache), POINTER(CBatch), POINTER(CTaps), c_void_p]
    lib.lm_lookup.argtypes = [POINTER(CMatrix), c_void_p, c_int32, c_void_p]
    lib.lm_product.argtypes = [POINTER(CMatrix), c_void_p, c_int32, c_int32, c_void_p]
    lib.lm_choose.argtypes = [c_void_p, c_int32, c_int32, POINTER(CChoice), c_void_p]
    lib.lm_attend_rows.argtypes = [POINTER(CRowAttention), c_int32]
    lib.lm_compute_pointwise.argtypes = [POINTER(CPointwise)]
    lib.lm_clip.argtypes = [c_void_p, c_void_p, c_int32, c_double, POINTER(c_double)]
    lib.lm_pack.argtypes = [c_int32, c_int32, c_int32, c_void_p, c_void_p]
    lib.lm_pack.restype = None
    lib.lm_pack_files.argtypes = [POINTER(CFileMatrix), c_int32, POINTER(CPacking)]
    lib.lm_encode.argtypes = [c_int32, c_int64, c_void_p, c_void_p]
    lib.lm_read_ns.argtypes = [c_void_p, c_int64]
    lib.lm_read_ns.restype = lib.lm_busy_ns.restype = c_int64
    return lib


def kernels() -> str | None:
    """Return the name of the kernels in use, or None if PyTorch is used."""
    lib = library()
    return None if lib is None else lib.lm_kernels().decode()


def arithmetic() -> str:
    """Return an identifier of everything that affects rounding: kernels, compiled library, machine and C library."""
    library_hash = hashlib.sha256(_FILE.read_bytes()).hexdigest()
    return f"{kernels()} {library_hash} {platform.machine()} {platform.libc_ver()}"


def product(matrix: CMatrix, x: NDArray[np.float32], input_bits: InputBits = INPUT_BITS) -> NDArray[np.float32]:
    """Multiply x (M, in) by a matrix to (M, out); x is quantized to `input_bits` if the matrix is packed.

    Raises:
        MemoryBudgetError: If there is not enough memory.
    """
    y = np.empty((len(x), matrix.rows), np.float32)
    pause()
    _check(_ready().lm_product(matrix, x.ctypes.data, len(x), input_bits, y.ctypes.data))
    return y


def run(model: CModel, cache: CCache, batch: CBatch, taps: CTaps | None, logits: int) -> None:
    """Run a batch, from token ids to the requested logits.

    Args:
        model: The weights.
        cache: The KV cache.
        batch: The tokens; its arrays are C-contiguous and have the header's types.
        taps: Where tapped activations are written.
        logits: Address of float32 (num_logits, V).

    Raises:
        IndexError: If a token id is outside the vocabulary.
        InputError: If the batch has an invalid position, block, sequence, adapter or row.
        MemoryBudgetError: If there is not enough memory for activations.
    """
    pause()
    code = _ready().lm_run(model, cache, batch, taps, logits)
    if code == _NO_SUCH_ROW:
        raise IndexError(f"a token id of the batch is outside the vocabulary; expected 0..{model.table.rows - 1}")
    if code == _BAD_BATCH:
        raise InputError(
            "the batch has an invalid position, block, sequence, adapter, edit or row of logits; expected blocks below "
            f"{cache.num_blocks} of {cache.block_size} slots, and each sequence's tokens in order"
        )
    if code:
        raise _no_memory()


def lookup(matrix: CMatrix, rows: NDArray[np.int64], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """Return some rows of a matrix, by index (...): (..., in); IndexError if there is no such row.

    `out`, if given, is contiguous, has the size of the result, and is overwritten and returned.
    """
    out = np.empty((*rows.shape, matrix.cols), np.float32) if out is None else out
    if _ready().lm_lookup(matrix, rows.ctypes.data, rows.size, out.ctypes.data):
        raise IndexError(f"ids span {int(rows.min())}..{int(rows.max())}; expected 0..{matrix.rows - 1}")
    return out


def choose(logits_BV: NDArray[np.float32], choices: Sequence[CChoice]) -> list[int]:
    """Sample a token for each row of contiguous logits: its id, or -1 if they have no finite maximum.

    Raises:
        MemoryBudgetError: If there is not enough memory for the candidates.
    """
    num_rows, vocab_size = logits_BV.shape
    ids = (c_int32 * num_rows)()
    c_choices = (CChoice * num_rows)(*choices)
    if _ready().lm_choose(logits_BV.ctypes.data, num_rows, vocab_size, c_choices, ids):
        raise _no_memory()
    return ids[:]


def attend_rows(call: CRowAttention, *, backward: bool) -> None:
    """Compute attention of training rows, or its gradients, into the arrays of `call`.

    Raises:
        MemoryBudgetError: If there is not enough memory.
    """
    _check(_ready().lm_attend_rows(call, backward))


def compute_pointwise(call: CPointwise) -> None:
    """Run a pointwise operation of training; MemoryBudgetError if there is not enough memory."""
    _check(_ready().lm_compute_pointwise(call))


def clip(grads: Sequence[int], counts: Sequence[int], max_norm: float) -> float:
    """Scale float32 arrays down to a total norm of `max_norm` and return the norm before.

    Raises:
        MemoryBudgetError: If there is not enough memory.
    """
    norm, size = c_double(), len(grads)
    _check(_ready().lm_clip((c_void_p * size)(*grads), (c_int64 * size)(*counts), size, max_norm, norm))
    return norm.value


def pack(kind: Kind, num_columns: int, blocks: NDArray[np.uint8], tiles: NDArray[np.uint8]) -> None:
    """Pack GGUF blocks, (rows, bytes of a row), into tiles (panels, tiles, tile_bytes) of the same format."""
    blocks = np.ascontiguousarray(blocks)
    _ready().lm_pack(kind, len(blocks), num_columns, blocks.ctypes.data, tiles.ctypes.data)


def pack_files(matrices: FileMatrices, state: CPacking) -> bool:
    """Pack matrices from files into tiles; threads that call this with the same `state`, initially 0, share the work.

    Returns:
        False if a file is truncated or cannot be read.

    Raises:
        MemoryBudgetError: If there is not enough memory for buffers.
    """
    code = _ready().lm_pack_files(matrices, len(matrices), state)
    if code == _UNREADABLE:
        return False
    _check(code)
    return True


def encode(kind: Kind, values: NDArray[np.float32], blocks: NDArray[np.uint8]) -> None:
    """Quantize weights to GGUF blocks, with the same bytes as `quant/ggml/encode.py`.

    Args:
        kind: Q8_0, Q4_0, Q4_1, Q5_0, IQ4_NL, Q4_K, Q5_K or Q6_K.
        values: C-contiguous (number of blocks, weights of a block).
        blocks: C-contiguous (number of blocks, bytes of a block); overwritten.
    """
    code = _ready().lm_encode(kind, len(values), values.ctypes.data, blocks.ctypes.data)
    assert code == 0, f"{kind.name} is not encoded"


def read_ns(data: NDArray[np.float32]) -> int:
    """Return the nanoseconds that all threads take to read an array once, to measure the memory bandwidth.

    Args:
        data: A multiple of 32 KiB, larger than the processor's caches, and written before, so that its pages exist.
    """
    return _ready().lm_read_ns(data.ctypes.data, data.nbytes)


def busy_ns() -> int:
    """Return the total time that the kernels have computed in this process, in nanoseconds; 0 with PyTorch."""
    lib = library()
    return 0 if lib is None else lib.lm_busy_ns()


def _ready() -> ctypes.CDLL:
    lib = library()
    assert lib is not None
    lib.lm_set_threads(num_threads())
    return lib


def _check(code: int) -> None:
    if code:
        raise _no_memory()


def _no_memory() -> MemoryBudgetError:
    return MemoryBudgetError("not enough memory for this forward pass; ask for fewer tokens or answers at once")
