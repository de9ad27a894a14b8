"""The options of `Llama.generate` and its like, by name and type. Never torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast, get_args

from llamarium.engine.pooling import Places
from llamarium.engine.proposers.base import ProposerPolicy, check_exact
from llamarium.engine.proposers.draft import DraftModel
from llamarium.engine.proposers.lookup import PromptLookup
from llamarium.engine.tiers.disk_cache import DiskCache
from llamarium.errors import OptionError, SamplingError, check_choice, show_value
from llamarium.generation.text_model import TextModel
from llamarium.options.declare import declared, option, with_default
from llamarium.options.keywords import EngineKeywords
from llamarium.options.serving import EngineOptions
from llamarium.runtime.intervention import Edit
from llamarium.runtime.runner import CacheDtype, Runner
from llamarium.sampling.grammar.description import OPTIONS as GRAMMAR_OPTIONS
from llamarium.sampling.keywords import SamplingKeywords
from llamarium.sampling.params import SamplingParams
from llamarium.tokenizer.compare import check_same_vocabulary

OptionsT = TypeVar("OptionsT", bound=SamplingKeywords)

ProposerChoice = ProposerPolicy | TextModel | None
"""What proposes tokens, or a model that is to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOptions:
    """Options for computing an answer, which is the same text unless the KV cache is quantized.

    OptionError if a value is invalid.
    """

    use_cache: bool = option(True, "keep a KV cache; False recomputes everything for every token")
    prompt_lookup: bool | PromptLookup = option(
        False, "draft tokens from the prompt and earlier texts: True, or a `PromptLookup`"
    )
    draft_model: TextModel | DraftModel | None = option(
        None, "a smaller `Llama` with the same vocabulary that drafts tokens, or a `DraftModel`, which learns from use"
    )
    kv_cache_dtype: CacheDtype = with_default(EngineOptions, "kv_cache_dtype", "auto")

    def __post_init__(self) -> None:
        """Check the values."""
        check_choice("use_cache", self.use_cache, (True, False))
        check_choice("kv_cache_dtype", self.kv_cache_dtype, get_args(CacheDtype))
        proposer_choice(self.prompt_lookup, self.draft_model)

    @property
    def proposer(self) -> ProposerChoice:
        """What proposes tokens, or a model that is to."""
        return proposer_choice(self.prompt_lookup, self.draft_model)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of a request to an engine, apart from sampling parameters."""

    timeout_s: float | None = option(None, "seconds after which the request ends with a `RequestTimeoutError`")
    adapter: str | None = option(None, "name of the engine's adapter that answers; None is the model without one")
    salt: str = option("", "requests share cached prefixes only if they have the same salt; a secret keeps one private")
    ngram_pool: str | None = option(
        "",
        'with prompt_lookup: drafts come from requests with the same name here (by default "") and no salt; None keeps '
        "this request's text out of all pools",
    )
    must_keep_up: bool = option(False, "end the answer with an error if its reader falls far behind")
    edits: tuple[Edit, ...] = option((), "edits of what the model computes, for this request alone")
    places: Places | None = option(
        None, "layers and positions whose hidden states are returned, as `Piece.states` and `Completion.states`"
    )


class EngineArguments(EngineKeywords, total=False):
    """The options of `Llama.engine`: those of `EngineOptions`, and objects.

    Attributes:
        prompt_lookup: As in `PassOptions`, for all answers; measured costs of one answer serve the next.
        draft_model: As in `PassOptions`; its KV cache is part of `kv_memory`.
        disk_cache: A folder in which the KV cache of prefixes is kept, and found again by the next process.
    """

    prompt_lookup: bool | PromptLookup
    draft_model: TextModel | DraftModel | None
    disk_cache: DiskCache | None


def split_options(options: Any, kind: type) -> dict[str, Any]:
    """Remove the options that a dataclass declares from `options`, and return them."""
    return {name: options.pop(name) for name in declared(kind) if name in options}


def with_params(params: SamplingParams | None, options: OptionsT) -> OptionsT:
    """Return the options of a call that has been given `SamplingParams`, too, over which its options go.

    SamplingError if `params` are something else.
    """
    if params is None:
        return options
    if not isinstance(params, SamplingParams):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SamplingError(f"params is {show_value(params)}; expected SamplingParams, or options: temperature=0.7")
    own_options: Mapping[str, Any] = {name: value for name, value in options.items() if value is not None}
    defaults = {item.name: getattr(params, item.name) for item in fields(params)}
    if "max_new_tokens" in own_options:
        del defaults["max_tokens"]
    if not own_options.keys().isdisjoint(GRAMMAR_OPTIONS):
        del defaults["grammar"]
    return cast(OptionsT, {**defaults, **own_options})


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


def proposer_of(model: TextModel, choice: ProposerChoice, runner: Runner | None = None) -> ProposerPolicy | None:
    """Return what proposes tokens for a model; with a `runner` for requests with any sampling parameters.

    OptionError if drafts could change the tokens of a request to `runner`; errors as `drafting`.
    """
    policy = choice if choice is None or isinstance(choice, ProposerPolicy) else drafting(model, choice)
    if policy is not None and runner is not None:
        check_exact(runner, policy, is_greedy=False)
    return policy


def drafting(model: TextModel, draft: TextModel) -> DraftModel:
    """Return a model as one that drafts for another; InputError or TokenizerError unless their vocabularies agree."""
    check_same_vocabulary(model, draft, "one cannot guess for the other")
    return DraftModel(draft.runner)
