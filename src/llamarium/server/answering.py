"""Turns protocol-independent requests into engine requests: prompts, lengths, grammars, and metrics."""

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
from llamarium.sampling.keywords import SamplingKeywords
from llamarium.sampling.params import SamplingParams
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
"""Returns the token ids of each of a request's prompts; called in a thread, not in the event loop."""

Form = tuple[str, Callable[[bool], Grammar]]
"""The path of the field that sets the output format, and a function that returns its grammar, which may take time.

The function's argument is True if objects may have properties that the schema does not list.
"""

InterventionReader = Callable[[ServedModel, TextEngine, int, int], tuple[tuple[Edit, ...], Places | None]]
"""Returns a prompt's interventions and the positions of its hidden states, given the tokens of prompt and of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The prompts of a request.

    Attributes:
        encode: Returns their token ids.
        count: Number of prompts.
        messages: The dialog in OpenAI's format; empty if the prompts are not a dialog.
        variables: Variables for the chat template.
        answer_start: Beginning of the answer, which the prompt ends with.
    """

    encode: Encode
    count: int = 1
    messages: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    answer_start: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Sampling options and stop conditions of a request's answers.

    Attributes:
        sampler: Sampling options, without `max_tokens`.
        max_tokens: Maximum number of generated tokens. None is the model's `max_new_tokens`, or the rest of the
            context.
        ignore_eos: Whether only the client's own stop strings and stop tokens end an answer.
        new_text: Whether the answer starts a new text instead of continuing the prompt's.
    """

    sampler: SamplingKeywords
    max_tokens: int | None
    ignore_eos: bool = False
    new_text: bool = False


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on the answer: an output format, tool calls, or either. Tools are also part of the prompt."""

    form: Form | None
    tools: ToolRequest

    @classmethod
    def of(cls, form: Form | None, tools: ToolRequest | None) -> "Constraint | None":
        """Return the constraint of a request, or None if it has neither an output format nor tools."""
        if form is None and (tools is None or not tools.tools):
            return None
        return cls(form, tools or ToolRequest())


@dataclass(frozen=True, slots=True)
class FieldNames:
    """A protocol's field names, for error messages.

    Attributes:
        prompt: Field with the prompts.
        length: Field with the maximum number of generated tokens.
        path_of: Translates a path in OpenAI's chat completions, e.g. `tools[0].function.parameters`.
    """

    prompt: str
    length: str
    path_of: Callable[[str], str] = str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """A protocol-independent generation request.

    Attributes:
        constraint: Constraint on the answer; None allows any text.
        salt: Cache salt: cached prefixes are shared only between requests with the same salt.
        is_kept: Whether the answer may be recorded (`--record`) and kept as a source of n-gram drafts.
        interventions: Interventions and requested hidden states; None without either.
    """

    model: ModelChoice
    prompts: Prompts
    options: AnswerOptions
    names: FieldNames
    constraint: Constraint | None = None
    salt: str = ""
    is_kept: bool = True
    interventions: InterventionReader | None = None

    def parts(self, edits: tuple[Edit, ...]) -> PromptParts:
        """Return the parts of a prompt, for prefix explanations; `edits` are the prompt's interventions."""
        changed = edits_key(edits).hex() if edits else ""
        adapter, prompts = self.model.adapter or "", self.prompts
        offered = () if self.constraint is None else self.constraint.tools.offered
        dialog = prompts.variables, offered, prompts.messages, prompts.answer_start
        return PromptParts(adapter, self.salt, changed, *dialog)


@dataclass(frozen=True, slots=True)
class Submitted:
    """The running answers to each prompt of a request, and the prefix explanation of each prompt."""

    answers: list[Answers]
    explained: list[Explained]


def variables_of(
    variables: Mapping[str, Any] | None = None, effort: str | None = None, documents: object = None
) -> dict[str, Any]:
    """Return a request's chat template variables, including `reasoning_effort` and `documents` if given."""
    own = {"reasoning_effort": effort, "documents": documents}
    return {**(variables or {}), **{name: value for name, value in own.items() if value is not None}}


