"""What the model is, and the very lines of Python that it executes, from where the package is installed."""

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import llamarium
from llamarium.checkpoints.checkpoint import expected_shapes
from llamarium.errors import UnknownNameError
from llamarium.page.architecture import view_of_model, view_of_shape
from llamarium.page.binary import Numbers
from llamarium.page.open_pass import OpenModel
from llamarium.page.schema.model import ModelView, PublishedShape, SourceView


def model(context: OpenModel, shape: PublishedShape | None = None) -> ModelView:
    """Return the modules, shapes, parameters, bytes and operations of the model at hand, or of a published shape."""
    if shape is not None:
        return view_of_shape(shape)
    view = view_of_model(context.llama, context.engine, context.state.loaded_with())
    return view.model_copy(update={"has_lesson": context.state.lesson is not None})


def source(context: OpenModel, name: str) -> SourceView:
    """Return the lines that a part of the model executes, as they are installed."""
    return source_of(name)


def weight(context: OpenModel, key: str) -> Numbers:
    """Send a weight that is a vector: a norm's."""
    names = [name for name in expected_shapes(context.llama.config) if name.endswith("norm.weight")]
    if key not in names:
        message = f"no vector of weights has this key; there are {names[0]} and the like"
        raise UnknownNameError(message, code="unknown_weight", param="key")
    return Numbers(context.llama.runner.dequantize(key), "D")


SOURCES: Mapping[str, str] = {
    "bpe.merge": "llamarium.tokenizer.bpe:ByteLevelBPE.merge",
    "model": "llamarium.model.llama:LlamaModel.forward",
    "layer": "llamarium.model.llama:LlamaDecoderLayer.forward",
    "norm": "llamarium.model.norm:LlamaRMSNorm",
    "project": "llamarium.model.attention:LlamaAttention.project",
    "attention": "llamarium.model.attention:LlamaAttention.forward",
    "attend": "llamarium.attention.base:attend_eagerly",
    "rotate": "llamarium.model.rope:Rotary.rotate",
    "rotate.complex": "llamarium.model.rope:rotate_complex",
    "rope.frequencies": "llamarium.rope:rope_frequencies",
    "rope.scale": "llamarium.rope:_llama3",
    "mlp": "llamarium.model.mlp:LlamaMLP",
    "o_proj": "llamarium.inspect.probes.heads:_through_columns",
    "silu": "llamarium.model.mlp:SiLUActivation",
    "attribution": "llamarium.inspect.probes.attribution:attribute",
    "lens": "llamarium.inspect.lens:lens",
    "sampler": "llamarium.sampling.steps:stages",
    "sampler.noise": "llamarium.sampling.steps:noise",
    "advance": "llamarium.inspect.forward:advance",
    "stream_errors": "llamarium.inspect.measures.streams:stream_errors",
    "kl": "llamarium.inspect.measures.divergence:kl_of_rows",
    "neighbors": "llamarium.inspect.neighbors:_cosines_of",
    "init": "llamarium.model.init:init_weights",
    "cross": "llamarium.attention.base:CrossAttend.__call__",
    "translate": "llamarium.inspect.probes.translation:Translator.write",
    "mask": "llamarium.inspect.interventions.experiments:Experiment.visible",
    "nf4": "llamarium.quant.codes:nf4_blocks",
    "unpack": "llamarium.quant.packed:LinearPacked.dequantize_at",
    "quantize.inputs": "llamarium.quant.codes:round_inputs",
    "product": "llamarium.quant.codes:product_reference",
    "learn": "llamarium.inspect.probes.learning:learn",
    "edit": "llamarium.runtime.shell:apply",
    "steer": "llamarium.inspect.interventions.edits:steer",
    "patch": "llamarium.inspect.interventions.patching:PatchGrid._run",
}
"""What can be read, by the name that a stage gives it: a module, and what stands in it."""


def source_of(name: str) -> SourceView:
    """Return the lines of one of `SOURCES`; imports torch."""
    if name not in SOURCES:
        raise UnknownNameError(
            f"no lines are known under this name; there are: {', '.join(SOURCES)}", code="unknown_source", param="name"
        )
    module, _, place = SOURCES[name].partition(":")
    target: Any = importlib.import_module(module)
    for part in place.split("."):
        target = getattr(target, part)
    target = inspect.unwrap(target)  # below torch's decorators
    lines, first = inspect.getsourcelines(target)
    file = Path(inspect.getsourcefile(inspect.unwrap(target)) or "").relative_to(Path(llamarium.__file__).parents[1])
    return SourceView(name=name, file=file.as_posix(), line=first, text=inspect.cleandoc("\n" + "".join(lines)))
