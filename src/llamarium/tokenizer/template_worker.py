"""Renders a chat template from a file. It is run as a process of its own, by `template`, and imports nothing of ours.

Jinja's sandbox keeps a template from reaching Python's objects, but not from working forever or filling the memory:
nested loops, doubled strings and huge powers are ordinary template code. A process can be given hard limits, and be
ended, where a thread cannot.

Reads one JSON object from stdin: `path` (sys.path), `template`, `variables` (a list; the template is rendered for
each), `cpu_s`, `memory_bytes`, `output_characters`. Writes one JSON object to stdout: `texts`, or `error`.

Source: the variables, filters and extensions are those of transformers' `apply_chat_template`.
"""

import json
import signal
import sys
from datetime import datetime
from typing import Any


def main() -> None:
    """Answer one request."""
    request: dict[str, Any] = json.load(sys.stdin.buffer)
    sys.path[:] = request["path"]
    try:
        answer: dict[str, Any] = {"texts": render(request)}
    except RefusedByTemplate as error:
        answer = {"error": f"the template refuses the dialog: {error}"}
    except MemoryError:
        answer = {"error": f"the template needs more than {request['memory_bytes'] >> 20} MiB"}
    except Exception as error:  # noqa: BLE001 - whatever a template can raise becomes one message
        answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
    # Lone surrogates, which a template can make, stay visible as escapes.
    sys.stdout.write(json.dumps(answer))


class RefusedByTemplate(Exception):
    """The template called `raise_exception`."""


def limit_resources(cpu_s: float, memory_bytes: int) -> None:
    """Let the system end this process after `cpu_s` of work, and refuse it memory; Windows has no such limits."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF, unhandled, ends the process, even inside C code


def render(request: dict[str, Any]) -> list[str]:
    """Render the template for each set of variables."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    limit_resources(request["cpu_s"], request["memory_bytes"])  # importing Jinja is not the template's work

    class Generation(Extension):
        """`{% generation %}` marks what the assistant says, for training; rendering shows it as it is."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's interface

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    template = environment.from_string(request["template"])
    return [bounded(template.generate(**variables), request["output_characters"]) for variables in request["variables"]]


def bounded(parts: Any, limit: int) -> str:
    """Join the parts of an output, up to a limit."""
    kept: list[str] = []
    length = 0
    for part in parts:
        length += len(part)
        if length > limit:
            raise ValueError(f"the template writes more than {limit} characters")
        kept.append(part)
    return "".join(kept)


def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not have."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def strftime_now(layout: str) -> str:
    """Write the local time."""
    return datetime.now().strftime(layout)


def raise_exception(message: str) -> None:
    """Let a template refuse a dialog."""
    raise RefusedByTemplate(message)


if __name__ == "__main__":
    main()
