"""What layers add to the stream, what it would say after each of them, and a pass as a whole."""

from collections.abc import Collection
from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field

from llamarium.errors import QuestionError
from llamarium.inspect.lens import STREAMS, Half, Lens
from llamarium.inspect.lens import lens as read_stream
from llamarium.inspect.measures import after_error as errors
from llamarium.inspect.measures import head_kinds as kinds_of
from llamarium.inspect.measures.after_error import AfterError, ErrorKind
from llamarium.inspect.measures.head_kinds import HeadKinds
from llamarium.inspect.measures.linear_probe import LinearProbe
from llamarium.inspect.measures.linear_probe import linear_probe as probes_of
from llamarium.inspect.measures.probe_tasks import ProbeTask, examples_of
from llamarium.inspect.probes import attribution as attributions
from llamarium.inspect.probes import heads as heads_of
from llamarium.inspect.probes import neurons as neurons_of
from llamarium.inspect.probes import picture as pictures
from llamarium.inspect.probes.attribution import Attribution
from llamarium.inspect.probes.heads import HeadShares
from llamarium.inspect.probes.neurons import Neurons
from llamarium.inspect.trace import Trace
from llamarium.page.binary import Numbers, check_size
from llamarium.page.open_pass import OpenModel, OpenPass
from llamarium.page.probes.probe import Count, Index, Position, Stop
from llamarium.page.schema.passes import ActivationQuery
from llamarium.page.selection import window_of
from llamarium.server.lifecycle.threads import check_wanted

MAX_KINDS_TOKENS = 512
"""Of all whose pairs each head has a share."""

MAX_GRID_TOKENS = 64
"""At each of which the lens reads every layer at once: the whole vocabulary for each place."""

MAX_BLOCK_TOKENS = 2048
"""Of a picture in blocks: each of them looks at each."""

TokenId = Annotated[int | None, Field(ge=0)]
"""Of a token that is asked about, or none."""

_STEP_BYTES = 160 * 10**6  # of all layers' activations that a picture holds at once: a trace has 256 MB


def activations(context: OpenPass, name: str, query: ActivationQuery) -> Numbers:
    """Send an activation's numbers."""
    return replace(context.select(name, query), dtype=query.dtype)


def heads(context: OpenPass, layer: Index, position: Position = None) -> HeadShares:
    """Return length and share of what each head of a layer adds to a token's stream."""
    return _heads(context, layer, position).at(0)


def heads_added(context: OpenPass, layer: Index, position: Position = None) -> Numbers:
    """Send what each head of a layer adds to a token's stream; axes N D."""
    return Numbers(_heads(context, layer, position).added_TND[0], "ND")


def _heads(context: OpenPass, layer: int, position: int | None) -> heads_of.HeadsJoined:
    at = context.position(position)
    context.check_layer(layer)
    return heads_of.heads_joined(context.llama.runner, context.trace(heads_of.NAMES, [layer], range(at, at + 1)), layer)


def head_kinds(context: OpenPass) -> HeadKinds:
    """Return how much of each head's attention goes to the previous token, the first one, and by induction."""
    num_tokens = len(context.forward_pass.ids)
    if num_tokens > MAX_KINDS_TOKENS:
        message = f"{num_tokens} tokens; heads are sorted on {MAX_KINDS_TOKENS} at most: use a shorter text"
        raise QuestionError(message, code="invalid_parameter", param="id")
    return kinds_of.head_kinds(context.trace(kinds_of.NAMES, context.layers))


def neurons(
    context: OpenPass,
    layer: Index,
    position: Position = None,
    k: Annotated[int, Field(ge=1, le=100)] = 12,
    stride: Count = 1,
) -> Neurons:
    """Return the neurons of a layer that fire most at a token, and what they do at every so many others."""
    at, rows = context.position(position), range(0, len(context.forward_pass.ids), stride)
    context.check_layer(layer)
    traced = _with(context, neurons_of.NAMES, layer, at, rows)
    return neurons_of.top_neurons(context.llama.config, traced, layer, position=at, k=k)


def _with(context: OpenPass, names: Collection[str], layer: int, at: int, rows: range) -> Trace:
    """Trace some tokens, and behind them the one in question, if it is none of them."""
    some = context.trace(names, [layer], rows)
    if at in rows:
        return some
    alone = context.trace(names, [layer], range(at, at + 1))
    both = {key: np.concatenate([values, alone.arrays[key]]) for key, values in some.arrays.items()}
    return Trace(some.token_ids, (*rows, at), both)


