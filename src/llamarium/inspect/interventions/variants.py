"""Variants: the same model with its weights stored otherwise, or with another head.

The cost of a type of weights shows when both models read the same text (`measures/comparison.py`). A variant is made of
the weights in memory. Of quantized weights, "float32" is what they mean now, multiplied without further rounding, and
"NF4" is rounded twice. Variants compute in float32 on the modules, so two of them differ in their weights alone.
"""

from dataclasses import replace
from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn

from llamarium.checkpoints.modules import empty_model
from llamarium.config import ModelConfig
from llamarium.errors import InputError, check_choice
from llamarium.inspect.interventions.matrices import matrix_of
from llamarium.inspect.shapes import check_whole
from llamarium.model import LlamaForCausalLM
from llamarium.quant.base import QuantizedEmbedding
from llamarium.quant.formats import METHODS
from llamarium.quant.linears import QUANTIZED_LINEARS
from llamarium.runtime.shell import shell_of

VariantName = Literal["float32", "NF4", "Q8_0", "Q4_1", "random-head", "tied-head"]
"""Weights unpacked to float32, or the Linears but the head quantized; a head of random rows, or the table as head."""


@torch.no_grad()
def variant_of(model: LlamaForCausalLM, name: VariantName, *, seed: int = 0) -> LlamaForCausalLM:
    """Return a copy of a model's modules, otherwise stored; the model stays as it is.

    Args:
        model: Plain, packed, or with an adapter, which is merged.
        name: "float32", or a type for all Linears but the head; "random-head" gives a tied model a head of its own, of
            the rows that training begins with; "tied-head" makes the table the head, as a loader does that ignores
            that the two were stored apart.
        seed: Of the random rows.

    Raises:
        InputError: For a head that the model has already, or modules whose weights are not known.
        OptionError: For another name, or a shape that the type cannot take.
    """
    check_choice("name", name, get_args(VariantName))
    check_whole([seed], "seed")
    if name == "random-head" or name == "tied-head":
        return _with_head(model, tied=name == "tied-head", seed=seed)
    other = empty_model(model.config)
    for path, module in list(other.named_modules()):
        is_tied = path == "lm_head" and model.config.tie_word_embeddings
        if "weight" in module._parameters and not is_tied:  # pyright: ignore[reportPrivateUsage]
            other.set_submodule(path, _filled(path, module, model, name))
    other.tie_weights()
    return other.eval().requires_grad_(False)


def variant_bytes(config: ModelConfig, name: VariantName, *, itemsize: int = 4) -> int:
    """Return what a variant occupies beside the model, by its shape alone; `itemsize` is that of the model's dtype."""
    check_choice("name", name, get_args(VariantName))
    if name == "random-head" or name == "tied-head":
        return config.vocab_size * config.hidden_size * itemsize
    other = empty_model(config)
    for path, module in [*other.named_modules()]:
        if name in METHODS and isinstance(module, nn.Linear) and path != "lm_head":
            linear = QUANTIZED_LINEARS[name](module.in_features, module.out_features, device="meta")
            other.set_submodule(path, linear)
    return sum(t.numel() * t.element_size() for t in (*other.parameters(), *other.buffers()))


def _filled(path: str, module: nn.Module, model: LlamaForCausalLM, name: VariantName) -> nn.Module:
    """Return what takes the place of an empty module, with the model's values."""
    values = _values(model.get_submodule(path), path)
    if name in METHODS and isinstance(module, nn.Linear) and path != "lm_head":
        return QUANTIZED_LINEARS[name].from_weight(values)
    module.weight = nn.Parameter(values, requires_grad=False)
    return module


def _values(module: nn.Module, path: str) -> Tensor:
    """Return a weight as numbers, float32."""
    if isinstance(module, QuantizedEmbedding):
        return module.dequantize(torch.float32)
    if hasattr(module, "in_features"):
        return matrix_of(module, path)
    weight = module._parameters.get("weight")  # pyright: ignore[reportPrivateUsage]
    if weight is None:
        raise InputError(f"{path} is a {type(module).__name__}, whose weight is not known; expected a plain module")
    return weight.detach().float()


def _with_head(model: LlamaForCausalLM, *, tied: bool, seed: int) -> LlamaForCausalLM:
    config = model.config
    if config.tie_word_embeddings == tied:
        raise InputError(
            "the model's head is the embedding table already; expected 'random-head'" if tied
            else "the model has a head of its own already; expected 'tied-head'"
        )  # fmt: skip
    if tied:
        rows_VD = _values(cast(nn.Module, model.model.embed_tokens), "model.embed_tokens")
    else:
        generator = torch.Generator(model.device).manual_seed(seed)
        rows_VD = torch.empty(config.vocab_size, config.hidden_size, device=model.device)
        rows_VD.normal_(0.0, config.initializer_range, generator=generator)
    head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, device="meta")
    head.weight = nn.Parameter(rows_VD.to(model.dtype), requires_grad=False)
    shell = shell_of(model)
    shell.config = replace(config, tie_word_embeddings=tied)
    shell.lm_head = head
    return shell
