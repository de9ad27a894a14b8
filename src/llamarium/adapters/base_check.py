"""Check that a model is the base that an adapter was trained on, and does not contain the adapter already.

On another base of the same shape an adapter is noise; on a base that it was merged into, it would be applied twice.
Therefore the header of an adapter's file stores five values that identify the base; other readers ignore them:

- `llamarium_base_stored`: the stored types of the weights that training started from, and a hash of some bytes of each.
  If it matches the loaded weights, whatever their dtype in memory, no other check is needed. It also identifies a
  quantized file that was dequantized for training.
- `llamarium_base_quantized`: the type that training quantized the stored Linears to, or "none".
- `llamarium_base`: a hash of weights that quantizing the Linears does not change: norms and some embedding rows.
- `llamarium_base_linears`: the type of the Linears, and a hash of some rows of each, which a merge changes. Hashes are
  comparable only for the same type: a base in NF4 is the same base with other values.
- `llamarium_base_projection`: <W, C> / <C, C>, where C is scale B A of all adapters together. A merged model has
  W + C instead of W, which adds 1 to this value in any type, because quantization noise is independent of C. It
  distinguishes a merged model from its base if hashes cannot. Both values are stored: the base's and the merged one.

`modules.py` implements `Base` for PyTorch modules; `WeightBase` is for the weights of a runner. Torch-free.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llamarium.adapters.files import SavedAdapter
from llamarium.checkpoints.checkpoint import expected_shapes
from llamarium.checkpoints.storage import FLOATS
from llamarium.config import EMBEDDING
from llamarium.errors import CheckpointError, DownloadError, escape, show_value, warn_caller
from llamarium.hub.builtin import cache_folder
from llamarium.quant.packing import to_bfloat16
from llamarium.runtime.adapter import LAYER_LINEARS, Adapter, LowRank
from llamarium.runtime.runner import Runner, WeightInfo

BASE_KEY, LINEARS_KEY, PROJECTION_KEY = "llamarium_base", "llamarium_base_linears", "llamarium_base_projection"
STORED_KEY, QUANTIZED_KEY = "llamarium_base_stored", "llamarium_base_quantized"
_EMBEDDING_ROWS = 256
_LINEAR_ROWS = 8
# Quantization to 4 bits changes a weight by about 0.1 of the weights' standard deviation; six times that bounds noise.
_QUANTIZATION_NOISE = 0.6


@dataclass(frozen=True, slots=True)
class Share:
    """The share of the adapters' correction C that the weights W contain.

    Attributes:
        of_correction: <W, C> / <C, C>; 0 if C is 0.
        noise: Bound on the change of `of_correction` by quantizing W.
    """

    of_correction: float
    noise: float

    @classmethod
    def of_sums(cls, inner: float, correction: float, base: float, count: int) -> "Share":
        """Compute the share from <W, C>, <C, C>, <W, W>, and the number of weights in these sums."""
        if not correction:  # nothing has been learned yet
            return cls(0.0, 0.0)
        return cls(inner / correction, _QUANTIZATION_NOISE * math.sqrt(base / count / correction))


def trained_quantized(metadata: Mapping[str, str]) -> str | None:
    """Return the type that training quantized the stored base to, "none", or None if the header does not have it.

    Earlier versions stored only the modules' types. NF4 there means quantized for training, because training never
    starts from files in NF4.
    """
    if QUANTIZED_KEY in metadata:
        return metadata[QUANTIZED_KEY]
    types = metadata.get(LINEARS_KEY, "").rpartition(":")[0].split("+")
    if any(name.startswith("Linear4bit") for name in types):
        return "NF4"
    return "none" if types == ["plain"] else None


class Base(Protocol):
    """The weights that an adapter is applied to."""

    def fingerprint(self) -> str | None:
        """Return a hex SHA-256 of the norms and some embedding rows, which quantizing Linears does not change.

        Values are rounded to bfloat16, so bfloat16 and float32 copies of a model agree. None for float16, which cannot
        represent some small bfloat16 values.
        """

    def linears_fingerprint(self) -> str:
        """Return the types of the layers' Linears and a hex SHA-256 of some rows of each: "plain:0123..."."""
        ...

    def share(self) -> Share | None:
        """Return the share of the adapter's correction in the weights; None if W is sharded over processes."""


