"""Quantized weights and inputs, their effect on a pass, and one step of training."""

import math
import threading
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field

from llamarium.config import EMBEDDING, HEAD
from llamarium.cost import count_parameters
from llamarium.errors import MemoryBudgetError, OptionError, QuestionError
from llamarium.extras import need_torch
from llamarium.inspect.measures.streams import relative_error, stream_errors
from llamarium.inspect.numbers import Floats
from llamarium.inspect.probes.four_bits import CodedWeights, coded_weights, rounded_inputs
from llamarium.inspect.probes.quantized import IN_C, can_round_inputs, input_bits_of, streams_as
from llamarium.inspect.shapes import linear_key, type_of
from llamarium.kernels.memory import free_bytes
from llamarium.page.binary import Numbers
from llamarium.page.executor import Pass
from llamarium.page.open_pass import OpenModel, OpenPass
from llamarium.page.probes.probe import Index, Position
from llamarium.page.probes.text import token_view
from llamarium.page.schema import weights as schema
from llamarium.page.selection import check_index
from llamarium.quant.formats import FORMATS
from llamarium.server.lifecycle.threads import check_wanted

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.inspect.probes.learning import Lesson

MAX_TOKENS = 128
"""Of a text that is learned from, or run in few bits."""

LESSON_MB = 4096.0
"""What a step of training may hold, and no more than half of the memory that is free."""

MAX_WEIGHTS = 2 * 10**9
"""Of the layers that are unpacked or quantized for one question."""

_INPUTS = {
    "q_proj": "attn_norm", "k_proj": "attn_norm", "v_proj": "attn_norm", "o_proj": "head_out",
    "gate_proj": "mlp_norm", "up_proj": "mlp_norm", "down_proj": "gated",
}  # fmt: skip
"""The activation that is each Linear's input."""

_at_work = threading.Lock()  # one such question at a time: each takes all processors, and memory


UpTo256 = Annotated[int, Field(ge=1, le=256)]
"""Weights or inputs of one answer."""


def codes(
    context: OpenModel,
    layer: Index,
    linear: schema.LinearName,
    row: Index = 0,
    start: Index = 0,
    count: UpTo256 = 32,
    quantize: schema.QuantizeName | None = None,
) -> schema.CodesView:
    """Return weights of a row of a Linear as codes, scales and what they mean, as stored or as `quantize` has them."""
    context.check_layer(layer)
    key, runner = linear_key(layer, linear), context.llama.runner
    type_of(runner, key)
    num_rows, num_columns = runner.weights[key].shape
    check_index("row", row, num_rows)
    _check_window(start, count, num_columns)
    with _alone(), _of_shape() if quantize else nullcontext():
        coded = coded_weights(runner, key, [row], quantize=quantize)
    return _codes_view(context.llama, key, range(start, start + count), coded, is_stored=quantize is None)


def matrix(
    context: OpenPass,
    linear: schema.LinearName | Literal["lm_head"],
    layer: Position = None,
    start: Index = 0,
    count: Annotated[int, Field(ge=1, le=64)] = 16,
) -> Numbers:
    """Send rows of a matrix with the pass's adapter, quantized ones as what their codes mean; axes R I."""
    if (layer is None) != (linear == "lm_head"):
        message = f"layer is {layer}; expected one for a layer's Linear, none for lm_head"
        raise QuestionError(message, param="layer")
    runner, key = context.llama.runner, HEAD
    if layer is not None:
        context.check_layer(layer)
        key = linear_key(layer, linear)
    type_of(runner, key)
    num_rows = runner.weights[EMBEDDING if key not in runner.weights else key].shape[0]
    check_index("start", start, num_rows)
    rows = range(start, min(start + count, num_rows))
    return Numbers(runner.dequantize(key, rows, adapted=True), "RI")


