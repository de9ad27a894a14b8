"""The text engine, which answers many requests at once: the result of `Llama.engine`. Torch-free.

    engine = llama.engine()
    for piece in engine.stream("Once upon a time"): ...          # in any thread
    async for piece in engine.stream("Once upon a time"): ...    # in any event loop

A background thread runs all of them concurrently (`llamarium.engine`). Each gets the same tokens as when it runs alone.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self, Unpack, get_args

from llamarium.adapters.load import read_beside
from llamarium.engine.counts import EngineSnapshot
from llamarium.engine.engine import Engine
from llamarium.engine.memory import num_blocks_for
from llamarium.engine.pooling import Places, Pooling, Vector
from llamarium.engine.prefix import PrefixIndex
from llamarium.engine.proposers.draft import DraftModel
from llamarium.engine.proposers.lookup import PromptLookup
from llamarium.engine.request import Request, check_timeout
from llamarium.engine.thread import EngineThread, State
from llamarium.engine.tiers.disk_cache import DiskCache
from llamarium.engine.tiers.disk_tier import DiskUse
from llamarium.errors import OptionError, SamplingError, check_choice
from llamarium.generation.adapters import AdapterChoices, ServedAdapter
from llamarium.generation.answers import Answers
from llamarium.generation.completion import row_texts
from llamarium.generation.dialog import CHAT_MAX_TOKENS, DialogOptions, read_dialog
from llamarium.generation.embedding import Embedding, embed
from llamarium.generation.keywords import RequestKeywords, StreamChatKeywords, StreamKeywords
from llamarium.generation.options import (
    RequestOptions,
    proposer_choice,
    proposer_of,
    split_options,
    with_params,
)
from llamarium.generation.text_model import TextModel, begins_text, compiled
from llamarium.keywords import shows_options
from llamarium.options.keywords import EngineKeywords
from llamarium.options.serving import EngineOptions
from llamarium.runtime.runner import CacheDtype, Runner
from llamarium.sampling.constraint import CompiledGrammar
from llamarium.sampling.params import SamplingParams
from llamarium.tokenizer.tools.request import ToolRequest

MAX_BUFFERED = 4096
"""Maximum number of steps buffered for a reader with `must_keep_up`; then the answer ends with an error."""

MAX_DIRECTIONS = 64
"""Maximum number of cached results of `direction`."""


class TextEngine:
    """Answers many requests at once; close it, or use it in a `with`.

    `adapters` are folders by name. The other options are those of `EngineArguments`. `max_tokens` is the most of a
    request, prompt and answer; `read` and `step_priority` are those of `EngineThread`. `prefix_index` is the prefix
    cache's; any thread may call its `ids_of`.

    Raises:
        OptionError: If an option is out of range, guesses could change the tokens, or a disk cache could.
        InputError: If the draft model has another vocabulary.
        MemoryBudgetError: If there is no memory for the cache.
        TokenizerError: If the model came without a tokenizer.
    """

    @shows_options(EngineOptions)
    def __init__(
        self,
        model: TextModel,
        *,
        adapters: Mapping[str, str | Path] | None = None,
        prompt_lookup: bool | PromptLookup = False,
        draft_model: TextModel | DraftModel | None = None,
        disk_cache: DiskCache | None = None,
        **options: Unpack[EngineKeywords],
    ) -> None:
        self._model, self.tokenizer = model, model.tokenizer
        chosen = EngineOptions(**options)
        self.kv_cache_dtype: CacheDtype = chosen.kv_cache_dtype
        self._base = model.runner
        adapters_read = {
            name: read_beside(Path(folder), model.loaded, model.tokenizer) for name, folder in (adapters or {}).items()
        }
        runner = (
            self._base.with_adapters([adapter for _, adapter in adapters_read.values()])
            if adapters_read
            else self._base
        )
        self.proposer = policy = proposer_of(model, proposer_choice(prompt_lookup, draft_model), runner)
        draft_runner = policy.runner if isinstance(policy, DraftModel) else None
        num_blocks = num_blocks_for(runner, chosen.kv_memory, chosen.max_num_seqs, self.kv_cache_dtype, draft_runner)
        engine = Engine(
            runner, num_blocks, kv_cache_dtype=self.kv_cache_dtype, max_num_seqs=chosen.max_num_seqs, proposer=policy,
            disk=disk_cache,
        )  # fmt: skip
        self._thread = EngineThread(engine)
        self.max_tokens, self.read, self.step_priority = (
            engine.max_tokens,
            self._thread.read,
            self._thread.step_priority,
        )
        self.prefix_index: PrefixIndex = engine.prefix_index
        self._directions: dict[object, Vector] = {}
        self.choices = AdapterChoices(
            self._thread, self._base, {name: saved for name, (saved, _) in adapters_read.items()}
        )

    @property
    def runner(self) -> Runner:
        """The runner with all adapters; other passes may use it while answers are generated."""
        return self._thread.engine.runner

    @property
    def adapters(self) -> Mapping[str, ServedAdapter]:
        """The adapters that requests may choose, by name."""
        return self.choices.served

    def add_adapter(self, name: str, folder: str | Path) -> None:
        """Add an adapter, or replace the one with this name; running requests keep the old one.

        Raises:
            LlamariumError: If it cannot be read, or was trained on another base model or chat format.

        >>> with llamarium.load("story/best").engine() as engine:
        ...     engine.add_adapter("mine", "tuned/best")
        ...     len(engine.submit("To be", adapter="mine", max_tokens=3).result().completions)
        1
        """
        self.choices.add(name, *read_beside(Path(folder), self._model.loaded, self.tokenizer))

    @property
    def state(self) -> State:
        """Lifecycle state."""
        return self._thread.state

    @property
    def failure(self) -> BaseException | None:
        """The error that stopped it, or None."""
        return self._thread.failure

    @property
    def snapshot(self) -> EngineSnapshot:
        """The engine's state after its last step."""
        return self._thread.snapshot

    @property
    def disk_use(self) -> DiskUse | None:
        """Current usage of the disk cache; None without one."""
        disk = self._thread.engine.disk
        return None if disk is None else disk.use()

    @shows_options(RequestOptions, is_checked=False)
    def begin(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        new_text: bool = False,
        stop_ids: Iterable[int] | None = None,
        grammar: CompiledGrammar | None = None,
        tools: ToolRequest | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Answers:
        """Start answering a prompt given as ids, with complete parameters.

        With `new_text`, answers start a new text, as in a dialog, instead of continuing the prompt's. `stop_ids` are
        the ids that end an answer, None for the model's. `grammar` is the compiled grammar of `params`; None compiles
        it now if there is one. `tools` are the tools in the prompt. Other options are those of `RequestOptions`.

        Raises:
            LlamariumError: As `Engine.prepare`; if the engine has stopped; or if the model was edited after the engine
                was created.
        """
        request = RequestOptions(**options)
        deadline_s = self._deadline(request.timeout_s)
        stops = self._model.stop_ids if stop_ids is None else frozenset(stop_ids)
        begins = new_text or begins_text(self.tokenizer, prompt_ids)
        rows, _ = row_texts(self.tokenizer, [params], stops, [begins], tools)
        grammar = grammar or (params.grammar and compiled(self._model, params))
        max_buffered = MAX_BUFFERED if request.must_keep_up else math.inf
        answers = Answers(prompt_ids, rows, adapter=request.adapter, most_buffered=max_buffered)
        with nullcontext(-1) if request.adapter is None else self.choices.number(request.adapter) as number:
            hidden = None, request.edits, request.places
            to_run = Request(
                prompt_ids, params, stops, number, request.salt, grammar, deadline_s, *hidden, request.ngram_pool
            )
            return answers.begin(self._thread, to_run)

    @shows_options(SamplingParams, RequestOptions, error=SamplingError)
    def submit(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **options: Unpack[StreamKeywords]
    ) -> Answers:
        """Start answering a prompt (text or ids); wait for the answer with `result()` or `await`.

        Iteration yields it piece by piece, in a thread or in an event loop. Invalid requests raise a LlamariumError at
        once.

        >>> with llama.engine() as engine:
        ...     both = [engine.submit(text, temperature=0, max_tokens=5) for text in ("To be", "ROMEO:")]
        ...     [len(answers.result().completions[0].token_ids) for answers in both]
        [5, 5]

        Args:
            prompt: As in `Llama.generate`.
            params: As in `Llama.generate`.
            **options: Those of `SamplingParams`, as in `Llama.generate`, and of `RequestOptions`.
        """
        options = with_params(params, options)
        request_options = split_options(options, RequestOptions)
        return self.begin(self._model.encode(prompt), self._model.sampling_params(**options), **request_options)

    @shows_options(SamplingParams, RequestOptions, error=SamplingError)
    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **options: Unpack[StreamKeywords]
    ) -> Answers:
        """Answer a prompt piece by piece: `submit` under the name that `Llama` uses.

        >>> with llama.engine() as engine:
        ...     "".join(piece.text for piece in engine.stream("To be", temperature=0, max_tokens=5))
        ' the '
        """
        return self.submit(prompt, params, **options)

    @shows_options(SamplingParams, RequestOptions, error=SamplingError, max_tokens=CHAT_MAX_TOKENS)
    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        **options: Unpack[StreamChatKeywords],
    ) -> Answers:
        """Answer a dialog piece by piece, as `submit`; tools as in `Llama.chat`.

        >>> with smollm2.engine() as engine:
        ...     answers = engine.stream_chat([{"role": "user", "content": "Hi"}], temperature=0, max_tokens=3)
        ...     answers.result().message["role"]
        'assistant'
        """
        options = with_params(params, options)
        request_options = split_options(options, RequestOptions)
        dialog_options = DialogOptions(**split_options(options, DialogOptions))
        ids, tools = read_dialog(self._model, messages, dialog_options, options)
        return self.begin(ids, self._model.chat_params(**options), new_text=True, tools=tools, **request_options)

    def embed(
        self,
        prompt: str | Sequence[int],
        pooling: Pooling = "mean",
        *,
        timeout_s: float | None = None,
        adapter: str | None = None,
        salt: str = "",
    ) -> Future[Embedding]:
        """Return a future of a text's embedding, pooled from the final norm's outputs; errors as `submit`.

        `pooling` is "mean" over all tokens or "last" for the last token; other options as in `RequestOptions`.

        >>> with llama.engine() as engine:
        ...     engine.embed("To be").result().vector.shape
        (192,)
        """
        check_choice("pooling", pooling, get_args(Pooling))
        deadline_s, params = self._deadline(timeout_s), SamplingParams(max_tokens=1)  # unused
        with self.choices.number(adapter) as number:
            return embed(
                self._thread, Request(self._model.encode(prompt), params, (), number, salt, None, deadline_s, pooling)
            )

    def direction(
        self,
        toward_ids: Sequence[int],
        away_ids: Sequence[int],
        layer: int,
        *,
        timeout_s: float | None = None,
        adapter: str | None = None,
        salt: str = "",
    ) -> Vector:
        """Return the difference of two prompts' residual streams after a layer, at their last tokens, (D,); cached.

        It waits for both passes. Options and errors as in `begin`.
        """
        with self.choices.number(adapter) as number:  # the name may be reused for another adapter
            key = tuple(toward_ids), tuple(away_ids), layer, number
        if (difference := self._directions.pop(key, None)) is None:
            params = SamplingParams(max_tokens=1, temperature=0.0)
            places = [Places([layer], [len(ids) - 1]) for ids in key[:2]]
            request_options: dict[str, Any] = {"timeout_s": timeout_s, "adapter": adapter, "salt": salt}
            pending = [
                self.begin(ids, params, places=place, **request_options)
                for ids, place in zip(key[:2], places, strict=True)
            ]
            toward, away = (answers.result().or_raise().completions[0].states[0].values for answers in pending)
            difference = toward - away
        self._directions[key] = difference
        if len(self._directions) > MAX_DIRECTIONS:
            self._directions.pop(next(iter(self._directions)), None)
        return difference

    def _deadline(self, timeout_s: float | None) -> float:
        if self._model.loaded.runner() is not self._base:
            raise OptionError("the model was edited after the engine was created; call llama.engine() again")
        if timeout_s is None:
            return math.inf
        check_timeout(timeout_s)
        return time.monotonic() + timeout_s

    def close(self, timeout_s: float | None = None) -> bool:
        """Accept no more requests, finish the live ones, and stop; return whether all were finished.

        After `timeout_s` seconds the remaining ones end with an error; None waits indefinitely. Leaving a `with` block
        closes without waiting.

        >>> engine = llama.engine()
        >>> answers = engine.submit("To be", temperature=0, max_tokens=3)
        >>> engine.close()
        True
        >>> len(answers.result().completions[0].token_ids)
        3
        """
        return self._thread.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close it without waiting for answers."""
        self.close(timeout_s=0)
