"""Questions to a pass: what heads, neurons and layers add, what the stream would say, and how positions turn."""

from typing import Literal

from pydantic import Field

from llamarium.page.schema.base import Answer, Query
from llamarium.page.schema.model import PublishedShape


class HeadsQuery(Query):
    """`GET /inspect/passes/{id}/heads`, and `.../heads/added`: of one layer, at one token; the last where left out."""

    layer: int = Field(ge=0)
    position: int | None = Field(None, ge=0)


class HeadsView(Answer):
    """What each head of a layer adds to a token's stream through its columns of o_proj.

    Attributes:
        layer: The layer.
        position: The token.
        norms: The length of what each head adds.
        shares: How much of attention's output lies along it; they sum to one.
        rounding: The length of what attention's output differs by from the sum of these.
    """

    layer: int
    position: int
    norms: tuple[float, ...]
    shares: tuple[float, ...]
    rounding: float


class NeuronsQuery(Query):
    """`GET /inspect/passes/{id}/neurons`: the neurons of a layer that fire most at a token."""

    layer: int = Field(ge=0)
    position: int | None = Field(None, ge=0)
    k: int = Field(12, ge=1, le=100)
    stride: int = Field(1, ge=1)


class NeuronView(Answer):
    """What one neuron computes for a token.

    Attributes:
        index: Its number, below F.
        gate: Of the gate projection.
        act: silu(gate).
        up: Of the up projection.
        gated: act · up, what its column of the down projection is multiplied with.
        by_token: The same for every `stride`-th token of the text, from the first on.
    """

    index: int
    gate: float
    act: float
    up: float
    gated: float
    by_token: tuple[float, ...]


class NeuronsView(Answer):
    """The neurons of one layer by the size of their product, the largest first."""

    layer: int
    position: int
    neurons: tuple[NeuronView, ...]


class AttributionQuery(Query):
    """`GET /inspect/passes/{id}/attribution`: where a token's logit comes from, or its lead over another's."""

    token_id: int = Field(ge=0)
    against_id: int | None = Field(None, ge=0)
    position: int | None = Field(None, ge=0)


class AdditionView(Answer):
    """Something that was added to the stream.

    Attributes:
        part: What added it.
        layer: Of which layer; None for the embedding.
        head: Which head; None but for heads.
        norm: The length of what was added.
        logit: What it gives to the logit.
    """

    part: Literal["embed", "attention", "head", "mlp"]
    layer: int | None
    head: int | None
    norm: float
    logit: float


class AttributionView(Answer):
    """Where a logit comes from.

    Attributes:
        position: After which token it is asked for.
        target_id: The token.
        against_id: Where given, all numbers are of the target's logit less this token's.
        logit: What the pass has computed.
        scale: What the final norm of that pass multiplies the stream with.
        additions: The embedding, then attention and MLP of each layer: they sum to the logit, but for `rounding`.
        heads: The heads of each layer, which sum to its attention.
        rounding: The logit less the sum.
    """

    position: int
    target_id: int
    against_id: int | None
    logit: float
    scale: float
    additions: tuple[AdditionView, ...]
    heads: tuple[AdditionView, ...]
    rounding: float


class LensQuery(Query):
    """`GET /inspect/passes/{id}/lens`: what the stream would say after a token, at each place in the depth."""

    position: int | None = Field(None, ge=0)
    k: int = Field(5, ge=1, le=20)
    token_id: int | None = Field(None, ge=0)


class LikelyView(Answer):
    """A token that may come next, and how probable it is thought to be."""

    token_id: int
    text: str
    probability: float
    logprob: float


class ChosenView(Answer):
    """What is thought of the token that was asked about; rank 1 is the most probable."""

    probability: float
    logprob: float
    rank: int


class LensPlaceView(Answer):
    """What the stream would say after one half of a layer.

    Attributes:
        layer: The layer.
        after: Which half of it has been added.
        candidates: The most probable next tokens, the best first.
        chosen: Of the token that was asked about; None if none was.
    """

    layer: int
    after: Literal["attention", "mlp"]
    candidates: tuple[LikelyView, ...]
    chosen: ChosenView | None


class LensView(Answer):
    """What the stream would say at each place, in the order of computation."""

    position: int
    token_id: int | None
    places: tuple[LensPlaceView, ...]


class LensGridQuery(Query):
    """`GET /inspect/passes/{id}/lens/grid`: what the stream would say at each layer and token.

    Attributes:
        after: Which half of a layer has been added.
        token_id: A token whose probability is returned at each place.
        start: The first token.
        stop: Up to this one, which is left out; 64 tokens at most, the whole text where left out.
    """

    after: Literal["attention", "mlp"] = "mlp"
    token_id: int | None = Field(None, ge=0)
    start: int = Field(0, ge=0)
    stop: int | None = Field(None, ge=1)


class LensCellView(Answer):
    """What the stream would say at one place: the most probable next token, and of the one that was asked about."""

    best: LikelyView
    chosen: ChosenView | None


class LensGridView(Answer):
    """A row for each layer, a cell for each token from `start` on."""

    after: Literal["attention", "mlp"]
    token_id: int | None
    start: int
    rows: tuple[tuple[LensCellView, ...], ...]


class RopeQuery(Query):
    """`GET /inspect/rope`: the pairs of the model at hand or of a published shape, and their angles at a position."""

    position: int = Field(0, ge=0)
    shape: PublishedShape | None = None


class RopePairView(Answer):
    """One pair of features: i and i + H/2.

    Attributes:
        index: i.
        frequency: Radians a position, with the model's scaling.
        unscaled: The same without.
        wavelength: Positions of one whole turn.
        angle: At the position asked about, in radians.
        turns: Whole turns over the context.
    """

    index: int
    frequency: float
    unscaled: float
    wavelength: float
    angle: float
    turns: float


class RopeView(Answer):
    """Every pair's frequency, and its angle at a position."""

    position: int
    context: int
    is_scaled: bool
    pairs: tuple[RopePairView, ...]


class DistancesQuery(Query):
    """`GET /inspect/passes/{id}/distances`: a token's query against a token's key, were they so far apart.

    Attributes:
        layer: The layer.
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


class DistancesView(Answer):
    """The score at each distance: q·k / √H of the same two vectors, turned by their positions."""

    distances: tuple[int, ...]
    scores: tuple[float, ...]
