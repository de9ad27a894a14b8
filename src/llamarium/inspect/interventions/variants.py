"""Variants: the same model with its weights stored otherwise, or with another head; by PyTorch or in C.

The cost of a type of weights shows when both models read the same text (`measures/comparison.py`). A variant is made of
the weights in memory. Of quantized weights, "float32" is what they mean now, multiplied without further rounding, and
"NF4" is rounded twice. Variants compute in float32, so two of them differ in their weights alone: on the modules, or,
without PyTorch, in C, which holds all of their weights as float32. No torch at import.
"""

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from llamarium.checkpoints.weights import float_weights, replaced_in_c
from llamarium.config import EMBEDDING, HEAD, ModelConfig
from llamarium.errors import InputError, OptionError, check_choice
from llamarium.inspect.shapes import check_whole
from llamarium.kv_codes import DTYPE_BYTES
from llamarium.quant.codes import coded
from llamarium.quant.formats import METHODS, quantized_type
from llamarium.runtime.runner import Runner

if TYPE_CHECKING:
    from torch import Tensor

    from llamarium.model import LlamaForCausalLM

VariantName = Literal["float32", "NF4", "Q8_0", "Q4_1", "random-head", "tied-head"]
"""Weights unpacked to float32, or the Linears but the head quantized; a head of random rows, or the table as head."""

BITS: dict[VariantName, float] = {"float32": 32, "Q8_0": 8.5, "Q4_1": 5, "NF4": 4.127}
"""Of a weight, scales and minima shared out."""


def variant_of(model: "LlamaForCausalLM", name: VariantName, *, seed: int = 0) -> "LlamaForCausalLM":
    """Return a copy of a model's modules, otherwise stored, adapters merged; the model stays as it is.

    "random-head" gives a tied model a head of its own, of the rows that training begins with; "tied-head" makes the
    table the head, as a loader does that ignores that they were stored apart.

    Raises:
        InputError: For a head that the model has already, or modules whose weights are not known.
        OptionError: For another name, or a shape that the type cannot take.
    """
    from torch import nn, no_grad

    from llamarium.checkpoints.modules import empty_model, set_bias
    from llamarium.quant.linears import quantize_linear
    from llamarium.runtime.loaded_model import runner_of

    _check(model.config, name, seed)
    runner = runner_of(model)
    if name == "random-head" or name == "tied-head":
        return _with_head(model, runner, tied=name == "tied-head", seed=seed)
    other = empty_model(model.config)
    with no_grad():
        for path, module in list(other.named_modules()):
            is_tied = path == "lm_head" and model.config.tie_word_embeddings
            if "weight" not in module._parameters or is_tied:  # pyright: ignore[reportPrivateUsage]
                continue
            values, has_bias = _values(runner, f"{path}.weight"), getattr(module, "bias", None) is not None
            if name in METHODS and isinstance(module, nn.Linear) and path != "lm_head":
                other.set_submodule(path, quantize_linear(values, name))
            else:
                module.weight = nn.Parameter(values, requires_grad=False)
            if has_bias:
                set_bias(other.get_submodule(path), _values(runner, f"{path}.bias"))
    other.tie_weights()
    return other.eval().requires_grad_(False)


def variant_in_c(runner: Runner, name: VariantName, *, seed: int = 0) -> Runner:
    """Return what runs a variant in C, adapters merged; arguments and errors are those of `variant_of`."""
    config = runner.config
    _check(config, name, seed)
    if name == "random-head":
        return replaced_in_c(
            runner, replace(config, tie_word_embeddings=False), float_weights({HEAD: _random_rows(config, seed)})
        )
    if name == "tied-head":
        return replaced_in_c(runner, replace(config, tie_word_embeddings=True), {})
    values = {key: runner.dequantize(key, adapted=True) for key in runner.weights}
    if name != "float32":
        values |= {key: coded(values[key], name).values_RC for key in _linears(runner)}
    return replaced_in_c(runner.with_adapters(()), config, float_weights(values))


def variant_bytes(runner: Runner, name: VariantName, *, in_c: bool) -> int:
    """Return what a variant of this model occupies beside it, by its shape alone.

    OptionError for another name, or a shape that the type cannot take.
    """
    check_choice("name", name, get_args(VariantName))
    shapes, linears = {key: one.shape for key, one in runner.weights.items()}, set(_linears(runner))
    if name not in BITS:
        reads_table = in_c and name == "tied-head"
        return 0 if reads_table else prod(shapes[EMBEDDING]) * (4 if in_c else DTYPE_BYTES[runner.dtype])
    for key in linears if name in METHODS else ():
        if quantized_type(name, shapes[key][1]) != name:
            raise OptionError(f"{key} has {shapes[key][1]} columns, which cannot be {name}; expected a multiple of 32")
    bits = {key: BITS[name] if key in linears and not in_c else 32 for key in shapes}
    return round(sum(prod(shape) * bits[key] for key, shape in shapes.items()) / 8)


def without_rope_scaling(runner: Runner) -> Runner:
    """Return a runner of the same weights whose queries and keys turn as before the context was stretched."""
    return replaced_in_c(runner, replace(runner.config, rope_scaling=None), {})


def _check(config: ModelConfig, name: VariantName, seed: int) -> None:
    check_choice("name", name, get_args(VariantName))
    check_whole([seed], "seed")
    if name == ("tied-head" if config.tie_word_embeddings else "random-head"):
        raise InputError(
            "the model's head is the embedding table already; expected 'random-head'" if name == "tied-head"
            else "the model has a head of its own already; expected 'tied-head'"
        )  # fmt: skip


def _linears(runner: Runner) -> list[str]:
    return [key for key, one in runner.weights.items() if len(one.shape) == 2 and key not in (EMBEDDING, HEAD)]


def _random_rows(config: ModelConfig, seed: int) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    shape = config.vocab_size, config.hidden_size
    return np.random.default_rng(seed).normal(0, config.initializer_range, shape).astype(np.float32)


def _values(runner: Runner, key: str) -> "Tensor":
    from torch import from_numpy

    from llamarium.inspect.shapes import type_of

    type_of(runner, key)  # refuses a module whose weight is unknown
    return from_numpy(runner.dequantize(key, adapted=True)).to(runner.device)


def _with_head(model: "LlamaForCausalLM", runner: Runner, *, tied: bool, seed: int) -> "LlamaForCausalLM":
    from torch import from_numpy, nn

    from llamarium.runtime.shell import shell_of

    config, shell = model.config, shell_of(model)
    rows_VD = _values(runner, EMBEDDING) if tied else from_numpy(_random_rows(config, seed)).to(model.device)
    head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, device="meta")
    head.weight = nn.Parameter(rows_VD.to(model.dtype), requires_grad=False)
    shell.config = replace(config, tie_word_embeddings=tied)
    shell.lm_head = head
    return shell
