"""Variants: the same model with weights of another type, or with another head, in PyTorch or C.

Running a model and its variant on the same text shows what a weight type costs (`measures/comparison.py`). A variant is
made from the weights in memory. If these are quantized already, "float32" dequantizes them, and "NF4" rounds a second
time. Variants compute in float32, so two of them differ only in their weights. They run on the modules or, without
PyTorch, in C, which holds all weights as float32. No torch at import.
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
    """Return a copy of a model's modules with weights of another type, adapters merged.

    "random-head" unties a tied model's head and initializes it as training does; "tied-head" uses the embedding as the
    head, like a loader that ignores a separately stored head. The given model is not changed.

    Raises:
        InputError: If the model already has that head, or for modules of unknown weight types.
        OptionError: For an unknown name, or a shape that the type does not support.
    """
    from torch import nn, no_grad

    from llamarium.checkpoints.modules import empty_model, set_bias
    from llamarium.quant.linears import quantize_linear
    from llamarium.runtime.loaded_model import runner_of

    _check(model.config, name, seed)
    runner = runner_of(model)
    if name == "random-head" or name == "tied-head":
        return _with_head(model, runner, tied=name == "tied-head", seed=seed)
    variant = empty_model(model.config)
    with no_grad():
        for path, module in list(variant.named_modules()):
            is_tied = path == "lm_head" and model.config.tie_word_embeddings
            if "weight" not in module._parameters or is_tied:  # pyright: ignore[reportPrivateUsage]
                continue
            values, has_bias = _values(runner, f"{path}.weight"), getattr(module, "bias", None) is not None
            if name in METHODS and isinstance(module, nn.Linear) and path != "lm_head":
                variant.set_submodule(path, quantize_linear(values, name))
            else:
                module.weight = nn.Parameter(values, requires_grad=False)
            if has_bias:
                set_bias(variant.get_submodule(path), _values(runner, f"{path}.bias"))
    variant.tie_weights()
    return variant.eval().requires_grad_(False)


def variant_in_c(runner: Runner, name: VariantName, *, seed: int = 0) -> Runner:
    """Build a native runner for a variant, adapters merged; arguments and errors as in `variant_of`."""
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
    """Return the additional memory that a variant needs, in bytes, computed from the shapes.

    OptionError for an unknown name, or a shape that the type does not support.
    """
    check_choice("name", name, get_args(VariantName))
    shapes, linears = {key: weight.shape for key, weight in runner.weights.items()}, set(_linears(runner))
    if name not in BITS:
        reads_table = in_c and name == "tied-head"
        return 0 if reads_table else prod(shapes[EMBEDDING]) * (4 if in_c else DTYPE_BYTES[runner.dtype])
    for key in linears if name in METHODS else ():
        if quantized_type(name, shapes[key][1]) != name:
            raise OptionError(f"{key} has {shapes[key][1]} columns, which cannot be {name}; expected a multiple of 32")
    bits = {key: BITS[name] if key in linears and not in_c else 32 for key in shapes}
    return round(sum(prod(shape) * bits[key] for key, shape in shapes.items()) / 8)


def without_rope_scaling(runner: Runner) -> Runner:
    """Return a runner with the same weights and without RoPE scaling."""
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
    return [key for key, weight in runner.weights.items() if len(weight.shape) == 2 and key not in (EMBEDDING, HEAD)]


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
