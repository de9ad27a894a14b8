"""Quantized weights and inputs, their effect on a pass, and one step of training."""

from typing import Literal

from pydantic import Field

from llamarium.inspect.measures.streams import StreamError
from llamarium.inspect.tokens import Candidate
from llamarium.page.schema.base import PageRequest, View

LinearName = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""The Linears of a layer."""

QuantizeName = Literal["NF4", "Q8_0", "Q4_1"]
"""What Linears can become while a model is loaded."""


class WeightView(View):
    """One weight.

    Attributes:
        level: The code's value before the scale.
        scale: Multiplies the level; shared within a block.
        minimum: Is added then; None where the type has none.
        original: The weight before, or None where it is not kept.
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
        num_columns: Its inputs, the weights of a row.
        meaning: A weight's formula: q is its code, d and m are the block's scale and minimum.
        block_size: Weights in a block of the type.
        bits_per_weight: With the share of the scales.
        is_stored: The codes are the model's own.
        stored_type: The model's own.
        levels: The value of each code before the scale.
        level_counts: How many weights of the whole row have each code.
        row_error: Length of the row's error over the row's length; None where the original is not kept.
    """

    module: str
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


class InputView(View):
    """One input: `value` is code · scale."""

    original: float
    code: int
    scale: float
    value: float


class InputsView(View):
    """Inputs as the C kernels round them.

    Attributes:
        num_inputs: Of the whole Linear.
        num_wide: How many of all have a code of more than 8 bits: those beside the largest of their 32.
        error: Length of the error of all over their length.
        is_rounded: The pass has rounded them so; False where its weights are not packed.
        input_bits: 8, or 16 where the rest is rounded once more and multiplied too; None where nothing is rounded.
    """

    position: int
    num_inputs: int
    start: int
    inputs: tuple[InputView, ...]
    num_wide: int
    error: float
    is_rounded: bool
    input_bits: int | None


class ErrorsOfView(View):
    """The errors of the pass itself; in float32 with the weights quantized; or with the inputs rounded, too."""

    what: Literal["pass", "weights", "weights and inputs"]
    layers: tuple[StreamError, ...]


class ErrorsView(View):
    """Distances from the pass of the same weights in float32: of the pass itself, and of those in a requested type."""

    quantize: QuantizeName | None
    runs: tuple[ErrorsOfView, ...]


class LessonRequest(PageRequest):
    """`POST /inspect/passes/{id}/lesson`: one step of training on the pass's text, on a copy of the model.

    Attributes:
        optimizer: torch's, with its defaults but for the rate and no weight decay.
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


class LearnedPartView(View):
    """A part of the model: the length of its gradient, and how far the step has moved its weights.

    Attributes:
        layer: None for the embedding, the final norm, and a head that is not tied.
    """

    name: Literal["embedding", "attention", "MLP", "norms", "head"]
    layer: int | None
    gradient: float | None
    moved: float | None


class LessonView(View):
    """The effect of one step of training on a copy of the model.

    Attributes:
        rows: Of the embedding table.
        parts: Of the model, in the order of the forward pass.
        before: The most probable next tokens before the step.
        after: Those after it; empty where the step was so large that numbers are not finite any more.
        num_unpacked: Modules whose packed weights were unpacked in the copy: packed ones cannot learn.
        num_bytes: Memory of the step, about.
    """

    optimizer: Literal["SGD", "AdamW"]
    learning_rate: float
    tokens: tuple[LearnedTokenView, ...]
    rows: tuple[LearnedRowView, ...]
    parts: tuple[LearnedPartView, ...]
    gradient_norm: float
    before: tuple[Candidate, ...]
    after: tuple[Candidate, ...]
    num_unpacked: int
    num_bytes: int
