"""From a checkpoint to a model: build on the meta device, swap Linears, put each tensor in its place.

Nothing is allocated before the headers agree with the config (the checkpoint's opening checks that). Then the model is
filled module by module, so that quantizing while loading never holds two full copies, and a tied head becomes the
embedding's own storage. Every weight's way is kept as a `TensorSource`: which file, which tensor, which type.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from llamarium.checkpoints.checkpoint import EMBEDDING, HEAD, Checkpoint, TensorEntry, list_some
from llamarium.checkpoints.decode import FLOAT_DTYPES, as_tensor, nf4_linear, read
from llamarium.errors import CheckpointError, OptionError, escape
from llamarium.kernels import native
from llamarium.model import LlamaForCausalLM
from llamarium.quant.base import QuantizedLinear
from llamarium.quant.formats import GROUP, PACKED_FORMATS
from llamarium.quant.ggml import EmbeddingGGML, LinearGGML, dequantize
from llamarium.quant.half import use_half_linears
from llamarium.quant.nf4 import Linear4bit
from llamarium.quant.packed import EmbeddingPacked, LinearPacked, pack_ggml, pack_integers
from llamarium.quant.swap import QUANTIZED_LINEARS, Method
from llamarium.runtime.fuse import join_projections
from llamarium.runtime.plan import make_deterministic, unfit_linears, use_kernels

DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

NAME_OF_DTYPE: Final = {dtype: name for name, dtype in FLOAT_DTYPES.items()}

Dequantize = Literal["auto", "load", "use"]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a checkpoint becomes a model.

    Attributes:
        dtype: What the model computes in; None means as stored, and bfloat16 for quantized files.
        device: Where it computes.
        quantize: Quantize the Linears (but the head) on loading: "NF4", "Q8_0" or "Q4_1".
        dequantize: For files that are already quantized: "load" dequantizes once into `dtype`, "use" keeps the bytes
            as they are stored and dequantizes for every use. "auto" keeps NF4 and packed folders as they are; of GGUF's
            types it packs those that the CPU kernels multiply, and dequantizes the others.
        strict: Refuse weights that are not finite instead of warning.
        join: On a CPU, put weights in the order of the kernels and give the model a plan (`runtime/plan.py`), or
            join small projections (`runtime/fuse.py`); a model that is to be trained has its weights apart and plain.
        deterministic: Let the C kernels take every pass, also those that PyTorch would take sooner, so that a request's
            bits are the same alone, in any batch, with any chunking and on any number of threads.
    """

    dtype: torch.dtype | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    quantize: Method | None = None
    dequantize: Dequantize = "auto"
    strict: bool = False
    join: bool = True
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where one weight of the model came from.

    Attributes:
        key: Its state-dict key, in Hugging Face's names.
        shape: Its logical shape.
        file: The file it was read from.
        name: Its name in that file.
        stored_dtype: Its type there, such as "BF16" or "Q4_1".
        dtype: Its type in memory, such as "BF16", "Q4_1" or "NF4".
        permuted: Its rows were in Meta's interleaved order and have been put into the half-split one.
        tied_to: The key whose storage it shares, or None.
        num_bytes: What it occupies in memory; 0 when tied.
    """

    key: str
    shape: tuple[int, ...]
    file: Path
    name: str
    stored_dtype: str
    dtype: str
    permuted: bool
    tied_to: str | None
    num_bytes: int


def load_model(
    checkpoint: Checkpoint, options: LoadOptions, progress: Callable[[int, int], None] | None = None
) -> tuple[LlamaForCausalLM, tuple[TensorSource, ...]]:
    """Build the model that a checkpoint holds.

    Args:
        checkpoint: An opened checkpoint.
        options: How.
        progress: Called with (bytes read, bytes in all) after each tensor.

    Raises:
        CheckpointError: If a tensor cannot be read, or with `strict` if one is not finite.
        OptionError: If an option does not fit the checkpoint.
    """
    _check_options(checkpoint, options)
    dtype = options.dtype or natural_dtype(checkpoint)
    with torch.device("meta"), _Undrawn():
        model = LlamaForCausalLM(checkpoint.config)
    loader = _Loader(checkpoint, options, dtype, progress)
    for name, module in list(model.named_modules()):
        if f"{name}.weight" in checkpoint.entries:
            model.set_submodule(name, loader.fill(name, module))
    if model.config.tie_word_embeddings:
        loader.tie(model)
    if options.device.type == "cpu":
        if dtype is not torch.float32:
            use_half_linears(model)
        if loader.packs and dtype is torch.bfloat16 and options.quantize != "NF4":
            _warn_of_shapes(checkpoint, model)
        if options.join and not use_kernels(model):
            join_projections(model)
    if options.deterministic and not make_deterministic(model):
        raise OptionError(
            f"{escape(checkpoint.path)}: deterministic needs weights that the C kernels multiply (packed, or bfloat16) "
            f"on the CPU; this model is in {str(dtype).removeprefix('torch.')} on {options.device.type}, with "
            f"{native.kernels() or 'PyTorch'} as kernels (`llamarium doctor`)"
        )
    return model.eval().requires_grad_(False), tuple(loader.sources)


def _warn_of_shapes(checkpoint: Checkpoint, model: LlamaForCausalLM) -> None:
    if unfit := unfit_linears(model):
        warnings.warn(
            f"{escape(checkpoint.path)}: the C kernels take columns in groups of {GROUP}, and {len(unfit)} Linears "
            f"have others: {list_some(unfit, 4)}; PyTorch multiplies them, and runs the layers",
            stacklevel=3,
        )


def natural_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """What a checkpoint computes in unless told otherwise: as its Linears are stored, else bfloat16."""
    entry = checkpoint.entries["model.layers.0.self_attn.q_proj.weight"]
    return FLOAT_DTYPES.get(entry.dtype, torch.bfloat16)


class _Undrawn(TorchFunctionMode):
    """Leaves `torch.nn.init` out: on the meta device it draws nothing, and takes a tenth of a second for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return None
        return func(*args, **(kwargs or {}))


