"""Validation of hand-written grammars: llguidance's Lark, and llama.cpp's GBNF.

llguidance's Lark also has control tokens, sampling options, parser options and relaxed JSON schemas. They do not
describe a text, and are errors here.
"""

import re
from typing import Any

from llamarium.errors import GrammarError, GrammarLimitError, escape, show_value
from llamarium.extras import optional

MAX_RULES = 1000
"""Maximum number of rules; llguidance recurses over them, within the stack size of `workers.py`."""

_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/')
_RULE = re.compile(r"^[ \t]*[?!]?[A-Za-z_][\w.-]*[ \t]*(?:\[[^\]\n]*\]|\{[^}\n]*\})?[ \t]*:", re.M)
_DIRECTIVE = re.compile(r"%(\w*)")
_KNOWN_DIRECTIVES = ("ignore", "import", "regex")
_OPTION = re.compile(r"\b(temperature|max_tokens|stop)\s*=")
_NOT_TEXT = {
    "<": "control tokens (<...>), which are no text",
    "@": "other grammars (@...)",
    "~": "~, which is repetition or negation; write {M,N} for the one, and there is no other",
}


def check_lark(text: str) -> None:
    """Check that a Lark grammar only uses features that describe a text; GrammarError if not."""
    bare = _QUOTED.sub(" ", text)
    for directive in _DIRECTIVE.findall(bare):
        if directive not in _KNOWN_DIRECTIVES:
            directives = ", ".join(f"%{name}" for name in _KNOWN_DIRECTIVES)
            hint = "; a schema is Grammar.json_schema" if directive == "json" else ""
            raise GrammarError(f"the Lark grammar has %{show_value(directive)[1:-1]}; there are: {directives}{hint}")
    if option := _OPTION.search(bare):
        raise GrammarError(f"the Lark grammar has {option[1]}=; give that with the request, not in the grammar")
    for sign, feature in _NOT_TEXT.items():
        if sign in bare:
            raise GrammarError(f"the Lark grammar has {feature}")
    check_num_rules(len(_RULE.findall(bare)))


def check_num_rules(count: int) -> None:
    """Check the number of rules; GrammarLimitError if there are too many."""
    if count > MAX_RULES:
        raise GrammarLimitError(f"the grammar has {count:,} rules; expected at most {MAX_RULES:,}")


def literal(text: str) -> str:
    """Return the regular expression, for use between slashes, that matches one text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def gbnf_to_lark(text: str) -> str:
    """Convert a GBNF grammar (llama.cpp) to llguidance's Lark, with llguidance's converter; GrammarError if invalid."""
    converter: Any = optional("llguidance.gbnf_to_lark", "serve", "structured output")
    try:
        rules = converter.GrammarParser().parse(text)
        converter.resolve(rules)
        for rule in rules.values():
            _group_repeated(rule, converter)
        return "\n".join(map(str, sorted(rules.values(), key=lambda rule: rule.order)))
    except RecursionError:
        raise GrammarLimitError("the GBNF grammar is nested too deep; make it flatter") from None
    except Exception as error:  # noqa: BLE001 - the converter raises various errors for malformed text
        raise GrammarError(f"the GBNF grammar cannot be read: {escape(error)}") from None


def _group_repeated(node: Any, converter: Any) -> None:
    """Parenthesize nested repetitions: Lark allows one operator, and the converter writes two for `("a"?){2}`."""
    for child in node.children():
        _group_repeated(child, converter)
    if isinstance(node, converter.RepetitionNode) and isinstance(node.node, converter.RepetitionNode):
        node.node = converter.SequenceNode([node.node])