def sampled_embedding(num_rows: int) -> range:
    """Return the indices of the embedding rows that are hashed."""
    return range(0, num_rows, max(1, num_rows // _EMBEDDING_ROWS))


def sampled_linear(num_rows: int) -> range:
    """Return the indices of a Linear's rows that are hashed."""
    return range(0, num_rows, max(1, num_rows // _LINEAR_ROWS))


def sha256(parts: Iterable[NDArray[Any]]) -> str:
    """Return the hex SHA-256 of float32 arrays rounded to bfloat16."""
    digest = hashlib.sha256()
    for values in parts:
        digest.update(to_bfloat16(values).data)
    return digest.hexdigest()


def same_linears(saved: str, current: str) -> bool | None:
    """Return whether two `linears_fingerprint`s are equal; None if the Linears have different types."""
    if saved == current:
        return True
    return False if saved.rpartition(":")[0] == current.rpartition(":")[0] else None


def check_base(base: Base, saved: SavedAdapter, stored: Callable[[], str] | None = None) -> None:
    """Check a base against the values in an adapter's file; warn if they are missing, or the base is in float16.

    `stored` returns the `stored_fingerprint` of the base, if it is known. If the file has another one, the weights are
    compared, and a success is remembered in the cache folder.

    Raises:
        CheckpointError: If it is another base, or contains the adapter already.
    """
    fingerprint = None if stored is None else stored()
    if fingerprint is not None and fingerprint == saved.metadata.get(STORED_KEY):
        return
    note = None if fingerprint is None else _note(saved, fingerprint)
    if note is not None and note.is_file():
        return
    if _compare(base, saved) and note is not None:
        with suppress(OSError):  # only a cache
            note.parent.mkdir(parents=True, exist_ok=True)
            note.touch()


def _note(saved: SavedAdapter, stored: str) -> Path | None:
    """Return the path of the empty file that marks an adapter as checked with a base; None without a cache folder."""
    digest = hashlib.sha256(f"1 {stored} {sorted(saved.metadata.items())}".encode())
    rows = ((name, values) for name, (_, values) in saved.token_rows.items())
    for name, values in (*saved.tensors.items(), *saved.weights.items(), *rows):
        digest.update(f"{name} {values.shape}".encode() + values.tobytes())
    try:
        return cache_folder() / "checked-adapters" / digest.hexdigest()
    except DownloadError:
        return None


def _compare(base: Base, saved: SavedAdapter) -> bool:
    folder, written, name = saved.folder, saved.metadata, saved.base_name
    if (expected := written.get(BASE_KEY)) is None:
        return False
    actual = base.fingerprint()
    if actual is None:
        warn_caller("in float16 a base has no fingerprint: whether the adapter is its own is not checked")
    elif actual != expected:
        raise _another(folder, name, expected, actual)
    if (linears := written.get(LINEARS_KEY)) is None:
        warn_caller(
            f"{escape(folder)}: was saved by a version that did not note the base's Linears; whether the base contains "
            "this adapter already (it was merged into it) is not checked"
        )
        return False
    current = base.linears_fingerprint()
    if (is_same := same_linears(linears, current)) is True:
        return actual is not None
    contained = _is_contained(base, written.get(PROJECTION_KEY))
    if contained:
        raise CheckpointError(
            f"{escape(folder)}: the base contains this adapter already, as it was merged into it; once more would move "
            f"the weights twice as far. Take the model as it is, or load the base itself ({show_value(name)})"
        )
    if is_same is False:
        raise _another(folder, name, linears.rpartition(":")[2], current.rpartition(":")[2])
    if contained is None:
        warn_caller(
            f"{escape(folder)}: the base is stored otherwise than in training; whether it contains this adapter "
            "already is not checked"
        )
    return actual is not None and contained is not None


def _is_contained(base: Base, written: str | None) -> bool | None:
    """Return whether a base contains the adapters' correction; None if that cannot be determined."""
    try:
        before, merged = map(float, (written or "").split())
    except ValueError:
        return None
    share = base.share()
    if share is None or not math.isfinite(before + merged) or share.noise > abs(merged - before) / 2:
        return None
    return abs(share.of_correction - merged) < abs(share.of_correction - before)


def _another(folder: Path, name: object, expected: str, actual: str) -> CheckpointError:
    return CheckpointError(
        f"{escape(folder)}: the adapter was trained on another base ({show_value(name)}, fingerprint "
        f"{escape(expected, 12)}; this one has {escape(actual, 12)}); load that base"
    )


_Floats = NDArray[np.float32]

# Weights processed at a time: 4 MiB in float32.
_CHUNK_WEIGHTS = 2**20


@dataclass(frozen=True, slots=True)
class WeightBase:
    """A runner's weights and an adapter for them, as a `Base`."""

    runner: Runner
    saved: SavedAdapter

    def fingerprint(self) -> str | None:
        """See `Base.fingerprint`."""
        norms = [key for key in expected_shapes(self.runner.config) if key.endswith("norm.weight")]
        rows = self.runner.dequantize(EMBEDDING, sampled_embedding(self.runner.config.vocab_size))
        return sha256((rows, *map(self.runner.dequantize, norms)))

    def linears_fingerprint(self) -> str:
        """See `Base.linears_fingerprint`."""
        layers = range(self.runner.config.num_hidden_layers)
        weights = [
            self.runner.weights[f"model.layers.{layer}.{name}.weight"]
            for layer in layers
            for name in LAYER_LINEARS.values()
        ]
        types = {"plain" if w.type_name in FLOATS else f"LinearPacked {w.type_name}" for w in weights}
        return f"{'+'.join(sorted(types))}:{sha256(map(self._sampled, weights))}"

    def _sampled(self, weight: WeightInfo) -> _Floats:
        rows = self.runner.dequantize(weight.key, sampled_linear(weight.shape[0]))
        return rows if weight.type_name in FLOATS else rows + 0.0  # -0.0 to 0.0: the code is the same

    def share(self) -> Share | None:
        """See `Base.share`."""
        inner = correction = base = 0.0
        count = 0
        for name in self.saved.linears:
            for weights, change in self._rows(name):
                inner += float((weights * change).sum(dtype=np.float64))
                correction += float(np.square(change).sum(dtype=np.float64))
                base += float(np.square(weights).sum(dtype=np.float64))
                count += weights.size
        return Share.of_sums(inner, correction, base, count)

    def adapter(self) -> Adapter:
        """Return the adapter for the C kernels."""
        return {name: self._low_rank(name) for name in self.saved.linears}

    def _low_rank(self, name: str) -> LowRank:
        tensors = self.saved.tensors
        magnitude = tensors.get(f"{name}.lora_magnitude_vector")
        gain = None
        if magnitude is not None:
            corrected = (weights + change for weights, change in self._rows(name))
            norms: _Floats = np.concatenate([np.linalg.norm(rows, axis=1) for rows in corrected])
            gain = magnitude / norms
        a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        return LowRank(self.saved.scales[name], a, b, gain)

    def _rows(self, name: str) -> Iterator[tuple[_Floats, _Floats]]:
        """Yield W and scale B A for ranges of rows, each (rows, in), so that W is never dequantized as a whole."""
        a, b = (self.saved.tensors[f"{name}.lora_{part}.weight"] for part in "AB")
        step = max(1, _CHUNK_WEIGHTS // a.shape[1])
        for start in range(0, len(b), step):
            rows = range(start, min(start + step, len(b)))
            yield (
                self.runner.dequantize(f"{name}.weight", rows),
                (b[start : rows.stop] @ a) * np.float32(self.saved.scales[name]),
            )
