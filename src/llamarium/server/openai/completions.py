"""`POST /v1/completions`."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from fastapi import APIRouter, Request, Response

from llamarium.errors import LlamariumError
from llamarium.generation.completion import Generation, Piece
from llamarium.generation.logprobs import PromptLogprobs
from llamarium.sampling.params import GenerationOptions
from llamarium.server.answering import AnswerRequest, place_of
from llamarium.server.errors import ApiError, of_library
from llamarium.server.http.body import StrictRoute
from llamarium.server.http.stream import STREAMED, encode
from llamarium.server.naming import chosen_model
from llamarium.server.openai.fields import sampler_options, shows_usage
from llamarium.server.openai.forms import form_of
from llamarium.server.openai.logprobs import CompletionLogprobs
from llamarium.server.openai.requests import CompletionRequest
from llamarium.server.openai.respond import Chunks, respond
from llamarium.tokenizer.base import Tokenizer

router = APIRouter(route_class=StrictRoute)

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""

MAX_ECHOED_LOGPROBS = 2**18
"""Log-probabilities of prompts that one request is told: a prompt of 131,072 tokens with one other at each place."""

Prompt = str | list[int]
T = TypeVar("T")


class CompletionShape:
    """A completion.

    Args:
        prompts: As they were given, if they come before their answers.
        tells_prompt: Their tokens' log-probabilities are told, too.
        tells_ids: The ids of prompts and answers are told, under vLLM's names.

    Attributes:
        echoes: The prompts' texts, which come before the answers; empty where they do not.
    """

    prefix, whole_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, prompts: Sequence[Prompt], tells_prompt: bool, tells_ids: bool) -> None:
        self._prompts, self._tells_prompt, self._tells_ids = prompts, tells_prompt, tells_ids
        self.echoes: list[str] = []
        self._prompt_of: dict[int, int] = {}  # of a streamed answer
        self._tellers: dict[int, CompletionLogprobs] = {}

    def choice(self, tokenizer: Tokenizer, generation: Generation, prompt: int, row: int) -> dict[str, Any]:
        """Return one answer, without its index."""
        answer = generation.completions[row]
        logprobs = None
        if answer.logprobs is not None:
            logprobs = self._of_answer(tokenizer, prompt).tell(answer.token_ids, answer.logprobs)
            if self._tells_prompt and generation.prompt_logprobs is not None:
                before = self._of_prompt(tokenizer, prompt, generation.prompt_logprobs)
                logprobs = {name: before[name] + logprobs[name] for name in logprobs}
        told: dict[str, Any] = {
            "text": self._echo(prompt) + answer.text,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
        }
        if self._tells_ids:
            told["token_ids"] = answer.token_ids
            if row == 0:
                told["prompt_token_ids"] = generation.prompt_ids
        return told

    def beside(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """Return nothing: each prompt's ids stand with the first of its answers."""
        return {}

    def first(self, chunks: Chunks, prompt: int, index: int, prompt_ids: Sequence[int]) -> str:
        """Return the prompt, where it is asked for; with log-probabilities its text comes with the first piece."""
        is_first = prompt not in self._prompt_of.values()
        self._prompt_of[index] = prompt
        echo = "" if self._tells_prompt else self._echo(prompt)
        ids = self._ids_told(())
        if ids and is_first:
            ids += f',"prompt_token_ids":{encode(prompt_ids)}'
        return chunks.event(index, f'"text":{encode(echo)}{ids}') if echo or (ids and is_first) else ""

    def piece(self, tokenizer: Tokenizer, chunks: Chunks, index: int, piece: Piece) -> str:
        """Return the piece's text, and at the end why it ends."""
        prompt, events, logprobs = self._prompt_of[index], "", "null"
        if self._tells_prompt and piece.prompt_logprobs is not None:
            told = encode(self._of_prompt(tokenizer, prompt, piece.prompt_logprobs))
            events = chunks.event(index, f'"text":{encode(self._echo(prompt))}{self._ids_told(())}', told)
        ids = self._ids_told(piece.token_ids)
        if not (piece.text or piece.logprobs or piece.finish_reason or (ids and piece.token_ids)):
            return events
        if piece.logprobs:
            if index not in self._tellers:
                self._tellers[index] = self._of_answer(tokenizer, prompt)
            logprobs = encode(self._tellers[index].tell(piece.token_ids, piece.logprobs))
        return events + chunks.event(index, f'"text":{encode(piece.text)}{ids}', logprobs, encode(piece.finish_reason))

    def _ids_told(self, ids: Sequence[int]) -> str:
        """Return what of a chunk tells ids, as JSON."""
        return f',"token_ids":{encode(ids)}' if self._tells_ids else ""

    def _echo(self, prompt: int) -> str:
        return self.echoes[prompt] if self.echoes else ""

    def _of_answer(self, tokenizer: Tokenizer, prompt: int) -> CompletionLogprobs:
        return CompletionLogprobs(tokenizer, len(self._echo(prompt)), tokenizer.stream(continuation=True))

    def _of_prompt(self, tokenizer: Tokenizer, prompt: int, logprobs: PromptLogprobs) -> dict[str, Any]:
        """Return what is told of a prompt, whose control tokens are part of its text where it came as ids."""
        decoder = tokenizer.stream(skip_special_tokens=isinstance(self._prompts[prompt], str))
        return CompletionLogprobs(tokenizer, 0, decoder).tell(logprobs.ids, logprobs)


