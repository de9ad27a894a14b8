"""Runs a chat template in a process of its own, whose limits `template_worker` sets."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from llamarium.errors import ChatFormatError, escape

CPU_LIMIT_S = 0.3  # of one rendering; the longest published ones take 0.01
WALL_LIMIT_S = 2 if sys.platform == "win32" else 10  # where there is no CPU limit, the clock must do
MEMORY_LIMIT_BYTES = 2**29
TRAINING_DAY = datetime(2024, 7, 26)  # the one that Llama 3.1's and 3.2's templates name where they have no clock
_OUTPUT_CHARACTERS = 2**16  # of one rendering, all tokenized here; and for each character that the template is given:
_OUTPUT_RATIO = 8  # published ones write one to three
_REQUEST_CHARACTERS = 2**22  # of one process, unless a single rendering needs more

Answer = Mapping[str, str]
"""The result of one rendering: `text` or `error`."""


class TemplateRenderer:
    """A template with the variables that every dialog has.

    Attributes:
        source: The file that the template stands in, for messages.
    """

    def __init__(self, template: str, source: str, fixed: Mapping[str, Any]) -> None:
        self.source = source
        self._template = template
        self._fixed = fixed

    def render(
        self, variables: Sequence[Mapping[str, Any]], now: datetime, borders: str = ""
    ) -> Iterator[str | ChatFormatError]:
        """Yield what the template writes for each of `variables`, or the error if it refuses this one, or is stopped.

        ChatFormatError is raised if no process can be started. `borders` are two characters that stand around what the
        template marks as the assistant's, or none.
        """
        written = self._request(variables, now, borders)
        is_one = len(variables) == 1
        answers = self._run(written) if is_one or len(written) < _REQUEST_CHARACTERS else None
        if answers is None and not is_one:  # too much for one process, or one of them has ended it
            half = len(variables) // 2
            yield from self.render(variables[:half], now, borders)
            yield from self.render(variables[half:], now, borders)
            return
        if answers is None:
            yield ChatFormatError(
                f"{self.source}: the chat template was stopped: it did not end within {CPU_LIMIT_S} s of computing, "
                "or took the process down; expected a template that ends"
            )
            return
        for answer in answers:
            if "error" in answer:
                yield ChatFormatError(f"{self.source}: chat template: {escape(answer['error'])}")
            else:
                yield answer["text"]

    def attempt(self, variables: Sequence[Mapping[str, Any]], now: datetime) -> Sequence[Answer]:
        """Return a text or an error for each of `variables`, from one process; nothing if it was stopped."""
        return self._run(self._request(variables, now)) or ()

    def _request(self, variables: Sequence[Mapping[str, Any]], now: datetime, borders: str = "") -> bytes:
        longest = max(len(json.dumps(one, ensure_ascii=False)) for one in variables)
        request = {
            "path": sys.path,
            "template": self._template,
            "fixed": self._fixed,
            "variables": variables,
            "now": now.isoformat(),
            "borders": borders,
            "cpu_s": CPU_LIMIT_S,
            "memory_bytes": MEMORY_LIMIT_BYTES,
            "output_characters": _OUTPUT_CHARACTERS + _OUTPUT_RATIO * (len(self._template) + longest),
        }
        return json.dumps(request).encode()

    def _run(self, request: bytes) -> list[dict[str, str]] | None:
        """Run `template_worker`, isolated from the environment's Python settings; None if it was ended."""
        worker = Path(__file__).with_name("template_worker.py")
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", str(worker)],
                input=request,
                capture_output=True,
                timeout=WALL_LIMIT_S,
                check=True,
            )
            return json.loads(done.stdout)
        except OSError as error:
            raise ChatFormatError(
                f"{self.source}: no process could be started for the chat template: {error}"
            ) from None
        except (subprocess.SubprocessError, ValueError):
            return None
