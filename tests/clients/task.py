"""What every Python package is asked for: a function's call, and its result. The address is in OPENAI_BASE_URL."""

import os
from typing import Any

from pydantic import BaseModel

URL, MODEL, KEY = os.environ["OPENAI_BASE_URL"], "small", "none"
ADDRESS = URL.removesuffix("/v1")
TASK = "Join llamarium and 7421 by a hyphen, and repeat the result."


def join(left: str, right: str) -> str:
    """Join two texts by a hyphen.

    Args:
        left: The first text.
        right: The second text.
    """
    return f"{left}-{right}"


class Join(BaseModel):
    """The two texts to join: the arguments of `join`, for packages that ask for a form and call nothing."""

    left: str
    right: str

    def told(self) -> str:
        """The next turn, with the result."""
        return f"The result is {join(self.left, self.right)}. Repeat it."


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "join", "description": "Join two texts", "parameters": Join.model_json_schema()},
}
