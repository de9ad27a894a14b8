"""Variants: the same model with its weights stored otherwise, or with another head.

The cost of a type of weights shows when both models read the same text (`measures/comparison.py`). A variant is made of
the weights in memory. Of quantized weights, "float32" is what they mean now, multiplied without further rounding, and
"NF4" is rounded twice. Variants compute in float32 on the modules, so two of them differ in their weights alone.
"""

from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor, nn

from llamarium.checkpoints.modules import empty_model
from llamarium.config import EMBEDDING, ModelConfig
from llamarium.errors import check_choice
from llamarium.inspect.interventions.variants_in_c import VariantName, check_head
from llamarium.inspect.probes.weights import type_of
from llamarium.inspect.shapes import check_whole
from llamarium.model import LlamaForCausalLM
from llamarium.quant.formats import METHODS
from llamarium.quant.linears import QUANTIZED_LINEARS
from llamarium.runtime.loaded_model import runner_of
from llamarium.runtime.runner import Runner
from llamarium.runtime.shell import shell_of


@torch.no_grad()
def variant_of(model: LlamaForCausalLM, name: VariantName, *, seed: int = 0) -> LlamaForCausalLM:
    """Return a copy of a model's modules, otherwise stored, adapters merged; the model stays as it is.

    "random-head" gives a tied model a head of its own, of the rows that training begins with; "tied-head" makes the
    table the head, as a loader does that ignores that they were stored apart.

    Raises:
        InputError: For a head that the model has already, or modules whose weights are not known.
        OptionError: For another name, or a shape that the type cannot take.
    """
    check_choice("name", name, get_args(VariantName))
    check_whole([seed], "seed")
    check_head(model.config, name)
    if name == "random-head" or name == "tied-head":
        return _with_head(model, tied=name == "tied-head", seed=seed)
    runner, other = runner_of(model), empty_model(model.config)
    for path, module in list(other.named_modules()):
        is_tied = path == "lm_head" and model.config.tie_word_embeddings
        if "weight" not in module._parameters or is_tied:  # pyright: ignore[reportPrivateUsage]
            continue
        values = _values(runner, f"{path}.weight")
        if name in METHODS and isinstance(module, nn.Linear) and path != "lm_head":
            other.set_submodule(path, QUANTIZED_LINEARS[name].from_weight(values))
        else:
            module.weight = nn.Parameter(values, requires_grad=False)
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


def _values(runner: Runner, key: str) -> Tensor:
    """Return a weight as float32, adapters added."""
    type_of(runner, key)  # refuses a module whose weight is unknown
    return torch.from_numpy(runner.dequantize(key, adapted=True)).to(runner.device)


def _with_head(model: LlamaForCausalLM, *, tied: bool, seed: int) -> LlamaForCausalLM:
    config = model.config
    if tied:
        rows_VD = _values(runner_of(model), EMBEDDING)
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