class _Loader:
    """Fills modules one by one and notes where everything came from."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: LoadOptions,
        dtype: torch.dtype,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.checkpoint = checkpoint
        self.options = options
        self.dtype = dtype
        self.progress = progress
        self.sources: list[TensorSource] = []
        half = options.dtype in (None, torch.bfloat16)  # in float32 somebody wants the weights' own products
        self.packs = options.join and half and options.device.type == "cpu" and native.library() is not None
        self._total_bytes = sum(entry.num_bytes for entry in checkpoint.entries.values())
        self._read_bytes = 0

    def fill(self, name: str, module: nn.Module) -> nn.Module:
        """Return what takes the place of the meta module called `name`."""
        entry = self.checkpoint.entries[f"{name}.weight"]
        if self._is_to_be_packed(module, entry):
            filled, held = self._tiled(
                module, pack_ggml(as_tensor(self.checkpoint.stored(entry.key).data), entry.dtype)
            )
        elif self._stays_quantized(module, entry):
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
        elif isinstance(embedding, EmbeddingPacked):
            model.set_submodule("lm_head", embedding.linear)
        else:
            model.tie_weights()
        source = next(source for source in self.sources if source.key == EMBEDDING)
        self.sources.append(replace(source, key=HEAD, tied_to=EMBEDDING, num_bytes=0))

    def _stays_quantized(self, module: nn.Module, entry: TensorEntry) -> bool:
        is_matrix = isinstance(module, (nn.Linear, nn.Embedding))
        if not is_matrix or entry.dtype in FLOAT_DTYPES or self.options.quantize is not None:
            return False
        as_it_is = entry.dtype == "NF4" or entry.is_packed
        return self.options.dequantize == "use" or (self.options.dequantize == "auto" and as_it_is)

    def _is_to_be_packed(self, module: nn.Module, entry: TensorEntry) -> bool:
        if not self.packs or self.options.dequantize != "auto" or self.options.quantize is not None:
            return False
        if not isinstance(module, (nn.Linear, nn.Embedding)) or entry.is_packed or entry.dtype not in PACKED_FORMATS:
            return False
        return entry.shape[1] % PACKED_FORMATS[entry.dtype].columns == 0

    def _tiled(self, module: nn.Module, linear: LinearPacked) -> tuple[nn.Module, str]:
        is_embedding = isinstance(module, nn.Embedding)
        return EmbeddingPacked(linear, self.dtype) if is_embedding else linear, linear.format.name

    def _quantized(self, module: nn.Module, entry: TensorEntry) -> tuple[nn.Module, str]:
        stored = self.checkpoint.stored(entry.key)
        if entry.dtype == "NF4":
            return nf4_linear(stored, f"{entry.file}: {entry.name}"), "NF4"
        data = as_tensor(stored.data)
        if entry.is_packed:
            kernels = self.packs and self.options.dequantize == "auto"
            format = PACKED_FORMATS[entry.dtype]
            return self._tiled(module, LinearPacked(data, entry.shape[0], format, uses_kernels=kernels))
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
        return module, NAME_OF_DTYPE[self.dtype]

    def _check_finite(self, module: nn.Module, entry: TensorEntry) -> None:
        """Warn of, or with `strict` refuse, weights that are NaN or infinite."""
        if isinstance(module, (LinearPacked, EmbeddingPacked)) and module.has_finite_scales():
            return
        parts = _parts(module)
        if all(bool(part.sum(dtype=torch.float32).isfinite()) for part in parts()):  # sync: a scalar a part, once
            return
        num_bad = sum(int((~part.isfinite()).sum()) for part in parts())
        if num_bad == 0:
            return
        found = f"{entry.file}: {entry.name} has {num_bad} weights that are NaN or infinite"
        if self.options.strict:
            raise CheckpointError(f"{found}; expected none, as strict loading asks")
        warnings.warn(f"{found}; the model's output will be wrong where they are used", stacklevel=4)

    def _note(self, entry: TensorEntry, module: nn.Module, held: str) -> None:
        self._read_bytes += entry.num_bytes
        if self.progress is not None:
            self.progress(self._read_bytes, self._total_bytes)
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        self.sources.append(
            TensorSource(
                entry.key, entry.shape, entry.file, entry.name, entry.dtype, held,
                permuted=entry.permuted, tied_to=None, num_bytes=sum(t.numel() * t.element_size() for t in tensors),
            )
        )  # fmt: skip


def _parts(module: nn.Module) -> Callable[[], Iterator[Tensor]]:
    """Return a way to see a module's weight part by part, so that quantized ones are never dequantized whole."""
    if isinstance(module, QuantizedLinear):
        return lambda: (module.dequantize_rows(start, stop, torch.float32) for start, stop in module.chunks())
    if isinstance(module, EmbeddingGGML):
        return lambda: (dequantize(rows, module.type_name) for rows in module.weight.split(4096))
    if isinstance(module, EmbeddingPacked):
        return _parts(module.linear)
    return lambda: iter((module.get_parameter("weight"),))


def _check_options(checkpoint: Checkpoint, options: LoadOptions) -> None:
    quantized = sorted({e.dtype for e in checkpoint.entries.values() if e.dtype not in FLOAT_DTYPES})
    if options.dequantize != "auto" and not quantized:
        raise OptionError(
            f"{checkpoint.path}: dequantize={options.dequantize!r} was asked for, but no tensor is quantized; "
            "leave it out"
        )
    if options.dequantize == "use" and options.quantize is not None:
        raise OptionError(f"quantize={options.quantize!r} and dequantize='use' exclude each other; choose one")
