"""Probes of a pass: heads, neurons, attribution, the logit lens, and RoPE."""

from typing import Literal

from pydantic import Field

from llamarium.inspect.measures.after_error import ErrorKind
from llamarium.inspect.measures.probe_tasks import ProbeTask
from llamarium.inspect.probes.rope import RopePair
from llamarium.page.schema.base import Query, View, WindowQuery
from llamarium.page.schema.model import PublishedShape


class HeadsQuery(Query):
    """`GET /inspect/passes/{id}/heads`, and `.../heads/added`: of one layer, at one token; the last where left out."""

    layer: int = Field(ge=0)
    position: int | None = Field(None, ge=0)


class HeadsView(View):
    """What each head of a layer adds to a token's stream through its columns of o_proj.

    Attributes:
        norms: The length of what each head adds.
        shares: How much of attention's output lies along it; they sum to one.
        rounding: The length of what attention's output differs by from the sum of these.
    """

    layer: int
    position: int
    norms: tuple[float, ...]
    shares: tuple[float, ...]
    rounding: float


class NeuronsQuery(HeadsQuery):
    """`GET /inspect/passes/{id}/neurons`: the neurons of a layer that fire most at a token."""

    k: int = Field(12, ge=1, le=100)
    stride: int = Field(1, ge=1)


class AttributionQuery(Query):
    """`GET /inspect/passes/{id}/attribution`: where a token's logit comes from, or its lead over another's."""

    token_id: int = Field(ge=0)
    against_id: int | None = Field(None, ge=0)
    position: int | None = Field(None, ge=0)


class LensQuery(Query):
    """`GET /inspect/passes/{id}/lens`: what the stream would say after a token, at each place in the depth."""

    position: int | None = Field(None, ge=0)
    k: int = Field(5, ge=1, le=20)
    token_id: int | None = Field(None, ge=0)


class PictureQuery(WindowQuery):
    """`GET /inspect/passes/{id}/picture`: a pass as a whole, in a few numbers for each layer and token, its columns.

    Attributes:
        blocks: A column is all tokens up to its own from the column before, and not its own alone.
    """

    blocks: bool = False


class LensGridQuery(WindowQuery):
    """`GET /inspect/passes/{id}/lens/grid`: what the stream would say at each layer and token, 64 tokens at most.

    Attributes:
        after: Which half of a layer has been added.
        token_id: A token whose probability is returned at each place.
    """

    after: Literal["attention", "mlp"] = "mlp"
    token_id: int | None = Field(None, ge=0)


class RopeQuery(Query):
    """`GET /inspect/rope`: the pairs of the model at hand or of a published shape, and their angles at a position."""

    position: int = Field(0, ge=0)
    shape: PublishedShape | None = None


class RopeView(View):
    """Every pair's frequency, and its angle at a position."""

    position: int
    context: int
    is_scaled: bool
    pairs: tuple[RopePair, ...]


class DistancesQuery(Query):
    """`GET /inspect/passes/{id}/distances`: a token's query against a token's key, were they so far apart.

    Attributes:
        head: The query head; its key is that of its group.
        position: Token of the query; the last one if left out.
        key: Token of the key.
        stop: Distances from 0 up to this one, which is left out.
        stride: Every so many of them.
    """

    layer: int = Field(ge=0)
    head: int = Field(ge=0)
    position: int | None = Field(None, ge=0)
    key: int = Field(0, ge=0)
    stop: int = Field(128, ge=1)
    stride: int = Field(1, ge=1)


class DistancesView(View):
    """The score at each distance: q·k / √H of the same two vectors, turned by their positions."""

    distances: tuple[int, ...]
    scores: tuple[float, ...]


class LinearProbeQuery(Query):
    """`GET /inspect/linear_probe`: a bundled property that is read from the stream."""

    task: ProbeTask


class AfterErrorQuery(Query):
    """`GET /inspect/after_error`: which wrong token is put into the bundled texts."""

    kind: ErrorKind = "likely"
