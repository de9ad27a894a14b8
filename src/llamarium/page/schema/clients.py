"""Requests of the server's clients, as they run, and the ticket that lets the browser in."""

from typing import Literal

from pydantic import Field

from llamarium.engine.counts import BlockRun
from llamarium.page.schema.base import Answer, Query
from llamarium.page.schema.passes import PassView
from llamarium.page.schema.sampling import SamplerView
from llamarium.sampling.params import Parameter
from llamarium.server.fields import Body, with_parameters


class RequestView(Answer):
    """One answer in the making.

    Attributes:
        number: Of its request, by arrival.
        row: Which of the request's answers.
        stage: "waiting" has no blocks, "prefill" reads the prompt, "decode" gets a token in every step.
        adapter: The name of the one that answers, or None.
        is_embedding: The prompt's vector is wanted, and no token.
        num_prompt: Tokens of the prompt.
        num_tokens: Those, and the answer's so far.
        limit: At how many tokens it ends at the latest.
        num_computed: Tokens whose keys and values are in the cache.
        num_cached: Tokens of the prompt that were there when it began.
        num_blocks: Blocks of the cache that it has.
        num_shared: Those of them that others have, too.
        blocks: The first of them, in the order of positions.
    """

    number: int
    row: int
    stage: Literal["waiting", "prefill", "decode"]
    adapter: str | None
    is_embedding: bool
    num_prompt: int
    num_tokens: int
    limit: int
    num_computed: int
    num_cached: int
    num_blocks: int
    num_shared: int
    blocks: tuple[BlockRun, ...]


class RequestsView(Answer):
    """What a server's engine was doing between two steps.

    Attributes:
        at_s: When, in seconds of the server's own clock.
        num_running: Answers that have blocks.
        num_waiting: Answers that wait.
        num_blocks: Of the cache.
        num_used_blocks: Those that answers have.
        block_size: Tokens of a block.
        generated_tokens: Chosen since the server began.
        requests: The answers, by arrival; the first ones alone where there are too many.
    """

    at_s: float
    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    block_size: int
    generated_tokens: int
    requests: tuple[RequestView, ...]


class OpenQuery(Query):
    """`GET /inspect/requests/{name}`: one answer, with `k` candidates of each step of the sampler."""

    k: int = Field(10, ge=1, le=200)


def _as_number(parameter: Parameter) -> tuple[object, object]:
    return (str if parameter.name == "seed" else parameter.kind), ...


@with_parameters("page", _as_number)
class ParametersView(Answer):
    """What a request asks of the sampler; the seed as text, since it may have more digits than a browser's numbers."""

    max_tokens: int
    has_logit_bias: bool
    has_form: bool


class OpenedView(Answer):
    """One answer as of the moment when it was opened, computed again.

    Attributes:
        request: What it was doing.
        params: What it asks of the sampler.
        run: The pass over its tokens so far.
        start: Where the answer begins.
        sampler: How its next token is chosen; None where a vector is wanted.
    """

    request: RequestView
    params: ParametersView
    run: PassView
    start: int
    sampler: SamplerView | None


class TicketRequest(Body):
    """`POST /inspect/ticket`: what stood in the link that was opened."""

    ticket: str


class TicketView(Answer):
    """The server's key, for this tab."""

    key: str
