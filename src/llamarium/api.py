"""The public interface: `load()` a model, then generate, chat, score and trace with it."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, get_args, overload

import numpy as np
from numpy.typing import NDArray

from llamarium.adapters.files import read_adapter
from llamarium.adapters.load import read_chosen_tokenizer, with_adapter
from llamarium.adapters.model_names import DEFAULT_MODEL, base_model
from llamarium.checkpoints.beside import Beside
from llamarium.checkpoints.choose_runner import load_weights
from llamarium.checkpoints.open import open_model
from llamarium.checkpoints.options import TensorSource
from llamarium.config import ModelConfig
from llamarium.engine.pooling import Pooling
from llamarium.engine.tiers.disk_cache import DiskCache
from llamarium.errors import SamplingError, TokenizerError, check_choice, counted, escape
from llamarium.generation.answer import complete, stream
from llamarium.generation.completion import Generation, Piece, stop_ids_of
from llamarium.generation.conversation import Conversation
from llamarium.generation.dialog import CHAT_MAX_TOKENS, DialogOptions, read_dialog
from llamarium.generation.embedding import embed_prompts
from llamarium.generation.keywords import AnswerKeywords, ChatKeywords
from llamarium.generation.loop import DialogEngine
from llamarium.generation.options import EngineArguments, PassOptions, split_options, with_params
from llamarium.generation.text_engine import TextEngine
from llamarium.generation.text_methods import TextMethods
from llamarium.hub.folders import is_learner_folder
from llamarium.inspect.methods import Measured
from llamarium.keywords import shows_options
from llamarium.options.keywords import LoadKeywords
from llamarium.options.loading import LoadOptions
from llamarium.options.serving import EngineOptions
from llamarium.runtime.device import choose_device
from llamarium.runtime.loaded_model import LoadedModel
from llamarium.runtime.runner import Runner
from llamarium.sampling.params import SamplingParams
from llamarium.tokenizer.base import Tokenizer

if TYPE_CHECKING:
    from llamarium.model import LlamaForCausalLM
    from llamarium.sampling.grammar.compiler import GrammarCompiler


Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@shows_options(LoadOptions)
def load(
    model: str | Path | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
    **options: Unpack[LoadKeywords],
) -> "Llama":
    """Load a model and its tokenizer. On a CPU the C kernels compute, without torch.

    LlamariumError if the model cannot be found, read, or loaded so; see `llamarium.errors`.

    >>> llamarium.load("shakespeare-char")
    <Llama shakespeare-char: 6 layers of 192, vocabulary of 65>

    Args:
        model: A built-in name, a folder (Hugging Face or Meta), a `.gguf` file, or `org/name` on the Hugging Face hub.
            None is the adapter's base, and without an adapter "smollm2-135m".
        progress: Called with (bytes read, total bytes).
        **options: How it is loaded, as follows.
    """
    chosen = LoadOptions(**options)
    device = "cpu" if is_learner_folder(model) and chosen.device == "auto" else chosen.device  # no GPU runs it
    return _load(model, replace(chosen, device=choose_device(device)), progress)


def _load(model: str | Path | None, options: LoadOptions, progress: Callable[[int, int], None] | None) -> "Llama":
    adapter, chat_template = options.adapter, options.chat_template
    opened = open_model(base_model(model, adapter, {}) or DEFAULT_MODEL, with_tokenizer=False)
    saved = None if adapter is None else read_adapter(Path(adapter), opened.checkpoint.config)
    with warnings.catch_warnings():  # of what it warns, `Llama` does
        warnings.simplefilter("ignore")
        source = f"{escape(opened.path)}/generation_config.json"  # refused before the weights are read:
        SamplingParams.from_generation_config(opened.generation_config, source=source)
    with Beside(lambda: read_chosen_tokenizer(opened, saved, chat_template)) as reading:
        if saved is not None or chat_template is not None:
            reading.wait()  # what the caller chose is refused before the weights are read

        def tell(done: int, total: int) -> None:
            reading.check()  # a tokenizer that does not fit ends a long load
            if progress is not None:
                progress(done, total)

        loaded, sources = load_weights(opened.checkpoint, options, tell)
        opened = reading.result()
    loaded = loaded if saved is None else with_adapter(loaded, saved)
    tokenizer, recommended = opened.optional_tokenizer, opened.generation_config
    return Llama(opened.name, loaded, tokenizer, sources, recommended, opened.why_no_tokenizer)


def _are_several(prompt: object) -> bool:
    """Whether it is a list of prompts, rather than one of ids."""
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list, tuple))


class Llama(TextMethods, Measured):
    """A loaded model with its tokenizer.

    >>> llama = llamarium.load("shakespeare-char")
    >>> llama
    <Llama shakespeare-char: 6 layers of 192, vocabulary of 65>

    Attributes:
        name: As given to `load`.
        config: The model's shape.
        sources: Origin of each weight.
        generation_config: The publisher's recommended sampling parameters, or nothing.
        stop_ids: Ids that end an answer.
        why_no_tokenizer: Reason why `tokenizer` raises, if it does.
    """

    def __init__(
        self,
        name: str,
        model: "LoadedModel | LlamaForCausalLM",
        tokenizer: Tokenizer | None,
        sources: tuple[TensorSource, ...] = (),
        generation_config: Mapping[str, Any] | None = None,
        why_no_tokenizer: str | None = None,
    ) -> None:
        self.name = name
        self.loaded = model if isinstance(model, LoadedModel) else LoadedModel.of_modules(model)
        self.config: ModelConfig = self.loaded.config
        self.sources = sources
        self.generation_config = generation_config or {}
        self._tokenizer = tokenizer
        self._grammars: GrammarCompiler | None = None
        self.why_no_tokenizer = why_no_tokenizer or f"{name} was made without a tokenizer; call llama.model(ids)"
        defaults = SamplingParams.from_generation_config(self.generation_config)  # checks the file, too
        self.stop_ids = stop_ids_of(self.config, tokenizer, defaults.stop_token_ids)

    def __repr__(self) -> str:
        c = self.config
        return (
            f"<Llama {self.name}: {counted(c.num_hidden_layers, 'layer')} of {c.hidden_size}, vocabulary of "
            f"{c.vocab_size:,}>"
        )

    @property
    def model(self) -> "LlamaForCausalLM":
        """The `LlamaForCausalLM`, built at first use; `llama.model(ids)` returns logits (B, T, V). Needs torch.

        >>> sum(weight.numel() for weight in llama.model.parameters())
        2374272
        """
        return self.loaded.model

    @property
    def runner(self) -> Runner:
        """The runner chosen at loading, or the modules if they have been edited.

        >>> llama.runner.device
        'cpu'
        """
        return self.loaded.runner()

    @property
    def optional_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None.

        >>> smollm2.optional_tokenizer is smollm2.tokenizer
        True
        """
        return self._tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; TokenizerError if it has none, or one of an unsupported kind.

        >>> smollm2.tokenizer.vocab_size
        49152
        """
        if self._tokenizer is None:
            raise TokenizerError(self.why_no_tokenizer)
        return self._tokenizer

    @overload
    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[AnswerKeywords]
    ) -> Generation: ...
    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]],
        params: SamplingParams | None = None,
        **options: Unpack[AnswerKeywords],
    ) -> list[Generation]: ...
    @shows_options(SamplingParams, PassOptions, error=SamplingError)
    def generate(
        self, prompt: Any, params: SamplingParams | None = None, **options: Unpack[AnswerKeywords]
    ) -> Generation | list[Generation]:
        """Continue one prompt, or a list of prompts side by side.

        >>> llama.generate("To be, or not to b", temperature=0, max_tokens=6).text
        'e so m'

        Args:
            prompt: Text (BOS is added if the model has one) or token ids (as they are), or a list of either.
            params: Complete parameters; options go over them. None takes those of the model's generation_config.json.
            **options: Those of `SamplingParams` and of `PassOptions`; what is left out is as the model's
                generation_config.json recommends, then as the signature shows.

        Returns:
            A `Generation`, or a list of them for a list of prompts, in which a prompt whose logits are NaN, say, gets a
            completion with "error".

        Raises:
            SamplingError: For an unknown option or a value outside its range; `GrammarError` for a form of answer.
            ContextLengthError: If a prompt leaves no room in the context.
            OptionError: If `prompt_lookup` or `draft_model` could change the answer with this model (bfloat16 through
                PyTorch, say), or a package for structured output is missing.
            LlamariumError: If no token can be chosen for a single prompt.
        """
        options = with_params(params, options)
        several = _are_several(prompt)
        prompts = [self.encode(p) for p in (prompt if several else [prompt])]
        pass_options = PassOptions(**split_options(options, PassOptions))
        generations = complete(self, prompts, self.sampling_params(**options), pass_options)
        return generations if several else generations[0].or_raise()

    @shows_options(SamplingParams, PassOptions, error=SamplingError)
    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[AnswerKeywords]
    ) -> Iterator[Piece]:
        """Continue one prompt, piece by piece; options as in `generate`, without `n`.

        Errors are raised by the call; computation begins with the first piece.

        >>> for piece in llama.stream("To be, or not to b", temperature=0, max_tokens=6):
        ...     print(piece.text, end="|")
        e| |s|o| |m|
        """
        options = with_params(params, options)
        pass_options = PassOptions(**split_options(options, PassOptions))
        return stream(self, self.encode(prompt), self.sampling_params(**options), pass_options)

    @shows_options(SamplingParams, PassOptions, error=SamplingError, max_tokens=CHAT_MAX_TOKENS)
    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Unpack[ChatKeywords]
    ) -> Generation:
        """Answer a dialog: a list of {"role", "content"} messages; options as in `generate`, and `DialogOptions`.

        An answer has 1,024 tokens at most, unless the options or the model's generation_config.json set it.
        `Generation.tool_calls` are its calls, and `Generation.message` is its message for the next dialog.

        >>> smollm2.chat([{"role": "user", "content": "Say hello."}], temperature=0, max_tokens=8).message["role"]
        'assistant'
        """
        options = with_params(params, options)
        pass_options = PassOptions(**split_options(options, PassOptions))
        dialog_options = DialogOptions(**split_options(options, DialogOptions))
        ids, tools = read_dialog(self, messages, dialog_options, options)
        return complete(self, [ids], self.chat_params(**options), pass_options, new_text=True, tools=tools)[
            0
        ].or_raise()

    @shows_options(SamplingParams, PassOptions, error=SamplingError, max_tokens=CHAT_MAX_TOKENS)
    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        prefix: DialogEngine | None = None,
        **options: Unpack[ChatKeywords],
    ) -> Iterator[Piece]:
        """Answer a dialog piece by piece; options as in `chat`, without `n`; errors as in `stream`.

        `Piece.deltas` has texts and calls in order, `Piece.text` the text alone. `prefix`, as of `conversation`, keeps
        keys and values from turn to turn.

        >>> pieces = smollm2.stream_chat([{"role": "user", "content": "Say hello."}], temperature=0, max_tokens=8)
        >>> len([piece.text for piece in pieces])
        8
        """
        options = with_params(params, options)
        pass_options = PassOptions(**split_options(options, PassOptions))
        dialog_options = DialogOptions(**split_options(options, DialogOptions))
        ids, tools = read_dialog(self, messages, dialog_options, options)
        return stream(self, ids, self.chat_params(**options), pass_options, new_text=True, tools=tools, prefix=prefix)

    @overload
    def embed(self, text: Prompt, *, pooling: Pooling = "mean") -> NDArray[np.float32]: ...
    @overload
    def embed(self, text: list[str] | list[list[int]], *, pooling: Pooling = "mean") -> NDArray[np.float32]: ...
    @shows_options()
    def embed(self, text: Any, *, pooling: Pooling = "mean") -> NDArray[np.float32]:
        """Return a text's vector of length 1, float32 (D,), or those of a list of texts, (N, D).

        >>> king, queen = llama.embed(["the king", "the queen"])
        >>> 0 < float(king @ queen) < 1
        True

        Args:
            text: Text or token ids, or a list of either.
            pooling: "mean" of the last layer's normalised states of all tokens, or the "last" token's.

        Raises:
            InputError: For a text without tokens.
            ContextLengthError: For one that is longer than the context.
            AnswerError: If hidden states are NaN or infinite.
        """
        check_choice("pooling", pooling, get_args(Pooling))
        several = _are_several(text)
        vectors_ND = embed_prompts(
            self.runner, [self.encode(prompt) for prompt in (text if several else [text])], pooling
        )
        return vectors_ND if several else vectors_ND[0]

    def conversation(self, system: str | None = None, disk_cache: DiskCache | None = None) -> "Conversation[Llama]":
        """Begin a dialog of several turns, whose keys and values are kept from turn to turn.

        With a `disk_cache` also for other processes; OptionError if they have not the same bits in each.

        >>> dialog = smollm2.conversation()
        >>> answer = "".join(piece.text for piece in dialog.say("Say hello.", temperature=0, max_tokens=8))
        >>> dialog.messages[1]["content"] == answer
        True
        """
        return Conversation(self, system, disk_cache)

    @shows_options(TextEngine, EngineOptions)
    def engine(
        self, *, adapters: Mapping[str, str | Path] | None = None, **options: Unpack[EngineArguments]
    ) -> TextEngine:
        """Return an engine that answers many requests at once, in any thread or event loop; close it after use.

        >>> with llama.engine(max_num_seqs=8) as engine:
        ...     engine.submit("To be, or not to b", temperature=0, max_tokens=6).result().text
        'e so m'

        Args:
            adapters: Folders of LoRA adapters by name; each request may choose one.
            **options: prompt_lookup, draft_model and disk_cache as in `EngineArguments`, and the following.

        Raises:
            LlamariumError: If an option is out of range, an adapter has another base, or there is no memory.
        """
        return TextEngine(self, adapters=adapters, **options)

    @property
    def grammars(self) -> "GrammarCompiler":
        """The grammar compiler for this model's vocabulary; OptionError if its package is missing.

        >>> type(llama.grammars).__name__
        'GrammarCompiler'
        """
        from llamarium.sampling.grammar.compiler import GrammarCompiler

        if self._grammars is None:
            self._grammars = GrammarCompiler(self.tokenizer, self.config.vocab_size)
        return self._grammars
