"""llama.cpp's notation of grammars (GBNF) in llguidance's Lark, by llguidance's own converter."""

from typing import Any

from llamarium.errors import GrammarError, GrammarLimitError, escape
from llamarium.extras import optional


def to_lark(text: str) -> str:
    """Return a GBNF grammar as Lark."""
    converter: Any = optional("llguidance.gbnf_to_lark", "serve", "structured output")
    try:
        rules = converter.GrammarParser().parse(text)
        converter.resolve(rules)
        for rule in rules.values():
            _group_repeated(rule, converter)
        return "\n".join(map(str, sorted(rules.values(), key=_place)))
    except RecursionError:
        raise GrammarLimitError("the GBNF grammar is nested too deep; make it flatter") from None
    except Exception as error:  # noqa: BLE001 - the converter's own, and what it meets in a malformed text
        raise GrammarError(f"the GBNF grammar cannot be read: {escape(error)}") from None


def _group_repeated(node: Any, converter: Any) -> None:
    """Put parentheses around nested repetitions: Lark takes one sign, and the converter writes two for `("a"?){2}`."""
    for child in node.children():
        _group_repeated(child, converter)
    if isinstance(node, converter.RepetitionNode) and isinstance(node.node, converter.RepetitionNode):
        node.node = converter.SequenceNode([node.node])


def _place(rule: Any) -> int:
    return rule.order
