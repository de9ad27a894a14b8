"""Two models over one text, and the checkpoints of a training run."""

from llamarium.inspect.measures.comparison import ComparedToken
from llamarium.inspect.measures.streams import StreamError
from llamarium.inspect.tokens import Candidate
from llamarium.page.schema.base import View


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
        has_history: Whether it has a journal: `runs/{run}/history`.
        steps: Of its checkpoints; of more than 60, so many spread over them. None if these are not whole models.
        num_bytes: What the last one's weights occupy.
    """

    name: str
    has_history: bool
    steps: tuple[int, ...]
    num_bytes: int
    num_layers: int
    num_heads: int


class RunsView(View):
    """The runs, the names of those whose checkpoints cannot be opened, and the most tokens that checkpoints read."""

    unreadable: tuple[str, ...]
    runs: tuple[RunView, ...]
    max_tokens: int


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
