"""Passes and their numbers."""

from typing import ClassVar, Literal

from pydantic import ConfigDict, Field

from llamarium.page.schema.base import Dtype, PageRequest, Query, View
from llamarium.page.schema.text import TokenView
from llamarium.server.openai.fields import Message


class ExperimentFields(PageRequest):
    """The fields of an `inspect.interventions.experiments.Experiment`."""

    model_config = ConfigDict(frozen=True)

    bidirectional: bool = False
    hidden: tuple[int, ...] = Field(default=(), strict=False, max_length=64)
    rotation: bool = True
    rope_scaling: Literal["model", "off"] = "model"


class PassRequest(PageRequest):
    """`POST /inspect/passes`: a text, its ids, or a dialog; one of them."""

    dialog: ClassVar[str | None] = "messages"

    text: str | None = None
    ids: list[int] | None = Field(None, min_length=1)
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    adapter: str | None = None
    experiment: ExperimentFields | None = None


class PassView(View):
    """A pass over one text: its id follows from the token ids, the adapter and the experiment."""

    id: str
    tokens: tuple[TokenView, ...]
    adapter: str | None
    experiment: ExperimentFields | None
    runner: str
    dtype: str
    kv_dtype: str


class ActivationQuery(Query):
    """`GET /inspect/passes/{id}/activations/{name}`: numbers of a pass.

    Attributes:
        layer: Of one layer; of all where left out, with an axis L before the others.
        head: Of one head (axis N or K); of all where left out.
        position: Of one token (axis T, or the row of S); of all where left out.
        start: On the axis T, as `stop`; the axis S has all tokens, or every so many of them.
        stop: Up to this one, which is left out; the whole text where left out.
        stride: Every so many tokens.
    """

    layer: int | None = Field(None, ge=0)
    head: int | None = Field(None, ge=0)
    position: int | None = Field(None, ge=0)
    start: int = Field(0, ge=0)
    stop: int | None = Field(None, ge=1)
    stride: int = Field(1, ge=1)
    dtype: Dtype = "float32"
