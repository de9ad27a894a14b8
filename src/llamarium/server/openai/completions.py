"""`POST /v1/completions`."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from fastapi import APIRouter, Request, Response

from llamarium.errors import LlamariumError
from llamarium.generation.completion import Generation, Piece, PromptLogprobs
from llamarium.sampling.keywords import SamplingKeywords
from llamarium.server.answering import AnswerOptions, AnswerRequest, Constraint, FieldNames, Prompts, place_of
from llamarium.server.errors import ApiError, of_library
from llamarium.server.http.body import StrictRoute
from llamarium.server.http.stream import STREAMED, encode
from llamarium.server.lifecycle.service import ModelChoice, chosen_model
from llamarium.server.openai.choices import ChoicesFormatter
from llamarium.server.openai.fields import sampler_options
from llamarium.server.openai.forms import FORM_FIELDS, form_of
from llamarium.server.openai.interventions import INTERVENTION_FIELDS, interventions_of
from llamarium.server.openai.logprobs import CompletionLogprobs, check_reported
from llamarium.server.openai.requests import CompletionRequest
from llamarium.server.replying import reply
from llamarium.tokenizer.base import Tokenizer

router = APIRouter(route_class=StrictRoute)

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens`."""

Prompt = str | list[int]
T = TypeVar("T")


class CompletionFormatter(ChoicesFormatter):
    """Formats a completion; with `echo`, the prompts' texts in `echoes` precede the answers."""

    prefix, whole_name, chunk_name, nothing = "cmpl", "text_completion", "text_completion", '"text":""'

    def __init__(
        self,
        request: Request,
        body: CompletionRequest,
        model: ModelChoice,
        prompts: Sequence[Prompt],
        echoes: Sequence[str],
    ) -> None:
        super().__init__(request, body, model)
        self._prompts, self._echoes = prompts, echoes
        self._echoes_logprobs = body.logprobs is not None and body.echo is True
        self._logprobs: dict[int, CompletionLogprobs] = {}  # by index of the streamed choice

    def _choice(self, generation: Generation, prompt: int, row: int) -> dict[str, Any]:
        answer = generation.completions[row]
        logprobs = None
        if answer.logprobs is not None:
            logprobs = self._of_answer(prompt).next(answer.token_ids, answer.logprobs)
            if self._echoes_logprobs and generation.prompt_logprobs is not None:
                before = self._of_prompt(prompt, generation.prompt_logprobs)
                logprobs = {name: before[name] + logprobs[name] for name in logprobs}
        choice: dict[str, Any] = {
            "text": self._echo(prompt) + answer.text,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
        }
        if self._shows_ids:
            choice["token_ids"] = answer.token_ids
            if row == 0:
                choice["prompt_token_ids"] = generation.prompt_ids
        return choice | self._of_prompts(generation)

    def _first(self, index: int, prompt: int, ids: str) -> str:
        echo = "" if self._echoes_logprobs else self._echo(prompt)  # otherwise the first piece has the text
        return self._chunk(index, f'"text":{encode(echo)}{self._ids(())}{ids}') if echo or ids else ""

    def _piece(self, index: int, prompt: int, piece: Piece) -> str:
        events, logprobs = "", "null"
        if self._echoes_logprobs and piece.prompt_logprobs is not None:
            echoed = encode(self._of_prompt(prompt, piece.prompt_logprobs))
            events = self._chunk(index, f'"text":{encode(self._echo(prompt))}{self._ids(())}', echoed)
        ids = self._ids(piece.token_ids)
        if not (piece.text or piece.logprobs or piece.finish_reason or (ids and piece.token_ids)):
            return events
        if piece.logprobs:
            if index not in self._logprobs:
                self._logprobs[index] = self._of_answer(prompt)
            logprobs = encode(self._logprobs[index].next(piece.token_ids, piece.logprobs))
        reason = "null" if piece.finish_reason is None else f'"{piece.finish_reason}"'
        return events + self._chunk(index, f'"text":{encode(piece.text)}{ids}', logprobs, reason)

    def _ids(self, ids: Sequence[int]) -> str:
        """Return the JSON member `token_ids` of a choice, or ""."""
        return f',"token_ids":{encode(ids)}' if self._shows_ids else ""

    def _echo(self, prompt: int) -> str:
        return self._echoes[prompt] if self._echoes else ""

    def _of_answer(self, prompt: int) -> CompletionLogprobs:
        return CompletionLogprobs(self._tokenizer, len(self._echo(prompt)), self._tokenizer.stream(continuation=True))

    def _of_prompt(self, prompt: int, logprobs: PromptLogprobs) -> dict[str, Any]:
        """Return the `logprobs` of a prompt; the text includes control tokens if the prompt was given as ids."""
        decoder = self._tokenizer.stream(skip_special_tokens=isinstance(self._prompts[prompt], str))
        return CompletionLogprobs(self._tokenizer, 0, decoder).next(logprobs.ids, logprobs)


