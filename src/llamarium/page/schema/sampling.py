"""From logits to a token, and one token more."""

from pydantic import Field

from llamarium.page.schema.base import PageRequest, View
from llamarium.server.fields import with_parameters
from llamarium.server.openai.forms import ResponseFormat
from llamarium.server.openai.tools import Tool, ToolChoice


@with_parameters("page", lambda parameter: (parameter.kind, parameter.default or 0))
class SamplerRequest(PageRequest):
    """`POST /inspect/passes/{id}/sampler`: parameters as for an answer, which has the ranges and meanings.

    Attributes:
        position: The token after which one is chosen; the last where left out.
        start: Where the answer begins: what stands before is the prompt. After `position` where left out.
        k: Candidates that are listed after each step.
        response_format: The form of the answer, as chat completions have it.
        tools: That it may call, as `tool_choice` and `parallel_tool_calls` say; strict calls have a form.
    """

    position: int | None = Field(None, ge=0)
    start: int | None = Field(None, ge=1)
    k: int = Field(10, ge=1, le=200)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class CandidateView(View):
    """A token that may come next: its logit, and what the softmax of all logits makes of it."""

    token_id: int
    text: str
    logit: float
    probability: float
    logprob: float


class NextView(View):
    """The most probable tokens after a position, the best first."""

    position: int
    candidates: tuple[CandidateView, ...]


class TokenScoreView(View):
    """One token: log P after those before it, and its rank, 1 for the most probable."""

    position: int
    token_id: int
    logprob: float
    rank: int


class ScoreView(View):
    """The tokens from a position on."""

    tokens: tuple[TokenScoreView, ...]
