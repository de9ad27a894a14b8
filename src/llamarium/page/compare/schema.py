"""Two models over one text, and the checkpoints of a training run."""

from pydantic import Field

from llamarium.inspect.measures.comparison import ComparedToken
from llamarium.inspect.measures.streams import StreamError
from llamarium.inspect.tokens import Candidate
from llamarium.page.schema.base import Query, View


class SideView(View):
    """A `Side`, with the `seconds` that building it took; None where it has not been built."""

    id: str
    title: str
    words: str
    num_bytes: int
    seconds: float | None
    vocabulary: str


class SidesView(View):
    """What can be compared.

    Attributes:
        sides: The first is the model as it answers.
        max_bytes: What one of them may take now: half of the memory that is free, one is there at a time.
        max_tokens: Of a text that is compared.
        side: The default.
        against: The default that it is measured against.
        note: What cannot be seen of the served model, as only packed weights are at hand; "" where others are.
        in_bits: What `/inspect/passes/{id}/bits` can be asked of, by name; "" is the served model.
    """

    sides: tuple[SideView, ...]
    max_bytes: int
    max_tokens: int
    side: str
    against: str
    note: str
    in_bits: tuple[str, ...]


class CompareQuery(Query):
    """`GET /inspect/passes/{id}/compare`: two sides over the text of a pass, `k` candidates for each token and side."""

    side: str = Field(max_length=300)
    against: str = Field(max_length=300)
    k: int = Field(3, ge=1, le=20)


class ComparisonView(View):
    """Two sides over one text.

    Attributes:
        kl: The mean of the tokens'.
        same_top: The share of the tokens after which both have the same most probable one.
        texts: The tokens' texts.
    """

    side: SideView
    against: SideView
    layers: tuple[StreamError, ...]
    tokens: tuple[ComparedToken, ...]
    kl: float
    same_top: float
    texts: tuple[str, ...]


class BitsQuery(Query):
    """`GET /inspect/passes/{id}/bits`: a reference in each type; the first of `SidesView.in_bits` where left out."""

    of: str | None = Field(None, max_length=300)


class BitsRow(View):
    """A reference in one type, or the served model, against the reference in float32.

    Attributes:
        bits: Of a weight; None where a type's are unknown.
        is_shown: Whether it is the served model as it answers.
        errors: Relative error of the stream after each layer, the mean of the tokens'.
        kl: The mean of the tokens'.
        perplexity: Of a text that is always the same; None where the model cannot read it.
    """

    type: str
    bits: float | None
    is_shown: bool
    errors: tuple[float, ...]
    kl: float
    same_top: float
    perplexity: float | None


class BitsView(View):
    """A reference in each type; `num_characters` of the text whose perplexity is measured."""

    of: str
    texts: tuple[str, ...]
    rows: tuple[BitsRow, ...]
    num_characters: int


class RunView(View):
    """A training run that the server was started with.

    Attributes:
        steps: Of its checkpoints; of more than 60, so many spread over them.
        num_bytes: What the last one's weights occupy.
    """

    name: str
    steps: tuple[int, ...]
    num_bytes: int
    num_layers: int
    num_heads: int


class RunsView(View):
    """The runs whose checkpoints can be looked at, those that cannot be opened, and the most tokens that they read."""

    unreadable: tuple[str, ...]
    runs: tuple[RunView, ...]
    max_tokens: int


class RunRowsQuery(Query):
    """`GET /inspect/runs/{run}/rows`: rows of the embedding table over a run, by ids that commas separate."""

    ids: str = Field(pattern=r"^[0-9]{1,9}(,[0-9]{1,9})*$", max_length=1024)


class RunRowsView(View):
    """Rows of the embedding table over a run, all in one projection.

    Attributes:
        places: For each step and row, where it stands on the first two principal components of the last checkpoint's.
        share: Of the last one's variance that these show.
    """

    steps: tuple[int, ...]
    ids: tuple[int, ...]
    places: tuple[tuple[tuple[float, ...], ...], ...]
    share: float


class RewardedView(View):
    """One answer of a group; reward and advantage are None where the journal has no number."""

    text: str
    reward: float | None
    advantage: float | None


class GroupView(View):
    """A prompt that a run on rewards answered several times, the best answer first."""

    step: int
    prompt: str
    answers: tuple[RewardedView, ...]


class GroupsView(View):
    """Groups of answers over a run; none where it learned from no rewards."""

    groups: tuple[GroupView, ...]


class MomentQuery(Query):
    """`GET /inspect/passes/{id}/moment`: a checkpoint's predictions of a pass's text, and the patterns of a layer."""

    run: str = Field(max_length=300)
    step: int = Field(ge=0)
    layer: int = Field(ge=0)


class MomentPatternQuery(MomentQuery):
    """`GET /inspect/passes/{id}/moment/pattern`: a head's pattern by a checkpoint, as bytes; axes T S."""

    head: int = Field(ge=0)


class MomentView(View):
    """A checkpoint's predictions of a text.

    Attributes:
        surprises: -log P of each token, nats; None for the first.
        best: The most probable token after the text's last.
        seconds: To load the checkpoint.
        ids: What it has read: of another vocabulary than the served model's, the first tokens of the same text.
        texts: Of those.
    """

    run: str
    step: int
    surprises: tuple[float | None, ...]
    loss: float | None
    best: Candidate
    seconds: float | None
    ids: tuple[int, ...]
    texts: tuple[str, ...]
