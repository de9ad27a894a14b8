"""A model's matrices, by layer and name, whatever they are stored as."""

from llamarium.config import EMBEDDING, HEAD
from llamarium.errors import InputError
from llamarium.runtime.runner import Runner

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def linear_key(layer: int, linear: str) -> str:
    """Return the state-dict key of a layer's matrix."""
    return f"model.layers.{layer}.{'self_attn' if linear in ATTENTION else 'mlp'}.{linear}.weight"


def type_of(runner: Runner, key: str) -> str:
    """Return the type that a matrix is stored as; InputError if it is unknown: its module has been replaced."""
    found = runner.weights.get(EMBEDDING if key == HEAD and runner.config.tie_word_embeddings else key)
    if found is None:
        name = key.removesuffix(".weight")
        raise InputError(f"{name} is another module, whose matrix is not known; expected a Linear")
    return found.type_name
