"""Everything that travels as JSON, for the page's side of the schema."""

import json
from collections.abc import Iterator
from typing import Any, cast

from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode

from llamarium.page.extension import ROUTERS
from llamarium.page.routes.ticket import ticket_routes
from llamarium.page.schema.base import EndView
from llamarium.page.schema.interventions import PatchBeginView, PatchCellsView
from llamarium.page.ticket import Ticket

STREAMED = (PatchBeginView, PatchCellsView, EndView)
"""Events of streams, which no route returns."""


class _Everything(GenerateJsonSchema):
    """A schema in which what is answered has all its fields, those with a default too."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        return self.mode == "serialization" or super().field_is_required(field, total)


def as_json() -> str:
    """Return the JSON schema of all requests, responses and streamed events, keys sorted."""
    _, schema = TypeAdapter.json_schemas(_types(), schema_generator=_Everything)
    named = {"title": "Schema", "$defs": {name: _untitled(one) for name, one in schema["$defs"].items()}}
    return json.dumps(named, indent=2, sort_keys=True) + "\n"


def _types() -> Iterator[tuple[Any, JsonSchemaMode, TypeAdapter[Any]]]:
    for router in (*ROUTERS, ticket_routes(Ticket(""))):
        for route in router.routes:
            assert isinstance(route, APIRoute)
            if route.body_field is not None:
                kind = cast("type[Any]", route.body_field.field_info.annotation)
                yield kind, "validation", TypeAdapter(kind)
            if route.response_model is not None:
                yield route.response_model, "serialization", TypeAdapter(route.response_model)
    for kind in STREAMED:
        yield kind, "serialization", TypeAdapter(kind)


def _untitled(schema: Any) -> Any:
    """Leave out the titles that pydantic makes of fields' names: each would become a type of TypeScript."""
    if isinstance(schema, list):
        return [_untitled(one) for one in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    fields = cast("dict[str, Any]", schema)
    return {key: _untitled(one) for key, one in fields.items() if not (key == "title" and isinstance(one, str))}
