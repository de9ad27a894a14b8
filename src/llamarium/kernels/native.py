"""The CPU kernels in C, through ctypes: what `native/llamarium.h` declares, and where it is found.

The library is built with the package and needs nothing at run time. Where it is missing (no compiler when the package
was installed), everything runs through PyTorch, and `llamarium doctor` says so. `LLAMARIUM_KERNELS` chooses a set of
kernels by name, and `torch` means none.

All functions here take arrays that the caller has checked: C-contiguous, of the stated dtype and shape.
"""

import ctypes
import functools
import hashlib
import os
import platform
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llamarium.errors import InputError, MemoryBudgetError, OptionError, show_value, warn_caller
from llamarium.kernels.threads import num_threads
from llamarium.kernels.turns import pause

INTERFACE = 27
"""`LM_INTERFACE` of the header that this file was written for."""

VARIABLE = "LLAMARIUM_KERNELS"
KERNELS = ("amx", "avx512_bf16", "avx512_vnni", "avx2", "neon_i8mm", "neon_dotprod", "portable")
InputBits = Literal[8, 16]
"""What the inputs of packed weights are rounded to, but for outliers, before they are multiplied (decision 0022)."""

INPUT_BITS: InputBits = 8
"""Default."""

_OFF = "torch"
_NO_SUCH_ROW, _BAD_BATCH, _UNREADABLE = 2, 3, 5
_FILE = Path(__file__).with_name("_native.so")


class Kind(IntEnum):
    """How a matrix is stored, under the names of `quant/formats.py`; `LM_...` in the header."""

    BF16 = 0
    Q8_0 = 1
    Q4_0 = 2
    Q4_1 = 3
    IQ4_NL = 4
    Q4_K = 5
    Q5_K = 6
    Q6_K = 7
    F32 = 8
    Q5_0 = 9
    F16 = 10
    IQ4_XS = 11


class CMatrix(Structure):
    """`lm_matrix`."""

    _fields_ = (
        ("kind", c_int32), ("rows", c_int32), ("cols", c_int32), ("data", c_void_p), ("codebook", c_void_p),
        ("bias", c_void_p),
    )  # fmt: skip


LINEARS_OF_A_LAYER = ("q", "k", "v", "o", "gate", "up", "down")
"""Their order in the header's structs."""


class CLayer(Structure):
    """`lm_layer`."""

    _fields_ = (
        ("attention_norm", c_void_p), ("mlp_norm", c_void_p),
        *((name, CMatrix) for name in LINEARS_OF_A_LAYER),
    )  # fmt: skip


class CLora(Structure):
    """`lm_lora`."""

    _fields_ = (
        ("rank", c_int32), ("scale", c_float), ("a", c_void_p), ("b", c_void_p), ("gain", c_void_p),
    )  # fmt: skip


class CLoraLayer(Structure):
    """`lm_lora_layer`."""

    _fields_ = tuple((name, CLora) for name in LINEARS_OF_A_LAYER)


class CAdapter(Structure):
    """`lm_adapter`."""

    _fields_ = (("layers", POINTER(CLoraLayer)), ("head", CLora))


class CModel(Structure):
    """`lm_model`."""

    _fields_ = (
        ("num_layers", c_int32), ("hidden", c_int32), ("intermediate", c_int32), ("num_heads", c_int32),
        ("num_kv_heads", c_int32), ("head_dim", c_int32), ("norm_eps", c_float), ("norm_dtype", c_int32),
        ("frequencies", c_void_p), ("attention_factor", c_float), ("final_norm", c_void_p), ("layers", POINTER(CLayer)),
        ("table", CMatrix), ("head", CMatrix), ("num_adapters", c_int32), ("adapters", POINTER(CAdapter)),
        ("input_bits", c_int32), ("window", c_int32),
    )  # fmt: skip


class CCache(Structure):
    """`lm_cache`."""

    _fields_ = (
        ("k_dtype", c_int32), ("v_dtype", c_int32), ("num_blocks", c_int32), ("block_size", c_int32),
        ("k", POINTER(c_void_p)), ("v", POINTER(c_void_p)),
        ("k_scales", POINTER(c_void_p)), ("v_scales", POINTER(c_void_p)),
    )  # fmt: skip


