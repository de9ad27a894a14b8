"""Quantize a model on disk to packed formats, layer by layer.

Four methods, each better and slower than the one before:

| method     | scales                                                      | needs a text |
|------------|-------------------------------------------------------------|--------------|
| nearest    | of the largest weight of a group; round to nearest          |              |
| fit        | of the least squared error (`quantization/fit.py`)          |              |
| importance | of the least error weighted by the inputs' mean squares     | yes          |
| gptq       | compensating earlier columns (`quantization/gptq.py`)       | yes          |

Layer by layer, weights are read in float32, inputs measured (`quantization/calibrate.py`), and Linears quantized and
kept until they are written. The embedding and the head come last, since only then the head's inputs are known.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn

from llamarium.checkpoints.checkpoint import Checkpoint
from llamarium.checkpoints.decode import FLOAT_DTYPES, read
from llamarium.checkpoints.packed.save import PackedWeight
from llamarium.config import EMBEDDING, HEAD
from llamarium.errors import CheckpointError, OptionError, escape, show_value
from llamarium.model import LlamaForCausalLM
from llamarium.model.llama import LlamaDecoderLayer
from llamarium.model.rope import Rotary
from llamarium.quant.formats import GROUP, PACKED_FORMATS
from llamarium.quant.packed import EmbeddingPacked, LinearPacked
from llamarium.quantization.calibrate import LINEARS_BY_INPUT, InputStatistics, run_layer
from llamarium.quantization.fit import FITTED_FORMATS, fit
from llamarium.quantization.gptq import gptq

QuantizeMethod = Literal["nearest", "fit", "importance", "gptq"]
METHODS: tuple[QuantizeMethod, ...] = get_args(QuantizeMethod)
CALIBRATED: tuple[QuantizeMethod, ...] = ("importance", "gptq")
"""The methods that look at a text."""

_LINEARS = tuple(name for names in LINEARS_BY_INPUT.values() for name in names)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to quantize a model.

    Attributes:
        type: Of the layers' Linears, one of `FITTED_FORMATS`.
        method: One of `METHODS`.
        requantize: Accept weights that are quantized already, unpacked.
    """

    type: str
    method: QuantizeMethod
    requantize: bool = False


