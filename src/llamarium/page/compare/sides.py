"""The sides that can be compared: variants of the served model, references and checkpoints. No torch at import."""

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from llamarium.checkpoints.storage import FLOATS
from llamarium.errors import OptionError, UnknownNameError
from llamarium.extras import has_torch
from llamarium.generation.text_engine import TextEngine
from llamarium.hub.builtin import BUILTINS
from llamarium.inspect.interventions import variants
from llamarium.inspect.interventions.variants import BITS, VariantName
from llamarium.page.compare.others import Side
from llamarium.page.compare.references import References, as_stored, side_id
from llamarium.page.compare.runs import Runs
from llamarium.quant.formats import FORMATS, METHODS
from llamarium.runtime.runner import Runner

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.model import LlamaForCausalLM

_TITLES = {
    "float32": "float32", "NF4": "NF4 (4 bits)", "Q4_1": "Q4_1 (int4)", "Q8_0": "Q8_0 (int8)",
    "random-head": "a head of its own, untrained", "tied-head": "the table as head",
}  # fmt: skip
_HEADS = {
    "random-head": (
        "The model ties its head to the embedding table. This is what the very same streams say through a head of its "
        "own, of the random rows that training begins with: only the predictions differ. What training makes of an "
        "untied head, two training runs show."
    ),
    "tied-head": (
        "The model has a head of its own. This is what the very same streams say through the embedding table, as a "
        "loader has it that takes the two for one: only the predictions differ."
    ),
}


def sides_of(llama: "Llama", engine: TextEngine, references: References, runs: Runs) -> list[Side]:
    """Return all sides; the first is the served model."""
    own_variants = _variants(llama, engine) if llama.loaded.has_modules else ()
    stored = as_stored(llama)
    packed = () if stored is None else (stored,)
    return [*_at_hand(llama, engine), *packed, *own_variants, *references.sides(llama), *runs.sides(llama)]


def find_side(sides: list[Side], side_id: str, field: str) -> Side:
    """Return a side by its id; errors are attributed to the request's `field`."""
    for side in sides:
        if side.id == side_id:
            return side
    message = f"there is nothing of this name to compare; there are: {', '.join(side.id for side in sides)}"
    raise UnknownNameError(message, code="unknown_side", param=field)


def first_pair(llama: "Llama", references: References) -> tuple[str, str]:
    """Return the ids of the default pair: the inspected side, and the one that it is compared with."""
    if not _packed_types(llama):
        return "NF4", "model"
    if names := references.of_model(llama):
        return "model", side_id(names[0], "float32")
    if as_stored(llama) is not None:  # the served model has the same weights dequantized to float32
        return "stored", "model"
    return "model", "float32"


def measured_in_bits(llama: "Llama", references: References) -> tuple[str, ...]:
    """Return the names of the 16- or 32-bit references for the served model; "" is the model itself."""
    return references.of_model(llama) if _packed_types(llama) else ("",)


def ids_in_bits(name: str, references: References) -> dict[VariantName, str]:
    """Return the side ids of a reference by weight type."""
    if name == "":
        return {kind: kind for kind in BITS}
    references.check(name)
    return {kind: side_id(name, kind) for kind in BITS}


def about_bits(llama: "Llama", references: References) -> str:
    """Return why the served model's quantization error cannot be measured, with a command that helps; or ""."""
    packed = _packed_types(llama)
    if not packed or references.of_model(llama):
        return ""
    of_builtin = (
        builtin_model
        for builtin_model in BUILTINS.values()
        if Path(llama.name).name in (builtin_model.name, builtin_model.file)
    )
    command = "start with --reference MODEL, where MODEL is what they were quantized from"
    if (builtin := next(of_builtin, None)) is not None:
        command = f"start llamarium inspect -m {builtin.name} --reference {builtin.origin}"
    return (
        f"The weights of this model are stored in {' and '.join(packed)}. What these bits cost can only be measured "
        f"against the 16-bit weights that they were made from, which are not here: {command}."
    )


def stored_as(llama: "Llama") -> tuple[str, float | None]:
    """Return the quantized types of the stored model, and the mean bits per weight, None if unknown."""
    sources = [source for source in llama.sources if not source.tied_to]
    name = " and ".join(_packed_types(llama))
    if not sources or any(source.stored_dtype not in FORMATS for source in sources):
        return name, None
    num_bits = sum(prod(source.shape) * FORMATS[source.stored_dtype].bits_per_weight for source in sources)
    return name, num_bits / sum(prod(source.shape) for source in sources)


