"""Interventions in a pass: edits, steering, activations of a second prompt."""

from typing import Literal

from pydantic import Field

from llamarium.inspect.interventions.effect import Floor, Measured, PatchCell, TokenEffect
from llamarium.page.schema.base import PageRequest, View
from llamarium.page.schema.text import TokenView


class EditFields(PageRequest):
    """What a part of the model computes, times `factor`; as `inspect.interventions.edits.Edit`.

    Attributes:
        part: The embedding's rows; what attention, one head or the MLP of a layer computes; the stream after a layer.
        layer: None for "embed".
        head: For "head" alone.
        positions: At which tokens; all where left out.
        factor: 0 removes it, 1 leaves it unchanged.
    """

    part: Literal["embed", "attention", "head", "mlp", "residual"]
    layer: int | None = None
    head: int | None = None
    positions: list[int] | None = Field(None, min_length=1, max_length=1024)
    factor: float = Field(0.0, ge=-1000, le=1000)


class SteeringFields(PageRequest):
    """The difference of two prompts, at their last tokens, added to the stream after a layer, at some tokens or all."""

    toward: str
    away: str
    layer: int
    strength: float = Field(1.0, ge=-1000, le=1000)
    positions: list[int] | None = Field(None, min_length=1, max_length=1024)


class EditedRequest(PageRequest):
    """`POST /inspect/passes/{id}/edited`: the same text with edits of the model, beside it without them.

    Attributes:
        steering: One more edit, after them.
        position: The token before the predicted one; the last where left out.
        token_id: A token that is always listed, whatever its rank.
        k: How many of the most probable next tokens of each are listed.
        max_tokens: Tokens that both generate greedily after it.
    """

    edits: list[EditFields] = Field([], max_length=64)
    steering: SteeringFields | None = None
    position: int | None = Field(None, ge=0)
    token_id: int | None = Field(None, ge=0)
    k: int = Field(10, ge=1, le=50)
    max_tokens: int = Field(0, ge=0, le=32)


class EditedView(View):
    """An `inspect.interventions.effect.Effect`, and how the text goes on without the edits and with them."""

    position: int
    runner: str
    divergence: float
    floor: Floor
    tokens: tuple[TokenEffect, ...]
    answer_before: tuple[TokenView, ...]
    answer_after: tuple[TokenView, ...]


class PatchRequest(PageRequest):
    """`POST /inspect/passes/{id}/patches`: put a second prompt's activations into this pass, place by place.

    Attributes:
        source_ids: The second prompt; as many tokens.
        token_id: The next token that is measured.
        against_id: Its logit is subtracted.
        part: What is put in: the stream after a layer, or what its attention, or its MLP, adds.
        layers: Rows of the grid; all where left out.
        positions: Columns; all where left out.
    """

    source_ids: list[int] = Field(min_length=1)
    token_id: int = Field(ge=0)
    against_id: int | None = Field(None, ge=0)
    part: Literal["residual", "attention", "mlp"] = "residual"
    layers: list[int] | None = Field(None, min_length=1)
    positions: list[int] | None = Field(None, min_length=1)


class PatchBeginView(View):
    """The first event of an `inspect.interventions.patching.PatchGrid`, with the number of its cells."""

    type: Literal["begin"] = "begin"
    base: Measured
    source: Measured
    floor: float
    layers: tuple[int, ...]
    positions: tuple[int, ...]
    total: int


class PatchCellsView(View):
    """Some cells, and how many have come by now."""

    type: Literal["cells"] = "cells"
    cells: tuple[PatchCell, ...]
    done: int
