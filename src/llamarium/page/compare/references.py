"""Reference models with 16- or 32-bit weights, as stored and quantized. Torch-free.

The reference is the model before quantization: dequantized weights of a quantized model would hide the quantization
error.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from llamarium.checkpoints.open import OpenedModel, open_model
from llamarium.checkpoints.storage import FLOATS
from llamarium.config import EMBEDDING, HEAD
from llamarium.errors import InputError, OptionError, UnknownNameError, escape
from llamarium.inspect.interventions.variants import BITS, VariantName, variant_in_c
from llamarium.page.compare.others import Side
from llamarium.quant.formats import METHODS, quantized_type
from llamarium.runtime.runner import Runner
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.compare import check_same_vocabulary

if TYPE_CHECKING:
    from llamarium.api import Llama


class References:
    """Reference models by name, given as names or paths for `llamarium.load`.

    OptionError if a reference is quantized, has no tokenizer, or if two have the same name.
    """

    def __init__(self, sources: Sequence[str | Path] = ()) -> None:
        self._opened = dict[str, OpenedModel]()
        for source in sources:
            name, reference = reference_name(source), open_model(source)
            if name in self._opened:
                raise OptionError(f"{escape(source)}: two references are called {escape(name)}; rename one of them")
            if packed := {entry.dtype for entry in reference.checkpoint.entries.values()} - set(FLOATS):
                raise OptionError(
                    f"{escape(name)}: its weights are {' and '.join(sorted(packed))}; expected 16 or 32 bits: a "
                    "reference is what was quantized"
                )
            if reference.optional_tokenizer is None:
                raise OptionError(reference.why_no_tokenizer)
            self._opened[name] = reference
        self._tokenizers = OwnTokenizers()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the models."""
        return tuple(self._opened)

    def sides(self, llama: "Llama") -> Iterator[Side]:
        """Yield a side for each model and weight type."""
        for name, reference in self._opened.items():
            tokenizer = self._tokenizers.of(llama, name, reference)
            stored = " and ".join({entry.dtype for entry in reference.checkpoint.entries.values()})
            kinds: list[VariantName] = [kind for kind in BITS if _fits(reference, kind)]
            for kind in kinds:
                words = f"The weights of {name}, stored as {stored}, in float32."
                if kind != "float32":
                    words = f"Those weights quantized once to {kind}, but for table, norms and head; sums are float32."
                yield Side(
                    side_id(name, kind), f"{name} in {kind}", words,
                    4 * sum(prod(entry.shape) for entry in reference.checkpoint.entries.values()),
                    _building(reference, kind), vocabulary="" if tokenizer is None else name, tokenizer=tokenizer,
                )  # fmt: skip

    def of_model(self, llama: "Llama") -> tuple[str, ...]:
        """Return the names of the references with a model's architecture and vocabulary."""
        fitting = list[str]()
        for name, reference in self._opened.items():
            shapes = {(c.num_hidden_layers, c.hidden_size, c.vocab_size) for c in (reference.config, llama.config)}
            if len(shapes) == 1 and self._tokenizers.of(llama, name, reference) is None:
                fitting.append(name)
        return tuple(fitting)

    def check(self, name: str) -> None:
        """Raise an error for an unknown name."""
        if name not in self._opened:
            names = ", ".join(self._opened) or "none (`llamarium inspect --reference MODEL` names one)"
            message = f"there is no reference of this name; there is: {names}"
            raise UnknownNameError(message, code="unknown_reference", param="of")


def reference_name(source: str | Path) -> str:
    """Return a reference's name: the last part of its path."""
    return Path(source).resolve().name


def side_id(name: str, kind: VariantName) -> str:
    """Return the id of a reference's weights in one precision."""
    return f"reference:{name}:{kind}"


def as_stored(llama: "Llama") -> Side | None:
    """Return a side with a model's quantized weights as stored, if they were dequantized at loading; else None."""
    packed = sorted({source.stored_dtype for source in llama.sources} - set(FLOATS))
    in_memory = {weight.type_name for weight in llama.runner.weights.values()}
    files = {source.file for source in llama.sources}
    if not packed or in_memory - set(FLOATS) or not all(file.is_file() for file in files):
        return None
    words = (
        f"The same weights as they are stored, in {' and '.join(packed)}: products of packed weights round their "
        "inputs, as in `llamarium serve`. The shown model has them unpacked."
    )
    num_bytes = sum(file.stat().st_size for file in files)
    return Side("stored", f"packed, {' and '.join(packed)}", words, num_bytes, lambda: _load_stored(files))


def _load_stored(files: set[Path]) -> Runner:
    from llamarium.api import load

    file = min(files)
    return load(file if file.suffix == ".gguf" else file.parent, device="cpu").runner


class OwnTokenizers:
    """Cache of tokenizers by model name, compared with the served model's."""

    def __init__(self) -> None:
        self._found = dict[str, Tokenizer | None]()

    def of(self, llama: "Llama", name: str, other: OpenedModel) -> Tokenizer | None:
        """Return a model's tokenizer; None if it has the served model's vocabulary."""
        if name not in self._found:
            try:
                check_same_vocabulary(llama, other, "differ")
                self._found[name] = None
            except InputError:
                self._found[name] = other.tokenizer
        return self._found[name]


def _fits(reference: OpenedModel, kind: VariantName) -> bool:
    if kind not in METHODS:
        return True
    linears = (entry for key, entry in reference.checkpoint.entries.items() if key not in (EMBEDDING, HEAD))
    return all(quantized_type(kind, entry.shape[1]) == kind for entry in linears if len(entry.shape) == 2)


def _building(reference: OpenedModel, kind: VariantName) -> Callable[[], Runner]:
    def build() -> Runner:
        from llamarium.api import load

        runner = load(reference.path, dtype="float32", device="cpu").runner
        return runner if kind == "float32" else variant_in_c(runner, kind)

    return build
