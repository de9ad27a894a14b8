"""One product from memory: the bytes of weights that each format's kernels take a second, against reading them only.

    python bench/products.py [--threads 1] [--rows 1]

Each matrix is multiplied when no cache holds it: there are as many of them as make 400 MB, and they take turns.
`--rows` is how many rows of tokens a product has: 1 is a decode step, 64 a part of a prompt, where arithmetic is the
limit and GMAC/s (billions of multiply-adds a second) says more. LLAMARIUM_KERNELS chooses the set of kernels.
"""

import time
from typing import Any

import torch
from torch import Tensor

import common
from llamarium.kernels import native
from llamarium.quant.formats import PACKED_FORMATS, TILE_ROWS
from llamarium.quant.packed import LinearPacked

ROWS, COLUMNS = 8192, 2048  # of a matrix
NUM_BYTES = 400_000_000


def main() -> None:
    """Measure each format in turn with reading."""
    parser = common.parser(__doc__)
    parser.add_argument("--rows", type=int, default=1, help="rows of tokens (default 1)")
    parser.set_defaults(threads=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    x = torch.randn(options.rows, COLUMNS)
    rows: list[dict[str, Any]] = []
    for name in PACKED_FORMATS:
        memory, linears = matrices(name)
        sides = {
            "product": lambda linears=linears: {"GB/s": product_speed(linears, x)},
            "reading": lambda memory=memory: {"GB/s": memory.nbytes / native.read_ns(memory.numpy())},
        }
        medians = common.alternate(options.rounds, sides)
        products = medians["product"]["GB/s"] / linears[0].weight.nbytes * ROWS * COLUMNS * options.rows
        share = medians["product / reading"]["GB/s"]
        reading = medians["reading"]["GB/s"]
        row = {"GB/s": medians["product"]["GB/s"], "reading GB/s": reading, "share": share, "GMAC/s": products}
        rows.append({"format": name, **row})
    name = f"products-{native.kernels()}-{options.rows}"
    common.report(name, options, rows, {row.pop("format"): row for row in map(dict, rows)})


def matrices(name: str) -> tuple[Tensor, list[LinearPacked]]:
    """Return memory, and matrices of a format that lie in it: any codes and integers, and finite scales."""
    format = PACKED_FORMATS[name]
    shape = (ROWS // TILE_ROWS, COLUMNS // format.columns, format.tile_bytes)
    num_bytes = shape[0] * shape[1] * shape[2]
    memory = torch.randint(256, (NUM_BYTES // num_bytes, num_bytes), dtype=torch.uint8)
    linears = [LinearPacked(tiles.view(shape), ROWS, format) for tiles in memory]
    for linear in linears:
        start = 0 if format.is_super else format.code_bytes // 2
        linear.weight.view(torch.float16)[..., start : start + format.half_bytes // 2].fill_(0.01)
    return memory, linears


def product_speed(linears: list[LinearPacked], x: Tensor) -> float:
    """Return the GB/s of weights."""
    begin = time.perf_counter()
    for linear in linears:
        native.product(linear.matrix, x.numpy())
    return sum(linear.weight.nbytes for linear in linears) / (time.perf_counter() - begin) / 1e9


if __name__ == "__main__":
    main()
