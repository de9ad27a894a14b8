"""Requests of the server's clients, as they run, and the ticket that lets the browser in."""

from pydantic import Field

from llamarium.engine.counts import SequenceState
from llamarium.inspect.probes.sampling import SamplerSteps
from llamarium.page.schema.base import PageRequest, Query, View
from llamarium.page.schema.passes import PassView
from llamarium.server.fields import with_parameters


class RequestsView(View):
    """What a server's engine was doing between two steps.

    Attributes:
        at_s: When, in seconds of the server's own clock.
        num_running: Answers that have blocks.
        num_blocks: Of the cache.
        num_used_blocks: Those that answers have.
        generated_tokens: Chosen since the server began.
        requests: The answers, by arrival; the first ones alone where there are too many.
        adapters: Names of those that are served, by their number in `requests`.
    """

    at_s: float
    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    block_size: int
    generated_tokens: int
    requests: tuple[SequenceState, ...]
    adapters: dict[str, str]


class OpenQuery(Query):
    """`GET /inspect/requests/{name}`: one answer, with `k` candidates of each step of the sampler."""

    k: int = Field(10, ge=1, le=200)


@with_parameters("page", lambda one: (str if one.name == "seed" else one.kind, ...))
class ParametersView(View):
    """A request's sampling parameters; the seed as text, since it may have more digits than a browser's numbers."""

    max_tokens: int
    has_logit_bias: bool
    has_form: bool


class OpenedView(View):
    """One answer as of the moment when it was opened, computed again.

    Attributes:
        run: The pass over its tokens so far.
        start: Where the answer begins.
        sampler: How its next token is chosen; None where a vector is wanted.
    """

    request: SequenceState
    params: ParametersView
    run: PassView
    start: int
    sampler: SamplerSteps | None


class TicketRequest(PageRequest):
    """`POST /inspect/ticket`: what stood in the link that was opened."""

    ticket: str


class TicketView(View):
    """The server's key, for this tab."""

    key: str
