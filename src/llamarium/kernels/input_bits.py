"""Bits of the inputs of packed weights. Imports nothing heavy, so that options can name them."""

from typing import Literal

InputBits = Literal[8, 16]
"""Bits to which activations, except outliers, are quantized before products with packed weights (decision 0022)."""

INPUT_BITS: InputBits = 8
"""The default `InputBits`."""
