"""The grammar of an answer that has to call tools.

llguidance ignores unknown keywords. So schemas of calls in JSON go through `json_schema.lowered`, and what cannot be
enforced is refused by its tool's path. The pythonic form has rules of its own, with fewer keywords.
"""

import json
from dataclasses import replace
from typing import Protocol

from llamarium.errors import GrammarError, ToolError
from llamarium.sampling.constraint import CompiledGrammar
from llamarium.sampling.grammar.description import MAX_BYTES, Grammar
from llamarium.sampling.grammar.json_schema import lowered
from llamarium.tokenizer.tools.definition import ToolDefinition
from llamarium.tokenizer.tools.forms import ToolForm
from llamarium.tokenizer.tools.request import ToolRequest

MAX_RULES = 5000
"""Rules for the calls of a request: some 80 tools of 20 arguments, compiled within a second."""


class Compiler(Protocol):
    """Compiles grammars for one vocabulary: a `GrammarCompiler`."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile one, or raise `GrammarError`."""
        ...


def grammar_of_calls(request: ToolRequest, form: ToolForm | None) -> Grammar | None:
    """Return the grammar that forces calls, or None; `form` is how they are written."""
    if not request.is_held:
        return None
    if form != "pythonic":
        request = replace(request, tools=tuple(_lowered(tool, i) for i, tool in enumerate(request.tools)))
    text = request.grammar(form)
    assert text is not None
    if len(text.encode()) > MAX_BYTES or text.count("\n") > MAX_RULES:
        raise ToolError(
            "tools",
            f"are too much for a grammar: {len(text):,} characters in {text.count(chr(10)):,} rules, of {MAX_BYTES:,} "
            f"bytes and {MAX_RULES:,} rules at most; give fewer tools, or smaller ones",
        )
    return Grammar("calls", text)


def compile_calls(compiler: Compiler, grammar: Grammar, request: ToolRequest) -> CompiledGrammar:
    """Compile the grammar of `grammar_of_calls`."""
    try:
        return compiler.compile(grammar)
    except GrammarError as error:
        for i, tool in enumerate(request.tools):
            try:
                compiler.compile(Grammar.json_schema(tool.parameters))
            except GrammarError as its_own:
                raise _refusal(i, its_own) from None
        raise ToolError("tools", f"cannot be held: {error}") from None


def _lowered(tool: ToolDefinition, i: int) -> ToolDefinition:
    """Return a tool with a schema of enforced keywords."""
    try:
        schema = lowered(json.loads(Grammar.json_schema(tool.parameters).text))
    except GrammarError as error:
        raise _refusal(i, error) from None
    return replace(tool, parameters={**schema, "type": "object"})


def _refusal(i: int, error: GrammarError) -> ToolError:
    return ToolError(f"tools[{i}].function.parameters", f"cannot be held: {error}")
