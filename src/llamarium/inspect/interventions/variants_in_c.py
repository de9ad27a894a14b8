"""Variants without PyTorch: the C kernels run the model's weights with other numbers, all of them held as float32."""

from dataclasses import replace
from math import prod
from typing import Literal, get_args

import numpy as np

from llamarium.checkpoints.native_weights import replaced_in_c
from llamarium.config import EMBEDDING, HEAD, ModelConfig
from llamarium.errors import InputError, check_choice
from llamarium.quant.codes import coded
from llamarium.quant.formats import METHODS, group_size
from llamarium.runtime.runner import Runner

VariantName = Literal["float32", "NF4", "Q8_0", "Q4_1", "random-head", "tied-head"]
"""Weights unpacked to float32, or the Linears but the head quantized; a head of random rows, or the table as head."""


def variant_in_c(runner: Runner, name: VariantName, *, seed: int = 0) -> Runner:
    """Return what runs a variant, adapters merged; see `variants.variant_of`, whose random rows are others.

    Raises:
        InputError: For a head that the model has already.
        OptionError: For another name, or a shape that the type cannot take.
    """
    check_choice("name", name, get_args(VariantName))
    config = runner.config
    check_head(config, name)
    if name == "random-head":
        shape = config.vocab_size, config.hidden_size
        rows_VD = np.random.default_rng(seed).normal(0, config.initializer_range, shape).astype(np.float32)
        return replaced_in_c(runner, replace(config, tie_word_embeddings=False), {HEAD: rows_VD})
    if name == "tied-head":
        return replaced_in_c(runner, replace(config, tie_word_embeddings=True), {})
    values = {key: runner.dequantize(key, adapted=True) for key in runner.weights}
    if name != "float32":
        values |= {key: coded(values[key], name).values_RC for key in _linears(runner)}
    return replaced_in_c(runner.with_adapters(()), config, values)


def check_head(config: ModelConfig, name: VariantName) -> None:
    """Refuse a head that the model has already."""
    if name == ("tied-head" if config.tie_word_embeddings else "random-head"):
        raise InputError(
            "the model's head is the embedding table already; expected 'random-head'" if name == "tied-head"
            else "the model has a head of its own already; expected 'tied-head'"
        )  # fmt: skip


def without_rope_scaling(runner: Runner) -> Runner:
    """Return a runner of the same weights whose queries and keys turn as before the context was stretched."""
    return replaced_in_c(runner, replace(runner.config, rope_scaling=None), {})


def variant_in_c_bytes(runner: Runner, name: VariantName) -> int:
    """Return what a variant occupies beside the model. OptionError for a shape that the type cannot take."""
    if name in METHODS and name != "NF4":
        for key in _linears(runner):
            group_size(runner.weights[key].shape[1], name)
    heads = {"random-head": runner.weights[EMBEDDING].shape, "tied-head": (0,)}
    return 4 * sum(map(prod, [heads[name]] if name in heads else (one.shape for one in runner.weights.values())))


def _linears(runner: Runner) -> list[str]:
    return [key for key, one in runner.weights.items() if len(one.shape) == 2 and key not in (EMBEDDING, HEAD)]
