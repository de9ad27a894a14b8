"""The grammar of an answer that may or has to call tools.

llguidance ignores unknown keywords. So schemas of calls in JSON go through `json_schema.lowered`, and what cannot be
enforced is refused by its tool's path. The pythonic form has rules of its own, with fewer keywords.

Where an answer without calls has a form, one grammar holds both. Its JSON must not be read as a call: beside calls in
JSON it is spaced as they are, and without blanks where it might begin as they do.
"""

import json
from dataclasses import replace
from typing import Any, Protocol, cast

from llamarium.errors import GrammarError, ToolError
from llamarium.sampling.constraint import CompiledGrammar
from llamarium.sampling.grammar.description import MAX_BYTES, Grammar
from llamarium.sampling.grammar.json_schema import rule
from llamarium.tokenizer.tools.definition import ToolDefinition
from llamarium.tokenizer.tools.forms import ToolForm
from llamarium.tokenizer.tools.grammar import openings
from llamarium.tokenizer.tools.request import ToolRequest

MAX_RULES = 5000
"""Rules for the calls of a request: some 80 tools of 20 arguments, compiled within a second."""


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
    `Grammar.json_schema`, for tools that are not strict. ToolError for tools that cannot be held, GrammarError for
    another form than JSON beside them.
    """
    if not request.offered or (answer is None and not request.is_held):
        return answer
    if answer is not None and answer.kind != "json_schema":
        expected = "expected a JSON schema or any JSON object beside tools, so that no answer is taken for a call"
        raise GrammarError(f"found a form of the kind {answer.kind}; {expected}")
    if form != "pythonic":
        request = replace(request, tools=tuple(_lowered(tool, i, open_objects) for i, tool in enumerate(request.tools)))
    text = request.grammar(form, None if answer is None else _rule_beside(json.loads(answer.text), form))
    assert text is not None and form is not None
    if len(text.encode()) > MAX_BYTES or text.count("\n") > MAX_RULES:
        raise ToolError(
            "tools",
            f"are too much for a grammar: {len(text):,} characters in {text.count(chr(10)):,} rules, of {MAX_BYTES:,} "
            f"bytes and {MAX_RULES:,} rules at most; give fewer tools, or smaller ones",
        )
    return Grammar("calls", text, () if answer is None else openings([tool.name for tool in request.offered], form))


def _rule_beside(schema: Any, form: ToolForm | None) -> str:
    """Return the rule of a lowered schema whose JSON does not begin as a call does."""
    named = schema
    if isinstance(schema, dict) and "$ref" in schema and "allOf" not in schema:
        for key in cast("str", schema["$ref"]).split("/")[1:]:
            named = named[int(key)] if isinstance(named, list) else named[key]
    is_object = isinstance(named, dict) and named.get("additionalProperties") is False
    is_no_call = is_object and "parameters" not in named.get("properties", {}) and "patternProperties" not in named
    return rule(schema, None if form != "llama3_json" else (", ", ": ") if is_no_call else (",", ":"))


def compile_answer(
    compiler: Compiler, grammar: Grammar, request: ToolRequest, answer: Grammar | None = None
) -> CompiledGrammar:
    """Compile the grammar of `grammar_of_answer`; errors as it raises them."""
    try:
        return compiler.compile(grammar)
    except GrammarError as error:
        if answer is not None:
            compiler.compile(answer)
        for i, tool in enumerate(request.tools):
            try:
                compiler.compile(Grammar.json_schema(tool.parameters))
            except GrammarError as its_own:
                raise _refusal(i, its_own) from None
        raise ToolError("tools", f"cannot be held: {error}") from None


def _lowered(tool: ToolDefinition, i: int, open_objects: bool) -> ToolDefinition:
    """Return a tool with a schema of enforced keywords."""
    try:
        found = Grammar.json_schema(tool.parameters, open_objects=open_objects and not tool.strict)
    except GrammarError as error:
        raise _refusal(i, error) from None
    return replace(tool, parameters={**json.loads(found.text), "type": "object"})


def _refusal(i: int, error: GrammarError) -> ToolError:
    return ToolError(f"tools[{i}].function.parameters", f"cannot be held: {error}")
