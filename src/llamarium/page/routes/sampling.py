"""From logits to a token, how probable tokens were, and what one more costs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query, Request

from llamarium.errors import GrammarError, counted
from llamarium.inspect.probes.cost import TokenCost, token_cost
from llamarium.inspect.probes.sampling import SamplerSteps, explain_choice, next_logits
from llamarium.inspect.score import scored_tokens
from llamarium.page.routes.open_pass import OfPass, OpenPass, RequestedPass
from llamarium.page.schema import sampling as schema
from llamarium.page.selection import check_index
from llamarium.page.work import work_on
from llamarium.sampling.constraint import CompiledGrammar, Constraint
from llamarium.sampling.grammar.description import Grammar
from llamarium.sampling.params import SamplingParams
from llamarium.sampling.row import SamplingRow
from llamarium.server.answering import held_form
from llamarium.server.errors import ApiError
from llamarium.server.http.body import StrictRoute
from llamarium.server.openai.forms import Formed, form_of
from llamarium.server.openai.tools import tool_request
from llamarium.server.settings import Settings

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.generation.text_engine import TextEngine

router = APIRouter(prefix="/inspect", route_class=StrictRoute)

MAX_SCORED = 128
"""Tokens that are scored at once: each needs the logits of the whole vocabulary."""

_OF_FORM = frozenset({"response_format", "tools", "tool_choice", "parallel_tool_calls"})


@router.post("/passes/{pass_id}/sampler")
async def sampler(request: Request, requested: OfPass, body: schema.SamplerRequest) -> SamplerSteps:
    """Return what each step of the sampler leaves after a position, the draw, and the token."""
    ids, settings = requested.one.ids, request.app.state.service.settings
    position, start = _places(requested, body)

    def read(known: OpenPass) -> SamplerSteps:
        row = _row(body, known.llama, settings, ids[:start], ids[start : position + 1])
        return explain_next(known, range(start, position + 1), row, body.k)

    return await requested.read("position", read)


def explain_next(known: OpenPass, answer: range, row: SamplingRow, k: int) -> SamplerSteps:
    """Return how the token after a part of a pass is chosen: after `answer`, its positions so far, behind the prompt.

    `row` is the sampler's state of the answer, `k` how many candidates are listed after each step.
    """
    one, engine, llama = known.one, known.engine, known.llama
    runner, last = engine.runner, answer.stop - 1
    if runner.is_row_exact or one.experiment is not None:
        logits_V = known.numbers("logits", None, range(last, answer.stop))[0].copy()  # the sampler works in place
    else:  # as the answer was made, token by token
        parts, kept_in = (one.ids[: answer.start], one.ids[answer.start : answer.stop]), engine.kv_cache_dtype
        logits_V = next_logits(runner, *parts, adapter=one.adapter_idx, kv_cache_dtype=kept_in)
    return explain_choice(row, logits_V, min(k, llama.config.vocab_size), llama.tokenizer)


@router.get("/passes/{pass_id}/score")
async def score(requested: OfPass, query: Annotated[schema.ScoreQuery, Query()]) -> schema.ScoreView:
    """Return how probable each token from a position on was, and its rank."""
    ids, start = requested.one.ids, query.start
    if len(ids) == 1:
        message = "the text has one token, which nothing stands before; ask with a longer one"
        raise ApiError(400, message, code="invalid_parameter", param="id")
    check_index("start", start, len(ids))
    if len(ids) - start > MAX_SCORED:
        message = f"start is {start} of {counted(len(ids), 'token')}; at most the last {MAX_SCORED} are scored at once"
        raise ApiError(400, message, code="invalid_parameter", param="start")

    def read(known: OpenPass) -> schema.ScoreView:
        logits_CV = known.numbers("logits", None, range(start - 1, len(ids) - 1))
        (found,) = scored_tokens([logits_CV], ids[start:])
        scored = zip(found.ids_C.tolist(), found.logprobs_C.tolist(), found.ranks_C.tolist(), strict=True)
        return schema.ScoreView(
            tokens=tuple(
                schema.TokenScoreView(position=place, token_id=token_id, logprob=logprob, rank=rank)
                for place, (token_id, logprob, rank) in enumerate(scored, start)
            )
        )

    return await requested.read("start", read)


@router.get("/passes/{pass_id}/cost")
async def cost(requested: OfPass) -> TokenCost:
    """Return the operations of the last token with the KV cache and without it."""
    one = requested.one
    if one.experiment is not None:
        message = "the pass is an experiment, which is not what answers cost; ask for it without experiment"
        raise ApiError(400, message, code="invalid_parameter", param="id")

    def read(_: "Llama", engine: "TextEngine") -> TokenCost:
        return token_cost(engine.runner, one.ids, adapter=one.adapter_idx, kv_cache_dtype=engine.kv_cache_dtype)

    return await work_on(requested.request, "id", read)


def _places(requested: RequestedPass, body: schema.SamplerRequest) -> tuple[int, int]:
    position = requested.position(body.position)
    start = position + 1 if body.start is None else body.start
    check_index("start", start, position + 2)
    return position, start


def _row(
    body: schema.SamplerRequest,
    llama: "Llama",
    settings: Settings,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
) -> SamplingRow:
    given = body.model_dump(exclude={"position", "start", "k", *_OF_FORM})
    grammar, compiled = _form(body, llama, settings)
    constraint = None
    if compiled is not None:
        _check_fits(compiled.begin(llama.stop_ids), answer_ids)
        constraint = compiled.begin(llama.stop_ids)
    params = SamplingParams(**given, grammar=grammar)
    return SamplingRow(params, prompt_ids, llama.config.vocab_size, answer_ids, constraint)


def _form(
    body: schema.SamplerRequest, llama: "Llama", settings: Settings
) -> tuple[Grammar, CompiledGrammar] | tuple[None, None]:
    form = form_of(Formed.model_validate({"response_format": body.response_format}))
    tools, _ = tool_request(body.tools, body.tool_choice, body.parallel_tool_calls)
    try:
        return held_form(llama, form, tools, settings)
    except GrammarError as error:
        raise ApiError(400, str(error), param="response_format") from None


def _check_fits(constraint: Constraint, answer_ids: Sequence[int]) -> None:
    """Refuse an answer that its form does not allow, or that is complete."""
    for place, token_id in enumerate(answer_ids):
        words = constraint.mask()
        if constraint.is_finished or not int(words[token_id // 32]) >> token_id % 32 & 1:
            message = f"token {place} of the answer, {token_id}, does not follow its form"
            raise ApiError(400, message, code="invalid_parameter", param="start")
        constraint.accept(token_id)
    constraint.mask()
    if constraint.is_finished:
        raise ApiError(
            400, "the answer is complete there, and nothing follows", code="invalid_parameter", param="position"
        )