def attribution(
    context: OpenPass, token_id: Index, against_id: TokenId = None, position: Position = None
) -> Attribution:
    """Divide a token's logit, or its lead over another's, among everything that was added to the stream."""
    at = context.position(position)
    context.check_token("token_id", token_id)
    context.check_token("against_id", against_id)
    traced = context.trace(attributions.NAMES, context.layers, range(at, at + 1))
    return attributions.attribute(context.llama.runner, traced, token_id, position=at, against_id=against_id)


def lens(
    context: OpenPass, position: Position = None, k: Annotated[int, Field(ge=1, le=20)] = 5, token_id: TokenId = None
) -> Lens:
    """Return what the stream would say after a token, after attention and after the MLP of each layer."""
    at = context.position(position)
    return _lens(context, STREAMS.values(), range(at, at + 1), k, token_id)


def lens_grid(
    context: OpenPass,
    start: Index = 0,
    stop: Stop = None,
    stride: Count = 1,
    after: Half = "mlp",
    token_id: TokenId = None,
) -> Lens:
    """Return what the stream would say after a half of each layer at some tokens: the most probable one alone.

    With `token_id` that token's probability at each place.
    """
    rows = window_of(len(context.forward_pass.ids), start, stop, stride)
    if len(rows) > MAX_GRID_TOKENS:
        message = (
            f"{len(rows)} tokens are requested, and {MAX_GRID_TOKENS} at most at once; give start and stop, or stride"
        )
        raise QuestionError(message, code="invalid_parameter", param="stop")
    return _lens(context, (STREAMS[after],), rows, 1, token_id)


def _lens(context: OpenPass, names: Collection[str], rows: range, k: int, token_id: int | None) -> Lens:
    context.check_token("token_id", token_id)
    traced = context.trace(names, context.layers, rows)
    return read_stream(context.llama.runner, traced, k, context.llama.tokenizer, chosen_id=token_id)


def picture(context: OpenPass, start: Index = 0, stop: Stop = None, stride: Count = 1, blocks: bool = False) -> Numbers:
    """Send what a pass is drawn from as a whole, as `inspect/probes/picture.py` says; axis P.

    With `blocks` a column is all tokens up to its own from the column before, and not its own alone.
    """
    columns = window_of(len(context.forward_pass.ids), start, stop, stride)
    if blocks and columns.stop > MAX_BLOCK_TOKENS:
        message = f"{columns.stop} tokens; {MAX_BLOCK_TOKENS} at most are shown in blocks: give stride alone"
        raise QuestionError(message, code="invalid_parameter", param="blocks")
    check_size(pictures.num_pairs(columns) * len(context.layers), "float32")
    config = context.llama.config
    pattern, streams = (
        config.num_attention_heads * len(context.forward_pass.ids),
        len(pictures.OF_A_TOKEN) * config.hidden_size,
    )
    of_a_token = 4 * len(context.layers) * (pattern + streams)
    step = max(1, _STEP_BYTES // of_a_token // (columns.step if blocks else 1))
    every = range(len(context.forward_pass.ids))
    if (pictures.tokens_of(columns) if blocks else columns) == every and len(every) * of_a_token <= _STEP_BYTES:
        full_trace = context.trace((*pictures.OF_ALL, *pictures.OF_A_TOKEN), context.layers)  # in one run of the text
        return Numbers(pictures.far_view([full_trace], [full_trace], columns, in_blocks=blocks), "P")
    layer_traces = [context.trace(pictures.OF_ALL, [layer]) for layer in context.layers]
    some = (columns[at : at + step] for at in range(0, len(columns), step))
    rows = map(pictures.tokens_of, some) if blocks else some
    parts = (context.trace(pictures.OF_A_TOKEN, context.layers, part_rows) for part_rows in rows)
    return Numbers(pictures.far_view(layer_traces, parts, columns, in_blocks=blocks), "P")


def linear_probe(context: OpenModel, task: ProbeTask) -> LinearProbe:
    """Return how well a linear map reads a bundled property from the stream, before and after each layer."""
    llama = context.llama
    return probes_of(llama.runner, examples_of(task, llama.tokenizer), check_wanted=check_wanted)


def after_error(context: OpenModel, kind: ErrorKind = "likely") -> AfterError:
    """Return how surprised the model is by the bundled texts behind a wrong token, by distance."""
    texts = [context.llama.encode(text) for text in errors.TEXTS]
    return errors.surprise_after_error(context.llama.runner, texts, kind=kind, check_wanted=check_wanted)
