"""Counts of tokens, of one request, whatever the protocol that reports them."""

from collections.abc import Sequence

from llamarium.generation.completion import Piece
from llamarium.generation.text_engine import Answers


class Usage:
    """The tokens of one HTTP request.

    Args:
        answers: To each of its prompts.

    Attributes:
        answers: The same.
        generated: Tokens of answers.
    """

    def __init__(self, answers: Sequence[Answers]) -> None:
        self.answers = answers
        self.generated = 0

    def count(self, pieces: Sequence[Piece]) -> None:
        """Count what a step has brought."""
        self.generated += sum(len(piece.token_ids) for piece in pieces)

    def noted(self) -> dict[str, int]:
        """Return the counts for the line that is written about the request."""
        return {"prompt": self.prompt, "cached": self.cached, "generated": self.generated}

    @property
    def prompt(self) -> int:
        """Tokens of prompts."""
        return sum(len(one.prompt_ids) for one in self.answers)

    @property
    def cached(self) -> int:
        """Those of them that were not run, as their keys and values were there."""
        return sum(one.num_cached for one in self.answers)
