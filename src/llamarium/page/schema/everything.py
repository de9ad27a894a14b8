"""Everything that travels as JSON, for the page's side of the schema."""

import json
from typing import Any, cast

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from llamarium.inspect.lens import Lens
from llamarium.inspect.neighbors import Neighbors, Similarity
from llamarium.inspect.probes.attribution import Attribution
from llamarium.inspect.probes.cost import TokenCost
from llamarium.inspect.probes.neurons import Neurons
from llamarium.inspect.probes.sampling import SamplerSteps
from llamarium.page.compare.schema import ComparisonView, MomentView, RunRowsView, RunsView, SidesView
from llamarium.page.schema.base import EndView
from llamarium.page.schema.clients import OpenedView, RequestsView, TicketRequest, TicketView
from llamarium.page.schema.interventions import EditedRequest, EditedView, PatchBeginView, PatchCellsView, PatchRequest
from llamarium.page.schema.model import ModelView, SourceView
from llamarium.page.schema.passes import NextView, PassRequest, PassView
from llamarium.page.schema.probes import DistancesView, HeadsView, RopeView
from llamarium.page.schema.sampling import SamplerRequest, ScoreView
from llamarium.page.schema.text import TokensRequest, TokensView
from llamarium.page.schema.weights import CodesView, ErrorsView, InputsView, LessonRequest, LessonView
from llamarium.page.schema.words import NeighborsRequest, SimilarityRequest, WordRequest

ASKED = (
    TokensRequest,
    PassRequest,
    NeighborsRequest,
    SimilarityRequest,
    WordRequest,
    SamplerRequest,
    TicketRequest,
    LessonRequest,
    EditedRequest,
    PatchRequest,
)
ANSWERED = (
    ModelView,
    SourceView,
    TokensView,
    PassView,
    NextView,
    Neighbors,
    Similarity,
    HeadsView,
    Neurons,
    Attribution,
    Lens,
    RopeView,
    DistancesView,
    SamplerSteps,
    ScoreView,
    TokenCost,
    TicketView,
    RequestsView,
    OpenedView,
    CodesView,
    InputsView,
    ErrorsView,
    LessonView,
    EditedView,
    PatchBeginView,
    PatchCellsView,
    EndView,
    SidesView,
    ComparisonView,
    RunsView,
    RunRowsView,
    MomentView,
)


class _Everything(GenerateJsonSchema):
    """A schema in which what is answered has all its fields, those with a default too."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        return self.mode == "serialization" or super().field_is_required(field, total)


def as_json() -> str:
    """Return the schema of everything that travels as JSON."""
    asked = [(kind, "validation", TypeAdapter(kind)) for kind in ASKED]
    answered = [(kind, "serialization", TypeAdapter(kind)) for kind in ANSWERED]
    _, schema = TypeAdapter.json_schemas([*asked, *answered], schema_generator=_Everything)  # pyright: ignore[reportArgumentType]
    named = {"title": "Schema", "$defs": {name: _untitled(one) for name, one in schema["$defs"].items()}}
    return json.dumps(named, indent=2, sort_keys=True) + "\n"


def _untitled(schema: Any) -> Any:
    """Leave out the titles that pydantic makes of fields' names: each would become a type of TypeScript."""
    if isinstance(schema, list):
        return [_untitled(one) for one in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    fields = cast("dict[str, Any]", schema)
    return {key: _untitled(one) for key, one in fields.items() if not (key == "title" and isinstance(one, str))}
