"""Load a checkpoint as PyTorch modules: built on the meta device, then filled weight by weight.

Opening the checkpoint has already checked its headers against the config. Weights come from the loader
(`checkpoints/weights.py`) and move to the device one at a time; a tied head shares the embedding's storage.
"""

from collections.abc import Callable

from llamarium.checkpoints.checkpoint import Checkpoint
from llamarium.checkpoints.decode import FLOAT_DTYPES
from llamarium.checkpoints.forms import loading_plan
from llamarium.checkpoints.modules import empty_model, put_weight, tie_head
from llamarium.checkpoints.options import TensorSource
from llamarium.checkpoints.weights import read_weights, with_tied_head
from llamarium.model import LlamaForCausalLM
from llamarium.options.loading import LoadOptions


def load_model(
    checkpoint: Checkpoint, options: LoadOptions, progress: Callable[[int, int], None] | None = None
) -> tuple[LlamaForCausalLM, tuple[TensorSource, ...]]:
    """Load a checkpoint as a model of PyTorch modules.

    A UserWarning reports weights that are NaN or infinite; with `options.strict` they are a CheckpointError.

    Returns:
        The frozen model in eval mode, and the source of each weight.
    """
    plan = loading_plan(checkpoint, options)
    model = empty_model(checkpoint.config)
    dtype, sources = FLOAT_DTYPES[plan.type_name], list[TensorSource]()
    for weight in read_weights(checkpoint, plan, options, progress):
        put_weight(model, weight, dtype, options.device, rounds_inputs=plan.rounds_inputs)
        sources.append(TensorSource.of(checkpoint.entries[weight.key], weight.type_name, weight.num_bytes))
    if model.config.tie_word_embeddings:
        tie_head(model)
    return model.eval().requires_grad_(False), with_tied_head(model.config, sources)