async def submit(service: Service, request: AnswerRequest, owner: str, scope: MutableMapping[str, Any]) -> Submitted:
    """Submit a request's prompts to the engine, in a thread.

    A request with a grammar, interventions or hidden states may take long to prepare. It gets a dedicated thread, so
    that other requests do not queue behind it in asyncio's thread pool.

    Args:
        service: The served model and its engine.
        request: The request.
        owner: The request's API key, or "".
        scope: The request's ASGI scope, which collects the fields that have no effect.

    Raises:
        ApiError: If the request is invalid or the engine rejects it.
    """
    constraint = request.constraint
    is_slow = constraint is not None and (constraint.form is not None or constraint.tools.is_held)
    if is_slow or request.interventions is not None:
        return await in_own_thread(partial(_submit, service, request, owner, scope))
    return await asyncio.to_thread(_submit, service, request, owner, scope)


def place_of(field: str, place: int, count: int) -> str:
    """Return the path of the prompt at index `place`; a single prompt's path is the field itself."""
    return field if count == 1 else f"{field}[{place}]"


def _submit(service: Service, request: AnswerRequest, owner: str, scope: MutableMapping[str, Any]) -> Submitted:
    model, engine = service.loaded or service.require()
    tokenizer = engine.tokenizer
    submitted: list[Answers] = []
    explained: list[Explained] = []
    field = request.names.prompt
    try:
        prompts = request.prompts.encode(tokenizer)
        compiled = _compiled_constraint(request, model, engine, service.settings, scope)
        for place, ids in enumerate(prompts):
            if len(prompts) > 1:
                field = place_of(request.names.prompt, place, len(prompts))
            room = 0 if request.options.max_tokens == 0 else 1
            check_prompt(model.config, ids, room=room)  # before the ids are used as indices
            params = _params(model, request, compiled.form, len(ids), service.max_tokens, scope)
            num_tokens = len(ids) + params.max_tokens
            read = request.interventions
            edits, places = ((), None) if read is None else read(model, engine, len(ids), num_tokens)
            submitted.append(
                engine.begin(
                    ids,
                    params,
                    new_text=request.options.new_text,
                    stop_ids=() if request.options.ignore_eos else None,
                    timeout_s=service.settings.request_timeout_s,
                    adapter=request.model.adapter,
                    salt=request.salt,
                    ngram_pool=owner if request.is_kept else None,
                    must_keep_up=True,
                    grammar=compiled.grammar,
                    tools=compiled.tools,
                    edits=edits,
                    places=places,
                )
            )
            path_of, parts = request.names.path_of, request.parts(edits)
            explained.append(service.explainer.opened(owner, submitted[-1], parts, engine, tokenizer, path_of))
    except BaseException as error:
        close(submitted)
        if isinstance(error, LlamariumError):
            raise refusal_of(error, request, tokenizer.source, field) from None
        raise
    return Submitted(submitted, explained)


class _Compiled(NamedTuple):
    """A compiled constraint: the grammar, its compiled form, and the tools that the answer may call."""

    form: Grammar | None = None
    grammar: CompiledGrammar | None = None
    tools: ToolRequest | None = None


def _compiled_constraint(
    request: AnswerRequest, model: ServedModel, engine: TextEngine, settings: Settings, scope: MutableMapping[str, Any]
) -> _Compiled:
    """Compile a request's constraint, and note unenforced schema keywords in the request's `scope`."""
    if request.constraint is None:
        return _Compiled()
    form, tools = request.constraint.form, request.constraint.tools
    tools = tools if form is None else tools.after(request.prompts.messages)
    with engine.step_priority.working():
        grammar, compiled = compiled_form(model, form, tools, settings)
    for keyword in () if grammar is None else grammar.unenforced:
        path = keyword if form is None else keyword.inside(form[0])
        no_effect_of(scope).add(request.names.path_of(str(path)))
    return _Compiled(grammar, compiled, tools)


