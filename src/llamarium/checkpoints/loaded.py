"""From an opened checkpoint to a loaded model: C where its kernels can run all of it, else the modules."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from llamarium.checkpoints.checkpoint import Checkpoint
from llamarium.checkpoints.native_weights import native_weights, sources_of
from llamarium.checkpoints.options import LoadOptions, TensorSource
from llamarium.errors import OptionError, escape
from llamarium.kernels import native
from llamarium.runtime.loaded import LoadedModel
from llamarium.runtime.native_runner import NativeRunner

if TYPE_CHECKING:
    from llamarium.model import LlamaForCausalLM

Progress = Callable[[int, int], None]


def load_weights(
    checkpoint: Checkpoint, options: LoadOptions, progress: Progress | None = None
) -> tuple[LoadedModel, tuple[TensorSource, ...]]:
    """Load a checkpoint's weights and choose what runs them.

    Args:
        checkpoint: Opened.
        options: How.
        progress: Called with (bytes read, bytes in all).

    Raises:
        CheckpointError: If a tensor cannot be read, or with `strict` if one is not finite.
        OptionError: If an option does not fit the checkpoint.
    """
    weights = native_weights(checkpoint, options, progress)
    if weights is None:
        return _load_modules(checkpoint, options, progress)

    def build() -> "LlamaForCausalLM":
        from llamarium.checkpoints.modules import build_model

        return build_model(checkpoint.config, weights)

    runner = NativeRunner(checkpoint.config, weights)
    check = getattr(checkpoint, "check_unchanged", None)
    loaded = LoadedModel(runner, build, deterministic=options.deterministic, check=check)
    return loaded, sources_of(checkpoint, weights)


def _load_modules(
    checkpoint: Checkpoint, options: LoadOptions, progress: Progress | None
) -> tuple[LoadedModel, tuple[TensorSource, ...]]:
    """Load modules; where they have become what the kernels multiply (quantized while loading, say), these run them."""
    from llamarium.checkpoints.load import load_model
    from llamarium.checkpoints.modules import weights_of

    model, sources = load_model(checkpoint, options, progress)
    check = getattr(checkpoint, "check_unchanged", None)
    may = options.join and native.library() is not None and (options.deterministic or model.dtype.itemsize == 2)
    weights = weights_of(model) if may else None
    if weights is not None:
        runner = NativeRunner(checkpoint.config, weights)
        return LoadedModel(runner, lambda: model, deterministic=options.deterministic, check=check), sources
    if options.deterministic:
        raise OptionError(
            f"{escape(checkpoint.path)}: deterministic needs weights that the C kernels multiply (packed, bfloat16 or "
            f"float32) on the CPU; this model is in {str(model.dtype).removeprefix('torch.')} on {model.device}, with "
            f"{native.kernels() or 'PyTorch'} as kernels (`llamarium doctor`)"
        )
    return LoadedModel.of_modules(model, check), sources
