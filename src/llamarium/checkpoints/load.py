"""From a checkpoint to a model: build on the meta device, swap Linears, put each tensor in its place.

Nothing is allocated before the headers agree with the config (the checkpoint's opening checks that). Then the model is
filled module by module, so that quantizing while loading never holds two full copies, and a tied head becomes the
embedding's own storage. Every weight's way is kept as a `TensorSource`: which file, which tensor, which type.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from llamarium.checkpoints.checkpoint import Checkpoint, TensorEntry, list_some
from llamarium.checkpoints.decode import FLOAT_DTYPES, as_tensor, nf4_linear, read
from llamarium.checkpoints.modules import empty_model, tie_head
from llamarium.checkpoints.native_weights import report_nonfinite
from llamarium.checkpoints.options import TYPE_OF_DTYPE, LoadOptions, TensorSource, check_options, natural_dtype
from llamarium.config import EMBEDDING, HEAD
from llamarium.errors import escape, warn_caller
from llamarium.kernels import native
from llamarium.model import LlamaForCausalLM
from llamarium.quant.base import QuantizedLinear
from llamarium.quant.formats import GROUP, PACKED_FORMATS
from llamarium.quant.ggml.blocks import dequantize
from llamarium.quant.ggml.linear import EmbeddingGGML, LinearGGML
from llamarium.quant.linears import QUANTIZED_LINEARS
from llamarium.quant.nf4 import Linear4bit
from llamarium.quant.packed import EmbeddingPacked, LinearPacked, pack_integers


def load_model(
    checkpoint: Checkpoint, options: LoadOptions, progress: Callable[[int, int], None] | None = None
) -> tuple[LlamaForCausalLM, tuple[TensorSource, ...]]:
    """Build the model that a checkpoint holds; a UserWarning tells of weights that are NaN or infinite."""
    check_options(checkpoint, options)
    model = empty_model(checkpoint.config)
    loader = _Loader(checkpoint, options, progress)
    for name, module in list(model.named_modules()):
        if f"{name}.weight" in checkpoint.entries:
            model.set_submodule(name, loader.fill(name, module))
    if model.config.tie_word_embeddings:
        loader.tie(model)
    if loader.packs and options.quantize in ("Q8_0", "Q4_1"):
        _warn_of_shapes(checkpoint, model)
    return model.eval().requires_grad_(False), tuple(loader.sources)


def _warn_of_shapes(checkpoint: Checkpoint, model: LlamaForCausalLM) -> None:
    linears = ((name, module) for name, module in model.named_modules() if hasattr(module, "in_features"))
    sizes = ((name, int(cast(Any, module).in_features)) for name, module in linears)
    if unfit := [f"{name} ({columns} columns)" for name, columns in sizes if columns % GROUP]:
        warn_caller(
            f"{escape(checkpoint.path)}: the C kernels take quantized columns in groups of {GROUP}, and {len(unfit)} "
            f"Linears have others: {list_some(unfit, 4)}; PyTorch runs the model"
        )


class _Loader:
    """Fills modules one by one and notes where everything came from."""

    def __init__(
        self, checkpoint: Checkpoint, options: LoadOptions, progress: Callable[[int, int], None] | None
    ) -> None:
        self.checkpoint = checkpoint
        self.options = options
        self.type_name = TYPE_OF_DTYPE[options.dtype or natural_dtype(checkpoint)]
        self.dtype = FLOAT_DTYPES[self.type_name]
        self.progress = progress
        self.sources: list[TensorSource] = []
        half = options.dtype in (None, "bfloat16")  # float32 means exact products of the weights
        self.packs = options.join and half and options.device == "cpu" and native.library() is not None
        self._total_bytes = sum(entry.num_bytes for entry in checkpoint.entries.values())
        self._read_bytes = 0

    def fill(self, name: str, module: nn.Module) -> nn.Module:
        """Return what takes the place of the meta module called `name`."""
        entry = self.checkpoint.entries[f"{name}.weight"]
        if self._stays_quantized(module, entry):
            filled, held = self._quantized(module, entry)
        else:
            filled, held = self._from_values(name, module, self._read(entry))
        filled = filled.to(self.options.device)
        self._check_finite(filled, entry)
        self._note(entry, filled, held)
        return filled

    def tie(self, model: LlamaForCausalLM) -> None:
        """Give the head the embedding's storage, quantized or not."""
        embedding = model.model.embed_tokens
        if isinstance(embedding, EmbeddingGGML):
            model.set_submodule("lm_head", LinearGGML(embedding.weight, embedding.type_name))
        else:
            tie_head(model)
        source = next(source for source in self.sources if source.key == EMBEDDING)
        self.sources.append(replace(source, key=HEAD, tied_to=EMBEDDING, num_bytes=0))

    def _stays_quantized(self, module: nn.Module, entry: TensorEntry) -> bool:
        is_matrix = isinstance(module, (nn.Linear, nn.Embedding))
        if not is_matrix or entry.dtype in FLOAT_DTYPES or self.options.quantize is not None:
            return False
        as_it_is = entry.dtype == "NF4" or entry.is_packed
        return self.options.dequantize == "use" or (self.options.dequantize == "auto" and as_it_is)

    def _quantized(self, module: nn.Module, entry: TensorEntry) -> tuple[nn.Module, str]:
        stored = self.checkpoint.stored(entry.key)
        if entry.dtype == "NF4":
            return nf4_linear(stored, f"{entry.file}: {entry.name}"), "NF4"
        data = as_tensor(stored.data)
        if entry.is_packed:
            linear = LinearPacked(data, entry.shape[0], PACKED_FORMATS[entry.dtype], uses_kernels=False)
            is_embedding = isinstance(module, nn.Embedding)
            return EmbeddingPacked(linear, self.dtype) if is_embedding else linear, entry.dtype
        if isinstance(module, nn.Embedding):
            return EmbeddingGGML(data, entry.dtype, self.dtype), entry.dtype
        return LinearGGML(data, entry.dtype), entry.dtype

    def _read(self, entry: TensorEntry) -> Tensor:
        """Return a weight; what is quantized is decoded into the model's dtype, without a float32 copy of the whole."""
        in_pieces = entry.dtype not in (*FLOAT_DTYPES, "NF4")
        if in_pieces and self.options.quantize is None:
            return read(self.checkpoint, entry.key, out=torch.empty(entry.shape, dtype=self.dtype))
        return read(self.checkpoint, entry.key)

    def _from_values(self, name: str, module: nn.Module, weight: Tensor) -> tuple[nn.Module, str]:
        method = self.options.quantize
        if method is not None and isinstance(module, nn.Linear) and name != "lm_head":
            linear = QUANTIZED_LINEARS[method].from_weight(weight)
            packed = pack_integers(linear) if self.packs and not isinstance(linear, Linear4bit) else None
            return packed or linear, method
        module.weight = nn.Parameter(weight.to(self.dtype), requires_grad=False)
        return module, self.type_name

    def _check_finite(self, module: nn.Module, entry: TensorEntry) -> None:
        if isinstance(module, (LinearPacked, EmbeddingPacked)) and module.has_finite_scales():
            return
        parts = _parts(module)
        if all(bool(part.sum(dtype=torch.float32).isfinite()) for part in parts()):  # sync: a scalar a part, once
            return
        num_bad = sum(int((~part.isfinite()).sum()) for part in parts())
        if num_bad == 0:
            return
        report_nonfinite(entry, num_bad, strict=self.options.strict)

    def _note(self, entry: TensorEntry, module: nn.Module, held: str) -> None:
        self._read_bytes += entry.num_bytes
        if self.progress is not None:
            self.progress(self._read_bytes, self._total_bytes)
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        num_bytes = sum(t.numel() * t.element_size() for t in tensors)
        self.sources.append(TensorSource.of(entry, held, num_bytes))


def _parts(module: nn.Module) -> Callable[[], Iterator[Tensor]]:
    """Return a way to see a module's weight part by part, so that quantized ones are never dequantized whole."""
    if isinstance(module, QuantizedLinear):
        return lambda: (module.dequantize_rows(start, stop, torch.float32) for start, stop in module.chunks())
    if isinstance(module, EmbeddingGGML):
        return lambda: (dequantize(rows, module.type_name) for rows in module.weight.split(4096))
    if isinstance(module, EmbeddingPacked):
        return _parts(module.linear)
    return lambda: iter((module.get_parameter("weight"),))
