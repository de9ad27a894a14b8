"""The one table of types: what C, GGUF and the options say of a type is what the table says."""

from ctypes import Structure, byref, c_int32

import pytest
import torch

from llamarium.errors import OptionError
from llamarium.kernels import native, structs
from llamarium.quant.formats import FORMATS, GROUP, PACKED_FORMATS, TILE_ROWS, chosen_type

pytestmark = pytest.mark.torch


def test_the_kernels_names_and_numbers_are_the_tables():
    floats = {"BF16": structs.Kind.BF16, "F16": structs.Kind.F16, "F32": structs.Kind.F32}
    assert {kind.name: kind for kind in structs.Kind} == floats | {n: f.kind for n, f in PACKED_FORMATS.items()}


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_a_tile_is_its_blocks_and_has_no_byte_more(name: str):
    format = PACKED_FORMATS[name]
    groups = format.columns // GROUP
    assert format.tile_bytes == (format.head_bytes or format.half_bytes) + groups * format.code_bytes
    assert format.bits_per_weight == 8 * format.tile_bytes / (TILE_ROWS * format.columns)
    assert format.num_levels == 1 << (8 * format.code_bytes // (TILE_ROWS * GROUP))
    assert format.levels is None or len(format.levels) == format.num_levels


class Tile(Structure):
    """`lm_tile`."""

    _fields_ = tuple(
        (name, c_int32) for name in ("columns", "bytes", "code_bytes", "codes_at", "scales_at", "minima_at")
    )


@pytest.mark.parametrize("name", FORMATS)
def test_a_tile_is_laid_out_as_in_c(name: str):
    lib, tile, format = native.library(), Tile(), PACKED_FORMATS.get(name)
    assert lib is not None
    if format is None:
        kind = structs.Kind.__members__.get(name, 99)
        assert lib.lm_tile_of(kind, byref(tile)) != 0
        return
    assert lib.lm_tile_of(format.kind, byref(tile)) == 0
    found = {name: getattr(tile, name) for name, _ in Tile._fields_}
    scales_at = 0 if format.is_super else format.code_bytes
    assert found == {
        "columns": format.columns,
        "bytes": format.tile_bytes,
        "code_bytes": format.code_bytes,
        "codes_at": format.head_bytes,
        "scales_at": scales_at,
        "minima_at": scales_at + 2 * TILE_ROWS if format.has_minimum else -1,
    }


@pytest.mark.parametrize(("typed", "meant"), [("nf4", "NF4"), ("Q4_k", "Q4_K"), ("IQ4_NL", "IQ4_NL"), ("None", "none")])
def test_types_are_typed_in_any_letters(typed: str, meant: str):
    assert chosen_type("type", typed, ("none", *FORMATS)) == meant


@pytest.mark.parametrize("value", [None, 4, torch.int8, "q9", ""])
def test_what_is_no_type_is_refused(value: object):
    with pytest.raises(OptionError, match=r"^type is .*; expected one of F32, F16"):
        chosen_type("type", value, tuple(FORMATS))
