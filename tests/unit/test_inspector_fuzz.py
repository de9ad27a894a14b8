"""Whatever is passed to an inspector's methods, what cannot be honoured is an error of the library, in words."""

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from llamarium.api import Llama
from llamarium.errors import LlamariumError
from llamarium.inspect.inspector import Inspector
from llamarium.inspect.interventions.edits import Edit
from llamarium.inspect.interventions.experiments import Experiment
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.tokenizer.backends.characters import CharacterTokenizer

pytestmark = pytest.mark.torch

ALPHABET = "abcdefghij klmnop.\n"
CONFIG = replace(preset("tiny"), vocab_size=len(ALPHABET), max_position_embeddings=32)

FIRST: dict[str, tuple[Any, ...]] = {
    "lens": ("bad",), "heads": ("bad", 0), "head_kinds": ("bad",), "attribution": ("bad", 1), "neurons": ("bad", 0),
    "learn": ("bad",), "sampler_steps": ("bad",), "variant": ("NF4",), "compare": ("bad", None), "token_cost": ("bad",),
    "effect": ("bad",), "trace_experiment": ("bad", Experiment()), "steer": ("bad", "cab", 0),
    "patch_grid": ("bad", "cab", 1),
}  # fmt: skip
"""Arguments of each method that can be honoured."""

WRONG: tuple[Any, ...] = (
    object(), b"x", 3.5, float("nan"), "", "no such thing", -99, True, None, [], [None], {"a": 1}, [[1]], lambda: 1,
)  # fmt: skip


@pytest.fixture(scope="module")
def llama() -> Llama:
    model = init_weights(LlamaForCausalLM(CONFIG), seed=3).requires_grad_(False)
    return Llama("tiny", model, CharacterTokenizer.from_text(ALPHABET))


def calls(llama: Llama, name: str) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Yield calls of a method in which one argument is another than it should be."""
    first = tuple(llama if argument is None else argument for argument in FIRST[name])
    parameters = list(inspect.signature(getattr(Inspector, name)).parameters.values())[1:]
    for place, wrong in itertools.product(range(len(first)), WRONG):
        yield f"argument {place} is {wrong!r}", (*first[:place], wrong, *first[place + 1 :]), {}
    for parameter, wrong in itertools.product(parameters[len(first) :], WRONG):
        if parameter.kind is parameter.VAR_POSITIONAL:
            yield f"*{parameter.name} has {wrong!r}", (*first, wrong), {}
        elif parameter.kind is not parameter.VAR_KEYWORD:
            yield f"{parameter.name}={wrong!r}", first, {parameter.name: wrong}


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_honoured_is_an_error_in_words(llama: Llama, name: str) -> None:
    raw: list[str] = []
    for what, args, options in calls(llama, name):
        try:
            getattr(llama.inspect, name)(*args, **options)
        except LlamariumError as error:
            if not str(error):
                raw.append(f"{what}: no words")
        except Exception as error:  # noqa: BLE001 - it is what is looked for
            raw.append(f"{what}: {type(error).__name__}: {error}")
    assert raw == []


@pytest.mark.parametrize(
    "edit",
    [
        object(), Edit("head"), Edit(WRONG[5]), Edit("mlp", WRONG[5]), Edit("mlp", 0, factor=WRONG[5]),
        Edit("mlp", 0, add=WRONG[7]),
    ],
    ids=["object", "no head", "no part", "a word as layer", "a word as factor", "a number as vector"],
)  # fmt: skip
def test_an_edit_that_is_none_is_an_error_in_words(llama: Llama, edit: Any) -> None:
    with pytest.raises(LlamariumError), llama.inspect.edited(edit):
        pass


@pytest.mark.parametrize("wrong", [w for w in WRONG if w is not None])
def test_an_experiment_that_is_none_is_an_error_in_words(llama: Llama, wrong: Any) -> None:
    for experiment in (wrong, Experiment(hidden=wrong), Experiment(rope_scaling=wrong)):
        try:
            llama.inspect.trace_experiment("bad", experiment)
        except LlamariumError:
            continue
        assert isinstance(experiment, Experiment) and not experiment.hidden
