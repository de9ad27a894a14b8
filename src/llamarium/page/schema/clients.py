"""Requests of the server's clients, as they run, and the ticket that lets the browser in."""

from pydantic import Field

from llamarium.engine.counts import SequenceState
from llamarium.inspect.probes.sampling import SamplerSteps
from llamarium.page.schema.base import PageRequest, Query, View
from llamarium.page.schema.passes import PassView
from llamarium.server.fields import with_parameters
from llamarium.server.prefix.compare import Reason


class PrefixView(View):
    """What a request's prompt shares with the nearest earlier one of the same API key; as in `Explanation`.

    Attributes:
        number: The request's, as in `requests`.
        field: The field with the first difference, as its protocol names it.
        other_fields: Further fields that differ, some of them.
        first_different_token: Its place in the prompt, None if none differs.
        text_before: What both prompts have before it.
        text: What this prompt has from it on.
        earlier_text: What the earlier prompt has from there on, if that is still known.
    """

    number: int
    num_tokens: int
    matched_tokens: int
    is_exact: bool
    reason: Reason
    message: str
    field: str | None
    other_fields: tuple[str, ...]
    first_different_token: int | None
    text_before: str | None
    text: str | None
    earlier_text: str | None


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
        prefixes: Of the newest requests of this client's own API key, those that have ended too; the newest first.
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
    prefixes: tuple[PrefixView, ...]


class OpenQuery(Query):
    """`GET /inspect/requests/{name}`: one answer, with `k` candidates of each step of the sampler."""

    k: int = Field(10, ge=1, le=200)


@with_parameters("page", lambda parameter: (str if parameter.name == "seed" else parameter.kind, ...))
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
