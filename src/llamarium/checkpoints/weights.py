"""The loader: reads a checkpoint's weights into memory. Torch-free.

The loader gives each weight the form that `checkpoints/forms.py` has chosen. A weight that is used as stored remains a
view of its file: packed folders, and floats in the model's dtype. Blocks that the C kernels multiply are packed into
tiles without loss. All other weights are decoded, cast or quantized in pieces, several pieces in parallel, so that at
most one weight is in memory twice at a time.

The C kernels use these weights directly (`runtime/native`). Modules are built over the same memory
(`checkpoints/modules.py`), or receive the weights one at a time (`checkpoints/load.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.checkpoints.checkpoint import Checkpoint, StoredTensor, TensorEntry, expected_shapes
from llamarium.checkpoints.forms import Form, LoadingPlan, loading_plan
from llamarium.checkpoints.gguf.packing import FilePacking
from llamarium.checkpoints.gguf.reader import GGUFCheckpoint
from llamarium.checkpoints.options import TensorSource
from llamarium.checkpoints.storage import FLOATS
from llamarium.checkpoints.values import as_floats, parts_of, pieces, values
from llamarium.config import EMBEDDING, HEAD, ModelConfig
from llamarium.errors import CheckpointError, OptionError, escape, warn_caller
from llamarium.kernels.threads import num_threads
from llamarium.options.loading import LoadOptions
from llamarium.quant.formats import FORMATS, PACKED_FORMATS, TILE_ROWS
from llamarium.quant.packing import count_nonfinite, count_nonfinite_tiles, pack_blocks, to_bfloat16
from llamarium.quant.stored_types import STORED_TYPES
from llamarium.runtime.native.runner import NativeRunner
from llamarium.runtime.native.weights import Weight
from llamarium.runtime.runner import Runner

Progress = Callable[[int, int], None]
"""Called with (bytes read, total bytes)."""


def native_weights(
    checkpoint: Checkpoint, options: LoadOptions, progress: Progress | None = None
) -> Mapping[str, Weight] | None:
    """Load a model's weights for the C kernels, by key, without a tied head.

    A UserWarning reports weights that are NaN or infinite.

    Returns:
        The weights; None, before anything is read, if the kernels cannot run the model with these options.
    """
    plan = loading_plan(checkpoint, options)
    if not plan.runs_in_c:
        return None
    if not isinstance(checkpoint, GGUFCheckpoint):
        return {weight.key: weight for weight in read_weights(checkpoint, plan, options, progress)}
    tiles = (key for key, form in plan.forms.items() if form == (checkpoint.entries[key].dtype, "tiles", False))
    with FilePacking(checkpoint, tiles) as packing:
        return {weight.key: weight for weight in read_weights(checkpoint, plan, options, progress, packing)}


def read_weights(
    checkpoint: Checkpoint,
    plan: LoadingPlan,
    options: LoadOptions,
    progress: Progress | None = None,
    packing: FilePacking | None = None,
) -> Iterator[Weight]:
    """Yield a checkpoint's weights in the planned forms, in the order of its entries, without a tied head.

    The weights of `packing` are packed in the background, and are complete only after the last one was yielded. Then a
    UserWarning reports each weight that contains NaN or infinity; with `options.strict` it is a CheckpointError.
    """
    done, total = 0, sum(entry.num_bytes for entry in checkpoint.entries.values())
    tell = progress or _tell_nobody
    packed = {} if packing is None else packing.weights
    counts = dict[str, Future[int]]()
    with ThreadPoolExecutor(num_threads()) as pool:
        reader = _Reader(checkpoint, pool)
        for key, entry in checkpoint.entries.items():
            if key in packed:
                yield packed[key]
                continue
            weight = reader.weight(entry, plan.forms[key])
            counts[key] = pool.submit(_count_nonfinite, weight)  # in the background: it can take longer than reading
            done += entry.num_bytes
            tell(done, total)
            yield weight
            del weight  # frees its memory if the consumer moved it to another device
        if packing is not None:
            packing.wait(lambda num_bytes: tell(done + num_bytes, total))
            reader.num_bad |= {key: packing.num_nonfinite(key) for key in packed}
        for key, entry in checkpoint.entries.items():
            if num_bad := reader.num_bad.get(key) or (key in counts and counts[key].result()):
                _report_nonfinite(entry, num_bad, strict=options.strict)


def sources_of(checkpoint: Checkpoint, weights: Mapping[str, Weight]) -> tuple[TensorSource, ...]:
    """Return the source of each weight, with a tied head's last."""
    entries = checkpoint.entries.values()
    sources = [TensorSource.of(e, weights[e.key].type_name, weights[e.key].num_bytes) for e in entries]
    return with_tied_head(checkpoint.config, sources)