class Quantizer:
    """Quantizes the model of a checkpoint.

    Args:
        checkpoint: Opened.
        recipe: How.
        windows_BT: int64, a sample of a text (`sample_windows`); needed by the methods in `CALIBRATED`.
        progress: Called with (weights done, weights in all) after each matrix.
        num_compared: Number of windows that also go through the unquantized model (`reference`).

    Raises:
        CheckpointError: If a norm's weights are NaN or infinite.
        OptionError: If the recipe is invalid, does not fit the checkpoint, or lacks its sample.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipe: Recipe,
        windows_BT: Tensor | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        num_compared: int = 0,
    ) -> None:
        check_recipe(checkpoint, recipe)
        if recipe.method in CALIBRATED and windows_BT is None:
            raise OptionError(f"method {recipe.method} looks at a text to calibrate with, and there is none; give one")
        self.checkpoint, self.recipe = checkpoint, recipe
        self._progress = progress
        self._num_done = 0
        self._num_layers_done = 0
        self._packed: dict[str, LinearPacked] = {}
        self._scaffold = _empty_model(checkpoint)
        _check_norms(checkpoint)
        self._hidden_BTD: Tensor | None = None
        self._reference_BTD: Tensor | None = None
        if windows_BT is not None:
            self._hidden_BTD = read(checkpoint, EMBEDDING)[windows_BT].float()
            self._reference_BTD = self._hidden_BTD[:num_compared].clone() if num_compared else None

    def quantize_layers(self) -> None:
        """Quantize the remaining layers."""
        while self._num_layers_done < self.checkpoint.config.num_hidden_layers:
            self._next_layer()

    def weights(self, head_type: str) -> list[PackedWeight]:
        """Return the weights to write, with a type for head and embedding; layers are quantized when they are read."""
        entries = self.checkpoint.entries

        def weight(key: str) -> PackedWeight:
            shape = cast("tuple[int, int] | tuple[int]", entries[key].shape)
            if len(shape) == 1:
                return PackedWeight(key, shape, None, lambda: read(self.checkpoint, key))
            if key in (EMBEDDING, HEAD):
                return PackedWeight(key, shape, head_type, lambda: self.table(key, head_type))
            return PackedWeight(key, shape, self.recipe.type, lambda: self._take(key))

        return [weight(key) for key in sorted(entries, key=lambda key: key in (EMBEDDING, HEAD))]  # these last

    def model(self, head_type: str | None) -> LlamaForCausalLM:
        """Return the quantized model in float32, to measure it; `head_type` None keeps head and embedding."""
        self.quantize_layers()
        model = _empty_model(self.checkpoint)
        for key, packed in self._packed.items():
            model.set_submodule(key.removesuffix(".weight"), packed)
        for key, entry in self.checkpoint.entries.items():
            if len(entry.shape) == 1:
                _set(model, key, read(self.checkpoint, key).float())
            elif key in (EMBEDDING, HEAD):
                self._set_table(model, key, head_type)
        return model.eval().requires_grad_(False)

    def reference(self) -> Tensor:
        """Return the unquantized model's normalised hidden states of the windows to compare, (B, T, D) float32."""
        self.quantize_layers()
        assert self._reference_BTD is not None
        return self._norm(self._reference_BTD)

    def table(self, key: str, type_name: str) -> LinearPacked:
        """Quantize the embedding or the head; a tied one is fitted to the head's inputs."""
        config = self.checkpoint.config
        importance = None
        if self.recipe.method in CALIBRATED and (key == HEAD or config.tie_word_embeddings):
            self.quantize_layers()
            assert self._hidden_BTD is not None
            importance = self._norm(self._hidden_BTD).square().mean(dim=(0, 1))
        weight = self._read(key)
        format, search = PACKED_FORMATS[type_name], self.recipe.method != "nearest"
        packed = self._named(key, lambda: fit(weight, format, importance=importance, search=search))
        self._count(weight)
        return packed

    def _set_table(self, model: LlamaForCausalLM, key: str, type_name: str | None) -> None:
        tied = self.checkpoint.config.tie_word_embeddings
        if type_name is None:
            _set(model, key, self._read(key))
            if tied:
                model.tie_weights()
            return
        packed = self.table(key, type_name)
        if key == EMBEDDING:
            model.model.embed_tokens = cast(nn.Embedding, EmbeddingPacked(packed, torch.float32))
        if key == HEAD or tied:
            model.set_submodule("lm_head", packed)

    def _take(self, key: str) -> LinearPacked:
        while key not in self._packed:
            self._next_layer()
        return self._packed.pop(key)

    def _next_layer(self) -> None:
        """Measure a layer's inputs, quantize its Linears, and compute its outputs."""
        index = self._num_layers_done
        prefix = f"model.layers.{index}."
        layer = cast(LlamaDecoderLayer, self._scaffold.model.layers[index])
        for key in self.checkpoint.entries:
            if key.startswith(prefix):
                _set(layer, key.removeprefix(prefix), self._read(key))
        statistics = self._look(layer)
        for name in _LINEARS:
            weight = layer.get_submodule(name).get_parameter("weight")
            packed = self._quantize(f"{prefix}{name}.weight", weight, statistics and statistics.of(name))
            self._packed[f"{prefix}{name}.weight"] = packed
            layer.set_submodule(name, packed)
            self._count(weight)
        if self._hidden_BTD is not None:
            self._hidden_BTD = run_layer(layer, self._hidden_BTD, self._rotary())
        self._scaffold.model.layers[index] = nn.Identity()  # frees the layer's norms and gives up the Linears
        self._num_layers_done += 1

    def _look(self, layer: LlamaDecoderLayer) -> InputStatistics | None:
        """Run the sample through the unquantized layer, for its inputs and for the reference."""
        if self._reference_BTD is not None:
            self._reference_BTD = run_layer(layer, self._reference_BTD, self._rotary())
        if self._hidden_BTD is None or self.recipe.method not in CALIBRATED:
            return None
        statistics = InputStatistics(wants_gram=self.recipe.method == "gptq")
        run_layer(layer, self._hidden_BTD, self._rotary(), statistics)
        return statistics

    def _rotary(self) -> Rotary:
        assert self._hidden_BTD is not None
        positions_1T = torch.arange(self._hidden_BTD.shape[1]).unsqueeze(0)
        return self._scaffold.model.rotary_emb(positions_1T, torch.float32)

    @torch.inference_mode()
    def _norm(self, hidden_BTD: Tensor) -> Tensor:
        """Apply the last norm."""
        _set(self._scaffold, "model.norm.weight", self._read("model.norm.weight"))
        return self._scaffold.model.norm(hidden_BTD)

    def _quantize(self, key: str, weight: Tensor, statistics: Tensor | None) -> LinearPacked:
        format = PACKED_FORMATS[self.recipe.type]
        if self.recipe.method == "gptq":
            assert statistics is not None
            return self._named(key, lambda: gptq(weight, statistics, format))
        search = self.recipe.method != "nearest"
        return self._named(key, lambda: fit(weight, format, importance=statistics, search=search))

    def _named(self, key: str, make: Callable[[], LinearPacked]) -> LinearPacked:
        """Call `make`; errors get the weight's name."""
        try:
            return make()
        except (CheckpointError, OptionError) as error:
            raise type(error)(f"{escape(self.checkpoint.path)}: {key}: {error}") from None

    def _read(self, key: str) -> Tensor:
        return read(self.checkpoint, key).float()

    def _count(self, weight: Tensor) -> None:
        self._num_done += weight.numel()
        if self._progress is not None:
            total = sum(math.prod(entry.shape) for entry in self.checkpoint.entries.values() if len(entry.shape) == 2)
            self._progress(min(self._num_done, total), total)


