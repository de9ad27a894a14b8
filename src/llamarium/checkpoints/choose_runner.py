"""Load an opened checkpoint: as a native runner if the C kernels support all of it, otherwise as PyTorch modules."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from llamarium.checkpoints.checkpoint import Checkpoint, stored_fingerprint
from llamarium.checkpoints.learner_folder import LearnerCheckpoint, check_learner_options
from llamarium.checkpoints.options import TensorSource
from llamarium.checkpoints.weights import native_weights, sources_of
from llamarium.errors import OptionError, escape
from llamarium.extras import need_torch
from llamarium.kernels import native
from llamarium.options.loading import LoadOptions
from llamarium.quant.stored_types import STORED_TYPES
from llamarium.runtime.loaded_model import LoadedModel
from llamarium.runtime.native.runner import NativeRunner
from llamarium.runtime.native.weights import Weight
from llamarium.runtime.runner import Runner

if TYPE_CHECKING:
    from llamarium.model import LlamaForCausalLM

Progress = Callable[[int, int], None]


def load_weights(
    checkpoint: Checkpoint, options: LoadOptions, progress: Progress | None = None
) -> tuple[LoadedModel, tuple[TensorSource, ...]]:
    """Load a checkpoint's weights and choose a runner for them.

    Raises:
        CheckpointError: If a tensor cannot be read or, with `strict`, contains NaN or infinity.
        OptionError: If an option does not fit the checkpoint.
        FunctionError: If the functions of a `llamarium build` folder cannot be started.
    """
    if isinstance(checkpoint, LearnerCheckpoint):
        check_learner_options(checkpoint.path, options)
        check = checkpoint.check_unchanged
        loaded = LoadedModel(checkpoint.runner(), None, check=check, weights_of=checkpoint.model)
        return loaded, checkpoint.sources()
    weights = native_weights(checkpoint, options, progress)
    if weights is None:
        return _load_modules(checkpoint, options, progress)

    def build() -> "LlamaForCausalLM":
        need_torch("llama.model: a model of modules")
        from llamarium.checkpoints.modules import build_model

        return build_model(checkpoint.config, weights, options.input_bits or native.INPUT_BITS)

    runner = _runner(checkpoint, weights, options)
    loaded = LoadedModel(
        runner, build, deterministic=options.deterministic, check=checkpoint.check_unchanged,
        stored=lambda: stored_fingerprint(checkpoint),
    )  # fmt: skip
    return loaded, sources_of(checkpoint, weights)


def runner_over(model: "LlamaForCausalLM") -> Runner | None:
    """Return a native runner over the memory of a model in training, without its adapters.

    None if the C kernels cannot run the model. Norm weights are copied now, so the runner is valid until the weights
    change.
    """
    from llamarium.checkpoints.modules import weights_of

    weights = weights_of(model, of_bases=True) if native.library() is not None else None
    return None if weights is None else NativeRunner(model.config, weights)


def _load_modules(
    checkpoint: Checkpoint, options: LoadOptions, progress: Progress | None
) -> tuple[LoadedModel, tuple[TensorSource, ...]]:
    need_torch(f"{escape(checkpoint.path)}: {_what_modules_do(checkpoint, options)}")
    from llamarium.checkpoints.load import load_model

    model, sources = load_model(checkpoint, options, progress)
    if options.deterministic:
        raise OptionError(
            f"{escape(checkpoint.path)}: deterministic needs the C kernels, which run any model on the CPU but NF4 and "
            f"what is dequantized at each use; this one is on {model.device}, with {native.kernels() or 'PyTorch'} as "
            "kernels (`llamarium doctor`)"
        )
    _refuse_input_bits(checkpoint, options)
    return LoadedModel.of_modules(model, checkpoint.check_unchanged), sources


def _what_modules_do(checkpoint: Checkpoint, options: LoadOptions) -> str:
    """Describe why loading this checkpoint needs PyTorch, for an error message."""
    if options.device != "cpu" or not options.join:
        return f"a model of modules on {options.device}"
    if native.library() is None:
        return "running it without the C kernels"
    if options.quantize == "NF4":
        return "quantizing to NF4"
    if options.quantize is not None:
        return f"multiplying {options.quantize} exactly"
    stored = sorted({entry.dtype for entry in checkpoint.entries.values() if entry.dtype in STORED_TYPES})
    return f"multiplying {', '.join(stored)}" if stored else "dequantizing at each use"


def _runner(checkpoint: Checkpoint, weights: Mapping[str, Weight], options: LoadOptions) -> NativeRunner:
    runner = NativeRunner(checkpoint.config, weights, input_bits=options.input_bits or native.INPUT_BITS)
    if runner.input_bits is None:
        _refuse_input_bits(checkpoint, options)
    return runner


def _refuse_input_bits(checkpoint: Checkpoint, options: LoadOptions) -> None:
    if options.input_bits is not None:
        raise OptionError(
            f"{escape(checkpoint.path)}: input_bits={options.input_bits} was asked for, which is for packed weights "
            "that the C kernels multiply, and nothing is rounded here; leave it out"
        )