PARTS = ("embed", "attention", "head", "mlp", "residual")
"""Their order in the header: `LM_EDIT_...`."""


class CEdit(Structure):
    """`lm_edit`."""

    _fields_ = (
        ("part", c_int32), ("layer", c_int32), ("head", c_int32), ("factor", c_float), ("add", c_void_p),
        ("num_positions", c_int32), ("positions", c_void_p),
    )  # fmt: skip


class CEdits(Structure):
    """`lm_edits`."""

    _fields_ = (("count", c_int32), ("all", POINTER(CEdit)))


class CBatch(Structure):
    """`lm_batch`."""

    _fields_ = (
        ("num_tokens", c_int32), ("num_sequences", c_int32), ("table_stride", c_int32), ("num_logits", c_int32),
        ("token_ids", c_void_p), ("positions", c_void_p), ("sequences", c_void_p), ("block_tables", c_void_p),
        ("logit_rows", c_void_p), ("adapters", c_void_p), ("edits", POINTER(CEdits)),
    )  # fmt: skip


TAPS_OF_A_LAYER = (
    "attn_norm", "q", "k", "v", "q_rot", "head_out", "attn_out", "resid_mid",
    "mlp_norm", "gate", "up", "act", "gated", "mlp_out", "resid",
)  # fmt: skip
"""What `CTaps.layers` points to, for each layer; `LM_TAP_...` of the header says what they are."""


class CTaps(Structure):
    """`lm_taps`."""

    _fields_ = (("embed", c_void_p), ("final_norm", c_void_p), ("layers", POINTER(c_void_p)))


class CRowAttention(Structure):
    """`lm_row_attention`."""

    _fields_ = (
        *(
            (key, c_int32)
            for key in "dtype num_rows num_tokens num_heads num_kv_heads head_dim causal window as_pass".split()
        ),
        *((key, c_void_p) for key in "segments q k v out log_sums grad_out grad_q grad_k grad_v".split()),
    )


class CPointwise(Structure):
    """`lm_pointwise`."""

    _fields_ = (
        *((name, c_int32) for name in ("op", "dtype", "x_dtype", "num_rows", "columns", "head_dim", "table_rows")),
        ("eps", c_float), ("inputs", c_void_p * 5), ("outputs", c_void_p * 3),
    )  # fmt: skip


class CChoice(Structure):
    """`lm_choice`."""

    _fields_ = (
        ("temperature", c_float), ("min_p", c_float), ("top_k", c_int32), ("top_p", c_double),
        ("seed", c_uint64), ("step", c_uint64), ("mask", c_void_p),
    )  # fmt: skip


class CFileMatrix(Structure):
    """`lm_file_matrix`."""

    _fields_ = (
        *((name, c_int32) for name in ("kind", "rows", "cols", "head_rows", "file")),
        ("offset", c_int64), ("tiles", c_void_p), ("num_nonfinite", POINTER(c_int64)),
    )  # fmt: skip


FileMatrices = ctypes.Array[CFileMatrix]


class CPacking(Structure):
    """`lm_packing`."""

    _fields_ = (("next", c_int64), ("num_bytes", c_int64))


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library, None for PyTorch's; OptionError if `LLAMARIUM_KERNELS` names none, or none that runs here."""
    wanted = os.environ.get(VARIABLE) or None
    if wanted not in (None, _OFF, *KERNELS):
        raise OptionError(f"{VARIABLE} is {show_value(wanted)}; expected {', '.join((*KERNELS, _OFF))}")
    if wanted == _OFF:
        return None
    found = _open()
    if found is None:
        if wanted is not None:
            raise OptionError(
                f"{VARIABLE} is {wanted}, and the package was installed without its kernels; {HOW_TO_BUILD}"
            )
        return None
    if found.lm_use_kernels(None if wanted is None else wanted.encode()):
        raise OptionError(
            f"{VARIABLE} is {wanted}, which this machine cannot run, or the compiler of the package did not know; "
            "leave it out"
        )
    return found


HOW_TO_BUILD = "install a C compiler, and the package again"


