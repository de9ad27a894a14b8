"""The public face: `load()` a model, then generate, chat, score and trace with it."""

import dataclasses
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import torch

from llamarium.checkpoints.gguf.reader import GGUFCheckpoint
from llamarium.checkpoints.load import DTYPES, load_model
from llamarium.checkpoints.open import open_checkpoint
from llamarium.checkpoints.options import Dequantize, LoadOptions, TensorSource
from llamarium.checkpoints.tokenizers import find_tokenizer, fit_tokenizer
from llamarium.config import ModelConfig
from llamarium.errors import (
    InputError,
    OptionError,
    SamplingError,
    TokenizerError,
    UnsupportedTokenizerError,
    show_value,
)
from llamarium.generation.completion import Completion, Generation, Piece, row_texts
from llamarium.generation.conversation import Conversation
from llamarium.generation.loop import KVCacheDtype, PrefixCache, generate_tokens
from llamarium.generation.sampler import SamplingParams
from llamarium.generation.speculate import PromptLookup
from llamarium.hub.builtin import recommended
from llamarium.hub.resolve import resolve
from llamarium.model import LlamaForCausalLM
from llamarium.quant.formats import chosen_type
from llamarium.quant.swap import METHODS
from llamarium.tokenizer.base import Tokenizer

if TYPE_CHECKING:
    from llamarium.inspect.divergence import Divergence
    from llamarium.inspect.neighbors import Neighbors
    from llamarium.inspect.next_tokens import NextStep
    from llamarium.inspect.perplexity import Perplexity
    from llamarium.inspect.score import Score
    from llamarium.inspect.trace import Trace

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

CHAT_MAX_TOKENS = 1024


def load(
    model: str | Path = "smollm2-135m",
    *,
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto",
    device: str = "auto",
    quantize: str | None = None,
    dequantize: Dequantize = "auto",
    kv_cache_dtype: KVCacheDtype = "auto",
    deterministic: bool = False,
    strict: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> "Llama":
    """Load a model and its tokenizer.

    Args:
        model: A built-in name, a folder (Hugging Face or Meta), a `.gguf` file, or `org/name` on the Hugging Face hub.
        dtype: What it computes in; "auto" is as stored, and bfloat16 for quantized files.
        device: "cpu", "cuda", "cuda:1", "mps"; "auto" is a GPU where there is one.
        quantize: Quantize the Linears while loading: "NF4", "Q8_0" or "Q4_1", in capital letters or not.
        dequantize: For files that are quantized already: "load" dequantizes once, "use" keeps them as they are
            stored and dequantizes for every use; "auto" keeps NF4 and packed folders as they are, packs what the CPU
            kernels multiply of GGUF's types (unless dtype is float32 or float16), and dequantizes the others.
        kv_cache_dtype: What generation and dialogs keep keys and values in: "auto" is the model's dtype, "int8" about
            half of bfloat16's memory.
        deterministic: Give a request the same bits alone, in any batch, with any chunking and on any number of threads.
            Packed weights do so anyway; for bfloat16 the C kernels then take long prompts too, where PyTorch is faster.
        strict: Refuse weights that are NaN or infinite, instead of warning.
        progress: Called with (bytes read, bytes in all).

    Raises:
        LlamariumError: If the model cannot be found, read, or loaded so; see `llamarium.errors`.
    """
    _check_choice("dtype", dtype, ("auto", *DTYPES))
    _check_choice("dequantize", dequantize, get_args(Dequantize))
    _check_choice("kv_cache_dtype", kv_cache_dtype, get_args(KVCacheDtype))
    _check_choice("deterministic", deterministic, (True, False))
    _check_choice("strict", strict, (True, False))
    options = LoadOptions(
        dtype=None if dtype == "auto" else dtype,
        device=str(choose_device(device)),
        quantize=None if quantize is None else chosen_type("quantize", quantize, METHODS),
        dequantize=dequantize,
        strict=strict,
        deterministic=deterministic,
    )
    path = resolve(model)
    checkpoint = open_checkpoint(path)
    why_none = None
    try:
        tokenizer = find_tokenizer(path, checkpoint.metadata if isinstance(checkpoint, GGUFCheckpoint) else None)
    except UnsupportedTokenizerError as error:  # the model computes logits without; `Llama.tokenizer` says why
        tokenizer, why_none = None, str(error)
    if tokenizer is not None:
        fit_tokenizer(tokenizer, checkpoint.config, path)
    module, sources = load_model(checkpoint, options, progress)
    generation_config = checkpoint.generation_config or recommended(path)
    return Llama(str(model), module, tokenizer, sources, generation_config, why_none, kv_cache_dtype)


def _check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise OptionError(f"{name} is {show_value(value)}; expected {', '.join(map(str, choices))}")


def choose_device(name: object) -> torch.device:
    """Return the device of that name; "auto" is a GPU where there is one.

    Raises:
        OptionError: If there is no such device here, or it holds no numbers.
    """
    if not isinstance(name, (str, torch.device)):
        raise OptionError(f"device is {show_value(name)}; expected auto, cpu, cuda, cuda:1 or mps")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"device {show_value(str(name))} cannot be used: {str(error).splitlines()[0]}") from None
    if device.type == "meta":
        raise OptionError("device 'meta' holds no numbers; expected cpu, cuda or mps")
    return device


