"""Everything that travels as JSON, for the page's side of the schema: with the table of probes, as two interfaces."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast, get_args

from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode

from llamarium.page.extension import OTHER_ROUTERS
from llamarium.page.probes.probe import Probe
from llamarium.page.probes.table import OF_MODEL, OF_PASS
from llamarium.page.routes.ticket import Ticket, ticket_routes
from llamarium.page.schema.base import EndView, PageRequest

TABLES: Mapping[str, Mapping[str, Probe]] = {"OfModel": OF_MODEL, "OfPass": OF_PASS}
"""By the names that they have in TypeScript."""

_Part = tuple[object, ...]  # what is described: a type's name, or a table, a path and what is asked or answered there


class _Everything(GenerateJsonSchema):
    """A schema in which what is answered has all its fields, those with a default too."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        return self.mode == "serialization" or super().field_is_required(field, total)


def as_json() -> str:
    """Return the JSON schema of all requests, responses and streamed events, keys sorted."""
    parts: list[tuple[_Part, JsonSchemaMode, TypeAdapter[Any]]] = [
        (part, mode, TypeAdapter(kind)) for part, mode, kind in (*_of_routes(), *_of_probes())
    ]
    schema_of, schema = TypeAdapter.json_schemas(parts, schema_generator=_Everything)
    tables = {name: _table(name, table, schema_of) for name, table in TABLES.items()}
    document = {
        "title": "Schema",
        "$defs": {name: _untitled(definition) for name, definition in schema["$defs"].items()} | tables,
    }
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def _of_routes() -> Iterator[tuple[_Part, JsonSchemaMode, Any]]:
    """Yield what the routes that are no probes ask and answer."""
    for router in (*OTHER_ROUTERS, ticket_routes(Ticket(""))):
        for route in router.routes:
            assert isinstance(route, APIRoute)
            if route.body_field is not None:
                yield (route.path, "body"), "validation", route.body_field.field_info.annotation
            if route.response_model is not None:
                yield (route.path, "answer"), "serialization", route.response_model
    yield (EndView,), "serialization", EndView


def _of_probes() -> Iterator[tuple[_Part, JsonSchemaMode, Any]]:
    """Yield what each probe asks, as `query` or `body`, and answers, as `answer` or `events`; numbers have no JSON."""
    for name, table in TABLES.items():
        for path, probe in table.items():
            query_type = probe.asked(path)
            if query_type is not None:
                yield (name, path, "body" if issubclass(query_type, PageRequest) else "query"), "validation", query_type
            if probe.is_streamed:
                yield (name, path, "events"), "serialization", get_args(probe.answer)[0]
            elif not probe.is_bulk:
                yield (name, path, "answer"), "serialization", probe.answer


def _table(name: str, table: Mapping[str, Probe], schema_of: Mapping[Any, Any]) -> dict[str, Any]:
    rows = {
        path: {key[2]: _untitled(part) for (key, _), part in schema_of.items() if key[:2] == (name, path)}
        for path in table
    }
    return _closed({path: _closed(row) for path, row in rows.items()})


def _closed(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _untitled(schema: Any) -> Any:
    """Leave out the titles that pydantic makes of fields' names: each would become a type of TypeScript."""
    if isinstance(schema, list):
        return [_untitled(item) for item in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    fields = cast("dict[str, Any]", schema)
    return {key: _untitled(item) for key, item in fields.items() if not (key == "title" and isinstance(item, str))}
