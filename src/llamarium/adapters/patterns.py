"""Regular expressions from adapter files, matched with a deadline.

PEFT files may have regular expressions for module names, and a malicious one can take exponential time on a name that
does not match. All patterns of an adapter share one deadline.
"""

import time
from collections.abc import Iterable

from llamarium.errors import TrainingError, show_value

_SECONDS = 0.5


class PatternMatcher:
    """A matcher of names against patterns; TrainingError for an invalid pattern, or one that takes too long."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + _SECONDS

    def matches(self, pattern: str, name: str) -> bool:
        """Return whether a pattern matches a whole name."""
        import regex

        left_s = self._deadline - time.monotonic()
        try:
            return regex.fullmatch(pattern, name, timeout=max(left_s, 1e-3)) is not None
        except TimeoutError:
            raise TrainingError(
                f"LoRA: the pattern {show_value(pattern)} takes longer than {_SECONDS:g} s; expected one without "
                "nested repetition, or a list of module names"
            ) from None
        except (regex.error, RecursionError, OverflowError) as error:
            raise TrainingError(f"LoRA: the pattern {show_value(pattern)} is invalid: {error}") from None

    def first(self, patterns: Iterable[str], name: str) -> str | None:
        """Return the first pattern that matches a name or its end after a dot, as PEFT does for `rank_pattern`."""
        return next((p for p in patterns if p == name or self.matches(rf"(.*\.)?({p})", name)), None)
