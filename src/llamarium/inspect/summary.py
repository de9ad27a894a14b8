"""A model's shape and costs: `llamarium info` as data.

Parameters and operations are computed from the config (`cost.py`), bytes and sources from the loaded model.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarium.config import EMBEDDING, ModelConfig
from llamarium.cost import ParameterCount, count_parameters, flops, kv_bytes_per_token
from llamarium.runtime.loaded_model import LoadedModel
from llamarium.runtime.runner import CacheDtype, Runner

if TYPE_CHECKING:
    from llamarium.checkpoints.options import TensorSource


@dataclass(frozen=True, slots=True)
class SourceGroup:
    """Weights of the same kind and source, such as the q projections of 16 layers.

    Attributes:
        pattern: State-dict key, with "*" for the layer.
        shape: Shape of each weight.
        name: Name in the file, with "*" for the layer.
        stored_dtype: Type in the file.
        dtype: Type in memory.
        permuted: True if rows were permuted from Meta's interleaved order to half-split order.
        tied_to: Key of the weight whose storage they share, or None.
        layers: Layers of the weights; empty for a weight outside the layers.
        files: Files that they were read from.
        num_bytes: Total size in memory; 0 if tied.
    """

    pattern: str
    shape: tuple[int, ...]
    name: str
    stored_dtype: str
    dtype: str
    permuted: bool
    tied_to: str | None
    layers: tuple[int, ...]
    files: tuple[Path, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """A model's shape and costs.

    Attributes:
        config: The model's config.
        parameters: Number of parameters by part; a tied head is counted once.
        bytes_by_dtype: Bytes of the weights in memory, by type; empty if no model was loaded.
        products: By type in memory, the backends of its products (C with a set of kernels, or PyTorch) and the weights
            that each multiplies.
        flops_per_token: Operations for one new token without context.
        flops_per_token_at_full_context: Operations for the last token of a full context.
        kv_dtype: KV cache dtype.
        kv_bytes_per_token: KV cache bytes per token.
        kv_bytes_at_full_context: KV cache bytes of one sequence with a full context.
        sources: Sources of the weights, in the order of the model.
        why_no_text: Reason why the model has no tokenizer; empty if it has one, or is a preset.
    """

    config: ModelConfig
    parameters: ParameterCount
    bytes_by_dtype: dict[str, int]
    products: dict[str, dict[str, tuple[str, ...]]]
    flops_per_token: int
    flops_per_token_at_full_context: int
    kv_dtype: str
    kv_bytes_per_token: int
    kv_bytes_at_full_context: int
    sources: tuple[SourceGroup, ...]
    why_no_text: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as JSON values, with the total of the parameters and the config as in `config.json`."""
        groups = [asdict(group) | {"files": [str(file) for file in group.files]} for group in self.sources]
        return asdict(self) | {
            "config": self.config.to_hf(),
            "parameters": asdict(self.parameters) | {"total": self.parameters.total},
            "sources": groups,
        }


def summarize(
    config: ModelConfig,
    loaded: LoadedModel | None = None,
    sources: "Sequence[TensorSource]" = (),
    kv_cache_dtype: CacheDtype = "auto",
    why_no_text: str = "",
) -> Summary:
    """Summarize a model; the default KV cache dtype is bfloat16 if it is not loaded.

    Args:
        config: The model's config.
        loaded: The loaded model; None for a preset.
        sources: Sources of its weights, as `load_weights` returns them.
        kv_cache_dtype: KV cache dtype.
        why_no_text: Reason why it has no tokenizer, if it has none.
    """
    runner = None if loaded is None else loaded.runner()
    own_dtype = "bfloat16" if runner is None else runner.kv_dtype
    kv_dtype = own_dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    kv_bytes = kv_bytes_per_token(config, kv_dtype)
    context = config.max_position_embeddings
    return Summary(
        config=config,
        parameters=count_parameters(config),
        bytes_by_dtype=_bytes_by_dtype(runner, sources),
        products={} if runner is None else _products(runner, sources),
        flops_per_token=flops(config, 1),
        flops_per_token_at_full_context=flops(config, 1, context - 1),
        kv_dtype=kv_dtype,
        kv_bytes_per_token=kv_bytes,
        kv_bytes_at_full_context=kv_bytes * context,
        sources=group_sources(sources),
        why_no_text=why_no_text,
    )


def group_sources(sources: "Iterable[TensorSource]") -> tuple[SourceGroup, ...]:
    """Group weights that differ only in their layer and file."""
    groups: dict[tuple[str, tuple[int, ...], str, str, str, bool, str | None], list[TensorSource]] = {}
    for s in sources:
        alike = _star(s.key), s.shape, _star(s.name), s.stored_dtype, s.dtype, s.permuted, s.tied_to
        groups.setdefault(alike, []).append(s)
    return tuple(
        SourceGroup(
            *alike,
            layers=tuple(int(match[1]) for s in members if (match := _LAYER.search(s.key))),
            files=tuple(dict.fromkeys(s.file for s in members)),
            num_bytes=sum(s.num_bytes for s in members),
        )
        for alike, members in groups.items()
    )


_LAYER = re.compile(r"(?<=\.)(\d+)(?=\.)")


def _star(name: str) -> str:
    return _LAYER.sub("*", name, count=1)


def _bytes_by_dtype(runner: Runner | None, sources: "Sequence[TensorSource]") -> dict[str, int]:
    """Return bytes by type, from the sources if there are any (tied weights have 0), or else from the runner."""
    sizes = [(s.dtype, s.num_bytes) for s in sources]
    if not sizes and runner is not None:
        sizes = [(weight.type_name, weight.num_bytes) for weight in runner.weights.values() if weight.num_bytes]
    total = Counter[str]()
    for dtype, num_bytes in sizes:
        total[dtype] += num_bytes
    return dict(total.most_common())


def _products(runner: Runner, sources: "Sequence[TensorSource]") -> dict[str, dict[str, tuple[str, ...]]]:
    products: dict[str, dict[str, tuple[str, ...]]] = {}
    for s in sources:
        if len(s.shape) == 2 and s.key != EMBEDDING:
            patterns, backend = products.setdefault(s.dtype, {}), runner.backend_of(s.key)
            patterns[backend] = tuple(dict.fromkeys((*patterns.get(backend, ()), _star(s.key))))
    return products
