"""Token counts of one request, for any protocol."""

from collections.abc import Sequence

from llamarium.generation.completion import Piece
from llamarium.generation.text_engine import Answers


class Usage:
    """The tokens of one HTTP request.

    Attributes:
        answers: To each of its prompts.
        generated: Tokens of answers.
    """

    def __init__(self, answers: Sequence[Answers]) -> None:
        self.answers = answers
        self.generated = 0

    def count(self, pieces: Sequence[Piece]) -> None:
        """Count the tokens of a step."""
        self.generated += sum(len(piece.token_ids) for piece in pieces)

    def noted(self) -> dict[str, int]:
        """Return the counts for the request's line in the log."""
        return {"prompt": self.prompt, "cached": self.cached, "generated": self.generated}

    @property
    def prompt(self) -> int:
        """Tokens of prompts."""
        return sum(len(one.prompt_ids) for one in self.answers)

    @property
    def cached(self) -> int:
        """Those of them whose keys and values were cached."""
        return sum(one.num_cached for one in self.answers)