def check_recipe(checkpoint: Checkpoint, recipe: Recipe) -> None:
    """Check that a model can be quantized so; OptionError if not."""
    for name, value, known in (("type", recipe.type, FITTED_FORMATS), ("method", recipe.method, METHODS)):
        if value not in known:
            raise OptionError(f"{name} is {show_value(value)}; expected one of {', '.join(known)}")
    where = escape(checkpoint.path)
    quantized = sorted({entry.dtype for entry in checkpoint.entries.values() if entry.dtype not in FLOAT_DTYPES})
    if quantized and not recipe.requantize:
        raise OptionError(
            f"{where}: is quantized already ({', '.join(quantized)}), and rounding again adds its error to that one; "
            "quantize the original model, or give --requantize (requantize=True)"
        )
    for key, entry in checkpoint.entries.items():
        if len(entry.shape) == 2 and entry.shape[1] % GROUP:
            raise OptionError(
                f"{where}: {key} has {entry.shape[1]} columns; the packed formats need a multiple of {GROUP}"
            )


def _check_norms(checkpoint: Checkpoint) -> None:
    """Check the weights that are not quantized, which are small, before any work."""
    for key, entry in checkpoint.entries.items():
        if len(entry.shape) == 1 and (num_bad := int((~read(checkpoint, key).isfinite()).sum())):
            where = f"{escape(checkpoint.path)}: {key}"
            raise CheckpointError(f"{where}: {num_bad} weights are NaN or infinite; mend the model")


def _empty_model(checkpoint: Checkpoint) -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(checkpoint.config)


def _set(module: nn.Module, key: str, values: Tensor) -> None:
    """Replace an empty parameter."""
    name, _, last = key.rpartition(".")
    setattr(module.get_submodule(name), last, nn.Parameter(values, requires_grad=False))