def with_tied_head(config: ModelConfig, sources: list[TensorSource]) -> tuple[TensorSource, ...]:
    """Return sources, followed by that of the head if it is tied."""
    if not config.tie_word_embeddings:
        return tuple(sources)
    source = next(source for source in sources if source.key == EMBEDDING)
    return (*sources, replace(source, key=HEAD, tied_to=EMBEDDING, num_bytes=0))


def replaced_in_c(runner: Runner, config: ModelConfig, weights: Mapping[str, Weight]) -> Runner:
    """Return a copy of a native runner with another config, and with `weights` replacing its own by key.

    If `config` unties the head and `weights` does not include it, the head is the embedding table.

    Raises:
        OptionError: If the runner is not a native one.
    """
    if not isinstance(runner, NativeRunner):
        raise OptionError(f"{runner.name} cannot run other weights or another shape; load the model for the C kernels")
    own_weights = {HEAD: replace(runner.weights[EMBEDDING], key=HEAD)} | dict(runner.weights)
    return runner.replaced(config, {key: weights.get(key) or own_weights[key] for key in expected_shapes(config)})


def float_weights(values: Mapping[str, NDArray[np.float32]], type_name: str = "F32") -> dict[str, Weight]:
    """Return float32 arrays as weights of type "F32", "F16" or "BF16", by key."""
    stored = {
        key: to_bfloat16(array) if type_name == "BF16" else array.astype(FLOATS[type_name], copy=False)
        for key, array in values.items()
    }
    return {key: Weight(key, type_name, array.shape, np.ascontiguousarray(array)) for key, array in stored.items()}


def _tell_nobody(_done: int, _total: int) -> None:
    """Ignore progress."""