def _open() -> ctypes.CDLL | None:
    if not _FILE.exists():
        return None
    try:
        found = ctypes.CDLL(str(_FILE))
        interface = int(found.lm_interface())
    except (OSError, AttributeError) as error:
        warn_caller(f"the CPU kernels cannot be loaded: {error}; {HOW_TO_BUILD}")
        return None
    if interface != INTERFACE:
        warn_caller(f"{_FILE} is of another version ({interface}, expected {INTERFACE}); {HOW_TO_BUILD}")
        return None
    found.lm_kernels.restype = c_char_p
    found.lm_use_kernels.argtypes = [c_char_p]
    found.lm_run.argtypes = [POINTER(CModel), POINTER(CCache), POINTER(CBatch), POINTER(CTaps), c_void_p]
    found.lm_lookup.argtypes = [POINTER(CMatrix), c_void_p, c_int32, c_void_p]
    found.lm_product.argtypes = [POINTER(CMatrix), c_void_p, c_int32, c_int32, c_void_p]
    found.lm_choose.argtypes = [c_void_p, c_int32, c_int32, POINTER(CChoice), c_void_p]
    found.lm_attend_rows.argtypes = [POINTER(CRowAttention), c_int32]
    found.lm_compute_pointwise.argtypes = [POINTER(CPointwise)]
    found.lm_clip.argtypes = [c_void_p, c_void_p, c_int32, c_double, POINTER(c_double)]
    found.lm_pack.argtypes = [c_int32, c_int32, c_int32, c_void_p, c_void_p]
    found.lm_pack.restype = None
    found.lm_pack_files.argtypes = [POINTER(CFileMatrix), c_int32, POINTER(CPacking)]
    found.lm_encode.argtypes = [c_int32, c_int64, c_void_p, c_void_p]
    found.lm_read_ns.argtypes = [c_void_p, c_int64]
    found.lm_read_ns.restype = found.lm_busy_ns.restype = c_int64
    return found


def kernels() -> str | None:
    """Return the name of the kernels in use, or None where PyTorch is used."""
    found = library()
    return None if found is None else found.lm_kernels().decode()


def arithmetic() -> str:
    """Return a name of what rounds: another compiler, processor or C library may do so otherwise."""
    library_hash = hashlib.sha256(_FILE.read_bytes()).hexdigest()
    return f"{kernels()} {library_hash} {platform.machine()} {platform.libc_ver()}"


def product(matrix: CMatrix, x: NDArray[np.float32], input_bits: InputBits = INPUT_BITS) -> NDArray[np.float32]:
    """Multiply x (M, in), as codes of `input_bits` if packed, to (M, out); MemoryBudgetError without memory."""
    y = np.empty((len(x), matrix.rows), np.float32)
    pause()
    _check(_ready().lm_product(matrix, x.ctypes.data, len(x), input_bits, y.ctypes.data))
    return y


def run(model: CModel, cache: CCache, batch: CBatch, taps: CTaps | None, logits: int) -> None:
    """Run a batch, from tokens to the logits of those that want them.

    Args:
        model: The weights, with `table` and `head`.
        cache: Where keys and values are kept.
        batch: The tokens. Its arrays are C-contiguous, and of the header's types.
        taps: What is handed out on the way.
        logits: The address of float32 (num_logits, vocabulary).

    Raises:
        IndexError: If there is no such token.
        InputError: If the batch names a position, block, sequence, adapter or row that there is not.
        MemoryBudgetError: If there is no memory for what lies between the layers.
    """
    pause()
    code = _ready().lm_run(model, cache, batch, taps, logits)
    if code == _NO_SUCH_ROW:
        raise IndexError(f"a token of the batch is not in the vocabulary; expected 0..{model.table.rows - 1}")
    if code == _BAD_BATCH:
        raise InputError(
            "the batch names a position, block, sequence, adapter, edit or row of logits that there is not; expected "
            f"blocks below {cache.num_blocks} of {cache.block_size} positions, a sequence's tokens in order"
        )
    if code:
        raise _no_memory()


