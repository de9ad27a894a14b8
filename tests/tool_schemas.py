"""Sixty schemas of tool arguments in the shapes that MCP servers publish, in words of our own; `TOOL_SCHEMAS` by name.

They come from hand, from zod 3 and 4, Pydantic, Go structs and OpenAPI documents, with the habits of each: drafts and
`$schema`, closed and open objects, `default` and other annotations everywhere, unions of nullable types, references.
"""

from typing import Any

D7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
TEXT = {"type": "string"}
CLOSED = {"additionalProperties": False}


def of(*required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object."""
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def text(description: str, **more: Any) -> dict[str, Any]:
    """Return the schema of a described text."""
    return {"type": "string", "description": description, **more}


def number(kind: str = "number", **more: Any) -> dict[str, Any]:
    """Return the schema of a number."""
    return {"type": kind, **more}


def array(items: Any, **more: Any) -> dict[str, Any]:
    """Return the schema of a list."""
    return {"type": "array", "items": items, **more}


PAGE = {"page": number("integer", minimum=1, default=1), "perPage": number("integer", minimum=1, maximum=100)}
SNOWFLAKE = {"type": "string", "pattern": "^[0-9]{17,20}$"}
POINT = of("lat", "lng", lat=number(minimum=-90, maximum=90), lng=number(minimum=-180, maximum=180)) | CLOSED
ENTITY = of("name", "kind", "notes", name=text("unique"), kind=TEXT, notes=array(TEXT))
CONDITION = {
    "$defs": {
        "Test": of("field", "op", "value", field=TEXT, op={"enum": ["eq", "lt", "gt"]}, value={}) | CLOSED,
        "All": of("all", all=array({"$ref": "#/$defs/Condition"}, minItems=1)) | CLOSED,
        "Condition": {"anyOf": [{"$ref": "#/$defs/Test"}, {"$ref": "#/$defs/All"}]},
    },
}
LOCATOR = {
    "oneOf": [
        of("by", "css", by={"const": "css"}, css=TEXT) | CLOSED,
        of("by", "text", by={"const": "text"}, text=TEXT, exact={"type": "boolean", "default": False}) | CLOSED,
        of("by", "x", "y", by={"const": "point"}, x=number("integer"), y=number("integer")) | CLOSED,
    ],
    "discriminator": {"propertyName": "by"},
}

TOOL_SCHEMAS: dict[str, dict[str, Any]] = {
    # files and processes
    "read_text": D7 | of("path", path=TEXT, head=number(description="first lines"), tail=number()) | CLOSED,
    "edit_text": D7
    | of(
        "path",
        "edits",
        path=TEXT,
        edits=array(of("old", "new", old=text("exact"), new=TEXT) | CLOSED),
        dryRun={"type": "boolean", "default": False},
    )
    | CLOSED,
    "find_files": of("root", "pattern", root=TEXT, pattern=text("glob"), exclude=array(TEXT, default=[])),
    "list_roots": {"type": "object", "properties": {}},
    "no_arguments": {"type": "object"},
    "run_command": of(
        "command",
        command=TEXT,
        timeout_ms=number("integer", exclusiveMinimum=0, maximum=600000),
        env={"type": "object", "additionalProperties": TEXT},
    ),
    "set_environment": of(
        "values",
        values={"type": "object", "patternProperties": {"^[A-Z_][A-Z0-9_]*$": TEXT}, "additionalProperties": False},
    ),
    "watch_process": of(
        "pid", pid=number("integer", format="int32", minimum=1), signal={"enum": ["TERM", "KILL", 9, 15]}
    ),
    # the web
    "fetch_page": {"title": "Fetch", "description": "Parameters of a fetch."}
    | of(
        "url",
        url={"type": "string", "format": "uri", "minLength": 1, "title": "Url"},
        max_length={"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 1000000, "default": 5000},
        raw={"type": "boolean", "default": False, "title": "Raw"},
    ),
    "web_search": of(
        "query",
        query=text("up to 400 characters", maxLength=400),
        count=number(default=10, minimum=1, maximum=20),
        freshness={"anyOf": [{"enum": ["day", "week", "month"]}, {"type": "null"}], "default": None},
    ),
    "crawl_site": of(
        "url",
        url=text("start", format="uri"),
        limit=number("integer", minimum=1),
        formats=array({"type": "string", "enum": ["markdown", "html", "links"]}, uniqueItems=True),
        scrape=of(onlyMainContent={"type": "boolean"}, waitFor=number()),
    ),
    "browser_click": of(
        "element",
        "target",
        element=text("for the permission dialog"),
        target=LOCATOR,
        button={"type": "string", "enum": ["left", "right", "middle"]},
    )
    | CLOSED
    | D7,
    "browser_fill": of(
        "fields", fields=array(of("name", "value", name=TEXT, value={"type": ["string", "boolean"]}) | CLOSED)
    ),
    "browser_resize": of("width", "height", width=number(exclusiveMinimum=0), height=number(exclusiveMinimum=0))
    | CLOSED,
    "take_screenshot": of(
        name=TEXT,
        type={"enum": ["png", "jpeg"], "default": "png"},
        quality=number("integer", minimum=0, maximum=100),
        clip={"anyOf": [of("x", "y", x=number(), y=number()), {"type": "null"}]},
    ),
    "http_request": of(
        "method",
        "url",
        method={"type": "string", "enum": ["GET", "POST", "PUT", "DELETE"]},
        url=TEXT,
        headers={"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": TEXT},
        body={"anyOf": [TEXT, {"type": "object"}, array({}), {"type": "null"}]},
    ),
    # code hosting
    "create_issue": of(
        "owner",
        "repo",
        "title",
        owner=text("login"),
        repo=TEXT,
        title=TEXT,
        body=TEXT,
        labels=array(TEXT),
        assignees=array(TEXT),
        milestone=number(),
    ),
    "search_code": of("q", q=TEXT, order={"type": "string", "enum": ["asc", "desc"]}, **PAGE),
    "push_files": of(
        "branch",
        "files",
        "message",
        branch=TEXT,
        message=TEXT,
        files=array(of("path", "content", path=TEXT, content=TEXT) | CLOSED, minItems=1),
    )
    | CLOSED,
    "review_change": of(
        "number",
        "event",
        number=number("integer"),
        event={"enum": ["APPROVE", "REQUEST_CHANGES", "COMMENT"]},
        comments=array(
            {
                "anyOf": [
                    of("path", "line", path=TEXT, line=number("integer")),
                    of("path", "position", path=TEXT, position=number("integer")),
                ]
            }
        ),
    ),
    "git_log": of(
        "repo",
        repo={"type": "string", "format": "path"},
        max_count={"type": "integer", "default": 10},
        since={"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}], "default": None},
    ),
    "compare_commits": of(
        "base", "head", base=text("sha", pattern="^[0-9a-f]{7,40}$"), head={"$ref": "#/properties/base"}
    ),
    # memory, notes and thoughts
    "create_entities": of("entities", entities=array(ENTITY)),
    "add_relations": of("relations", relations=array({"$ref": "#/$defs/r"}))
    | {"$defs": {"r": of("from", "to", **{"from": TEXT, "to": TEXT}) | CLOSED}},
    "think_on": of(
        "thought",
        "number",
        "total",
        thought=TEXT,
        number=number("integer", minimum=1),
        total=number("integer", minimum=1),
        branch=TEXT,
        revises={"type": ["integer", "null"]},
    ),
    "append_note": of(
        "vault", "content", vault=TEXT, content=TEXT, tags=array({"type": "string", "minLength": 1}, maxItems=10)
    ),
    "create_page": of(
        "parent",
        parent={
            "oneOf": [
                of("page_id", page_id={"type": "string", "format": "uuid"}),
                of("database_id", database_id={"type": "string", "format": "uuid"}),
            ]
        },
        properties={"type": "object", "additionalProperties": {"type": ["string", "number", "boolean", "null"]}},
        icon={"type": "string", "nullable": True},
    ),
    "update_block": of("block", block={"$ref": "#/definitions/block"})
    | {
        "definitions": {
            "block": of(
                "type", type={"enum": ["text", "list"]}, text=TEXT, children=array({"$ref": "#/definitions/block"})
            )
        }
    },
    # data
    "run_query": of("sql", sql=text("read only"), params=array({"type": ["string", "number", "boolean", "null"]})),
    "find_documents": of(
        "collection",
        collection=TEXT,
        filter={"type": "object", "additionalProperties": True},
        sort={"type": "object", "additionalProperties": {"enum": [1, -1]}},
        limit=number("integer", default=10),
    ),
    "aggregate": of("pipeline", pipeline=array({"type": "object", "minProperties": 1, "maxProperties": 1}, minItems=1)),
    "search_index": of(
        "index",
        "query",
        index=text("name", minLength=1, maxLength=255),
        query={"type": "object"},
        size=number("integer", minimum=0, maximum=10000),
        fields={"anyOf": [TEXT, array(TEXT)]},
    ),
    "search_vectors": of(
        "vector",
        vector=array(number(), minItems=3, maxItems=3),
        top_k=number("integer", minimum=1),
        threshold=number(minimum=0, maximum=1),
    ),
    "filter_rows": of("where", where={"$ref": "#/$defs/Condition"}) | CONDITION,
    "set_key": of("key", "value", key=TEXT, value={}, ttl={"type": "integer", "minimum": 0, "format": "int64"}),
    "insert_rows": of(
        "table",
        "rows",
        table={"type": "string", "pattern": r"^[A-Za-z_]\w{0,62}$"},
        rows=array({"type": "object", "additionalProperties": {}}, minItems=1, maxItems=500),
    ),
    "query_metrics": of(
        "expr",
        "start",
        expr=TEXT,
        start={"type": "string", "format": "date-time"},
        end={"type": "string", "format": "date-time"},
        step={"type": "string", "pattern": r"^\d+[smhd]$"},
    ),
    # people, time and messages
    "post_message": of(
        "channel",
        "text",
        channel=TEXT,
        text={"type": "string", "maxLength": 4000},
        thread_ts={"type": "string", "pattern": r"^\d{10}\.\d{6}$"},
    ),
    "send_mail": of(
        "to",
        "subject",
        to=array({"type": "string", "format": "email"}, minItems=1),
        subject=TEXT,
        body=TEXT,
        importance={"type": "string", "enum": ["low", "normal", "high"], "default": "normal"},
    ),
    "create_event": of(
        "summary",
        "start",
        "end",
        summary=TEXT,
        start={"$ref": "#/$defs/When"},
        end={"$ref": "#/$defs/When"},
        attendees=array(of("email", email={"type": "string", "format": "email"})),
    )
    | {
        "$defs": {
            "When": of(
                dateTime={"type": "string", "format": "date-time"},
                date={"type": "string", "format": "date"},
                timeZone=text("IANA"),
            )
            | {"anyOf": [{"required": ["date"]}, {"required": ["dateTime"]}]}
        }
    },
    "convert_time": of(
        "time",
        "from",
        "to",
        time={"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"},
        **{"from": TEXT, "to": TEXT},
    ),
    "add_task": of(
        "content",
        content=TEXT,
        priority={"type": "integer", "enum": [1, 2, 3, 4]},
        due={"type": "string", "format": "date", "nullable": True},
        duration=number("integer", minimum=1),
        duration_unit={"enum": ["minute", "day"]},
    )
    | {"dependentRequired": {"duration": ["duration_unit"], "duration_unit": ["duration"]}},
    "list_members": of("guild", guild=SNOWFLAKE, after=SNOWFLAKE, limit=number("integer", minimum=1, maximum=1000)),
    "invite_user": of(
        "id", id={"type": "integer", "minimum": 0, "maximum": 9223372036854775807}, role={"const": "member"}
    ),
    # places, devices and media
    "plan_route": of(
        "origin",
        "destination",
        origin=POINT,
        destination=POINT,
        mode={"enum": ["driving", "walking", "transit"]},
        waypoints=array(POINT, maxItems=8),
    ),
    "get_forecast": of(
        "latitude",
        "longitude",
        latitude=number(minimum=-90, maximum=90),
        longitude=number(minimum=-180, maximum=180),
        days={"type": "integer", "minimum": 1, "maximum": 16, "default": 7},
    ),
    "set_light": of(
        "entity",
        entity={"type": "string", "pattern": r"^light\.[a-z0-9_]+$"},
        brightness=number("integer", minimum=0, maximum=255),
        rgb={
            "type": "array",
            "prefixItems": [number("integer", minimum=0, maximum=255)] * 3,
            "items": False,
            "minItems": 3,
        },
    ),
    "set_thermostat": of(
        "celsius", celsius=number(minimum=5, maximum=30, multipleOf=0.5), until={"type": "string", "format": "time"}
    ),
    "make_image": of(
        "prompt",
        prompt=text("what", minLength=1),
        width=number("integer", minimum=64, maximum=2048, multipleOf=8),
        seed={"type": "integer", "minimum": 0, "maximum": 4294967295},
        style={"type": "string", "enum": ["photo", "drawing"]},
        guidance=number(minimum=0, maximum=20),
    ),
    "transcribe": of(
        "audio",
        audio={"type": "string", "contentEncoding": "base64", "contentMediaType": "audio/wav"},
        language={"type": "string", "pattern": "^[a-z]{2}(-[A-Z]{2})?$"},
    ),
    "play_music": D7
    | of(uris=array(text("spotify:...")), volume={"type": "integer", "minimum": 0, "maximum": 100}, device=TEXT)
    | {"anyOf": [{"required": ["uris"]}, {"required": ["volume"]}]},
    # clouds and operations
    "list_instances": of(
        region=text("aws", example="eu-west-1"),
        filters=array(of("Name", "Values", Name=TEXT, Values=array(TEXT))),
        MaxResults=number("integer", minimum=5, maximum=1000),
    ),
    "apply_manifest": of(
        "manifest",
        manifest={"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        namespace={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63},
        dry_run={"type": "boolean"},
    ),
    "scale_service": of(
        "name", "replicas", name=TEXT, replicas={"anyOf": [number("integer", minimum=0), {"const": "auto"}]}
    ),
    "deploy": of("image", "target", image=TEXT, target={"enum": ["staging", "production"]}, approval=TEXT)
    | {"if": {"properties": {"target": {"const": "production"}}}, "then": {"required": ["approval"]}},
    "create_charge": of(
        "amount",
        "currency",
        amount={"type": "integer", "minimum": 50, "format": "int64"},
        currency={"type": "string", "minLength": 3, "maxLength": 3},
        metadata={"type": "object", "maxProperties": 3, "additionalProperties": {"type": "string", "maxLength": 50}},
    ),
    "rotate_secret": of(
        "name",
        name={"type": "string", "pattern": "^[a-zA-Z0-9/_+=.@-]{1,512}$"},
        value={"type": "string", "format": "password", "writeOnly": True},
    ),
    "schedule_job": of(
        "cron",
        "job",
        cron={"type": "string", "pattern": r"^(\S+ ){4}\S+$"},
        job={"type": "string", "format": "uuid"},
        retries={"type": "integer", "minimum": 0, "maximum": 10, "exclusiveMaximum": False},
    ),
    # what is not held of it is named
    "tag_assets": of(
        "ids", "tags", ids=array({"type": "string", "format": "uuid"}, uniqueItems=True), tags=array(TEXT)
    ),
    "call_workflow": of("inputs", inputs={"$ref": "https://workflows.example/inputs.json"}),
}

NAMED = {
    "tag_assets": ["#/properties/ids/uniqueItems"],
    "call_workflow": ["#/properties/inputs/$ref"],
}
"""The keywords that are not held of those schemas that do not compile fully."""