@router.post("/v1/completions", responses=STREAMED)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue texts."""
    model = chosen_model(request, body.model)
    prompts = prompts_of(body.prompt, "prompt")
    echoes: list[str] = []
    limit, options = request.app.state.service.max_tokens, _options(body)

    def encode_prompts(tokenizer: Tokenizer) -> list[list[int]]:
        ids = for_each(prompts, "prompt", tokenizer, lambda prompt, _: encode_prompt(tokenizer, prompt, limit))
        if (num_logprobs := body.logprobs if body.echo else body.prompt_logprobs) is not None:
            check_reported(
                sum(map(len, ids)), num_logprobs, body.n or 1, "logprobs" if body.echo else "prompt_logprobs"
            )
        if body.echo:
            echoes[:] = for_each(prompts, "prompt", tokenizer, lambda prompt, _: _text_of(tokenizer, prompt))
        return ids

    set_fields, num_answers = body.model_fields_set, len(prompts) * (body.n or 1)
    generation_request = AnswerRequest(
        model=model,
        prompts=Prompts(encode=encode_prompts, count=len(prompts)),
        options=AnswerOptions(
            sampler=options,
            max_tokens={None: DEFAULT_MAX_TOKENS, -1: None}.get(body.max_tokens, body.max_tokens),
            ignore_eos=body.ignore_eos or False,
        ),
        names=FieldNames("prompt", "max_tokens"),
        constraint=None if set_fields.isdisjoint(FORM_FIELDS) else Constraint.of(form_of(body), None),
        salt=body.cache_salt or "",
        is_kept=getattr(body, "store", None) is not False,
        interventions=None
        if set_fields.isdisjoint(INTERVENTION_FIELDS)
        else interventions_of(request.app.state.service, body, model, num_answers),
    )
    formatter = CompletionFormatter(request, body, model, prompts, echoes)
    return await reply(request, generation_request, formatter, streams=body.stream or False)


def prompts_of(value: str | Sequence[str] | Sequence[int] | Sequence[list[int]], field: str) -> list[Prompt]:
    """Return a request's prompts, each a text or token ids; `field` is their field, for errors."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise ApiError(400, f"{field} is an empty list; expected at least one text or token id", param=field)
    return [cast(list[int], value)] if isinstance(value[0], int) else cast(list[Prompt], value)


def for_each(prompts: Sequence[Prompt], field: str, tokenizer: Tokenizer, work: Callable[[Prompt, str], T]) -> list[T]:
    """Return `work(prompt, path)` for each prompt; library errors become ApiErrors with the prompt's path."""
    results: list[T] = []
    for place, prompt in enumerate(prompts):
        path = place_of(field, place, len(prompts))
        try:
            results.append(work(prompt, path))
        except LlamariumError as error:
            raise of_library(error, field=path, source=tokenizer.source) from None
    return results


def _text_of(tokenizer: Tokenizer, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=False)


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt, max_tokens: int) -> list[int]:
    """Return a prompt's token ids; a text far longer than `max_tokens` tokens is rejected without encoding it."""
    if isinstance(prompt, str):
        tokenizer.check_length(prompt, max_tokens)
        return tokenizer.encode(prompt)
    return prompt


def _options(body: CompletionRequest) -> SamplingKeywords:
    if body.best_of is not None and body.best_of != (body.n or 1):
        reason = "ranking answers is not implemented; set it to n, or leave it out"
        raise ApiError(400, f"best_of is {body.best_of}; {reason}", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens is 0; expected at least 1, or echo set to true", param="max_tokens")
    if body.echo and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs and echo are both set; set only one", param="prompt_logprobs")
    options = sampler_options(body)
    options["logprobs"] = body.logprobs
    if body.echo and (body.logprobs is not None or body.max_tokens == 0):
        options["prompt_logprobs"] = body.logprobs or 0
    return options