def lookup(matrix: CMatrix, rows: NDArray[np.int64], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """Return some rows of a matrix, by their numbers (...): (..., in); IndexError if there is no such row.

    `out`: contiguous, of the result's size; overwritten and returned.
    """
    out = np.empty((*rows.shape, matrix.cols), np.float32) if out is None else out
    if _ready().lm_lookup(matrix, rows.ctypes.data, rows.size, out.ctypes.data):
        raise IndexError(f"ids span {int(rows.min())}..{int(rows.max())}; expected 0..{matrix.rows - 1}")
    return out


def choose(logits_BV: NDArray[np.float32], choices: Sequence[CChoice]) -> list[int]:
    """Choose a token for each row of logits, contiguous: its id, or -1 where they are NaN or have no finite maximum.

    MemoryBudgetError without memory for the candidates.
    """
    num_rows, vocab_size = logits_BV.shape
    ids = (c_int32 * num_rows)()
    how = (CChoice * num_rows)(*choices)
    if _ready().lm_choose(logits_BV.ctypes.data, num_rows, vocab_size, how, ids):
        raise _no_memory()
    return ids[:]


def attend_rows(call: CRowAttention, *, backward: bool) -> None:
    """Compute attention over rows, or its gradients, into `call`'s arrays; MemoryBudgetError without memory."""
    _check(_ready().lm_attend_rows(call, backward))


def compute_pointwise(call: CPointwise) -> None:
    """Compute what stands between a training step's products; MemoryBudgetError if there is no memory to work in."""
    _check(_ready().lm_compute_pointwise(call))


def clip(grads: Sequence[int], counts: Sequence[int], max_norm: float) -> float:
    """Scale float32 arrays down to `max_norm` together; return the norm before, MemoryBudgetError without memory."""
    norm, size = c_double(), len(grads)
    _check(_ready().lm_clip((c_void_p * size)(*grads), (c_int64 * size)(*counts), size, max_norm, norm))
    return norm.value


def pack(kind: Kind, num_columns: int, blocks: NDArray[np.uint8], tiles: NDArray[np.uint8]) -> None:
    """Put GGUF's blocks, (rows, bytes of a row), into tiles (panels, tiles, tile_bytes) of the same format."""
    blocks = np.ascontiguousarray(blocks)
    _ready().lm_pack(kind, len(blocks), num_columns, blocks.ctypes.data, tiles.ctypes.data)


def pack_files(matrices: FileMatrices, state: CPacking) -> bool:
    """Put matrices in files into tiles, with all threads that call this with the same `state`, which was 0.

    Returns False if a file ended early or cannot be read; MemoryBudgetError if there is no memory to read into.
    """
    code = _ready().lm_pack_files(matrices, len(matrices), state)
    if code == _UNREADABLE:
        return False
    _check(code)
    return True


def encode(kind: Kind, values: NDArray[np.float32], blocks: NDArray[np.uint8]) -> None:
    """Quantize weights: values (number of blocks, weights of a block) into GGUF's blocks (number, bytes of a block).

    Args:
        kind: Q8_0, Q4_0, Q4_1, Q5_0, IQ4_NL, Q4_K, Q5_K or Q6_K.
        values: C-contiguous.
        blocks: C-contiguous; overwritten. `quant/ggml/encode.py` makes the same bytes.
    """
    code = _ready().lm_encode(kind, len(values), values.ctypes.data, blocks.ctypes.data)
    assert code == 0, f"{kind.name} is not encoded"


def read_ns(data: NDArray[np.float32]) -> int:
    """Return the nanoseconds in which all threads read an array's memory once, as fast as they can.

    Args:
        data: Of a multiple of 32 KiB, larger than the caches, and written, so that each page is there.
    """
    return _ready().lm_read_ns(data.ctypes.data, data.nbytes)


def busy_ns() -> int:
    """Return the nanoseconds that the kernels have computed in this process so far; 0 where PyTorch is used."""
    found = library()
    return 0 if found is None else found.lm_busy_ns()


def _ready() -> ctypes.CDLL:
    lib = library()
    assert lib is not None
    lib.lm_set_threads(num_threads())
    return lib


def _check(code: int) -> None:
    if code:
        raise _no_memory()


def _no_memory() -> MemoryBudgetError:
    return MemoryBudgetError("there is no memory left for this pass; ask for fewer tokens or answers at once")
