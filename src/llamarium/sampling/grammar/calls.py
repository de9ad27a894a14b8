"""The grammar of an answer that may or has to call tools.

Schemas of calls in JSON go through `json_schema.lowered`. What cannot be held is refused by its tool's path if the tool
is strict, and named otherwise: no tool that is offered refuses a request. The pythonic form has rules of its own, with
fewer keywords.

Where an answer without calls has a form, one grammar holds both. Its JSON must not be read as a call: beside calls in
JSON it is spaced as they are, and without blanks where it might begin as they do.
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
"""Rules for the calls of a request: some 80 tools of 20 arguments, compiled within a second."""


_FIELD = "tools[{}].function.parameters"
_NOT_PYTHONIC = "is not held in calls as Python writes them; llama3_json holds it"
_ANY: Mapping[str, Any] = {"type": "object"}


class Compiler(Protocol):
    """Compiles grammars for one vocabulary: a `GrammarCompiler`."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile one, or raise `GrammarError`."""
        ...


def grammar_of_answer(
    request: ToolRequest, form: ToolForm | None, answer: Grammar | None = None, *, open_objects: bool = False
) -> Grammar | None:
    """Return the grammar of an answer, or None if it is free.

    Calls are written in a form, and an answer without any has the form `answer`. `open_objects` is that of
    `Grammar.json_schema`, for tools that are not strict. ToolError for strict tools that cannot be held, GrammarError
    for another form than JSON beside them.
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
            raise ToolError("parameters", f"cannot be held: at {place}: {keyword} {_NOT_PYTHONIC}")
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
    """Return the rule of a lowered schema whose JSON does not begin as a call does."""
    from llamarium.sampling.grammar.json_schema import rule  # what has no tools never needs it

    named = schema
    if isinstance(schema, dict) and "$ref" in schema and "allOf" not in schema:
        for key in cast("str", schema["$ref"]).split("/")[1:]:
            named = named[int(key)] if isinstance(named, list) else named[key]
    is_object = isinstance(named, dict) and named.get("additionalProperties") is False
    is_no_call = is_object and "parameters" not in named.get("properties", {}) and "patternProperties" not in named
    return rule(schema, None if form != "llama3_json" else (", ", ": ") if is_no_call else (",", ":"))


def compile_answer(
    compiler: Compiler,
    request: ToolRequest,
    form: ToolForm | None,
    answer: Grammar | None = None,
    *,
    open_objects: bool = False,
) -> tuple[Grammar, CompiledGrammar] | None:
    """Return the grammar of `grammar_of_answer` and its compiled form, or None if the answer is free.

    Where the schema of a tool that is not strict cannot be compiled, its arguments are any object, and the grammar
    names the schema as unenforced. Errors are those of `grammar_of_answer`.
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
            raise ToolError("tools", f"cannot be held: {error}") from None
    tools = [replace(tool, parameters=_ANY) if i in freed else tool for i, tool in enumerate(request.tools)]
    grammar = grammar_of_answer(replace(request, tools=tuple(tools)), form, answer, open_objects=open_objects)
    assert grammar is not None
    grammar = replace(grammar, unenforced=(*grammar.unenforced, *freed.values()))
    return grammar, compiler.compile(grammar)


def _that_do_not_compile(compiler: Compiler, request: ToolRequest) -> Iterator[tuple[int, UnenforcedKeyword]]:
    """Yield the places of tools whose schemas do not compile, and how they are named; ToolError for a strict one."""
    for i, tool in enumerate(request.tools):
        try:
            compiler.compile(Grammar.json_schema({**tool.parameters, "type": "object"}, tolerant=True))
        except GrammarError as error:
            if tool.strict:
                raise _refusal(i, error) from None
            yield i, _whole(i, error)


def _lowered(tool: ToolDefinition, i: int, open_objects: bool) -> tuple[ToolDefinition, tuple[UnenforcedKeyword, ...]]:
    """Return a tool with a schema of held keywords, and those that are not."""
    try:
        grammar = Grammar.json_schema(
            {**tool.parameters, "type": "object"},
            open_objects=open_objects and not tool.strict,
            strict=tool.strict,
            tolerant=True,
        )
        schema = json.loads(grammar.text)
        if not isinstance(schema, dict) or tool.parameters.get("type", "object") not in ("object", ["object"]):
            raise GrammarError("no object follows it, and arguments are one")
    except GrammarError as error:
        if tool.strict:
            raise _refusal(i, error) from None
        return replace(tool, parameters=_ANY), (_whole(i, error),)
    return replace(tool, parameters=schema), tuple(one.inside(_FIELD.format(i)) for one in grammar.unenforced)


def _whole(i: int, error: GrammarError) -> UnenforcedKeyword:
    """Name a tool's schema as not held at all."""
    return UnenforcedKeyword("#", "", f"cannot be held: {error}", _FIELD.format(i))


def _refusal(i: int, error: GrammarError) -> ToolError:
    return ToolError(_FIELD.format(i), f"cannot be held: {error}")
