"""From a checkpoint to the weights of the native runner, without torch.

A packed folder's tiles, and floats that are stored in the model's dtype, stay views of their file. Of GGUF's blocks
those types are packed that the C kernels multiply. What else there is becomes numbers of the model's dtype: other
types, other floats, and in float32 and float16 all types. NF4 is left to `checkpoints/load.py`, which builds modules.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.checkpoints.checkpoint import Checkpoint, StoredTensor, TensorEntry, expected_shapes
from llamarium.checkpoints.options import TYPE_OF_DTYPE, LoadOptions, TensorSource, check_options, natural_dtype
from llamarium.checkpoints.storage import FLOATS
from llamarium.config import EMBEDDING, HEAD, ModelConfig
from llamarium.errors import CheckpointError, OptionError, escape, warn_caller
from llamarium.kernels import native
from llamarium.kernels.threads import num_threads
from llamarium.quant.formats import PACKED_FORMATS
from llamarium.quant.packing import count_nonfinite, count_nonfinite_tiles, dequantize, pack_blocks, to_bfloat16
from llamarium.runtime.native.runner import NativeRunner
from llamarium.runtime.native.weights import Weight
from llamarium.runtime.runner import Runner

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all)."""


def native_weights(
    checkpoint: Checkpoint, options: LoadOptions, progress: Progress | None = None
) -> Mapping[str, Weight] | None:
    """Return a model's weights in the form in which the C kernels multiply them, by key; a tied head is not among them.

    None, and nothing is read, where a weight is NF4, or the options ask for modules. A UserWarning tells of weights
    that are NaN or infinite.
    """
    check_options(checkpoint, options)
    forms = _forms(checkpoint, options)
    if forms is None:
        return None
    done, total = 0, sum(entry.num_bytes for entry in checkpoint.entries.values())
    weights, counts = dict[str, Weight](), dict[str, Future[int]]()
    with ThreadPoolExecutor(num_threads()) as pool:  # looking at every weight takes longer than opening the file
        for key, entry in checkpoint.entries.items():
            weights[key] = _weight(checkpoint, entry, forms[key])
            counts[key] = pool.submit(_count_nonfinite, weights[key])
            done += entry.num_bytes
            if progress is not None:
                progress(done, total)
        for key, entry in checkpoint.entries.items():
            if num_bad := counts[key].result():
                report_nonfinite(entry, num_bad, strict=options.strict)
    return weights


def sources_of(checkpoint: Checkpoint, weights: Mapping[str, Weight]) -> tuple[TensorSource, ...]:
    """Return where each weight came from, a tied head's last."""
    entries = checkpoint.entries.values()
    sources = [TensorSource.of(e, weights[e.key].type_name, weights[e.key].data.nbytes) for e in entries]
    if checkpoint.config.tie_word_embeddings:
        source = next(source for source in sources if source.key == EMBEDDING)
        sources.append(replace(source, key=HEAD, tied_to=EMBEDDING, num_bytes=0))
    return tuple(sources)


def replaced_in_c(runner: Runner, config: ModelConfig, values: Mapping[str, NDArray[np.float32]]) -> Runner:
    """Return a runner like one in C, of another shape, and with these values in the place of some or all weights."""
    if not isinstance(runner, NativeRunner):
        raise OptionError(f"{runner.name} cannot run other weights or another shape; load the model for the C kernels")
    others = {key: Weight(key, "F32", array.shape, np.ascontiguousarray(array)) for key, array in values.items()}
    return runner.replaced(config, {key: others.get(key) or runner.weights[key] for key in expected_shapes(config)})


def _forms(checkpoint: Checkpoint, options: LoadOptions) -> dict[str, str] | None:
    """Return the type in which each weight is held, or None where the kernels cannot have them all."""
    entries = checkpoint.entries.values()
    asks_otherwise = options.quantize is not None or options.dequantize == "use" or not options.join
    if options.device != "cpu" or asks_otherwise or native.library() is None:
        return None
    if any(entry.dtype == "NF4" for entry in entries):
        return None
    dtype = options.dtype or natural_dtype(checkpoint)
    packs = dtype == "bfloat16" and options.dequantize == "auto"  # another dtype means exact products
    return {e.key: e.dtype if packs and e.dtype in PACKED_FORMATS else TYPE_OF_DTYPE[dtype] for e in entries}


def _weight(checkpoint: Checkpoint, entry: TensorEntry, form: str) -> Weight:
    changes = form != entry.dtype or (entry.dtype not in FLOATS and not entry.is_packed)
    stored = checkpoint.stored(entry.key, copy=changes)
    if form == entry.dtype:
        return Weight(entry.key, form, entry.shape, _as_multiplied(stored))
    values = dequantize(stored.type_name, stored.shape, stored.data)
    if form == "F16":
        with np.errstate(over="ignore"):  # what becomes infinite is reported
            return Weight(entry.key, form, entry.shape, values.astype(np.float16))
    return Weight(entry.key, form, entry.shape, to_bfloat16(values) if form == "BF16" else values)


def _as_multiplied(stored: StoredTensor) -> NDArray[Any]:
    """Return a weight in its own type, as the kernels multiply it."""
    if stored.type_name in FLOATS:
        return stored.data.view(FLOATS[stored.type_name]).reshape(stored.shape)
    return (
        stored.data if stored.is_packed else pack_blocks(stored.data, stored.shape[1], PACKED_FORMATS[stored.type_name])
    )


def _count_nonfinite(weight: Weight) -> int:
    if weight.type_name in FLOATS:
        return count_nonfinite(weight.data)
    return count_nonfinite_tiles(weight.data, PACKED_FORMATS[weight.type_name])


def report_nonfinite(entry: TensorEntry, num_bad: int, *, strict: bool) -> None:
    """Warn of, or with `strict` refuse, weights that are NaN or infinite."""
    found = f"{escape(entry.file)}: {escape(entry.name, 80)} has {num_bad} weights that are NaN or infinite"
    if strict:
        raise CheckpointError(f"{found}; expected none, since loading is strict")
    warn_caller(f"{found}; the model's output will be wrong where they are used")
