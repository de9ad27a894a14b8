"""Quantized weights and inputs, their effect on a pass, and one step of training."""

import math
import threading
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated

import numpy as np
from fastapi import APIRouter, Query, Request, Response

from llamarium.config import EMBEDDING, HEAD
from llamarium.cost import count_parameters
from llamarium.errors import MemoryBudgetError, OptionError
from llamarium.extras import need_torch
from llamarium.generation.text_engine import TextEngine
from llamarium.inspect.measures.streams import relative_error, stream_errors
from llamarium.inspect.numbers import Floats
from llamarium.inspect.probes.four_bits import CodedWeights, coded_weights, rounded_inputs
from llamarium.inspect.probes.quantized import IN_C, can_round_inputs, input_bits_of, streams_as
from llamarium.inspect.shapes import linear_key, type_of
from llamarium.kernels.memory import free_bytes
from llamarium.page.binary import Numbers, respond
from llamarium.page.executor import Pass
from llamarium.page.routes.open_pass import OfPass, OpenPass
from llamarium.page.routes.tokens import token_view
from llamarium.page.schema import weights as schema
from llamarium.page.selection import check_index
from llamarium.page.work import work_on
from llamarium.quant.formats import FORMATS
from llamarium.server.errors import ApiError
from llamarium.server.http.body import StrictRoute
from llamarium.server.lifecycle.threads import check_wanted

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.inspect.probes.learning import Lesson

router = APIRouter(prefix="/inspect", route_class=StrictRoute)

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


@router.get("/codes")
async def codes(request: Request, query: Annotated[schema.CodesQuery, Query()]) -> schema.CodesView:
    """Return weights of a Linear as codes, scales and what they mean, as stored or as another type has it."""

    def read(llama: "Llama", _: TextEngine) -> schema.CodesView:
        check_index("layer", query.layer, llama.config.num_hidden_layers)
        key, runner = linear_key(query.layer, query.linear), llama.runner
        type_of(runner, key)
        num_rows, num_columns = runner.weights[key].shape
        check_index("row", query.row, num_rows)
        _check_window(query.start, query.count, num_columns)
        with _alone(), _of_shape() if query.quantize else nullcontext():
            found = coded_weights(runner, key, [query.row], quantize=query.quantize)
        return _codes_view(llama, key, query, found)

    return await work_on(request, "quantize", read)


@router.get("/passes/{pass_id}/matrix", response_class=Response)
async def matrix(requested: OfPass, query: Annotated[schema.RowsOfQuery, Query()]) -> Response:
    """Send rows of a matrix, quantized ones as what their codes mean; axes R I."""
    if (query.layer is None) != (query.linear == "lm_head"):
        raise ApiError(
            400, f"layer is {query.layer}; expected one for a layer's Linear, none for lm_head", param="layer"
        )

    def read(known: OpenPass) -> Response:
        runner, key = known.llama.runner, HEAD
        if query.layer is not None:
            known.check_layer(query.layer)
            key = linear_key(query.layer, query.linear)
        type_of(runner, key)
        num_rows = runner.weights[EMBEDDING if key not in runner.weights else key].shape[0]
        check_index("start", query.start, num_rows)
        rows = range(query.start, min(query.start + query.count, num_rows))
        return respond(Numbers(runner.dequantize(key, rows, adapted=True), "RI"), "float32")

    return await requested.read("linear", read)


@router.get("/passes/{pass_id}/inputs")
async def inputs(requested: OfPass, query: Annotated[schema.InputsQuery, Query()]) -> schema.InputsView:
    """Return a Linear's inputs at a token, and their values in 8 bits."""
    at = requested.position(query.position)

    def read(known: OpenPass) -> schema.InputsView:
        known.check_layer(query.layer)
        bits = input_bits_of(known.llama.runner, linear_key(query.layer, query.linear))
        values = known.numbers(_INPUTS[query.linear], query.layer, range(at, at + 1)).reshape(1, -1)
        found = rounded_inputs(values)
        _check_window(query.start, query.count, values.shape[1])
        cut = slice(query.start, query.start + query.count)
        parts = (found.codes_MC, found.scales_MC, found.values_MC)
        columns = [values[0, cut].tolist(), *(part[0, cut].tolist() for part in parts)]
        return schema.InputsView(
            position=at,
            num_inputs=values.shape[1],
            start=query.start,
            inputs=tuple(
                schema.InputView(original=original, code=code, scale=scale, value=value)
                for original, code, scale, value in zip(*columns, strict=True)
            ),
            num_wide=int((abs(found.codes_MC) > 127).sum()),
            error=relative_error(float(np.linalg.norm(found.errors_MC)), float(np.linalg.norm(values))),
            is_rounded=bits is not None,
            input_bits=bits,
        )

    return await requested.read("linear", read)


@router.get("/passes/{pass_id}/errors")
async def errors(requested: OfPass, query: Annotated[schema.ErrorsQuery, Query()]) -> schema.ErrorsView:
    """Return the pass's distance from the same weights in float32, layer by layer, and that of quantized weights."""
    _check_plain(requested.one)
    return await requested.read("quantize", lambda known: _errors(known, query.quantize))


