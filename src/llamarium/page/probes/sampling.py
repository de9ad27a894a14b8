"""From logits to a token, how probable tokens were, and what one more costs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from llamarium.errors import GrammarError, QuestionError, counted
from llamarium.inspect.probes.cost import TokenCost, token_cost
from llamarium.inspect.probes.sampling import SamplerSteps, explain_choice, next_logits
from llamarium.inspect.score import scored_tokens
from llamarium.inspect.tokens import name_candidates, top_candidates
from llamarium.page.open_pass import OpenPass
from llamarium.page.probes.probe import Count, Position
from llamarium.page.schema.sampling import CandidateView, NextView, SamplerRequest, ScoreView, TokenScoreView
from llamarium.page.selection import check_index
from llamarium.sampling.constraint import CompiledGrammar, Constraint
from llamarium.sampling.grammar.description import Grammar
from llamarium.sampling.params import SamplingParams
from llamarium.sampling.row import SamplingRow
from llamarium.server.answering import compiled_form
from llamarium.server.openai.forms import Formed, form_of
from llamarium.server.openai.tools import tool_request
from llamarium.server.settings import Settings

if TYPE_CHECKING:
    from llamarium.api import Llama

MAX_SCORED = 128
"""Tokens that are scored at once: each needs the logits of the whole vocabulary."""

_OF_FORM = frozenset({"response_format", "tools", "tool_choice", "parallel_tool_calls"})


def following(context: OpenPass, position: Position = None, k: Annotated[int, Field(ge=1, le=200)] = 10) -> NextView:
    """Return the most probable tokens after a position."""
    at = context.position(position)
    logits_1V = context.numbers("logits", None, range(at, at + 1))
    best = top_candidates(logits_1V, min(k, logits_1V.shape[1]))[0]
    return NextView(
        position=at,
        candidates=tuple(
            CandidateView(
                token_id=candidate.token_id,
                text=candidate.text or "",
                logit=float(logits_1V[0, candidate.token_id]),
                probability=candidate.probability,
                logprob=candidate.logprob,
            )
            for candidate in name_candidates(best, context.llama.tokenizer)
        ),
    )


def sampler(context: OpenPass, body: SamplerRequest) -> SamplerSteps:
    """Return what each step of the sampler leaves after a position, the draw, and the token."""
    ids, settings = context.forward_pass.ids, context.state.service.settings
    position = context.position(body.position)
    start = position + 1 if body.start is None else body.start
    check_index("start", start, position + 2)
    row = _row(body, context.llama, settings, ids[:start], ids[start : position + 1])
    return explain_next(context, range(start, position + 1), row, body.k)


def explain_next(context: OpenPass, answer: range, row: SamplingRow, k: int) -> SamplerSteps:
    """Return how the token after a part of a pass is chosen: after `answer`, its positions so far, behind the prompt.

    `row` is the sampler's state of the answer, `k` how many candidates are listed after each step.
    """
    forward_pass, engine, llama = context.forward_pass, context.engine, context.llama
    runner, last = engine.runner, answer.stop - 1
    if runner.is_row_exact or forward_pass.experiment is not None:
        logits_V = context.numbers("logits", None, range(last, answer.stop))[0].copy()  # the sampler works in place
    else:  # as the answer was made, token by token
        parts, kept_in = (
            (forward_pass.ids[: answer.start], forward_pass.ids[answer.start : answer.stop]),
            engine.kv_cache_dtype,
        )
        logits_V = next_logits(runner, *parts, adapter=forward_pass.adapter_idx, kv_cache_dtype=kept_in)
    return explain_choice(row, logits_V, min(k, llama.config.vocab_size), llama.tokenizer)


def score(context: OpenPass, start: Count = 1) -> ScoreView:
    """Return how probable each token from a position on was, and its rank."""
    ids = context.forward_pass.ids
    if len(ids) == 1:
        message = "the text has one token, which nothing stands before; ask with a longer one"
        raise QuestionError(message, code="invalid_parameter", param="id")
    check_index("start", start, len(ids))
    if len(ids) - start > MAX_SCORED:
        message = f"start is {start} of {counted(len(ids), 'token')}; at most the last {MAX_SCORED} are scored at once"
        raise QuestionError(message, code="invalid_parameter", param="start")
    logits_CV = context.numbers("logits", None, range(start - 1, len(ids) - 1))
    (ranked,) = scored_tokens([logits_CV], ids[start:])
    scored = zip(ranked.ids_C.tolist(), ranked.logprobs_C.tolist(), ranked.ranks_C.tolist(), strict=True)
    return ScoreView(
        tokens=tuple(
            TokenScoreView(position=place, token_id=token_id, logprob=logprob, rank=rank)
            for place, (token_id, logprob, rank) in enumerate(scored, start)
        )
    )


def cost(context: OpenPass) -> TokenCost:
    """Return the operations of the last token with the KV cache and without it."""
    forward_pass, engine = context.forward_pass, context.engine
    if forward_pass.experiment is not None:
        message = "the pass is an experiment, which is not what answers cost; ask for it without experiment"
        raise QuestionError(message, code="invalid_parameter", param="id")
    return token_cost(
        engine.runner, forward_pass.ids, adapter=forward_pass.adapter_idx, kv_cache_dtype=engine.kv_cache_dtype
    )


def _row(
    body: SamplerRequest,
    llama: "Llama",
    settings: Settings,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
) -> SamplingRow:
    options = body.model_dump(exclude={"position", "start", "k", *_OF_FORM})
    grammar, compiled = _form(body, llama, settings)
    constraint = None
    if compiled is not None:
        _check_fits(compiled.begin(llama.stop_ids), answer_ids)
        constraint = compiled.begin(llama.stop_ids)
    params = SamplingParams(**options, grammar=grammar)
    return SamplingRow(params, prompt_ids, llama.config.vocab_size, answer_ids, constraint)


def _form(
    body: SamplerRequest, llama: "Llama", settings: Settings
) -> tuple[Grammar, CompiledGrammar] | tuple[None, None]:
    form = form_of(Formed.model_validate({"response_format": body.response_format}))
    tools, _ = tool_request(body.tools, body.tool_choice, body.parallel_tool_calls)
    try:
        return compiled_form(llama, form, tools, settings)
    except GrammarError as error:
        raise QuestionError(str(error), param="response_format") from None


def _check_fits(constraint: Constraint, answer_ids: Sequence[int]) -> None:
    """Refuse an answer that its form does not allow, or that is complete."""
    for place, token_id in enumerate(answer_ids):
        words = constraint.mask()
        if constraint.is_finished or not int(words[token_id // 32]) >> token_id % 32 & 1:
            message = f"token {place} of the answer, {token_id}, does not follow its form"
            raise QuestionError(message, code="invalid_parameter", param="start")
        constraint.accept(token_id)
    constraint.mask()
    if constraint.is_finished:
        raise QuestionError(
            "the answer is complete there, and nothing follows", code="invalid_parameter", param="position"
        )
