"""What answers in text are made with: a `Llama`, as its own parts see it. Never torch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from llamarium.config import ModelConfig
from llamarium.runtime.runner import Runner
from llamarium.sampling.constraint import CompiledGrammar
from llamarium.sampling.params import GenerationOptions, SamplingParams
from llamarium.tokenizer.base import Tokenizer

if TYPE_CHECKING:
    from llamarium.sampling.grammar.compiler import GrammarCompiler


class TextModel(Protocol):
    """A model with its tokenizer.

    Attributes:
        name: What was asked for.
        config: The model's shape.
        stop_ids: Ids that end an answer.
    """

    name: str
    config: ModelConfig
    stop_ids: frozenset[int]

    @property
    def runner(self) -> Runner:
        """What answers the next request."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        ...

    @property
    def grammars(self) -> "GrammarCompiler":
        """What compiles grammars for its vocabulary."""
        ...

    def encode(self, prompt: Any) -> list[int]:
        """Return a prompt's ids."""
        ...

    def sampling_params(self, **options: Unpack[GenerationOptions]) -> SamplingParams:
        """Put options over the publisher's recommendations."""
        ...

    def chat_params(self, **options: Unpack[GenerationOptions]) -> SamplingParams:
        """The same for a dialog's answer."""
        ...


def compiled(model: TextModel, params: SamplingParams) -> CompiledGrammar | None:
    """Return what the parameters' grammar compiles to, if they have one.

    Raises:
        GrammarError: If it cannot be compiled.
        OptionError: If the package for it is missing.
    """
    return None if params.grammar is None else model.grammars.compile(params.grammar)


def begins_text(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Whether a prompt has no text, as a BOS alone; nearly always a few tokens say so."""
    return not (tokenizer.decode(prompt[:8]) or tokenizer.decode(prompt))