@router.post("/passes/{pass_id}/lesson")
async def lesson(requested: OfPass, body: schema.LessonRequest) -> schema.LessonView:
    """Take one step of training on the pass's text, on a copy of the model: losses, gradients, predictions."""
    _check_plain(requested.one)

    def read(known: OpenPass) -> schema.LessonView:
        need_torch("a step of training")
        from llamarium.inspect.probes.learning import learn, lesson_bytes

        llama, ids = known.llama, known.one.ids
        with _alone():
            try:
                found = learn(
                    llama.model, ids, optimizer=body.optimizer, learning_rate=body.learning_rate,
                    k=min(body.k, llama.config.vocab_size),
                    tokenizer=llama.tokenizer, unpack=True, budget_mb=min(LESSON_MB, free_bytes() / 2e6),
                )  # fmt: skip
            except MemoryBudgetError as error:
                message = str(error).removesuffix(", or raise budget_mb")
                raise ApiError(400, message, code="lesson_too_large", param="optimizer") from None
        return _lesson_view(llama, body, found, lesson_bytes(llama.config, len(ids), body.optimizer))

    return await requested.read("id", read)


@contextmanager
def _alone() -> Generator[None]:
    with _at_work:
        check_wanted()
        yield


def _check_window(start: int, count: int, size: int) -> None:
    check_index("start", start, size)
    if start + count > size:
        raise ApiError(400, f"start + count is {start + count}; expected {size} at most", param="count")


def _check_plain(one: Pass) -> None:
    if one.experiment is not None:
        message = "the pass is an experiment, and this question is of the model as it is; ask for a pass without one"
        raise ApiError(400, message, code="invalid_parameter", param="id")
    if len(one.ids) > MAX_TOKENS:
        message = f"the text has {len(one.ids)} tokens; {MAX_TOKENS} at most for this question: ask with a shorter one"
        raise ApiError(400, message, code="text_too_long", param="id")


@contextmanager
def _of_shape() -> Generator[None]:
    """Refuse a type that a matrix of this shape cannot be, as the client's choice."""
    try:
        yield
    except OptionError as error:
        raise ApiError(400, str(error), code="invalid_parameter", param="quantize") from None


def _codes_view(llama: "Llama", key: str, query: schema.CodesQuery, found: CodedWeights) -> schema.CodesView:
    codes_C, cut = found.codes_RC[0], slice(query.start, query.start + query.count)
    values, scales = found.values_RC[0], found.scales_RC[0]
    minimums = None if found.minimums_RC is None else found.minimums_RC[0]
    originals = None if found.original_RC is None else found.original_RC[0]
    weights = tuple(
        schema.WeightView(
            code=int(codes_C[i]),
            level=found.levels[int(codes_C[i])],
            scale=float(scales[i]),
            minimum=None if minimums is None else float(minimums[i]),
            value=float(values[i]),
            original=None if originals is None else float(originals[i]),
        )
        for i in range(cut.start, cut.stop)
    )
    format = FORMATS[found.type_name]
    return schema.CodesView(
        module=key.removesuffix(".weight"),
        num_columns=len(codes_C),
        start=query.start,
        weights=weights,
        type_name=found.type_name,
        meaning=format.weight,
        block_size=format.block_size,
        bits_per_weight=format.bits_per_weight,
        is_stored=query.quantize is None,
        stored_type=_stored_type(llama, key),
        levels=found.levels,
        level_counts=tuple(np.bincount(codes_C, minlength=len(found.levels)).tolist()),
        row_error=None if originals is None else _row_error(values, originals),
    )


def _stored_type(llama: "Llama", key: str) -> str:
    """Return what a weight is held as, as `llamarium info` says; of a model that was not loaded, its dtype."""
    found = {source.key: source.dtype for source in llama.sources}.get(key)
    return FORMATS[type_of(llama.runner, key)].weight if found is None else found


def _row_error(values: Floats, originals: Floats) -> float:
    return relative_error(float(np.linalg.norm(values - originals)), float(np.linalg.norm(originals)))


def _errors(known: OpenPass, method: schema.QuantizeName | None) -> schema.ErrorsView:
    llama, ids = known.llama, known.one.ids
    count = count_parameters(llama.config)
    if count.attention + count.mlp > MAX_WEIGHTS:
        message = (
            f"the layers have {count.attention + count.mlp:,} weights, and {MAX_WEIGHTS:,} at most are unpacked for "
            "one question here; llamarium.inspect.probes.quantized.streams_as answers it in Python"
        )
        raise ApiError(400, message, code="model_too_large", param="quantize")
    trace, runner = known.trace(["resid"], known.layers), llama.runner
    with _alone(), _of_shape():
        exact = streams_as(runner, ids)
        runs = [schema.ErrorsOfView(what="pass", layers=tuple(stream_errors(trace, exact)))]
        if method is not None:
            check_wanted()
            weights = streams_as(runner, ids, quantize=method)
            runs.append(schema.ErrorsOfView(what="weights", layers=tuple(stream_errors(weights, exact))))
        if method in IN_C and can_round_inputs(llama.config):
            check_wanted()
            both = streams_as(runner, ids, quantize=method, rounds_inputs=True)
            runs.append(schema.ErrorsOfView(what="weights and inputs", layers=tuple(stream_errors(both, exact))))
    return schema.ErrorsView(quantize=method, runs=tuple(runs))


def _lesson_view(llama: "Llama", body: schema.LessonRequest, found: "Lesson", num_bytes: int) -> schema.LessonView:
    is_finite = all(map(math.isfinite, found.losses_after))
    gradients = found.row_gradients_RD.norm(dim=-1).tolist()
    rows = zip(found.row_ids, gradients, found.row_moves, strict=True)
    losses = zip(found.losses, found.losses_after, strict=True)
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
            for part in found.parts
        ),
        gradient_norm=found.gradient_norm,
        before=found.before,
        after=found.after if is_finite else (),
        num_unpacked=found.num_unpacked,
        num_bytes=num_bytes,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
