"""From a request's fields to the engine's answers: prompts, lengths, forms, and metrics."""

import asyncio
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

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
from llamarium.server.hints import NoEffect
from llamarium.server.lifecycle.service import MAX_ANSWERS, ServedModel, Service
from llamarium.server.lifecycle.threads import in_own_thread
from llamarium.server.metrics import RequestMetrics
from llamarium.server.naming import ModelChoice
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

NO_TOOLS = ToolRequest()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """A request for answers, of any protocol.

    Attributes:
        encode: Returns the prompts' ids.
        options: Of the sampler, without `max_tokens`.
        max_tokens: Of each answer; None is the model's generation config's, else the rest of the context.
        prompt_field: Its name in the protocol, for messages.
        length_field: Its name in the protocol, for messages.
        num_prompts: How many `encode` returns.
        form: Of the answer, or None.
        tools: That may be called; they are part of the ids.
        messages: The dialog, as OpenAI's API has it, or nothing.
        path_of: Translates a field's path from OpenAI's chat completions, as in `tools[0].function.parameters`.
        new_text: The answer is a text of its own.
        ignore_eos: Only the client's own stops end an answer.
        salt: Keys and values are shared only with requests of the same salt.
        variables: Of the chat template.
        begun: The beginning of the answer, which the prompt ends with.
        is_kept: It may be recorded (`--record`), and kept to find later drafts in.
        inside: What is done inside of the model, or looked at; None is nothing.
    """

    model: ModelChoice
    encode: Encode
    options: GenerationOptions
    max_tokens: int | None
    prompt_field: str
    length_field: str
    num_prompts: int = 1
    form: Form | None = None
    tools: ToolRequest = NO_TOOLS
    messages: Sequence[Mapping[str, Any]] = ()
    path_of: Callable[[str], str] = str
    new_text: bool = False
    ignore_eos: bool = False
    salt: str = ""
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    begun: str | None = None
    inside: Inside | None = None
    is_kept: bool = True

    @property
    def num_answers(self) -> int:
        """Over all prompts."""
        return self.num_prompts * (self.options.get("n") or 1)

    def parts(self, edits: tuple[Edit, ...]) -> PromptParts:
        """Return what its prompts are made of, with the edits of one of them."""
        changed = edits_key(edits).hex() if edits else ""
        tools, adapter = self.tools.offered, self.model.adapter or ""
        return PromptParts(adapter, self.salt, changed, self.variables, tools, self.messages, self.begun)

    @property
    def number_field(self) -> str:
        """The field with the number of answers, for messages."""
        return "n" if self.num_answers > self.num_prompts else self.prompt_field


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


async def submit(service: Service, asked: AnswerRequest, owner: str, no_effect: NoEffect) -> Submitted:
    """Submit a request's prompts to the engine in a thread; one that compiles a grammar has a thread of its own.

    `owner` is the request's API key, or "". What of the request turns out to have no effect is noted in `no_effect`.
    """
    if asked.num_answers > MAX_ANSWERS:
        message = f"{asked.num_answers} answers are asked for; a request has {MAX_ANSWERS} at most"
        raise ApiError(400, message, param=asked.number_field)
    if asked.form is not None or asked.tools.is_held or asked.inside is not None:
        return await in_own_thread(partial(_submit, service, asked, owner, no_effect))
    return await asyncio.to_thread(_submit, service, asked, owner, no_effect)


def place_of(field: str, place: int, count: int) -> str:
    """Return the path of one of a request's prompts; of a single one it is the field."""
    return field if count == 1 else f"{field}[{place}]"


def _submit(service: Service, asked: AnswerRequest, owner: str, no_effect: NoEffect) -> Submitted:
    model, engine = service.loaded or service.require()
    begun: list[Answers] = []
    explained: list[Explained] = []
    field = asked.prompt_field
    try:
        prompts = asked.encode(model.tokenizer)
        tools = asked.tools if asked.form is None else asked.tools.after(asked.messages)
        with nullcontext() if asked.form is None and not tools.tools else engine.turns.working():
            form, grammar = held_form(model, asked.form, tools, service.settings)
        note_unenforced(form, asked, no_effect)
        for place, ids in enumerate(prompts):
            field = place_of(asked.prompt_field, place, len(prompts))
            check_prompt(model.config, ids, room=0 if asked.max_tokens == 0 else 1)  # before a token is looked up
            params = _params(model, asked, form, len(ids), service.max_tokens, no_effect)
            num_tokens = len(ids) + params.max_tokens
            edits, places = ((), None) if asked.inside is None else asked.inside(model, engine, len(ids), num_tokens)
            begun.append(
                engine.submit(
                    ids,
                    params,
                    new_text=asked.new_text,
                    stop_ids=() if asked.ignore_eos else None,
                    timeout_s=service.settings.request_timeout_s,
                    adapter=asked.model.adapter,
                    salt=asked.salt,
                    ngram_pool=owner if asked.is_kept else None,
                    must_keep_up=True,
                    grammar=grammar,
                    tools=tools,
                    edits=edits,
                    places=places,
                )
            )
            parts = asked.parts(edits)
            explained.append(service.explainer.opened(owner, begun[-1], parts, engine, model.tokenizer, asked.path_of))
    except BaseException as error:
        close(begun)
        if isinstance(error, LlamariumError):
            raise refusal_of(error, replace(asked, prompt_field=field), model.tokenizer.source) from None
        raise
    return Submitted(begun, explained)


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


def note_unenforced(form: Grammar | None, asked: AnswerRequest, no_effect: NoEffect) -> None:
    """Note the keywords of schemas that an answer's grammar does not hold, by the client's fields."""
    for keyword in () if form is None else form.unenforced:
        named = keyword if asked.form is None else keyword.inside(asked.form[0])
        no_effect.add(asked.path_of(str(named)))


def _of_form(error: GrammarError, field: str) -> ApiError:
    refusal = of_library(error)
    refusal.param = field
    return refusal


def refusal_of(error: LlamariumError, asked: AnswerRequest, source: str) -> ApiError:
    """Translate an error of the library, by the client's field."""
    if isinstance(error, GrammarError) and asked.form is not None:
        return _of_form(error, asked.form[0])
    refusal = of_library(error, field=asked.prompt_field, source=source)
    return renamed(refusal, lambda name: asked.length_field if name == "max_tokens" else asked.path_of(name))


def _params(
    model: ServedModel, asked: AnswerRequest, form: Grammar | None, num_prompt: int, most: int, no_effect: NoEffect
) -> SamplingParams:
    """Return the parameters of a prompt's answers; stop strings within a form have no effect."""
    options = asked.options.copy()
    if form is not None:
        options["grammar"] = form
        if options.get("stop") and not form.has_free_text:
            no_effect.add(asked.path_of("stop"))
            options["stop"] = None
    recommended = model.generation_config.get("max_new_tokens")
    wanted = asked.max_tokens
    if num_prompt + (1 if wanted is None else wanted) > most:
        raise too_long(num_prompt, wanted, most)
    if wanted is None:
        wanted = min(most - num_prompt, most if recommended is None else recommended)
    options["max_tokens"] = wanted
    params = model.sampling_params(**options)
    return params.derived(stop_token_ids=tuple(options.get("stop_token_ids") or ())) if asked.ignore_eos else params


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
    if len(work) == 1:
        await work[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
