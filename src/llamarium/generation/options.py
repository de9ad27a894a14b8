"""The options of `Llama.generate` and its like, by name and type. Never torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypedDict, TypeVar, cast, get_args

from llamarium.engine.pooling import Places
from llamarium.engine.proposers.base import ProposerPolicy, check_exact
from llamarium.engine.proposers.draft import DraftModel
from llamarium.engine.proposers.lookup import PromptLookup
from llamarium.engine.tiers.disk_cache import DiskCache
from llamarium.errors import OptionError, SamplingError, check_choice, show_value
from llamarium.generation.text_model import TextModel
from llamarium.options.keywords import EngineKeywords
from llamarium.runtime.intervention import Edit
from llamarium.runtime.runner import CacheDtype, Runner
from llamarium.sampling.grammar.description import OPTIONS as GRAMMAR_OPTIONS
from llamarium.sampling.params import GenerationOptions, SamplingParams
from llamarium.tokenizer.compare import check_same_vocabulary

OptionsT = TypeVar("OptionsT", bound=GenerationOptions)

ProposerChoice = ProposerPolicy | TextModel | None
"""What proposes tokens, or a model that is to."""


class AnswerOptions(GenerationOptions, total=False):
    """The options of an answer: those of the sampler, and how its passes are run.

    Attributes:
        use_cache: False recomputes everything for every token.
        prompt_lookup: True, or a `PromptLookup`, proposes tokens from the text so far, and from texts before it: the
            same answer, sooner where it repeats one of them.
        draft_model: A smaller `Llama` with the same vocabulary proposes tokens: the same answer, sooner where it is
            right often enough. A `DraftModel` goes on with what it has learned.
        kv_cache_dtype: KV cache dtype: "auto" (same as the model), "int8" (about half of bfloat16's
            memory), "int8-k/int4-v" (two fifths) or "int4" (under a third).
    """

    use_cache: bool
    prompt_lookup: bool | PromptLookup
    draft_model: TextModel | DraftModel | None
    kv_cache_dtype: CacheDtype


class RequestOptions(TypedDict, total=False):
    """The options of a request to an engine, apart from sampling parameters.

    Attributes:
        timeout_s: Seconds after which it ends with a `RequestTimeoutError`.
        adapter: Which of the engine's adapters answers; None is the model as it is.
        salt: Keys and values are shared only between requests with the same salt; a secret one keeps a prefix private.
        ngram_pool: With `prompt_lookup`, drafts are found in texts of requests with the same name here, and no salt;
            None keeps a request's text out of all pools.
        must_keep_up: End the answer with an error if its reader falls far behind, instead of buffering all of it.
        edits: Of what the model computes for this request alone, in order: `llamarium.runtime.intervention.Edit`.
        places: Where its hidden states are wanted; they come with `Piece.states` and `Completion.states`.
    """

    timeout_s: float | None
    adapter: str | None
    salt: str
    ngram_pool: str | None
    must_keep_up: bool
    edits: tuple[Edit, ...]
    places: Places | None


class StreamOptions(GenerationOptions, RequestOptions, total=False):
    """The options of `TextEngine.stream`."""


class EngineArguments(EngineKeywords, total=False):
    """The options of `Llama.engine`: those of `EngineOptions`, and objects.

    Attributes:
        prompt_lookup: As in `AnswerOptions`, for all answers; measured costs of one answer serve the next.
        draft_model: As in `AnswerOptions`; its KV cache is part of `kv_memory`.
        disk_cache: A folder in which the KV cache of prefixes is kept, and found again by the next process.
    """

    prompt_lookup: bool | PromptLookup
    draft_model: TextModel | DraftModel | None
    disk_cache: DiskCache | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOptions:
    """How an answer's passes are run; see `AnswerOptions`.

    OptionError if a value is none of those that there are.
    """

    use_cache: bool = True
    prompt_lookup: bool | PromptLookup = False
    draft_model: TextModel | DraftModel | None = None
    kv_cache_dtype: CacheDtype = "auto"

    def __post_init__(self) -> None:
        """Check the values."""
        check_choice("use_cache", self.use_cache, (True, False))
        check_choice("kv_cache_dtype", self.kv_cache_dtype, get_args(CacheDtype))
        proposer_choice(self.prompt_lookup, self.draft_model)

    @property
    def proposer(self) -> ProposerChoice:
        """What proposes tokens, or a model that is to."""
        return proposer_choice(self.prompt_lookup, self.draft_model)


def split_options(options: AnswerOptions) -> PassOptions:
    """Remove the options of passes from some options, and return them.

    OptionError if a value is none of those that there are.
    """
    names = [item.name for item in fields(PassOptions)]
    given: dict[str, Any] = {name: options.pop(name) for name in names if name in options}
    return PassOptions(**given)


def with_params(params: SamplingParams | None, options: OptionsT) -> OptionsT:
    """Return the options of a call that has been given `SamplingParams`, too, over which its options go.

    SamplingError if `params` are something else.
    """
    if params is None:
        return options
    if not isinstance(params, SamplingParams):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SamplingError(f"params is {show_value(params)}; expected SamplingParams, or options: temperature=0.7")
    given: Mapping[str, Any] = {name: value for name, value in options.items() if value is not None}
    below = {item.name: getattr(params, item.name) for item in fields(params)}
    if "max_new_tokens" in given:
        del below["max_tokens"]
    if not given.keys().isdisjoint(GRAMMAR_OPTIONS):
        del below["grammar"]
    return cast(OptionsT, {**below, **given})


def proposer_choice(prompt_lookup: object, draft_model: object) -> ProposerChoice:
    """Return the proposer, or the model that is to be one, of two options.

    OptionError if a value is none of those that there are, or both are given.
    """
    lookup = prompt_lookup
    if not isinstance(lookup, PromptLookup):
        check_choice("prompt_lookup", lookup, (True, False, None))
        lookup = PromptLookup() if lookup else None
    draft = _checked_draft(draft_model)
    if lookup is not None and draft is not None:
        raise OptionError("prompt_lookup and draft_model both guess the next tokens; give one of them")
    return lookup or draft


def _checked_draft(draft: object) -> TextModel | DraftModel | None:
    if draft is None or isinstance(draft, DraftModel):
        return draft
    if not all(hasattr(draft, name) for name in ("runner", "optional_tokenizer")):
        raise OptionError(f"draft_model is {show_value(draft)}; expected a model as llamarium.load() returns it")
    return cast(TextModel, draft)


def proposer_of(model: TextModel, asked: ProposerChoice, runner: Runner | None = None) -> ProposerPolicy | None:
    """Return what proposes tokens for a model; with a `runner` for requests with any sampling parameters.

    OptionError if drafts could change the tokens of a request to `runner`; errors as `drafting`.
    """
    policy = asked if asked is None or isinstance(asked, ProposerPolicy) else drafting(model, asked)
    if policy is not None and runner is not None:
        check_exact(runner, policy, is_greedy=False)
    return policy


def drafting(model: TextModel, draft: TextModel) -> DraftModel:
    """Return a model as one that drafts for another; InputError or TokenizerError unless their vocabularies agree."""
    check_same_vocabulary(model, draft, "one cannot guess for the other")
    return DraftModel(draft.runner)


def split_request(options: StreamOptions) -> RequestOptions:
    """Remove the options of a request from some options, and return them."""
    return cast(RequestOptions, {name: options.pop(name) for name in RequestOptions.__annotations__ if name in options})
