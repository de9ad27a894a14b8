"""Keyword arguments as type checkers read them. Written by tools/options.py."""

from pathlib import Path
from typing import Literal, TypedDict


class LoadKeywords(TypedDict, total=False):
    """Options of `load`; `LoadOptions` declares them."""

    adapter: str | Path | None
    dtype: Literal["auto", "bfloat16", "float32", "float16"]
    device: str
    quantize: str | None
    dequantize: Literal["auto", "load", "use"]
    deterministic: bool
    input_bits: Literal[8, 16] | None
    strict: bool
    chat_template: str | Path | None


class WeightKeywords(TypedDict, total=False):
    """Options of `load` that `merge` has, too."""

    dtype: Literal["auto", "bfloat16", "float32", "float16"]
    device: str
    quantize: str | None
    dequantize: Literal["auto", "load", "use"]
    strict: bool


class EngineKeywords(TypedDict, total=False):
    """Options of an engine; `EngineOptions` declares them."""

    max_num_seqs: int
    kv_memory: int | None
    kv_cache_dtype: Literal["auto", "int8", "int8-k/int4-v", "int4"]