class Llama:
    """A loaded model with its tokenizer.

    Attributes:
        name: What was asked for.
        model: The `LlamaForCausalLM`; `llama.model(ids)` gives logits (B, T, V).
        config: Its shape.
        sources: Where each weight came from.
        generation_config: The publisher's recommended sampling parameters, or nothing.
        kv_cache_dtype: What keys and values are kept in where tokens are generated; scores and traces keep none.
        stop_ids: Ids that end an answer.
    """

    def __init__(
        self,
        name: str,
        model: LlamaForCausalLM,
        tokenizer: Tokenizer | None,
        sources: tuple[TensorSource, ...] = (),
        generation_config: Mapping[str, Any] | None = None,
        why_no_tokenizer: str | None = None,
        kv_cache_dtype: KVCacheDtype = "auto",
    ) -> None:
        self.name = name
        self.model = model
        self.config: ModelConfig = model.config
        self.sources = sources
        self.generation_config = generation_config or {}
        self.kv_cache_dtype: KVCacheDtype = kv_cache_dtype
        self._tokenizer = tokenizer
        self._why_no_tokenizer = why_no_tokenizer
        defaults = SamplingParams.from_generation_config(self.generation_config)  # checks the file, too
        self.stop_ids = _stop_ids(model.config, tokenizer, defaults.stop_token_ids)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            TokenizerError: If the model came without one, or with one of a kind that is not read.
        """
        if self._tokenizer is None:
            raise TokenizerError(
                self._why_no_tokenizer
                or f"{self.name} has no tokenizer files, so it reads and writes no text; put a tokenizer.json or "
                "tokenizer.model beside the weights, or call llama.model(ids)"
            )
        return self._tokenizer

    @overload
    def generate(self, prompt: str | list[int], **options: Any) -> Generation: ...
    @overload
    def generate(self, prompt: list[str] | list[list[int]], **options: Any) -> list[Generation]: ...
    def generate(self, prompt: Any, **options: Any) -> Generation | list[Generation]:
        """Continue one prompt, or a list of prompts side by side.

        Args:
            prompt: Text (BOS is added where the model has one) or token ids (taken as they are), or a list of either.
            **options: Fields of `SamplingParams`, over the model's own defaults; `max_new_tokens` is `max_tokens`.
                `use_cache=False` recomputes everything for every token. `prompt_lookup=True`, or a `PromptLookup`,
                guesses tokens from what was said before: the same answer, sooner where it repeats prompt or itself.

        Returns:
            A `Generation`, or a list of them for a list of prompts.

        Raises:
            SamplingError: For an unknown option or a value outside its range.
            ContextLengthError: If a prompt leaves no room in the context.
            OptionError: If `prompt_lookup` could change the answer with this model (bfloat16 through PyTorch, say).
        """
        several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list, tuple))
        prompts = [self.encode(p) for p in (prompt if several else [prompt])]
        use_cache, lookup = _pop_use_cache(options), _pop_prompt_lookup(options)
        generations = self._complete(prompts, self.sampling_params(**options), use_cache=use_cache, lookup=lookup)
        return generations if several else generations[0]

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Piece]:
        """Continue one prompt, piece by piece; options as in `generate`, without `n`."""
        use_cache, lookup = _pop_use_cache(options), _pop_prompt_lookup(options)
        params = self.sampling_params(**options)
        return self._stream(self.encode(prompt), params, use_cache=use_cache, lookup=lookup)

    def chat(self, messages: Sequence[Message], **options: Any) -> Generation:
        """Answer a dialog: a list of {"role", "content"} messages; options as in `generate`.

        An answer has 1,024 tokens at most, unless the options or the model's generation_config.json say otherwise.
        """
        lookup = _pop_prompt_lookup(options)
        ids = self.tokenizer.chat(messages)
        return self._complete([ids], self.chat_params(**options), new_text=True, lookup=lookup)[0]

    def stream_chat(
        self, messages: Sequence[Message], *, prefix: PrefixCache | None = None, **options: Any
    ) -> Iterator[Piece]:
        """Answer a dialog piece by piece; options as in `chat`, without `n`.

        Args:
            messages: The dialog.
            prefix: Keeps keys and values from one turn to the next; `conversation` has one.
            **options: As in `chat`.
        """
        lookup = _pop_prompt_lookup(options)
        ids = self.tokenizer.chat(messages)
        return self._stream(ids, self.chat_params(**options), new_text=True, prefix=prefix, lookup=lookup)

    def conversation(self, system: str | None = None) -> Conversation:
        """Begin a dialog of several turns, whose keys and values are kept from turn to turn."""
        return Conversation(self, system)

    def score(self, text: str) -> "Score":
        """Return log P(w_i | w_<i) of every token of `text`, their sum and the perplexity."""
        from llamarium.inspect.score import score_text

        return score_text(self.model, self.tokenizer, text)

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

        return perplexity_of_text(self.model, self.tokenizer, text, context=context, stride=stride, progress=progress)

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

        models = self.model, against.model
        check_same_vocabulary((self.name, against.name), models, (self.tokenizer, against.tokenizer))
        return divergence_of_text(*models, self.tokenizer, text, **options)

    def next_tokens(self, text: str, k: int = 10, steps: int = 1) -> "list[NextStep]":
        """Return the auto-regressive loop as data: the `k` best candidates and the choice, `steps` times."""
        from llamarium.inspect.next_tokens import follow_next_tokens

        steps_made = follow_next_tokens(
            self.model,
            self.tokenizer,
            text,
            k=k,
            steps=steps,
            stop_ids=self.stop_ids,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        return list(steps_made)

    def neighbors(
        self, word: str, *, minus: str | Sequence[str] = (), plus: str | Sequence[str] = (), k: int = 10
    ) -> "Neighbors":
        """Rank embedding rows by cosine similarity to `word` - `minus` + `plus`."""
        from llamarium.inspect.neighbors import neighbors

        return neighbors(self.model.model.embed_tokens, self.tokenizer, word, minus=minus, plus=plus, k=k)

    def trace(self, text: Prompt, **options: Any) -> "Trace":
        """Return the named activations of one forward pass; options as in `llamarium.inspect.trace.trace`."""
        from llamarium.inspect.trace import trace

        return trace(self.model, self.encode(text), **options)

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

    def sampling_params(self, **options: Any) -> SamplingParams:
        """Put `options` over the publisher's recommendations, with a fresh seed where none is given.

        Raises:
            SamplingError: For an unknown option or a value outside its range.
        """
        if "max_new_tokens" in options:
            if "max_tokens" in options:
                raise SamplingError("max_new_tokens and max_tokens are the same parameter; give one")
            options["max_tokens"] = options.pop("max_new_tokens")
        known = [f.name for f in dataclasses.fields(SamplingParams)]
        if unknown := sorted(set(options) - set(known)):
            raise SamplingError(f"unknown sampling parameters: {', '.join(unknown)}; there are: {', '.join(known)}")
        if isinstance(options.get("stop"), str):
            options["stop"] = (options["stop"],)
        params = SamplingParams.from_generation_config(self.generation_config, **options)
        return params if params.seed is not None else dataclasses.replace(params, seed=secrets.randbits(32))

    def chat_params(self, **options: Any) -> SamplingParams:
        """Return `sampling_params`, with the length of an answer where nobody says one."""
        if not options.keys() & {"max_tokens", "max_new_tokens"} and "max_new_tokens" not in self.generation_config:
            options["max_tokens"] = CHAT_MAX_TOKENS
        return self.sampling_params(**options)

    def _complete(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        use_cache: bool = True,
        new_text: bool = False,
        lookup: PromptLookup | None = None,
    ) -> list[Generation]:
        begins = [new_text or not self.tokenizer.decode(prompt) for prompt in prompts]
        rows, prompt_of = row_texts(self.tokenizer, [params] * len(prompts), self.stop_ids, begins)
        cancelled: set[int] = set()
        for event in generate_tokens(
            self.model,
            prompts,
            [params] * len(prompts),
            stop_ids=self.stop_ids,
            use_cache=use_cache,
            kv_cache_dtype=self.kv_cache_dtype,
            cancelled=cancelled,
            lookup=lookup,
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
        *,
        use_cache: bool = True,
        new_text: bool = False,
        prefix: PrefixCache | None = None,
        lookup: PromptLookup | None = None,
    ) -> Iterator[Piece]:
        if params.n != 1:
            raise SamplingError(f"n is {params.n}; streaming gives one answer, use generate() for several")
        begins = new_text or not self.tokenizer.decode(prompt)
        (row,), _ = row_texts(self.tokenizer, [params], self.stop_ids, [begins])
        events = generate_tokens(
            self.model,
            [prompt],
            [params],
            stop_ids=self.stop_ids,
            use_cache=use_cache,
            kv_cache_dtype=self.kv_cache_dtype,
            prefix=prefix,
            lookup=lookup,
        )
        for event in events:
            piece = row.push(event)
            yield piece
            if piece.finish_reason is not None:
                return


def _pop_use_cache(options: dict[str, Any]) -> bool:
    use_cache = options.pop("use_cache", True)
    _check_choice("use_cache", use_cache, (True, False))
    return use_cache


def _pop_prompt_lookup(options: dict[str, Any]) -> PromptLookup | None:
    lookup = options.pop("prompt_lookup", None)
    if lookup is None or isinstance(lookup, PromptLookup):
        return lookup
    _check_choice("prompt_lookup", lookup, (True, False))
    return PromptLookup() if lookup else None


def _stop_ids(config: ModelConfig, tokenizer: Tokenizer | None, recommended: Sequence[int]) -> frozenset[int]:
    """Every id that one of the model's own files calls an end, and the dialog format's end of turn."""
    ids = {*config.eos_token_id, *recommended}
    if tokenizer is not None:
        ids.update(tokenizer.eos_token_ids)
        if tokenizer.chat_format is not None:
            ids.update(tokenizer.chat_format.stop_ids)
    return frozenset(ids)
