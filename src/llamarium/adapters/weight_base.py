"""A runner's weights as an adapter's base, in numpy, and the adapter as its kernels add it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamarium.adapters.base_check import Share, sampled_embedding, sampled_linear, sha256
from llamarium.adapters.files import SavedAdapter
from llamarium.checkpoints.checkpoint import expected_shapes
from llamarium.checkpoints.storage import FLOATS
from llamarium.config import EMBEDDING
from llamarium.runtime.adapter import LAYER_LINEARS, Adapter, LowRank
from llamarium.runtime.runner import Runner, WeightInfo

_Floats = NDArray[np.float32]

# Weights in float32 at a time: 4 MiB.
_CHUNK_WEIGHTS = 2**20


@dataclass(frozen=True, slots=True)
class WeightBase:
    """A runner's weights and an adapter for them, as a `Base`."""

    runner: Runner
    saved: SavedAdapter

    def fingerprint(self) -> str | None:
        """See `Base.fingerprint`."""
        weights = self.runner.weights
        norms = [key for key in expected_shapes(self.runner.config) if len(weights[key].shape) == 1]
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
        return rows if weight.type_name in FLOATS else rows + 0.0  # -0.0 is 0.0: a code has no sign

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
        gain = None if magnitude is None else magnitude / self._row_norms(name)
        a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        return LowRank(self.saved.config.scale, a, b, gain)

    def _row_norms(self, name: str) -> _Floats:
        """Return the norms of the rows of W + scale B A: (out,)."""
        return np.concatenate([np.linalg.norm(weights + change, axis=1) for weights, change in self._rows(name)])

    def _rows(self, name: str) -> Iterator[tuple[_Floats, _Floats]]:
        """Yield W and scale B A, (rows, in), a range of rows at a time, so a packed W is never unpacked whole."""
        a, b = (self.saved.tensors[f"{name}.lora_{part}.weight"] for part in "AB")
        step = max(1, _CHUNK_WEIGHTS // a.shape[1])
        for start in range(0, len(b), step):
            rows = range(start, min(start + step, len(b)))
            yield (
                self.runner.dequantize(f"{name}.weight", rows),
                (b[start : rows.stop] @ a) * np.float32(self.saved.config.scale),
            )