def inputs(
    context: OpenPass,
    layer: Index,
    linear: schema.LinearName,
    position: Position = None,
    start: Index = 0,
    count: UpTo256 = 32,
) -> schema.InputsView:
    """Return a Linear's inputs at a token, and their values in 8 bits."""
    at = context.position(position)
    context.check_layer(layer)
    bits = input_bits_of(context.llama.runner, linear_key(layer, linear))
    values = context.numbers(_INPUTS[linear], layer, range(at, at + 1)).reshape(1, -1)
    rounded = rounded_inputs(values)
    _check_window(start, count, values.shape[1])
    cut = slice(start, start + count)
    parts = (rounded.codes_MC, rounded.scales_MC, rounded.values_MC)
    columns = [values[0, cut].tolist(), *(part[0, cut].tolist() for part in parts)]
    return schema.InputsView(
        position=at,
        num_inputs=values.shape[1],
        start=start,
        inputs=tuple(
            schema.InputView(original=original, code=code, scale=scale, value=value)
            for original, code, scale, value in zip(*columns, strict=True)
        ),
        num_wide=int((abs(rounded.codes_MC) > 127).sum()),
        error=relative_error(float(np.linalg.norm(rounded.errors_MC)), float(np.linalg.norm(values))),
        is_rounded=bits is not None,
        input_bits=bits,
    )


def lesson(context: OpenPass, body: schema.LessonRequest) -> schema.LessonView:
    """Take one step of training on the pass's text, on a copy of the model: losses, gradients, predictions."""
    _check_plain(context.forward_pass)
    need_torch("a step of training")
    from llamarium.inspect.probes.learning import learn, lesson_bytes

    llama, ids = context.llama, context.forward_pass.ids
    with _alone():
        try:
            lesson_result = learn(
                llama.model, ids, optimizer=body.optimizer, learning_rate=body.learning_rate,
                k=min(body.k, llama.config.vocab_size),
                tokenizer=llama.tokenizer, unpack=True, budget_mb=min(LESSON_MB, free_bytes() / 2e6),
            )  # fmt: skip
        except MemoryBudgetError as error:
            message = str(error).removesuffix(", or raise budget_mb")
            raise QuestionError(message, code="lesson_too_large", param="optimizer") from None
    return _lesson_view(llama, body, lesson_result, lesson_bytes(llama.config, len(ids), body.optimizer))


@contextmanager
def _alone() -> Generator[None]:
    with _at_work:
        check_wanted()
        yield


def _check_window(start: int, count: int, size: int) -> None:
    check_index("start", start, size)
    if start + count > size:
        raise QuestionError(f"start + count is {start + count}; expected {size} at most", param="count")


def _check_plain(forward_pass: Pass) -> None:
    if forward_pass.experiment is not None:
        message = "the pass is an experiment, and this question is of the model as it is; ask for a pass without one"
        raise QuestionError(message, code="invalid_parameter", param="id")
    if len(forward_pass.ids) > MAX_TOKENS:
        num_tokens = len(forward_pass.ids)
        message = f"the text has {num_tokens} tokens; {MAX_TOKENS} at most for this question: ask with a shorter one"
        raise QuestionError(message, code="text_too_long", param="id")


@contextmanager
def _of_shape() -> Generator[None]:
    """Refuse a type that a matrix of this shape cannot be, as the client's choice."""
    try:
        yield
    except OptionError as error:
        raise QuestionError(str(error), code="invalid_parameter", param="quantize") from None


def _codes_view(llama: "Llama", key: str, window: range, coded: CodedWeights, *, is_stored: bool) -> schema.CodesView:
    codes_C = coded.codes_RC[0]
    values, scales = coded.values_RC[0], coded.scales_RC[0]
    minimums = None if coded.minimums_RC is None else coded.minimums_RC[0]
    originals = None if coded.original_RC is None else coded.original_RC[0]
    weights = tuple(
        schema.WeightView(
            code=int(codes_C[i]),
            level=coded.levels[int(codes_C[i])],
            scale=float(scales[i]),
            minimum=None if minimums is None else float(minimums[i]),
            value=float(values[i]),
            original=None if originals is None else float(originals[i]),
        )
        for i in window
    )
    format = FORMATS[coded.type_name]
    return schema.CodesView(
        module=key.removesuffix(".weight"),
        num_columns=len(codes_C),
        start=window.start,
        weights=weights,
        type_name=coded.type_name,
        meaning=format.weight,
        block_size=format.block_size,
        bits_per_weight=format.bits_per_weight,
        is_stored=is_stored,
        stored_type=_stored_type(llama, key),
        levels=coded.levels,
        level_counts=tuple(np.bincount(codes_C, minlength=len(coded.levels)).tolist()),
        row_error=None if originals is None else _row_error(values, originals),
    )