def compiled_form(
    model: ServedModel, form: Form | None, tools: ToolRequest, settings: Settings
) -> tuple[Grammar, CompiledGrammar] | tuple[None, None]:
    """Return an answer's grammar and its compiled form, or (None, None) if any text is allowed.

    Raises:
        ApiError: If the output format or the tools cannot be compiled together; names the field of the output format.
        GrammarError: If the tools cannot be compiled and there is no output format.
    """
    tool_form, is_open = settings.tool_form or own_tool_form(model.tokenizer), settings.open_objects
    try:
        answer = None if form is None else form[1](is_open)
        compiled = compile_answer(model.grammars, tools, tool_form, answer, open_objects=is_open)
    except GrammarError as error:
        raise _of_form(error, form[0]) if form is not None else error from None
    return (None, None) if compiled is None else compiled


def wanted_forms(
    tokenizer: Tokenizer, form: Form | None, tools: ToolRequest, settings: Settings
) -> tuple[Grammar | None, Grammar | None]:
    """Return the grammar of the output format and that of the whole answer, each None if absent; neither is compiled.

    Errors as for `compiled_form`.
    """
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


def refusal_of(error: LlamariumError, request: AnswerRequest, source: str, field: str | None = None) -> ApiError:
    """Translate a library error to the client's field names.

    Args:
        error: The error.
        request: The request.
        source: The tokenizer's path, which is not shown to clients.
        field: Path of the prompt, if there are several; defaults to the field with the prompts.
    """
    names, constraint = request.names, request.constraint
    if isinstance(error, GrammarError) and constraint is not None and constraint.form is not None:
        return _of_form(error, constraint.form[0])
    refusal = of_library(error, field=field or names.prompt, source=source)
    return renamed(refusal, lambda name: names.length if name == "max_tokens" else names.path_of(name))


def _params(
    model: ServedModel,
    request: AnswerRequest,
    form: Grammar | None,
    num_prompt: int,
    limit: int,
    scope: MutableMapping[str, Any],
) -> SamplingParams:
    """Return the sampling parameters of a prompt's answers; a grammar without free text drops stop strings."""
    options, max_tokens = request.options.sampler.copy(), request.options.max_tokens
    if form is not None:
        options["grammar"] = form
        if options.get("stop") and not form.has_free_text:
            no_effect_of(scope).add(request.names.path_of("stop"))
            options["stop"] = None
    recommended = model.generation_config.get("max_new_tokens")
    if num_prompt + (1 if max_tokens is None else max_tokens) > limit:
        raise too_long(num_prompt, max_tokens, limit)
    if max_tokens is None:
        max_tokens = min(limit - num_prompt, limit if recommended is None else recommended)
    options["max_tokens"] = max_tokens
    params = SamplingParams.from_options(options, model.generation_config, model.config.vocab_size)
    if not request.options.ignore_eos:
        return params
    return params.derived(stop_token_ids=tuple(options.get("stop_token_ids") or ()))


def close(answers: Iterable[Answers]) -> None:
    """Abort answers that are still running."""
    for running in answers:
        running.close()


@contextmanager
def recording(metrics: RequestMetrics, field: str | None = None, *, is_edited: bool = False) -> Generator[None]:
    """Count a request that fails or is aborted in the body, and translate library errors with `of_library`.

    If the request `is_edited` (has interventions), non-finite logits are a client error: status 400.
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
    """Return `work(tokenizer)`, computed in a thread, as texts may be long.

    Args:
        request: The request, for the service.
        field: Field with the text, for errors.
        work: Uses the tokenizer.
        path_of: Translates the paths in errors.

    Raises:
        ApiError: 503 if the model is not ready; for errors of `work`, as `of_library`.
    """
    model, _ = request.app.state.service.require()
    tokenizer: Tokenizer = model.tokenizer
    try:
        return await asyncio.to_thread(work, tokenizer)
    except LlamariumError as error:
        raise renamed(of_library(error, field=field, source=tokenizer.source), path_of) from None


async def side_by_side(work: Sequence[Any]) -> None:
    """Run coroutines concurrently; the first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in work:
                group.create_task(coroutine)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
