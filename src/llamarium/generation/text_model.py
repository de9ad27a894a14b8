"""The part of `Llama` that text generation needs. Torch-free."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from llamarium.config import ModelConfig
from llamarium.runtime.loaded_model import LoadedModel
from llamarium.runtime.runner import Runner
from llamarium.sampling.constraint import CompiledGrammar
from llamarium.sampling.keywords import SamplingKeywords
from llamarium.sampling.params import SamplingParams
from llamarium.tokenizer.base import Tokenizer

if TYPE_CHECKING:
    from llamarium.sampling.grammar.compiler import GrammarCompiler


class TextModel(Protocol):
    """A model with its tokenizer; see `Llama`."""

    name: str
    config: ModelConfig
    loaded: LoadedModel
    stop_ids: frozenset[int]

    @property
    def runner(self) -> Runner: ...  # noqa: D102
    @property
    def tokenizer(self) -> Tokenizer: ...  # noqa: D102
    @property
    def grammars(self) -> "GrammarCompiler": ...  # noqa: D102
    def encode(self, prompt: Any) -> list[int]: ...  # noqa: D102
    def sampling_params(  # noqa: D102
        self, params: SamplingParams | None = None, **options: Unpack[SamplingKeywords]
    ) -> SamplingParams: ...
    def chat_params(  # noqa: D102
        self, params: SamplingParams | None = None, **options: Unpack[SamplingKeywords]
    ) -> SamplingParams: ...


def compiled(model: TextModel, params: SamplingParams) -> CompiledGrammar | None:
    """Return the compiled grammar of sampling parameters, or None if they have none.

    Raises:
        GrammarError: If it cannot be compiled.
        OptionError: If the package that compiles it is missing.
    """
    return None if params.grammar is None else model.grammars.compile(params.grammar)


def begins_text(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Return whether a prompt has no text, such as a BOS alone."""
    # Decoding the first tokens is enough for almost all prompts, and fast for long ones.
    return not (tokenizer.decode(prompt[:8]) or tokenizer.decode(prompt))
