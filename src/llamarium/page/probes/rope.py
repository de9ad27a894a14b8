"""RoPE: a model's frequencies, and a score by distance."""

from llamarium.errors import QuestionError
from llamarium.inspect.probes.rope import RopeAngles, ScoresByDistance, rope_angles, score_by_distance
from llamarium.page.open_pass import OpenModel, OpenPass
from llamarium.page.probes.probe import Count, Index, Position
from llamarium.page.schema.model import PublishedShape
from llamarium.page.selection import check_index
from llamarium.presets import PRESETS

MAX_DISTANCES = 4096
"""Of one answer."""


def rope(context: OpenModel, position: Index = 0, shape: PublishedShape | None = None) -> RopeAngles:
    """Return every pair and its angle at a position, of a published shape too."""
    return rope_angles(context.llama.config if shape is None else PRESETS[shape], position)


def distances(
    context: OpenPass,
    layer: Index,
    head: Index,
    position: Position = None,
    key: Index = 0,
    stop: Count = 128,
    stride: Count = 1,
) -> ScoresByDistance:
    """Return the score that the query of a token and the key of the token `key` would have at each distance."""
    at, selected = context.position(position), range(0, stop, stride)
    check_index("key", key, len(context.forward_pass.ids))
    if len(selected) > MAX_DISTANCES:
        message = f"these are {len(selected):,} distances; at most {MAX_DISTANCES:,} are returned: use a larger stride"
        raise QuestionError(message, code="too_many_numbers", param="stride")
    config = context.llama.config
    context.check_layer(layer)
    check_index("head", head, config.num_attention_heads)
    traced = context.trace(("q", "k"), [layer], range(at, at + 1))
    group = config.num_attention_heads // config.num_key_value_heads
    q_H, k_H = traced.arrays["q", layer][0, head], traced.arrays["k", layer][key, head // group]
    return ScoresByDistance(tuple(selected), tuple(score_by_distance(config, q_H, k_H, selected)))
