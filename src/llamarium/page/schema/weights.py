"""Weights themselves: as few bits, as inputs meet them, what few bits do to a pass, and one step of learning."""

from typing import Literal

from pydantic import Field

from llamarium.inspect.measures.streams import StreamError
from llamarium.inspect.tokens import Candidate
from llamarium.page.schema.base import Query, View
from llamarium.server.fields import Body

LinearName = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""The Linears of a layer."""

QuantizeName = Literal["NF4", "Q8_0", "Q4_1"]
"""What Linears can become while a model is loaded."""


class CodesQuery(Query):
    """`GET /inspect/codes`: weights of one row of a Linear, as codes, scales and what they mean.

    Attributes:
        layer: The layer.
        linear: Which Linear of it.
        row: Which row, an output.
        start: The first weight of the row to return.
        count: How many to return.
        quantize: As this type would have them; as they are stored where left out.
    """

    layer: int = Field(ge=0)
    linear: LinearName
    row: int = Field(0, ge=0)
    start: int = Field(0, ge=0)
    count: int = Field(32, ge=1, le=256)
    quantize: QuantizeName | None = None


class WeightView(View):
    """One weight.

    Attributes:
        code: What is stored of it alone.
        level: What the code stands for, before the scale.
        scale: What the level is multiplied with; shared with neighbours.
        minimum: What is added then; None where the type has none.
        value: What the weight means.
        original: What it was before, or None where that is not there.
    """

    code: int
    level: float
    scale: float
    minimum: float | None
    value: float
    original: float | None


class CodesView(View):
    """Weights of one row of a Linear in a type of few bits.

    Attributes:
        module: The Linear, by its name in the model.
        num_rows: Its outputs.
        num_columns: Its inputs, the weights of a row.
        start: The first weight that is returned.
        weights: They, one after the other.
        type_name: The type.
        meaning: What a weight is: q is its code, d and m are the block's scale and minimum.
        block_size: Weights in a block of the type.
        bits_per_weight: With the share of the scales.
        is_stored: The codes are those that the model has; otherwise what it would have.
        stored_type: What the model has.
        levels: What each code stands for.
        level_counts: How many weights of the whole row have each code.
        row_error: Length of the row's error over the row's length; None where the original is not there.
    """

    module: str
    num_rows: int
    num_columns: int
    start: int
    weights: tuple[WeightView, ...]
    type_name: str
    meaning: str
    block_size: int
    bits_per_weight: float
    is_stored: bool
    stored_type: str
    levels: tuple[float, ...]
    level_counts: tuple[int, ...]
    row_error: float | None


class InputsQuery(Query):
    """`GET /inspect/passes/{id}/inputs`: what a Linear is multiplied with at a token, rounded to 8 bits."""

    layer: int = Field(ge=0)
    linear: LinearName
    position: int | None = Field(None, ge=0)
    start: int = Field(0, ge=0)
    count: int = Field(32, ge=1, le=256)


class InputView(View):
    """One input: `value` is code · scale."""

    original: float
    code: int
    scale: float
    value: float


class InputsView(View):
    """Inputs as the C kernels round them.

    Attributes:
        position: The token.
        num_inputs: How many the Linear has.
        start: The first that is returned.
        inputs: They.
        num_wide: How many of all have a code of more than 8 bits: those beside the largest of their 32.
        error: Length of the error of all over their length.
        is_rounded: The pass has rounded them so; otherwise its weights are not packed, and nothing is rounded.
        input_bits: 8, or 16 where what 8 bits leave is rounded once more and multiplied too; None where nothing is.
    """

    position: int
    num_inputs: int
    start: int
    inputs: tuple[InputView, ...]
    num_wide: int
    error: float
    is_rounded: bool
    input_bits: int | None


class ErrorsQuery(Query):
    """`GET /inspect/passes/{id}/errors`: how far passes are from the one in float32, layer by layer."""

    quantize: QuantizeName | None = None


class ErrorsOfView(View):
    """The errors of one way to run the text.

    Attributes:
        what: The pass itself; or in float32 with the weights quantized; or with the inputs rounded, too.
        layers: All layers.
    """

    what: Literal["pass", "weights", "weights and inputs"]
    layers: tuple[StreamError, ...]


class ErrorsView(View):
    """How far passes are from the one of the same weights in float32.

    Attributes:
        quantize: The type of the weights, where one was asked for.
        runs: The pass itself, and where a type was asked for what that does.
    """

    quantize: QuantizeName | None
    runs: tuple[ErrorsOfView, ...]


class LessonRequest(Body):
    """`POST /inspect/passes/{id}/lesson`: one step of training on the pass's text, on a copy of the model.

    Attributes:
        optimizer: torch's, with its defaults but for the rate and no weight decay.
        learning_rate: Its rate.
        k: How many of the most probable next tokens are returned.
    """

    optimizer: Literal["SGD", "AdamW"] = "SGD"
    learning_rate: float = Field(1e-3, gt=0, le=10, allow_inf_nan=False)
    k: int = Field(50, ge=1, le=200)


class LearnedTokenView(View):
    """A token of the text but the first, and -log P of it; None where that is no finite number any more."""

    position: int
    loss: float
    loss_after: float | None


class LearnedRowView(View):
    """A token of the text, once: the length of the gradient on its row, and how far the step has moved the row."""

    token_id: int
    text: str
    gradient: float
    moved: float | None


class LessonView(View):
    """What one step of training on a text has done to a copy of the model.

    Attributes:
        optimizer: Name of the optimizer.
        learning_rate: Its rate.
        tokens: The losses.
        rows: Of the embedding table.
        gradient_norm: The length of the whole gradient.
        before: The most probable tokens to follow the text, as the copy was.
        after: The same after the step; none where the step was so large that nothing is finite any more.
        num_unpacked: How many modules had packed weights, which were unpacked in the copy: packed ones cannot learn.
        num_bytes: What the step held, about.
    """

    optimizer: Literal["SGD", "AdamW"]
    learning_rate: float
    tokens: tuple[LearnedTokenView, ...]
    rows: tuple[LearnedRowView, ...]
    gradient_norm: float
    before: tuple[Candidate, ...]
    after: tuple[Candidate, ...]
    num_unpacked: int
    num_bytes: int
