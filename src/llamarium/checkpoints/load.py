"""From a checkpoint to a model of modules: built on the meta device, then filled weight by weight.

Nothing is allocated before the headers agree with the config (the checkpoint's opening checks that). Weights come from
the loader (`checkpoints/weights.py`) and move to their device one by one, and a tied head becomes the embedding's own
storage.
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
    """Build the model that a checkpoint holds; a UserWarning tells of weights that are NaN or infinite."""
    plan = loading_plan(checkpoint, options)
    model = empty_model(checkpoint.config)
    dtype, sources = FLOAT_DTYPES[plan.type_name], list[TensorSource]()
    for weight in read_weights(checkpoint, plan, options, progress):
        put_weight(model, weight, dtype, options.device, rounds_inputs=plan.rounds_inputs)
        sources.append(TensorSource.of(checkpoint.entries[weight.key], weight.type_name, weight.num_bytes))
    if model.config.tie_word_embeddings:
        tie_head(model)
    return model.eval().requires_grad_(False), with_tied_head(model.config, sources)
