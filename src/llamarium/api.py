"""The public face: `load()` a model, then generate, chat, score and trace with it; torch is imported if need be."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args, overload

from llamarium.adapters.files import base_of, read_adapter
from llamarium.adapters.load import with_adapter, with_tokenizer_of
from llamarium.checkpoints.loaded import load_weights
from llamarium.checkpoints.options import Dequantize, DtypeName, LoadOptions, Method, TensorSource
from llamarium.config import ModelConfig
from llamarium.errors import InputError, LlamariumError, SamplingError, TokenizerError, check_choice, show_value
from llamarium.generation.completion import NOT_FINITE, Completion, Generation, Piece, row_texts, stop_ids_of
from llamarium.generation.conversation import Conversation
from llamarium.generation.kept import PrefixCache
from llamarium.generation.loop import generate_tokens
from llamarium.generation.options import AnswerOptions, Passing, split_options
from llamarium.generation.params import GenerationOptions, SamplingParams
from llamarium.kernels.native import InputBits
from llamarium.quant.formats import chosen_type
from llamarium.runtime.device import choose_device
from llamarium.runtime.loaded import LoadedModel
from llamarium.runtime.runner import Runner
from llamarium.tokenizer.base import Tokenizer

if TYPE_CHECKING:
    from llamarium.inspect.divergence import Divergence
    from llamarium.inspect.neighbors import Neighbors
    from llamarium.inspect.next_tokens import NextStep
    from llamarium.inspect.perplexity import Perplexity
    from llamarium.inspect.score import Score
    from llamarium.inspect.trace import Trace
    from llamarium.model import LlamaForCausalLM

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

DEFAULT_MODEL = "smollm2-135m"
CHAT_MAX_TOKENS = 1024


def load(
    model: str | Path | None = None,
    *,
    adapter: str | Path | None = None,
    dtype: Literal["auto"] | DtypeName = "auto",
    device: str = "auto",
    quantize: str | None = None,
    dequantize: Dequantize = "auto",
    deterministic: bool = False,
    input_bits: InputBits | None = None,
    strict: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> "Llama":
    """Load a model and its tokenizer. On a CPU with the C kernels it answers without torch.

    Args:
        model: A built-in name, a folder (Hugging Face or Meta), a `.gguf` file, or `org/name` on the Hugging Face hub.
            None is the base that the adapter names, and without an adapter "smollm2-135m".
        adapter: The folder of a LoRA adapter to put on, as `finetune` and `peft` save it; a tokenizer beside it counts.
        dtype: What it computes in; "auto" is as stored, and bfloat16 for quantized files.
        device: "cpu", "cuda", "cuda:1", "mps"; "auto" is a GPU where there is one.
        quantize: Quantize the Linears while loading: "NF4", "Q8_0" or "Q4_1".
        dequantize: For files that are quantized already: "load" unpacks once, "use" keeps them as they are and unpacks
            for every use; "auto" keeps NF4 and packed folders as they are, packs for the CPU kernels what they multiply
            of GGUF's types (unless dtype is float32 or float16), and unpacks the others.
        deterministic: Give a request the same bits alone, in any batch, with any chunking and on any number of threads,
            or refuse to load. The C kernels do so anyway; float32 weights are multiplied by them for it, where PyTorch
            is faster.
        input_bits: What the C kernels round the inputs of packed weights to, 8 or 16; None is 16. With 8 prompts are
            read in little more than half of the time, and answers leave those of float32 sooner.
        strict: Refuse weights that are NaN or infinite, instead of warning.
        progress: Called with (bytes read, bytes in all).

    Raises:
        LlamariumError: If the model cannot be found, read, or loaded so; see `llamarium.errors`.
    """
    from llamarium.checkpoints.open import open_model

    check_choice("dtype", dtype, ("auto", *get_args(DtypeName)))
    check_choice("dequantize", dequantize, get_args(Dequantize))
    check_choice("deterministic", deterministic, (True, False))
    check_choice("input_bits", input_bits, (None, *get_args(InputBits)))
    check_choice("strict", strict, (True, False))
    options = LoadOptions(
        dtype=None if dtype == "auto" else dtype,
        device=choose_device(device),
        quantize=None if quantize is None else chosen_type("quantize", quantize, get_args(Method)),
        dequantize=dequantize,
        strict=strict,
        deterministic=deterministic,
        input_bits=input_bits,
    )
    opened = open_model(model or (DEFAULT_MODEL if adapter is None else base_of(Path(adapter))))
    saved = None if adapter is None else read_adapter(Path(adapter), opened.checkpoint.config)
    if saved is not None:
        opened = with_tokenizer_of(opened, saved.folder)
    with warnings.catch_warnings():  # of what it warns, `Llama` does
        warnings.simplefilter("ignore")
        SamplingParams.from_generation_config(opened.generation_config)  # refused before the weights are read
    loaded, sources = load_weights(opened.checkpoint, options, progress)
    loaded = loaded if saved is None else with_adapter(loaded, saved)
    tokenizer, recommended = opened.optional_tokenizer, opened.generation_config
    return Llama(opened.name, loaded, tokenizer, sources, recommended, opened.why_no_tokenizer)


class Llama:
    """A loaded model with its tokenizer.

    Attributes:
        name: What was asked for.
        config: The model's shape.
        sources: Where each weight came from.
        generation_config: The publisher's recommended sampling parameters, or nothing.
        stop_ids: Ids that end an answer.
        why_no_tokenizer: Why `tokenizer` raises, where it does.
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
        self.why_no_tokenizer = why_no_tokenizer or f"{name} was made without a tokenizer; call llama.model(ids)"
        defaults = SamplingParams.from_generation_config(self.generation_config)  # checks the file, too
        self.stop_ids = stop_ids_of(self.config, tokenizer, defaults.stop_token_ids)

    def __repr__(self) -> str:
        """Say which model it is, and what answers."""
        c = self.config
        shape = f"{c.num_hidden_layers} layers of {c.hidden_size}, vocabulary of {c.vocab_size:,}"
        return f"<Llama {self.name}: {shape}>"

    @property
    def model(self) -> "LlamaForCausalLM":
        """The `LlamaForCausalLM`; `llama.model(ids)` gives logits (B, T, V). Built when first asked for, in place."""
        return self.loaded.model

    @property
    def runner(self) -> Runner:
        """What answers a request: the runner that was chosen at loading, or the modules if they have been edited."""
        return self.loaded.runner()

    @property
    def optional_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None where it came without one that is read."""
        return self._tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            TokenizerError: If the model came without one, or with one of a kind that is not read.
        """
        if self._tokenizer is None:
            raise TokenizerError(self.why_no_tokenizer)
        return self._tokenizer

    @overload
    def generate(self, prompt: Prompt, **options: Unpack[AnswerOptions]) -> Generation: ...
    @overload
    def generate(self, prompt: list[str] | list[list[int]], **options: Unpack[AnswerOptions]) -> list[Generation]: ...
    def generate(self, prompt: Any, **options: Unpack[AnswerOptions]) -> Generation | list[Generation]:
        """Continue one prompt, or a list of prompts side by side.

        Args:
            prompt: Text (BOS is added where the model has one) or token ids (taken as they are), or a list of either.
            **options: Fields of `SamplingParams`, over the model's own defaults, and those of `AnswerOptions`.

        Returns:
            A `Generation`, or a list of them for a list of prompts. A prompt of several whose logits are NaN gets a
            completion that says so ("error"), and the others theirs.

        Raises:
            SamplingError: For an unknown option or a value outside its range.
            ContextLengthError: If a prompt leaves no room in the context.
            OptionError: If `prompt_lookup` could change the answer with this model (bfloat16 through PyTorch, say).
            LlamariumError: If a single prompt's logits are NaN or infinite.
        """
        several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list, tuple))
        prompts = [self.encode(p) for p in (prompt if several else [prompt])]
        how = split_options(options)
        generations = self._complete(prompts, self.sampling_params(**options), how)
        return generations if several else generations[0].or_raise()

    def stream(self, prompt: Prompt, **options: Unpack[AnswerOptions]) -> Iterator[Piece]:
        """Continue one prompt, piece by piece; options as in `generate`, without `n`."""
        how = split_options(options)
        return self._stream(self.encode(prompt), self.sampling_params(**options), how)

    def chat(self, messages: Sequence[Message], **options: Unpack[AnswerOptions]) -> Generation:
        """Answer a dialog: a list of {"role", "content"} messages; options as in `generate`.

        An answer has 1,024 tokens at most, unless the options or the model's generation_config.json say otherwise.
        """
        how = split_options(options)
        ids = self.tokenizer.chat(messages)
        return self._complete([ids], self.chat_params(**options), how, new_text=True)[0].or_raise()

    def stream_chat(
        self, messages: Sequence[Message], *, prefix: PrefixCache | None = None, **options: Unpack[AnswerOptions]
    ) -> Iterator[Piece]:
        """Answer a dialog piece by piece; options as in `chat`, without `n`.

        Args:
            messages: The dialog.
            prefix: Keeps keys and values from one turn to the next; `conversation` has one.
            **options: As in `chat`.
        """
        how = split_options(options)
        ids = self.tokenizer.chat(messages)
        return self._stream(ids, self.chat_params(**options), how, new_text=True, prefix=prefix)

    def conversation(self, system: str | None = None) -> Conversation:
        """Begin a dialog of several turns, whose keys and values are kept from turn to turn."""
        return Conversation(self, system)

    def score(self, text: str) -> "Score":
        """Return log P(w_i | w_<i) of every token of `text`, their sum and the perplexity."""
        from llamarium.inspect.score import score_text

        return score_text(self.runner, self.tokenizer, text)

    def perplexity(
        self,
        text: str,
        *,
        context: int | None = None,
        stride: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> "Perplexity":
        """Measure how well the model predicts a text of any length, through a sliding window.

        Args:
            text: The text; BOS is put before it once, where the vocabulary wants it.
            context: Tokens of a window; None is 2,048, or the model's whole context where that is shorter.
            stride: Tokens from one window to the next, less than `context`; None is half of it. Each token is scored
                once, with at least `context` - `stride` tokens before it where there are that many.
            progress: Called with (tokens done, tokens in all).

        Returns:
            A `Perplexity`: perplexity, bits per byte, nats, and what they were measured with.

        Raises:
            TokenizerError: If the text cannot be encoded.
            InputError: If it has no token to score, or `context` or `stride` is out of range.
        """
        from llamarium.inspect.perplexity import perplexity_of_text

        return perplexity_of_text(self.runner, self.tokenizer, text, context=context, stride=stride, progress=progress)

    def divergence(self, text: str, *, against: "Llama", **options: Any) -> "Divergence":
        """Measure how far the predictions are from another model's: mean KL, its percentile, top-1 agreement.

        Args:
            text: As in `perplexity`.
            against: A model with the same vocabulary: the unquantized one, say, in float32.
            **options: context, stride, progress; as in `perplexity`.

        Raises:
            InputError: If the vocabularies differ, and as `perplexity`.
        """
        from llamarium.inspect.divergence import check_same_vocabulary, divergence_of_text

        if not isinstance(against, Llama):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"against is {show_value(against)}; expected another Llama")
        configs = self.config, against.config
        check_same_vocabulary((self.name, against.name), configs, (self.tokenizer, against.tokenizer))
        return divergence_of_text(self.runner, against.runner, self.tokenizer, text, **options)

    def next_tokens(self, text: str, k: int = 10, steps: int = 1) -> "list[NextStep]":
        """Return the auto-regressive loop as data: the `k` best candidates and the choice, `steps` times."""
        from llamarium.inspect.next_tokens import follow_next_tokens

        made = follow_next_tokens(self.runner, self.tokenizer, text, k=k, steps=steps, stop_ids=self.stop_ids)
        return list(made)

    def neighbors(
        self, word: str, *, minus: str | Sequence[str] = (), plus: str | Sequence[str] = (), k: int = 10
    ) -> "Neighbors":
        """Rank embedding rows by cosine similarity to `word` - `minus` + `plus`."""
        from llamarium.inspect.neighbors import neighbors

        return neighbors(self.model.model.embed_tokens, self.tokenizer, word, minus=minus, plus=plus, k=k)

    def trace(self, text: Prompt, **options: Any) -> "Trace":
        """Return the named activations of one forward pass; options as in `llamarium.inspect.trace.trace`."""
        from llamarium.inspect.trace import trace

        return trace(self.runner, self.encode(text), **options)

    def trace_steps(self, prompt: Prompt, num_steps: int, **options: Any) -> "Iterator[Trace]":
        """Follow a greedy answer: the named activations of each step of decoding, from the answer's own cache.

        Options are those of `llamarium.inspect.trace.trace_steps`.
        """
        from llamarium.inspect.trace import trace_steps

        return trace_steps(self.runner, self.encode(prompt), num_steps, **options)

    def encode(self, prompt: Any) -> list[int]:
        """Return a prompt's ids: text with BOS where the model has one, ids as they are.

        Args:
            prompt: A str, or a sequence of int.

        Raises:
            InputError: If it is neither text nor a sequence of whole numbers.
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Sequence):
            raise InputError(f"the prompt is {type(prompt).__name__}; expected text or a list of token ids")
        for token_id in prompt:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise InputError(f"the prompt holds {show_value(token_id)}; expected token ids, whole numbers")
        return list(prompt)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; special tokens have none."""
        return self.tokenizer.decode(ids)

    def sampling_params(self, **options: Unpack[GenerationOptions]) -> SamplingParams:
        """Put `options` over the publisher's recommendations, with a fresh seed where none is given.

        Raises:
            SamplingError: For an unknown option or a value outside its range.
        """
        return SamplingParams.from_options(options, self.generation_config)

    def chat_params(self, **options: Unpack[GenerationOptions]) -> SamplingParams:
        """Return `sampling_params`, with the length of an answer where nobody says one."""
        if not options.keys() & {"max_tokens", "max_new_tokens"} and "max_new_tokens" not in self.generation_config:
            options["max_tokens"] = CHAT_MAX_TOKENS
        return self.sampling_params(**options)

    def _complete(
        self, prompts: list[list[int]], params: SamplingParams, how: Passing, *, new_text: bool = False
    ) -> list[Generation]:
        begins = [new_text or self._is_blank(prompt) for prompt in prompts]
        rows, prompt_of = row_texts(self.tokenizer, [params] * len(prompts), self.stop_ids, begins)
        cancelled: set[int] = set()
        for event in generate_tokens(
            self.runner,
            prompts,
            [params] * len(prompts),
            stop_ids=self.stop_ids,
            use_cache=how.use_cache,
            kv_cache_dtype=how.kv_cache_dtype,
            cancelled=cancelled,
            lookup=how.lookup,
        ):
            if rows[event.row].push(event).finish_reason is not None:
                cancelled.add(event.row)
        answers: list[list[Completion]] = [[] for _ in prompts]
        for row, prompt_idx in zip(rows, prompt_of, strict=True):
            answers[prompt_idx].append(row.completion())
        return [Generation(tuple(ids), tuple(found)) for ids, found in zip(prompts, answers, strict=True)]

    def _stream(
        self,
        prompt: list[int],
        params: SamplingParams,
        how: Passing,
        *,
        new_text: bool = False,
        prefix: PrefixCache | None = None,
    ) -> Iterator[Piece]:
        if params.n != 1:
            raise SamplingError(f"n is {params.n}; streaming gives one answer, use generate() for several")
        (row,), _ = row_texts(self.tokenizer, [params], self.stop_ids, [new_text or self._is_blank(prompt)])
        runner = self.runner
        if prefix is not None:
            prefix.use(runner, how.kv_cache_dtype)
        events = generate_tokens(
            runner,
            [prompt],
            [params],
            stop_ids=self.stop_ids,
            use_cache=how.use_cache,
            kv_cache_dtype=how.kv_cache_dtype,
            prefix=prefix,
            lookup=how.lookup,
        )
        for event in events:
            piece = row.push(event)
            if piece.finish_reason == "error":
                raise LlamariumError(NOT_FINITE)
            yield piece
            if piece.finish_reason is not None:
                return

    def _is_blank(self, prompt: list[int]) -> bool:
        """Whether a prompt has no text, as a BOS alone; nearly always a few tokens say so."""
        return not (self.tokenizer.decode(prompt[:8]) or self.tokenizer.decode(prompt))