class _Reader:
    """A reader of one weight at a time.

    Attributes:
        num_bad: Number of NaN or infinite values that weights had before they were quantized, by key.
    """

    def __init__(self, checkpoint: Checkpoint, pool: Executor) -> None:
        self.checkpoint, self._pool = checkpoint, pool
        self.num_bad = dict[str, int]()

    def weight(self, entry: TensorEntry, form: Form) -> Weight:
        """Read a weight and convert it to its form."""
        as_stored = form.type_name == entry.dtype and (form.layout != "tiles" or entry.is_packed)
        stored = self.checkpoint.stored(entry.key, copy=not as_stored)
        data, state = stored.data, stored.state
        if as_stored:
            data = as_floats(stored) if form.layout == "rows" else data
        elif form.layout == "rows":
            data, state = self._cast(stored, form.type_name), {}
        elif form.type_name == "NF4":
            from llamarium.quant.nf4 import nf4_parts  # imports torch, which NF4 modules need anyway

            numbers = _as_numbers(stored, slice(None))
            self.num_bad[entry.key] = count_nonfinite(numbers)
            data, state = nf4_parts(numbers)
        elif form.layout == "blocks":
            data = self._encoded(entry.key, stored, form.type_name)
        else:
            data, state = self._tiles(entry.key, stored, form), {}
        return Weight(entry.key, form.type_name, entry.shape, data, state)

    def _cast(self, stored: StoredTensor, type_name: str) -> NDArray[Any]:
        """Cast a weight to a type in `FLOATS`; values that overflow to infinity are reported like stored ones."""
        out = np.empty(stored.shape, FLOATS[type_name])
        by_row = np.atleast_2d(out)

        def fill(rows: slice) -> None:
            if type_name == "F32":  # decoded in place: float32 would be the largest copy
                values(stored, rows, by_row[rows])
                return
            piece = values(stored, rows)
            with np.errstate(over="ignore"):
                by_row[rows] = to_bfloat16(piece) if type_name == "BF16" else piece

        self._for_each_piece(stored, fill)
        return out

    def _encoded(self, key: str, stored: StoredTensor, type_name: str) -> NDArray[np.uint8]:
        """Quantize a weight to GGUF blocks, uint8 (rows, bytes per row)."""
        num_rows, columns = stored.shape
        out = np.empty((num_rows, FORMATS[type_name].row_bytes(columns)), np.uint8)

        def fill(rows: slice) -> None:
            out[rows] = self._encode(key, stored, rows, type_name)

        self._for_each_piece(stored, fill)
        return out

    def _tiles(self, key: str, stored: StoredTensor, form: Form) -> NDArray[np.uint8]:
        """Return a weight in tiles: repacked from its stored blocks without loss, or quantized."""
        num_rows, columns = stored.shape
        type_name, format = form.type_name, PACKED_FORMATS[form.type_name]
        if stored.type_name == type_name:
            return pack_blocks(stored.data, columns, format)
        to_blocks = STORED_TYPES[stored.type_name].to_blocks if form.is_exact else None
        out = np.empty((-(-num_rows // TILE_ROWS), columns // format.columns, format.tile_bytes), np.uint8)

        def fill(rows: slice) -> None:
            if to_blocks is not None:
                blocks = to_blocks(parts_of(stored), stored.shape, rows.start, rows.stop, type_name)
            else:
                blocks = self._encode(key, stored, rows, type_name)
            out[rows.start // TILE_ROWS : -(-rows.stop // TILE_ROWS)] = pack_blocks(blocks, columns, format)

        self._for_each_piece(stored, fill)
        return out

    def _encode(self, key: str, stored: StoredTensor, rows: slice, type_name: str) -> NDArray[np.uint8]:
        numbers = _as_numbers(stored, rows)
        if num_bad := count_nonfinite(numbers):  # counted here: the blocks may not show them
            self.num_bad[key] = self.num_bad.get(key, 0) + num_bad
        from llamarium.quant.ggml.encode import encode

        return encode(numbers, type_name)

    def _for_each_piece(self, stored: StoredTensor, work: Callable[[slice], None]) -> None:
        for _ in self._pool.map(work, pieces(stored.shape)):
            pass


def _as_numbers(stored: StoredTensor, rows: slice) -> NDArray[Any]:
    """Return rows of a weight as input for `encode`: floats in their stored dtype, other types as float32."""
    return as_floats(stored)[rows] if stored.type_name in FLOATS else values(stored, rows)


def _count_nonfinite(weight: Weight) -> int:
    if weight.type_name in FLOATS:
        return count_nonfinite(weight.data)
    if weight.data.ndim == 3:
        return count_nonfinite_tiles(weight.data, PACKED_FORMATS[weight.type_name])
    stored = StoredTensor(weight.type_name, weight.shape, weight.data, weight.state)
    return sum(count_nonfinite(values(stored, rows)) for rows in pieces(stored.shape))


def _report_nonfinite(entry: TensorEntry, num_bad: int, *, strict: bool) -> None:
    """Issue a UserWarning about NaN or infinite weights; with `strict` raise CheckpointError."""
    problem = f"{escape(entry.file)}: {escape(entry.name, 80)} has {num_bad} weights that are NaN or infinite"
    if strict:
        raise CheckpointError(f"{problem}; expected none, since loading is strict")
    warn_caller(f"{problem}; the model's output will be wrong where they are used")
