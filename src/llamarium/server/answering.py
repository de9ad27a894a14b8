"""From a request's fields to the engine's answers: prompts, lengths, forms, and metrics."""

import asyncio
from collections.abc import Callable, Generator, Iterable, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from fastapi import Request

from llamarium.engine.pooling import Places
from llamarium.engine.request import check_prompt, too_long
from llamarium.errors import AnswerError, GrammarError, LlamariumError, RequestTimeoutError
from llamarium.generation.answers import Answers
from llamarium.generation.dialog import own_tool_form
from llamarium.generation.text_engine import TextEngine
from llamarium.runtime.intervention import Edit, edits_key
from llamarium.sampling.constraint import CompiledGrammar
from llamarium.sampling.grammar.calls import compile_answer, grammar_of_answer
from llamarium.sampling.grammar.description import Grammar
from llamarium.sampling.params import GenerationOptions, SamplingParams
from llamarium.server.dialogs import renamed
from llamarium.server.errors import ApiError, of_library
from llamarium.server.hints import no_effect_of
from llamarium.server.lifecycle.service import ModelChoice, ServedModel, Service
from llamarium.server.lifecycle.threads import in_own_thread
from llamarium.server.metrics import RequestMetrics
from llamarium.server.prefix.explainer import Explained
from llamarium.server.prefix.fields import PromptParts
from llamarium.server.settings import Settings
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.tools.request import ToolRequest

T = TypeVar("T")

Encode = Callable[[Tokenizer], list[list[int]]]
"""Returns the ids of a request's prompts; called outside the event loop."""

Form = tuple[str, Callable[[bool], Grammar]]
"""The field with the form of an answer, and its reader, by whether objects are open; a large schema takes time."""

