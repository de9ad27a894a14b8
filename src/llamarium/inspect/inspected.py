"""The interface that inspections need from a model; `inspector.py` is imported at first use."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from llamarium.generation.text_model import TextModel
from llamarium.runtime.loaded_model import LoadedModel
from llamarium.tokenizer.base import Tokenizer

if TYPE_CHECKING:
    from llamarium.model import LlamaForCausalLM

Prompt = str | Sequence[int]


class Inspected(TextModel, Protocol):
    """The part of a `Llama` that its inspector uses."""

    loaded: LoadedModel

    @property
    def model(self) -> "LlamaForCausalLM": ...  # noqa: D102
    @property
    def optional_tokenizer(self) -> Tokenizer | None: ...  # noqa: D102
