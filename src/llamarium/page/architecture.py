"""The module tree of a model with parameters, bytes and operations, for a loaded model or a published architecture.

The tree is the one that `print(model)` shows, with Hugging Face's names. Parameters and operations follow from the
config; bytes and types are those of the weights in memory, or of bfloat16 if no weights are loaded.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llamarium.checkpoints.checkpoint import expected_shapes
from llamarium.config import EMBEDDING, ModelConfig
from llamarium.page.schema.model import ModelView, ModuleNode, Sizes
from llamarium.presets import PRESETS
from llamarium.runtime.taps import axis_sizes

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.checkpoints.options import TensorSource
    from llamarium.generation.text_engine import TextEngine
    from llamarium.inspect.summary import Summary

_KINDS = {
    "embed_tokens": "Embedding",
    "layers": "ModuleList",
    "self_attn": "LlamaAttention",
    "mlp": "LlamaMLP",
    "input_layernorm": "LlamaRMSNorm",
    "post_attention_layernorm": "LlamaRMSNorm",
    "norm": "LlamaRMSNorm",
    "model": "LlamaModel",
}
_PUBLISHED = "BF16"
_PUBLISHED_BYTES = 2  # per value in bfloat16


def view_of_model(
    llama: "Llama", engine: "TextEngine", loaded_with: Mapping[str, str | int | bool] | None = None
) -> ModelView:
    """Describe the loaded model and the options that it was loaded with."""
    from llamarium.inspect.summary import summarize

    summary = summarize(llama.config, llama.loaded, llama.sources)
    return ModelView(
        name=llama.name,
        runner=engine.runner.name,
        dtype=engine.runner.dtype,
        input_bits=engine.runner.input_bits,
        tree=module_tree(llama.config, {tensor_source.key: tensor_source for tensor_source in llama.sources}),
        num_bytes=sum(summary.bytes_by_dtype.values()),
        adds_bos=bool(llama.tokenizer.encode("")),
        adapters=tuple(engine.adapters),
        loaded_with=dict(loaded_with or {}),
        **_of_config(summary),
    )


def view_of_shape(name: str) -> ModelView:
    """Describe a published architecture without loading weights."""
    from llamarium.inspect.summary import summarize

    tree = module_tree(PRESETS[name], {})
    return ModelView(
        name=name,
        runner=None,
        dtype=None,
        input_bits=None,
        tree=tree,
        num_bytes=tree.num_bytes,
        adds_bos=None,
        adapters=(),
        loaded_with={},
        **_of_config(summarize(PRESETS[name])),
    )


def _of_config(summary: "Summary") -> dict[str, Any]:
    c = summary.config
    return {
        "shape": Sizes(**axis_sizes(c), L=c.num_hidden_layers),
        "context": c.max_position_embeddings,
        "window": c.sliding_window,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_scaling": None if c.rope_scaling is None else c.rope_scaling.to_hf(),
        "tied": c.tie_word_embeddings,
        "attention_flops_per_position": 4 * c.num_hidden_layers * c.num_attention_heads * c.head_dim,
        "kv_bytes_per_token": summary.kv_bytes_per_token,
    }


def module_tree(config: ModelConfig, sources: "Mapping[str, TensorSource]") -> ModuleNode:
    """Return the root node of the module tree; `sources` are the loaded tensors by state-dict key, or empty."""
    nested: dict[str, Any] = {}
    shapes = expected_shapes(config)
    for key, shape in shapes.items():
        if key.endswith(".bias"):  # counted with its weight matrix
            continue
        *parents, leaf = key.removesuffix(".weight").split(".")
        place = nested
        for part in parents:
            place = place.setdefault(part, {})
        bias_key = key.removesuffix("weight") + "bias"
        place[leaf] = _weight_node(key, shape, math.prod(shapes[bias_key]) if bias_key in shapes else 0, sources)
    if config.tie_word_embeddings:
        nested["lm_head"] = _tied_head(config)
    return _holder("", "LlamaForCausalLM", nested)


def _weight_node(
    key: str, shape: tuple[int, ...], num_biases: int, sources: "Mapping[str, TensorSource]"
) -> ModuleNode:
    path, count, source = key.removesuffix(".weight"), math.prod(shape), sources.get(key)
    bias = sources.get(f"{path}.bias")
    of_bias = 0 if bias is None else bias.num_bytes
    name = path.rpartition(".")[2]
    multiplies = len(shape) == 2 and key != EMBEDDING
    return ModuleNode(
        name=name,
        path=path,
        kind=_KINDS.get(name, "Linear"),
        shape=shape,
        parameters=count + num_biases,
        num_bytes=(count + num_biases) * _PUBLISHED_BYTES if source is None else source.num_bytes + of_bias,
        type=_PUBLISHED if source is None else source.dtype,
        tied_to=None if source is None else source.tied_to,
        flops=2 * count if multiplies else 0,
        children=(),
    )


def _tied_head(config: ModelConfig) -> ModuleNode:
    shape = (config.vocab_size, config.hidden_size)
    return ModuleNode(
        name="lm_head", path="lm_head", kind="Linear", shape=shape, parameters=0, num_bytes=0, type=None,
        tied_to=EMBEDDING, flops=2 * math.prod(shape), children=(),
    )  # fmt: skip


def _holder(path: str, kind: str, parts: Mapping[str, Any]) -> ModuleNode:
    children = tuple(_child(f"{path}.{name}".removeprefix("."), name, part) for name, part in parts.items())
    return ModuleNode(
        name=path.rpartition(".")[2],
        path=path,
        kind=kind,
        shape=(),
        parameters=sum(child.parameters for child in children),
        num_bytes=sum(child.num_bytes for child in children),
        type=None,
        tied_to=None,
        flops=sum(child.flops for child in children),
        children=children,
    )


def _child(path: str, name: str, part: "ModuleNode | Mapping[str, Any]") -> ModuleNode:
    if isinstance(part, ModuleNode):
        return part
    return _holder(path, "LlamaDecoderLayer" if name.isdigit() else _KINDS[name], part)