@router.post("/v1/completions", responses=STREAMED)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue texts."""
    model = chosen_model(request, body.model)
    prompts = prompts_of(body.prompt, "prompt")
    tells_prompt = body.logprobs is not None and body.echo is True
    shape = CompletionShape(prompts, tells_prompt, tells_ids=body.return_token_ids or False)
    most = request.app.state.service.max_tokens

    def encode_prompts(tokenizer: Tokenizer) -> list[list[int]]:
        ids = for_each(prompts, "prompt", tokenizer, lambda prompt, _: encode_prompt(tokenizer, prompt, most))
        if body.echo:
            _check_told(body, sum(map(len, ids)))
            shape.echoes = for_each(prompts, "prompt", tokenizer, lambda prompt, _: _text_of(tokenizer, prompt))
        return ids

    asked = AnswerRequest(
        model=model,
        encode=encode_prompts,
        options=_options(body),
        form=form_of(body),
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        num_prompts=len(prompts),
        prompt_field="prompt",
        length_field="max_tokens",
        ignore_eos=body.ignore_eos or False,
        salt=body.cache_salt or "",
    )
    return await respond(request, asked, shape, streams=body.stream or False, shows_usage=shows_usage(body))


def prompts_of(given: str | Sequence[str] | Sequence[int] | Sequence[list[int]], field: str) -> list[Prompt]:
    """Return a request's prompts, each a text or ids.

    Raises:
        ApiError: In the name of `field`, if there are none.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        raise ApiError(400, f"{field} is an empty list; expected at least one text or token id", param=field)
    return [cast(list[int], given)] if isinstance(given[0], int) else cast(list[Prompt], given)


def for_each(prompts: Sequence[Prompt], field: str, tokenizer: Tokenizer, work: Callable[[Prompt, str], T]) -> list[T]:
    """Do something with each of a request's prompts, whose path it is given.

    Raises:
        ApiError: For what it refuses, in the name of that prompt.
    """
    found: list[T] = []
    for place, prompt in enumerate(prompts):
        path = place_of(field, place, len(prompts))
        try:
            found.append(work(prompt, path))
        except LlamariumError as error:
            raise of_library(error, field=path, source=tokenizer.source) from None
    return found


def _text_of(tokenizer: Tokenizer, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=False)


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt, most: int) -> list[int]:
    """Return a prompt's ids; a text that is far longer than `most` tokens is not encoded.

    Raises:
        LlamariumError: If it is.
    """
    if isinstance(prompt, str):
        tokenizer.check_length(prompt, most)
        return tokenizer.encode(prompt)
    return prompt


def _options(body: CompletionRequest) -> GenerationOptions:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, f"best_of is {body.best_of}; answers are not ranked: expected n, or none", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens is 0; expected at least 1, or echo besides", param="max_tokens")
    options = sampler_options(body)
    options["logprobs"] = body.logprobs
    if body.echo and (body.logprobs is not None or body.max_tokens == 0):
        options["prompt_logprobs"] = body.logprobs or 0
    return options


def _check_told(body: CompletionRequest, num_tokens: int) -> None:
    """Refuse more log-probabilities of prompts than a request is told.

    Raises:
        ApiError: If it asks for more.
    """
    if body.logprobs is None:
        return
    num_told = num_tokens * (body.logprobs + 1) * (body.n or 1)
    if num_told > MAX_ECHOED_LOGPROBS:
        raise ApiError(
            400,
            f"{num_told:,} log-probabilities of prompts are asked for, and a request is told "
            f"{MAX_ECHOED_LOGPROBS:,} at most: their tokens times n times logprobs + 1; ask for fewer",
            param="logprobs",
        )
