"""Schema keywords that an answer's grammar does not enforce; they are reported rather than ignored silently.

`Grammar.json_schema(...).unenforced` and `grammar_of_answer(...).unenforced` are the lists: empty for most schemas. The
server names them in the header of the answer and in its log; Python warns. Under `strict` there are none: there each
is a `GrammarError` (a `ToolError` for a tool) that names the same place.
"""

from dataclasses import dataclass, replace

from llamarium.errors import GrammarError, escape

Path = tuple[str, ...]
"""The keys and places that lead to a schema from the document's root."""


@dataclass(frozen=True, slots=True)
class UnenforcedKeyword:
    """A keyword of a JSON schema that restricts values and that the grammar does not enforce.

    Attributes:
        place: The schema that has it, as a JSON pointer: `#` or `#/properties/tags`.
        keyword: Its name, such as `uniqueItems`; "" is all of the schema.
        reason: Why it is not enforced, as the rest of a sentence that begins with the keyword.
        field: The request's field that has the schema: `tools[0].function.parameters`; "" is the answer's own schema,
            whose field the caller knows.
    """

    place: str
    keyword: str
    reason: str
    field: str = ""

    def __str__(self) -> str:
        """Return the keyword's path: `tools[0].function.parameters#/properties/tags/uniqueItems`."""
        return f"{self.field}{self.place}/{self.keyword}" if self.keyword else f"{self.field}{self.place}"

    def inside(self, field: str) -> "UnenforcedKeyword":
        """Return it with the field of a request, unless it has one."""
        return self if self.field else replace(self, field=field)


def pointer(path: Path) -> str:
    """Return a path as a JSON pointer in a reference, safe to print."""
    return escape("/".join(("#", *(step.replace("~", "~0").replace("/", "~1") for step in path))))


def refused(path: Path, why: str) -> GrammarError:
    """Return the error about the schema at a path."""
    return GrammarError(f"the JSON schema, at {pointer(path)}: {why}")
