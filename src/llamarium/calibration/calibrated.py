"""Calibrated quantization, layer by layer, and the choice of the head's type by KL divergence.

A layer's weights are read in float32, its inputs are measured (`calibration/calibrate.py`), and its Linears are
quantized and kept until they are written. The embedding and the head are last, because only then the head's inputs are
known.
"""

from collections.abc import Callable, Iterator
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from llamarium.attention import CausalAttend
from llamarium.calibration.calibrate import InputStatistics, run_layer
from llamarium.calibration.fit import FITTED_FORMATS, Bytes
from llamarium.calibration.quantizer import CALIBRATED, Quantizer, Recipe
from llamarium.checkpoints.checkpoint import Checkpoint
from llamarium.checkpoints.decode import read
from llamarium.checkpoints.modules import empty_model, set_bias
from llamarium.config import EMBEDDING, HEAD
from llamarium.errors import OptionError
from llamarium.inspect.forward import CHUNK_BYTES
from llamarium.inspect.measures.divergence import compare
from llamarium.inspect.numbers import Floats
from llamarium.model import LlamaForCausalLM
from llamarium.model.llama import LlamaDecoderLayer
from llamarium.model.rope import Rotary
from llamarium.quant.formats import FORMATS, PACKED_FORMATS
from llamarium.quant.packed import EmbeddingPacked, LinearPacked
from llamarium.runtime.adapter import LAYER_LINEARS
from llamarium.runtime.shell import on_host

HEAD_SHARE = 0.10
"""Maximum KL divergence that the head may add with "auto", as a share of that of the layers."""


class CalibratedQuantizer(Quantizer):
    """A quantizer that works layer by layer, with a sample of text for the methods in `CALIBRATED`.

    For other arguments and errors see `Quantizer`.

    Args:
        windows_BT: Token ids of the sample (`sample_windows`), int64.
        num_compared: Number of windows that are also run through the unquantized model (`reference`).

    Raises:
        OptionError: If the method needs a sample, and there is none.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipe: Recipe,
        windows_BT: Tensor | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        layer_done: Callable[[int, int], None] | None = None,
        num_compared: int = 0,
    ) -> None:
        super().__init__(checkpoint, recipe, progress=progress, layer_done=layer_done)
        if recipe.method in CALIBRATED and windows_BT is None:
            raise OptionError(f"method {recipe.method} looks at a text to calibrate with, and there is none; give one")
        self._num_layers_done = 0
        self._tiles: dict[str, Bytes] = {}
        self._scaffold = empty_model(checkpoint.config)
        self._hidden_BTD: Tensor | None = None
        self._reference_BTD: Tensor | None = None
        if windows_BT is not None:
            self._hidden_BTD = read(checkpoint, EMBEDDING)[windows_BT].float()
            self._reference_BTD = self._hidden_BTD[:num_compared].clone() if num_compared else None

    def quantize_layers(self) -> None:
        """Quantize the remaining layers."""
        while self._num_layers_done < self.checkpoint.config.num_hidden_layers:
            self._next_layer()

    def linear(self, key: str) -> Bytes:
        """Return the tiles of a layer's Linear, and release them; quantizes layers as needed."""
        while key not in self._tiles:
            self._next_layer()
        return self._tiles.pop(key)

    def table(self, key: str, type_name: str) -> Bytes:
        """Quantize the embedding or the head to tiles; a head, tied or not, is fitted to its inputs."""
        importance = None
        if self.recipe.method in CALIBRATED and (key == HEAD or self.checkpoint.config.tie_word_embeddings):
            self.quantize_layers()
            assert self._hidden_BTD is not None
            importance = self._norm(self._hidden_BTD).square().mean(dim=(0, 1)).numpy()
        return self.quantize(key, self.read(key), type_name, importance)

    def model(self, head_type: str | None) -> LlamaForCausalLM:
        """Return the quantized model, with other weights in float32; `head_type` None keeps head and embedding."""
        self.quantize_layers()
        model = empty_model(self.checkpoint.config)
        for key, tiles in self._tiles.items():
            model.set_submodule(key.removesuffix(".weight"), self._packed(key, tiles, self.recipe.type))
        for key, entry in self.checkpoint.entries.items():
            if key.endswith(".bias"):
                set_bias(model.get_submodule(key.removesuffix(".bias")), self._read(key))
            elif len(entry.shape) == 1:
                _set(model, key, self._read(key))
            elif key in (EMBEDDING, HEAD):
                self._set_table(model, key, head_type if self.fits(key) else None)
            elif not self.fits(key):
                _set(model, key, self._read(key))
        return model.eval().requires_grad_(False)

    def reference(self) -> Tensor:
        """Return the unquantized model's normalized hidden states of the compared windows, float32 (B, T, D)."""
        self.quantize_layers()
        assert self._reference_BTD is not None
        return self._norm(self._reference_BTD)

    def _packed(self, key: str, tiles: Bytes, type_name: str) -> LinearPacked:
        num_rows = self.checkpoint.entries[key].shape[0]
        return LinearPacked(torch.from_numpy(tiles), num_rows, PACKED_FORMATS[type_name])

    def _set_table(self, model: LlamaForCausalLM, key: str, type_name: str | None) -> None:
        tied = self.checkpoint.config.tie_word_embeddings
        if type_name is None:
            _set(model, key, self._read(key))
            if tied:
                model.tie_weights()
            return
        packed = self._packed(key, self.table(key, type_name), type_name)
        if key == EMBEDDING:
            model.model.embed_tokens = cast(nn.Embedding, EmbeddingPacked(packed, torch.float32))
        if key == HEAD or tied:
            model.set_submodule("lm_head", packed)

    def _next_layer(self) -> None:
        """Measure a layer's inputs, quantize its Linears, and compute its outputs."""
        index = self._num_layers_done
        prefix = f"model.layers.{index}."
        layer = cast(LlamaDecoderLayer, self._scaffold.model.layers[index])
        for key in self.checkpoint.entries:
            if key.startswith(prefix):
                _set(layer, key.removeprefix(prefix), self._read(key))
        statistics = self._look(layer)
        for name in LAYER_LINEARS.values():
            key, weight = f"{prefix}{name}.weight", layer.get_submodule(name).get_parameter("weight")
            if not self.fits(key):
                continue
            input_statistics = None if statistics is None else statistics.of(name).numpy()
            tiles = self._tiles[key] = self.quantize(key, weight.numpy(), self.recipe.type, input_statistics)
            bias = cast("Tensor | None", layer.get_submodule(name).bias)
            layer.set_submodule(name, self._packed(key, tiles, self.recipe.type))
            if bias is not None:
                set_bias(layer.get_submodule(name), bias.detach())
        if self._hidden_BTD is not None:
            self._hidden_BTD = self._run(layer, self._hidden_BTD)
        self._scaffold.model.layers[index] = nn.Identity()  # frees the layer's memory
        self._num_layers_done += 1

    def _look(self, layer: LlamaDecoderLayer) -> InputStatistics | None:
        """Run the sample through the unquantized layer, for input statistics and the reference."""
        if self._reference_BTD is not None:
            self._reference_BTD = self._run(layer, self._reference_BTD)
        if self._hidden_BTD is None or self.recipe.method not in CALIBRATED:
            return None
        statistics = InputStatistics(wants_gram=self.recipe.method == "gptq")
        self._run(layer, self._hidden_BTD, statistics)
        return statistics

    def _run(self, layer: LlamaDecoderLayer, hidden_BTD: Tensor, statistics: InputStatistics | None = None) -> Tensor:
        attend = CausalAttend(window=self.checkpoint.config.sliding_window)
        return run_layer(layer, hidden_BTD, self._rotary(), statistics, attend=attend)

    def _rotary(self) -> Rotary:
        assert self._hidden_BTD is not None
        positions_1T = torch.arange(self._hidden_BTD.shape[1]).unsqueeze(0)
        return self._scaffold.model.rotary_emb(positions_1T, torch.float32)

    @torch.inference_mode()
    def _norm(self, hidden_BTD: Tensor) -> Tensor:
        _set(self._scaffold, "model.norm.weight", self._read("model.norm.weight"))
        return self._scaffold.model.norm(hidden_BTD)

    def _read(self, key: str) -> Tensor:
        return torch.from_numpy(self.read(key))


