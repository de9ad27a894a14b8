"""Which tensor of a GGUF file gets which type, for each kind of file that is written.

Kinds of files have names like types, and in a file called Q8_0 all matrices are of that type. In others some matrices,
where rounding shows more, get a better one: the head in all files of 4 and 5 bits, and in Q4_K_M and Q5_K_M half of the
v and down projections. Vectors stay F32.

A matrix whose rows are no whole number of a type's blocks gets the nearest type whose blocks are smaller.

Source: llama.cpp, `llama-quant.cpp` (`llama_tensor_get_type`, `use_more_bits`) and `llama.h` (`llama_ftype`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from llamarium.config import EMBEDDING, HEAD, ModelConfig
from llamarium.quant.formats import SMALLER_BLOCKS, block_format


@dataclass(frozen=True, slots=True)
class Mixture:
    """A kind of file.

    Attributes:
        number: llama.cpp's for `general.file_type`.
        type_name: Of most matrices.
        head: Of the head, or of a table that is the head too.
        better: The type of some v and down projections; None: there are none.
        of_values, of_down: Whether the projection of a layer is one, by the layer's index and how many there are.
    """

    number: int
    type_name: str
    head: str
    better: str | None = None
    of_values: Callable[[int, int], bool] = lambda layer, num_layers: False
    of_down: Callable[[int, int], bool] = lambda layer, num_layers: False


def _first_last_and_third(layer: int, num_layers: int) -> bool:
    """Whether a layer is of the first eighth, the last eighth, or every third between."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


_MIXTURES = {
    "F32": Mixture(0, "F32", "F32"),
    "F16": Mixture(1, "F16", "F16"),
    "BF16": Mixture(32, "BF16", "BF16"),
    "Q8_0": Mixture(7, "Q8_0", "Q8_0"),
    "Q6_K": Mixture(18, "Q6_K", "Q6_K"),
    "Q5_K_M": Mixture(17, "Q5_K", "Q6_K", "Q6_K", _first_last_and_third, _first_last_and_third),
    "Q5_K_S": Mixture(16, "Q5_K", "Q6_K"),
    "Q5_1": Mixture(9, "Q5_1", "Q6_K"),
    "Q5_0": Mixture(8, "Q5_0", "Q6_K"),
    "Q4_K_M": Mixture(15, "Q4_K", "Q6_K", "Q6_K", _first_last_and_third, _first_last_and_third),
    "Q4_K_S": Mixture(14, "Q4_K", "Q6_K", "Q5_K", lambda layer, _: layer < 4, lambda layer, n: layer < n // 8),
    "Q4_1": Mixture(3, "Q4_1", "Q6_K"),
    "Q4_0": Mixture(2, "Q4_0", "Q6_K"),
}

MIXTURES = _MIXTURES | {"Q4_K": _MIXTURES["Q4_K_M"], "Q5_K": _MIXTURES["Q5_K_M"]}
"""Every kind of file that is written, by name; Q4_K and Q5_K are what llama.cpp takes them for."""

FLOATS = ("F32", "F16", "BF16")
BLOCKS = tuple(name for name in MIXTURES if name not in FLOATS)


def type_of(key: str, shape: tuple[int, ...], config: ModelConfig, mixture: Mixture) -> str:
    """Return a weight's type in GGUF: F32 for vectors; smaller blocks, or F16, where a row's length needs them."""
    if len(shape) == 1:
        return "F32"
    kind = wanted_type(key, config, mixture)
    if shape[-1] % block_format(kind).block_size:
        kind = SMALLER_BLOCKS.get(kind, "F16")
    return "F16" if shape[-1] % block_format(kind).block_size else kind


def wanted_type(key: str, config: ModelConfig, mixture: Mixture) -> str:
    """Return the type that a matrix gets if its rows are a whole number of blocks."""
    if key == HEAD or (key == EMBEDDING and config.tie_word_embeddings):
        return mixture.head
    chosen = {"self_attn.v_proj.weight": mixture.of_values, "mlp.down_proj.weight": mixture.of_down}
    for name, is_better in chosen.items():
        if key.endswith(name) and is_better(int(key.split(".")[2]), config.num_hidden_layers):
            return mixture.better or mixture.type_name
    return mixture.type_name
