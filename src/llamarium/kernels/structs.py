"""The structs of the C kernels, as `native/llamarium.h` declares them, and the names of what their arrays hold."""

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from enum import IntEnum


class Kind(IntEnum):
    """The storage format of a matrix, named as in `quant/formats.py`; `LM_...` in the header."""

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
"""The order of `CTaps.layers` within a layer; `LM_TAP_...` in the header describes them."""


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
