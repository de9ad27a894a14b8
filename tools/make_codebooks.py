"""Write `src/llamarium/quant/ggml/codebooks.py` from the values in the `gguf` package.

    python tools/make_codebooks.py

The codebooks are facts of GGUF's IQ formats: each type's codes are indices into a list of vectors. Only the values are
taken over, in an encoding of our own.
"""

import base64
from pathlib import Path

import numpy as np
from gguf import quants

TYPES = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S")
TARGET = Path(__file__).parents[1] / "src/llamarium/quant/ggml/codebooks.py"

HEADER = '''"""Codebooks of GGUF's IQ types: the vectors that the codes index.

This is data, made by `tools/make_codebooks.py`.

A codebook is a list of vectors of 4 or 8 components. Each component is one of a few magnitudes, and is stored as the
index of its magnitude in that list: four bits, the first component in the low half of a byte, in base 85.

Source: the values are those of ggml, `ggml-common.h` (`iq2xxs_grid`, ...), read from the `gguf` package,
`gguf/quants.py`.
"""

from typing import NamedTuple


class Codebook(NamedTuple):
    """A codebook as text.

    Attributes:
        magnitudes: The values that the stored indices refer to.
        width: Number of components per vector.
        data: Indices, two per byte, in base 85.
    """

    magnitudes: tuple[int, ...]
    width: int
    data: str


CODEBOOKS = {
'''


def codebook(name: str) -> str:
    """Return one entry of the table, as source."""
    kind = getattr(quants, name)
    kind.init_grid()
    grid = kind.grid.reshape(kind.grid_shape)
    magnitudes = sorted(int(value) for value in np.unique(grid))
    places = np.searchsorted(magnitudes, grid.astype(int)).astype(np.uint8).reshape(-1, 2)
    text = base64.b85encode((places[:, 0] | places[:, 1] << 4).tobytes()).decode()
    lines = [text[i : i + 100] for i in range(0, len(text), 100)]
    body = "".join(f'        "{line}"\n' for line in lines)
    return f'    "{name}": Codebook(\n        {tuple(magnitudes)}, {grid.shape[-1]},\n{body}    ),\n'


def source() -> str:
    """Return the module's text."""
    return HEADER + "".join(codebook(name) for name in TYPES) + "}  # fmt: skip\n"


if __name__ == "__main__":
    TARGET.write_text(source())