def _at_hand(llama: "Llama", engine: TextEngine) -> Iterator[Side]:
    """Yield the sides that share the served weights and take almost no memory."""
    runner = engine.runner
    words, kept_in = f"The pass that answers requests: {runner.name}.", engine.kv_cache_dtype
    yield Side("model", "as it answers", words, 0, lambda: runner, kv_cache_dtype=kept_in)
    for name, (number, _) in engine.adapters.items():
        words = f"The adapter {name} that this server serves, on the model: what it changes, and where it begins to."
        yield Side(f"adapter:{name}", f"with the adapter {name}", words, 0, lambda: runner, number, kept_in)
    if _has_adapter(llama):
        words = "The model as it was before the adapter was put on."
        yield Side("base", "without the adapter", words, 0, lambda: _without_adapter(llama))
    if runner.is_native and has_torch():
        words = "The same weights, multiplied by PyTorch's modules: what differs is in which order sums are rounded."
        yield Side("modules", "by the modules", words, 0, lambda: _modules(llama.model))
    if llama.config.rope_scaling is not None:
        words = (
            "An experiment: queries and keys turn as they did before the context was stretched. The weights have been "
            "trained with scaling; the slow pairs differ, and the more, the later a token stands."
        )
        yield Side("rope-off", "RoPE scaling off", words, 0, lambda: _unscaled(llama))


def _variants(llama: "Llama", engine: TextEngine) -> Iterator[Side]:
    unfit = "random-head" if not llama.config.tie_word_embeddings else "tied-head"
    packed = _packed_types(llama)
    for name in get_args(VariantName):
        if name != unfit and not (packed and name in METHODS):  # quantized weights would be rounded a second time
            try:
                num_bytes = variants.variant_bytes(engine.runner, name, in_c=not has_torch())
            except OptionError:  # a width that the type cannot take
                continue
            title = "unpacked to float32" if packed and name == "float32" else _TITLES[name]
            yield Side(name, title, _words(llama, name), num_bytes, _building(llama, name))


def _words(llama: "Llama", name: str) -> str:
    packed = _packed_types(llama)
    stored = f"which are {' and '.join(packed)}" if packed else "which are not quantized"
    if name in _HEADS:
        return _HEADS[name]
    if name == "float32":
        multiplies = "PyTorch multiplies them" if has_torch() else "C multiplies them"
        return f"The weights in memory, {stored}, unpacked: {multiplies} in float32 and rounds nothing else."
    return (
        f"The weights in memory, {stored}, quantized to {name}, but for table, norms and head; inputs and sums are "
        "float32."
    )


def _building(llama: "Llama", name: VariantName) -> Callable[[], Runner]:
    def build() -> Runner:
        if has_torch():
            return _modules(variants.variant_of(llama.model, name))
        return variants.variant_in_c(llama.runner, name)

    return build


def _modules(model: "LlamaForCausalLM") -> Runner:
    from llamarium.runtime.loaded_model import runner_of

    return runner_of(model)


def _unscaled(llama: "Llama") -> Runner:
    if not has_torch():
        return variants.without_rope_scaling(llama.runner)
    from llamarium.inspect.interventions.experiments import Experiment, begin
    from llamarium.runtime.shell import shell_of

    shell = shell_of(llama.model)
    begin(shell, Experiment(rope_scaling="off"))
    return _modules(shell)


def _packed_types(llama: "Llama") -> list[str]:
    """Return the quantized types of the weights, in memory or on disk."""
    stored = {source.stored_dtype for source in llama.sources}
    return sorted((stored | {weight.type_name for weight in llama.runner.weights.values()}) - set(FLOATS))


def _has_adapter(llama: "Llama") -> bool:
    if (adapters := llama.runner.adapters) is not None:
        return len(adapters) > 0
    from llamarium.adapters.lora import adapted_modules

    return any(adapted_modules(llama.model))


def _without_adapter(llama: "Llama") -> Runner:
    if llama.runner.adapters is not None:
        return llama.runner.with_adapters(())
    from llamarium.adapters.lora import adapted_modules
    from llamarium.runtime.shell import shell_of

    shell = shell_of(llama.model)
    for _, adapted in adapted_modules(shell):
        adapted.enabled = False
    return _modules(shell)
