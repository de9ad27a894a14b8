"""Grammars of answers that may or must call tools.

Schemas of calls in JSON are lowered by `json_schema.lowered`. A keyword that cannot be enforced is an error if its tool
is strict, and otherwise reported as unenforced, so a non-strict tool never fails a request. The pythonic form has
separate rules, with fewer keywords.

If an answer without calls is constrained too, one grammar has both. Its JSON must not be mistaken for a call, so it is
spaced like calls in JSON, and has no blanks where it could begin like a call.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol, cast

from llamarium.errors import GrammarError, ToolError
from llamarium.sampling.constraint import CompiledGrammar
from llamarium.sampling.grammar.description import MAX_BYTES, Grammar
from llamarium.sampling.grammar.schema.unenforced import UnenforcedKeyword
from llamarium.tokenizer.tools.definition import ToolDefinition
from llamarium.tokenizer.tools.forms import ToolForm
from llamarium.tokenizer.tools.grammar import openings
from llamarium.tokenizer.tools.request import ToolRequest

MAX_RULES = 5000
"""Maximum number of rules for the calls of a request: about 80 tools with 20 arguments, compiled within a second."""


_FIELD = "tools[{}].function.parameters"
_NOT_PYTHONIC = "is not enforced in calls in Python's syntax; llama3_json enforces it"
_ANY: Mapping[str, Any] = {"type": "object"}


class Compiler(Protocol):
    """A compiler of grammars for one vocabulary, such as `GrammarCompiler`."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar; GrammarError if that is not possible."""
        ...


def grammar_of_answer(
    request: ToolRequest, form: ToolForm | None, answer: Grammar | None = None, *, open_objects: bool = False
) -> Grammar | None:
    """Return the grammar of an answer, or None if it is unconstrained.

    Args:
        request: The request's tools.
        form: Form of calls.
        answer: Grammar of an answer without calls, or None.
        open_objects: As for `Grammar.json_schema`, for tools that are not strict.

    Raises:
        ToolError: If the schema of a strict tool cannot be enforced, or the tools are too large.
        GrammarError: If `answer` is not a JSON schema, and there are tools.
    """
    if not request.offered or (answer is None and not request.is_held):
        return answer
    if answer is not None and answer.kind != "json_schema":
        expected = "expected a JSON schema or any JSON object beside tools, so that no answer is taken for a call"
        raise GrammarError(f"found a form of the kind {answer.kind}; {expected}")
    unenforced = [] if answer is None else list(answer.unenforced)
    lowered = [_lowered(tool, i, open_objects) for i, tool in enumerate(request.tools)]
    request = replace(request, tools=tuple(tool for tool, _ in lowered))
    unenforced += [keyword for _, keywords in lowered for keyword in keywords]

    def note(i: int, place: str, keyword: str) -> None:
        if request.tools[i].strict:
            raise ToolError("parameters", f"cannot be enforced: at {place}: {keyword} {_NOT_PYTHONIC}")
        unenforced.append(UnenforcedKeyword(place, keyword, _NOT_PYTHONIC, _FIELD.format(i)))

    text = request.grammar(form, None if answer is None else _rule_beside(json.loads(answer.text), form), note)
    assert text is not None and form is not None
    if len(text.encode()) > MAX_BYTES or text.count("\n") > MAX_RULES:
        raise ToolError(
            "tools",
            f"are too much for a grammar: {len(text):,} characters in {text.count(chr(10)):,} rules, of {MAX_BYTES:,} "
            f"bytes and {MAX_RULES:,} rules at most; give fewer tools, or smaller ones",
        )
    opened = () if answer is None else openings([tool.name for tool in request.offered], form)
    is_free = answer is None and request.choice != "required"
    return Grammar("calls", text, opened, is_free, tuple(unenforced))


def _rule_beside(schema: Any, form: ToolForm | None) -> str:
    """Return the rule of a lowered schema whose JSON cannot begin like a call."""
    from llamarium.sampling.grammar.json_schema import rule  # imported only for requests with tools

    target = schema
    if isinstance(schema, dict) and "$ref" in schema and "allOf" not in schema:
        for key in cast("str", schema["$ref"]).split("/")[1:]:
            target = target[int(key)] if isinstance(target, list) else target[key]
    is_object = isinstance(target, dict) and target.get("additionalProperties") is False
    is_no_call = is_object and "parameters" not in target.get("properties", {}) and "patternProperties" not in target
    return rule(schema, None if form != "llama3_json" else (", ", ": ") if is_no_call else (",", ":"))


def compile_answer(
    compiler: Compiler,
    request: ToolRequest,
    form: ToolForm | None,
    answer: Grammar | None = None,
    *,
    open_objects: bool = False,
) -> tuple[Grammar, CompiledGrammar] | None:
    """Return the grammar of `grammar_of_answer` and its compiled form, or None if the answer is unconstrained.

    If the schema of a non-strict tool cannot be compiled, its arguments may be any object, and the schema is reported
    as unenforced. For arguments and errors see `grammar_of_answer`.
    """
    grammar = grammar_of_answer(request, form, answer, open_objects=open_objects)
    if grammar is None:
        return None
    try:
        return grammar, compiler.compile(grammar)
    except GrammarError as error:
        if answer is not None:
            compiler.compile(answer)
        freed = dict(_that_do_not_compile(compiler, request))
        if not freed:
            raise ToolError("tools", f"cannot be enforced: {error}") from None
    tools = [replace(tool, parameters=_ANY) if i in freed else tool for i, tool in enumerate(request.tools)]
    grammar = grammar_of_answer(replace(request, tools=tuple(tools)), form, answer, open_objects=open_objects)
    assert grammar is not None
    grammar = replace(grammar, unenforced=(*grammar.unenforced, *freed.values()))
    return grammar, compiler.compile(grammar)


def _that_do_not_compile(compiler: Compiler, request: ToolRequest) -> Iterator[tuple[int, UnenforcedKeyword]]:
    """Yield the indices of tools whose schemas do not compile, with the reason; ToolError for a strict tool."""
    for i, tool in enumerate(request.tools):
        try:
            compiler.compile(Grammar.json_schema({**tool.parameters, "type": "object"}, tolerant=True))
        except GrammarError as error:
            if tool.strict:
                raise _refusal(i, error) from None
            yield i, _whole(i, error)


def _lowered(tool: ToolDefinition, i: int, open_objects: bool) -> tuple[ToolDefinition, tuple[UnenforcedKeyword, ...]]:
    """Return a tool with its lowered schema, and the keywords that it does not enforce; ToolError if it is strict."""
    try:
        grammar = Grammar.json_schema(
            {**tool.parameters, "type": "object"},
            open_objects=open_objects and not tool.strict,
            strict=tool.strict,
            tolerant=True,
        )
        schema = json.loads(grammar.text)
        if not isinstance(schema, dict) or tool.parameters.get("type", "object") not in ("object", ["object"]):
            raise GrammarError("no object satisfies it, and arguments are an object")
    except GrammarError as error:
        if tool.strict:
            raise _refusal(i, error) from None
        return replace(tool, parameters=_ANY), (_whole(i, error),)
    return replace(tool, parameters=schema), tuple(one.inside(_FIELD.format(i)) for one in grammar.unenforced)


def _whole(i: int, error: GrammarError) -> UnenforcedKeyword:
    """Return the entry for a tool whose schema is not enforced at all."""
    return UnenforcedKeyword("#", "", f"cannot be enforced: {error}", _FIELD.format(i))


def _refusal(i: int, error: GrammarError) -> ToolError:
    return ToolError(_FIELD.format(i), f"cannot be enforced: {error}")
