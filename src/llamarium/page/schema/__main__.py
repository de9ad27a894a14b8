from llamarium.page.schema.everything import as_json

print(as_json(), end="")  # noqa: T201