def _stored_type(llama: "Llama", key: str) -> str:
    """Return what a weight is held as, as `llamarium info` says; of a model that was not loaded, its dtype."""
    dtype = {source.key: source.dtype for source in llama.sources}.get(key)
    return FORMATS[type_of(llama.runner, key)].weight if dtype is None else dtype


def _row_error(values: Floats, originals: Floats) -> float:
    return relative_error(float(np.linalg.norm(values - originals)), float(np.linalg.norm(originals)))


def errors(context: OpenPass, quantize: schema.QuantizeName | None = None) -> schema.ErrorsView:
    """Return the pass's distance from the same weights in float32, layer by layer, and that of quantized weights."""
    _check_plain(context.forward_pass)
    llama, ids = context.llama, context.forward_pass.ids
    count = count_parameters(llama.config)
    if count.attention + count.mlp > MAX_WEIGHTS:
        message = (
            f"the layers have {count.attention + count.mlp:,} weights, and {MAX_WEIGHTS:,} at most are unpacked for "
            "one question here; llamarium.inspect.probes.quantized.streams_as answers it in Python"
        )
        raise QuestionError(message, code="model_too_large", param="quantize")
    trace, runner = context.trace(["resid"], context.layers), llama.runner
    with _alone(), _of_shape():
        exact = streams_as(runner, ids)
        runs = [schema.ErrorsOfView(what="pass", layers=tuple(stream_errors(trace, exact)))]
        if quantize is not None:
            check_wanted()
            weights = streams_as(runner, ids, quantize=quantize)
            runs.append(schema.ErrorsOfView(what="weights", layers=tuple(stream_errors(weights, exact))))
        if quantize in IN_C and can_round_inputs(llama.config):
            check_wanted()
            both = streams_as(runner, ids, quantize=quantize, rounds_inputs=True)
            runs.append(schema.ErrorsOfView(what="weights and inputs", layers=tuple(stream_errors(both, exact))))
    return schema.ErrorsView(quantize=quantize, runs=tuple(runs))


def _lesson_view(llama: "Llama", body: schema.LessonRequest, result: "Lesson", num_bytes: int) -> schema.LessonView:
    is_finite = all(map(math.isfinite, result.losses_after))
    gradients = result.row_gradients_RD.norm(dim=-1).tolist()
    rows = zip(result.row_ids, gradients, result.row_moves, strict=True)
    losses = zip(result.losses, result.losses_after, strict=True)
    return schema.LessonView(
        optimizer=body.optimizer,
        learning_rate=body.learning_rate,
        tokens=tuple(
            schema.LearnedTokenView(position=i, loss=loss, loss_after=_finite(after))
            for i, (loss, after) in enumerate(losses, 1)
        ),
        rows=tuple(
            schema.LearnedRowView(
                token_id=i, text=token_view(llama.tokenizer, i).text, gradient=gradient, moved=_finite(moved)
            )
            for i, gradient, moved in rows
        ),
        parts=tuple(
            schema.LearnedPartView(
                name=part.name, layer=part.layer, gradient=_finite(part.gradient), moved=_finite(part.moved)
            )
            for part in result.parts
        ),
        gradient_norm=result.gradient_norm,
        before=result.before,
        after=result.after if is_finite else (),
        num_unpacked=result.num_unpacked,
        num_bytes=num_bytes,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