Inside = Callable[[ServedModel, TextEngine, int, int], tuple[tuple[Edit, ...], Places | None]]
"""Returns the edits for a prompt, and the places of its hidden states that are wanted, by the tokens of the prompt, and
the most that it has with an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The prompts of a request.

    Attributes:
        encode: Returns their ids.
        count: How many there are.
        messages: The dialog, as OpenAI's API has it, or nothing.
        variables: Of the chat template.
        begun: The beginning of the answer, which the prompt ends with.
    """

    encode: Encode
    count: int = 1
    messages: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    begun: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """How the tokens of each answer are chosen, and where it ends.

    Attributes:
        sampler: Of the sampler, without `max_tokens`.
        max_tokens: None is the model's generation config's, else the rest of the context.
        ignore_eos: Only the client's own stops end an answer.
        new_text: The answer is a text of its own.
    """

    sampler: GenerationOptions
    max_tokens: int | None
    ignore_eos: bool = False
    new_text: bool = False


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer may be: a form, calls of tools (which are part of the prompt's ids), or either."""

    form: Form | None
    tools: ToolRequest

    @classmethod
    def of(cls, form: Form | None, tools: ToolRequest | None) -> "Constraint | None":
        """Return the constraint of a request; None without a form and tools: then nothing is read of either."""
        if form is None and (tools is None or not tools.tools):
            return None
        return cls(form, tools or ToolRequest())


@dataclass(frozen=True, slots=True)
class FieldNames:
    """A protocol's names of fields, for errors.

    Attributes:
        prompt: The field with the prompts.
        length: The field with the answer's length.
        path_of: Translates a path from OpenAI's chat completions, as in `tools[0].function.parameters`.
    """

    prompt: str
    length: str
    path_of: Callable[[str], str] = str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """A request for answers, of any protocol.

    Attributes:
        constraint: None is any text.
        salt: Keys and values are shared only with requests of the same salt.
        is_kept: It may be recorded (`--record`), and kept to find later drafts in.
        inside: What is done inside of the model, or looked at; None is nothing.
    """

    model: ModelChoice
    prompts: Prompts
    options: AnswerOptions
    names: FieldNames
    constraint: Constraint | None = None
    salt: str = ""
    is_kept: bool = True
    inside: Inside | None = None

    def parts(self, edits: tuple[Edit, ...]) -> PromptParts:
        """Return what its prompts are made of, with the edits of one of them."""
        changed = edits_key(edits).hex() if edits else ""
        adapter, prompts = self.model.adapter or "", self.prompts
        offered = () if self.constraint is None else self.constraint.tools.offered
        dialog = prompts.variables, offered, prompts.messages, prompts.begun
        return PromptParts(adapter, self.salt, changed, *dialog)


@dataclass(frozen=True, slots=True)
class Submitted:
    """The answers to each prompt of a request, on their way, and what the prompts share with earlier ones."""

    answers: list[Answers]
    explained: list[Explained]


def variables_of(
    given: Mapping[str, Any] | None = None, effort: str | None = None, documents: object = None
) -> dict[str, Any]:
    """Return what a request gives the chat template besides its dialog."""
    more = {"reasoning_effort": effort, "documents": documents}
    return {**(given or {}), **{name: value for name, value in more.items() if value is not None}}


async def submit(service: Service, asked: AnswerRequest, owner: str, scope: MutableMapping[str, Any]) -> Submitted:
    """Submit a request's prompts to the engine in a thread; one that compiles a grammar has a thread of its own.

    `owner` is the request's API key, or "". What of the request turns out to have no effect is noted in its `scope`.
    """
    held = asked.constraint
    is_slow = held is not None and (held.form is not None or held.tools.is_held)
    if is_slow or asked.inside is not None:
        return await in_own_thread(partial(_submit, service, asked, owner, scope))
    return await asyncio.to_thread(_submit, service, asked, owner, scope)


def place_of(field: str, place: int, count: int) -> str:
    """Return the path of one of a request's prompts; of a single one it is the field."""
    return field if count == 1 else f"{field}[{place}]"


def _submit(service: Service, asked: AnswerRequest, owner: str, scope: MutableMapping[str, Any]) -> Submitted:
    model, engine = service.loaded or service.require()
    tokenizer = engine.tokenizer
    begun: list[Answers] = []
    explained: list[Explained] = []
    field = asked.names.prompt
    try:
        prompts = asked.prompts.encode(tokenizer)
        held = _NOTHING_HELD if asked.constraint is None else _held(asked, model, engine, service.settings, scope)
        for place, ids in enumerate(prompts):
            if len(prompts) > 1:
                field = place_of(asked.names.prompt, place, len(prompts))
            check_prompt(
                model.config, ids, room=0 if asked.options.max_tokens == 0 else 1
            )  # before a token is looked up
            params = _params(model, asked, held.form, len(ids), service.max_tokens, scope)
            num_tokens = len(ids) + params.max_tokens
            edits, places = ((), None) if asked.inside is None else asked.inside(model, engine, len(ids), num_tokens)
            begun.append(
                engine.begin(
                    ids,
                    params,
                    new_text=asked.options.new_text,
                    stop_ids=() if asked.options.ignore_eos else None,
                    timeout_s=service.settings.request_timeout_s,
                    adapter=asked.model.adapter,
                    salt=asked.salt,
                    ngram_pool=owner if asked.is_kept else None,
                    must_keep_up=True,
                    grammar=held.grammar,
                    tools=held.tools,
                    edits=edits,
                    places=places,
                )
            )
            path_of, parts = asked.names.path_of, asked.parts(edits)
            explained.append(service.explainer.opened(owner, begun[-1], parts, engine, tokenizer, path_of))
    except BaseException as error:
        close(begun)
        if isinstance(error, LlamariumError):
            raise refusal_of(error, asked, tokenizer.source, field) from None
        raise
    return Submitted(begun, explained)


class _Held(NamedTuple):
    """What an answer is held to: a grammar and its compiled form, and the tools that it may call."""

    form: Grammar | None = None
    grammar: CompiledGrammar | None = None
    tools: ToolRequest | None = None


_NOTHING_HELD = _Held()


def _held(
    asked: AnswerRequest, model: ServedModel, engine: TextEngine, settings: Settings, scope: MutableMapping[str, Any]
) -> _Held:
    """Compile a request's constraint; what it does not enforce is noted in the request's `scope`."""
    assert asked.constraint is not None
    form, tools = asked.constraint.form, asked.constraint.tools
    tools = tools if form is None else tools.after(asked.prompts.messages)
    with engine.turns.working():
        grammar, compiled = held_form(model, form, tools, settings)
    for keyword in () if grammar is None else grammar.unenforced:
        named = keyword if form is None else keyword.inside(form[0])
        no_effect_of(scope).add(asked.names.path_of(str(named)))
    return _Held(grammar, compiled, tools)


def held_form(
    model: ServedModel, form: Form | None, tools: ToolRequest, settings: Settings
) -> tuple[Grammar, CompiledGrammar] | tuple[None, None]:
    """Return the grammar of an answer and its compiled form, if it has one."""
    tool_form, is_open = settings.tool_form or own_tool_form(model.tokenizer), settings.open_objects
    try:
        answer = None if form is None else form[1](is_open)
        held = compile_answer(model.grammars, tools, tool_form, answer, open_objects=is_open)
    except GrammarError as error:
        raise _of_form(error, form[0]) if form is not None else error from None
    return (None, None) if held is None else held


def wanted_forms(
    tokenizer: Tokenizer, form: Form | None, tools: ToolRequest, settings: Settings
) -> tuple[Grammar | None, Grammar | None]:
    """Return the grammar of a request's form, and that of its whole answer, if any; they are not compiled."""
    tool_form, is_open = settings.tool_form or own_tool_form(tokenizer), settings.open_objects
    try:
        answer = None if form is None else form[1](is_open)
        return answer, grammar_of_answer(tools, tool_form, answer, open_objects=is_open)
    except GrammarError as error:
        raise _of_form(error, form[0]) if form is not None else error from None


def _of_form(error: GrammarError, field: str) -> ApiError:
    refusal = of_library(error)
    refusal.param = field
    return refusal


def refusal_of(error: LlamariumError, asked: AnswerRequest, source: str, field: str | None = None) -> ApiError:
    """Translate an error of the library, by the client's field; `field` is that of one of several prompts."""
    names, held = asked.names, asked.constraint
    if isinstance(error, GrammarError) and held is not None and held.form is not None:
        return _of_form(error, held.form[0])
    refusal = of_library(error, field=field or names.prompt, source=source)
    return renamed(refusal, lambda name: names.length if name == "max_tokens" else names.path_of(name))


def _params(
    model: ServedModel,
    asked: AnswerRequest,
    form: Grammar | None,
    num_prompt: int,
    most: int,
    scope: MutableMapping[str, Any],
) -> SamplingParams:
    """Return the parameters of a prompt's answers; stop strings within a form have no effect."""
    options, wanted = asked.options.sampler.copy(), asked.options.max_tokens
    if form is not None:
        options["grammar"] = form
        if options.get("stop") and not form.has_free_text:
            no_effect_of(scope).add(asked.names.path_of("stop"))
            options["stop"] = None
    recommended = model.generation_config.get("max_new_tokens")
    if num_prompt + (1 if wanted is None else wanted) > most:
        raise too_long(num_prompt, wanted, most)
    if wanted is None:
        wanted = min(most - num_prompt, most if recommended is None else recommended)
    options["max_tokens"] = wanted
    params = SamplingParams.from_options(options, model.generation_config, model.config.vocab_size)
    if not asked.options.ignore_eos:
        return params
    return params.derived(stop_token_ids=tuple(options.get("stop_token_ids") or ()))


def close(answers: Iterable[Answers]) -> None:
    """Abort requests."""
    for one in answers:
        one.close()


@contextmanager
def recording(metrics: RequestMetrics, field: str | None = None, *, is_edited: bool = False) -> Generator[None]:
    """Translate errors of the library in the body, as `of_library`, and count a request that breaks off.

    Logits that are not finite are the client's fault where the request `is_edited`.
    """
    reason = "disconnected"
    try:
        yield
        reason = ""
    except LlamariumError as error:
        reason = "timeout" if isinstance(error, RequestTimeoutError) else "error"
        if is_edited and isinstance(error, AnswerError):
            message = f"{error}, with these interventions: use a smaller strength"
            raise ApiError(400, message, code="not_finite", param="steer") from None
        raise of_library(error, field=field) from None
    finally:
        if reason:
            metrics.aborted(reason)


async def with_tokenizer(
    request: Request, field: str, work: Callable[[Tokenizer], T], path_of: Callable[[str], str] = str
) -> T:
    """Call `work` with the tokenizer in a thread, since texts may be long; `field` and `path_of` are for errors."""
    model, _ = request.app.state.service.require()
    tokenizer: Tokenizer = model.tokenizer
    try:
        return await asyncio.to_thread(work, tokenizer)
    except LlamariumError as error:
        raise renamed(of_library(error, field=field, source=tokenizer.source), path_of) from None


async def side_by_side(work: Sequence[Any]) -> None:
    """Run coroutines concurrently; the first error cancels the others, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
