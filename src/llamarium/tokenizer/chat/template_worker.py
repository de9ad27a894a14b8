"""Renders a chat template from a file. It is run as a process of its own, by `template`, and imports nothing of ours.

Jinja's sandbox keeps a template from reaching Python's objects, but not from working forever or filling the memory:
nested loops, doubled strings and huge powers are ordinary template code. A process can be given hard limits, and be
ended, where a thread cannot.

Reads one JSON object from stdin: `path` (sys.path), `template`, `fixed` (variables), `variables` (a list of more; the
template is rendered for each), `now` (what its clock shows, ISO 8601), `borders` (two characters that stand around what
`{% generation %}` marks, or none), `cpu_s` (of one rendering), `memory_bytes`,
`output_characters` (of one). Writes one JSON list to stdout, for each rendering `{"text": ...}` or `{"error": ...}`.

Source: the variables, filters and extensions are those of transformers' `apply_chat_template`.
"""

import json
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

OF_DIALOGS = ("add_generation_prompt", "bos_token", "eos_token", "messages", "pad_token", "tools")
"""The variables of every dialog."""

_METHODS_OF_TEXT = frozenset(
    "split rsplit partition rpartition startswith endswith find rfind count replace removeprefix removesuffix".split()
)


def main() -> None:
    """Read a request from stdin, and write its renderings to stdout."""
    request: dict[str, Any] = json.load(sys.stdin.buffer)
    sys.path[:] = request["path"]
    # Lone surrogates, which a template can make, stay visible as escapes.
    sys.stdout.write(json.dumps(render(request)))


class RefusedByTemplate(Exception):
    """The template called `raise_exception`."""


def limit_memory(num_bytes: int) -> None:
    """Let the system refuse this process memory; Windows has no such limit."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_time(cpu_s: float) -> None:
    """Let the system end this process after `cpu_s` of work, counted from now; Windows has no such limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF, unhandled, ends the process, even inside C code


def sandbox(now: str, borders: str = "") -> Any:
    """Return Jinja's immutable sandbox, its clock at `now` (ISO 8601); it bounds neither time nor memory."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %}` marks what the assistant says, for training; rendering shows it between the borders.

        Its body is a scope, as in transformers: what is set in it is gone after it.
        """

        tags = {"generation"}  # noqa: RUF012 - Jinja's interface

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

        def _write(self, caller: Callable[[], str]) -> str:
            return f"{borders[:1]}{caller()}{borders[1:]}"

    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = datetime.fromisoformat(now).strftime
    return environment


@lru_cache(16)
def read_variables(template: str) -> frozenset[str]:
    """Return the variables that a template reads, besides those of every dialog; it is parsed, and not run."""
    from jinja2 import TemplateError, meta

    environment = sandbox("2024-07-26")
    try:
        names = meta.find_undeclared_variables(environment.parse(template))
    except (TemplateError, RecursionError):
        return frozenset()
    return frozenset(names) - {*environment.globals, *OF_DIALOGS}


@lru_cache(16)
def read_sought(template: str) -> frozenset[str]:
    """Return the texts that a template looks for in other texts: `'x' in text`, and arguments of methods of a text."""
    from jinja2 import TemplateError, nodes

    sought: set[str] = set()
    try:
        tree = sandbox("2024-07-26").parse(template)
    except (TemplateError, RecursionError):
        return frozenset()
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _METHODS_OF_TEXT:
            sought.update(arg.value for arg in call.args if isinstance(arg, nodes.Const) and isinstance(arg.value, str))
    for compared in tree.find_all(nodes.Compare):
        is_inside = any(operand.op in ("in", "notin") for operand in compared.ops)
        if is_inside and isinstance(compared.expr, nodes.Const) and isinstance(compared.expr.value, str):
            sought.add(compared.expr.value)
    return frozenset(sought)


def render(request: dict[str, Any]) -> list[dict[str, str]]:
    """Return a `text` or an `error` for each of `variables`, within the limits of memory, time and length."""
    environment = sandbox(request["now"], request["borders"])
    compiled: list[Any] = []

    def write(variables: dict[str, Any]) -> str:
        limit_time(request["cpu_s"])
        if not compiled:
            compiled.append(environment.from_string(request["template"]))
        return bounded(compiled[0].generate({**request["fixed"], **variables}), request["output_characters"])

    limit_memory(request["memory_bytes"])  # importing Jinja is not the template's work
    return [attempt(write, variables, request["memory_bytes"]) for variables in request["variables"]]


def attempt(write: Callable[[dict[str, Any]], str], variables: dict[str, Any], memory_bytes: int) -> dict[str, str]:
    """Return the text, or whatever a template can raise as one message."""
    try:
        return {"text": write(variables)}
    except RefusedByTemplate as error:
        return {"error": f"the template refuses the dialog: {error}"}
    except MemoryError:
        return {"error": f"the template needs more than {memory_bytes >> 20} MiB"}
    except Exception as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {error}"[:1000]}


def bounded(parts: Any, limit: int) -> str:
    """Join an output's parts; ValueError as soon as they have more than `limit` characters."""
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


def raise_exception(message: str) -> None:
    """Raise RefusedByTemplate: the function by which a template refuses a dialog."""
    raise RefusedByTemplate(message)


if __name__ == "__main__":
    main()