def _set(module: nn.Module, key: str, values: Tensor) -> None:
    name, _, last = key.rpartition(".")
    setattr(module.get_submodule(name), last, nn.Parameter(values, requires_grad=False))


def choose_head(quantizer: CalibratedQuantizer, windows_BT: Tensor) -> tuple[str, dict[str | None, float]]:
    """Choose the type of the head and the embedding by its effect on the KL divergence on some windows.

    Remaining layers are quantized first.

    Returns:
        The smallest type whose divergence is at most `HEAD_SHARE` above that of an unquantized head, or else the type
        with the smallest divergence; and the divergence of each tested type, in nats per token.
    """
    types = sorted(FITTED_FORMATS, key=lambda name: FORMATS[name].bits_per_weight)
    reference_BTD = quantizer.reference()
    original = quantizer.model(None)
    kl: dict[str | None, float] = {None: _mean_kl(original, windows_BT, original, reference_BTD)}
    for name in types:
        kl[name] = _mean_kl(quantizer.model(name), windows_BT, original, reference_BTD)
        if kl[name] <= (1 + HEAD_SHARE) * kl[None]:
            return name, kl
    return min(types, key=lambda name: kl[name]), kl


@torch.inference_mode()
def _mean_kl(model: LlamaForCausalLM, windows_BT: Tensor, original: LlamaForCausalLM, reference_BTD: Tensor) -> float:
    """Return the mean KL divergence from the original model, given its hidden states and head, in nats per token."""
    total, count = 0.0, 0
    positions_1T = torch.arange(windows_BT.shape[1]).unsqueeze(0)
    for ids_T, reference_TD in zip(windows_BT, reference_BTD, strict=True):
        hidden_TD = model.model(ids_T.unsqueeze(0), positions_1T, CausalAttend(window=model.config.sliding_window))[0]
        for compared, *_ in compare(_logits(model, hidden_TD), _logits(original, reference_TD)):
            total, count = total + float(compared.kl_C.sum(dtype=np.float64)), count + len(compared.kl_C)
    return total / count


def _logits(model: LlamaForCausalLM, hidden_TD: Tensor) -> Iterator[Floats]:
    for part_CD in hidden_TD.split(max(1, CHUNK_BYTES // (4 * model.config.vocab_size))):
        yield on_host(model.logits(part_CD))
