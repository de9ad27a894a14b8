"""What the parts of reading ask of the one that walks (`reading.py`)."""

from typing import Any, Protocol

from llamarium.sampling.grammar.schema.unenforced import Path


class Reader(Protocol):
    """Reads the schemas of one document."""

    def schema(self, schema: Any, path: Path) -> Any:
        """Return a schema lowered to keywords that grammars enforce."""
        ...

    def resolved(self, schema: Any, path: Path) -> tuple[Any, Path]:
        """Return the schema, and its path, that a reference leads to; another schema is returned as it is."""
        ...

    def may_compare(self, num_names: int = 0) -> bool:
        """Count a step of a comparison of schemas, or of lists of names, and return whether there may be another."""
        ...

    def write_out(self, num_characters: int) -> None:
        """Count characters that the result has and the document does not; GrammarLimitError if they are too many."""
        ...

    def shared(self, lowered: Any) -> Any:
        """Return a lowered schema for repeated use: a long one becomes a reference to a definition."""
        ...

    def note(self, path: Path, keyword: str, reason: str) -> None:
        """Note that a keyword of the schema at a path is not enforced; GrammarError if it has to be."""
        ...
