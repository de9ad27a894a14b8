"""The steps of the course, in the order of a pass."""

from llamarium.course.step import Step
from llamarium.course.steps import attend, attention, bits, layer, model, tokens, training, writing

_merge, _embed = tokens.STEPS
_rms_norm, _swiglu, _layer = layer.STEPS
_project, _rotate, _join = attention.STEPS
_attend, _attend_cached = attend.STEPS

STEPS: tuple[Step, ...] = (
    _merge, _embed, _rms_norm, _project, _rotate, _attend, _join, _swiglu, _layer,
    *model.STEPS, *writing.STEPS, _attend_cached, *bits.STEPS, *training.STEPS,
)  # fmt: skip
"""All of them; a step's number is its place, from 1."""
