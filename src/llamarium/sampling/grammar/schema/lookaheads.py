r"""Lookaheads at the beginning of a JavaScript expression, as expressions of their own.

`^(?=A)B` is followed where `^A` and `^B` are. `^(?!A)B` needs the complement of `A`, which is written out for what
libraries write: not to begin with some characters (`(?!\.)`, `(?!xn--)`), not to be one text (`(?!null$)`), to hold
nothing twice in a row or at all (`(?!.*\.\.)`), and not to be made of some characters alone (`(?![-+.]*$)`).
"""

import re

from llamarium.sampling.grammar.schema.patterns import PatternError

_BEGIN = re.compile(r"\^?\(\?([=!])")
_ATOM = r"\\[^A-Za-z0-9]|\\[dDwWsS]|\[\^?(?:\\.|[^\]\\])+\]|[^\\\[\](){}*+?|^$.]"
_ATOMS = re.compile(rf"(?:{_ATOM})+")
_OCCURRENCE = re.compile(rf"\.\*({_ATOM})({_ATOM})?")
_ALONE = re.compile(rf"({_ATOM})[*+]\$")


def split(pattern: str) -> list[str]:
    """Return the expressions all of which a text follows that follows this one; PatternError for other lookaheads."""
    parts: list[str] = []
    while lookahead := _BEGIN.match(pattern):
        end = _closing(pattern, lookahead.end())
        inner, rest = pattern[lookahead.end() : end].removeprefix("^"), pattern[end + 1 :]
        if not pattern.startswith("^") or _has_alternatives(inner) or _has_alternatives(rest):
            raise PatternError(f"has the lookahead {pattern[: end + 1]} beside alternatives, or not after ^")
        parts.append(f"^{inner}" if lookahead[1] == "=" else _complement(inner))
        pattern = f"^{rest}"
    return [*parts, pattern]


def _complement(inner: str) -> str:
    """Return an expression of texts that do not begin with another."""
    if alone := _ALONE.fullmatch(inner):  # a text of none of these characters is made of them, too
        return f"^[\\s\\S]*{_other(alone[1])}"
    if occurrence := _OCCURRENCE.fullmatch(inner):
        first, second = occurrence.groups()
        if second is None:
            return f"^{_other(first)}*$"
        if first == second:
            return f"^(?:{_other(first)}|{first}{_other(first)})*{first}?$"
    expression = inner.removesuffix("$")
    if _ATOMS.fullmatch(expression):
        atoms = re.findall(_ATOM, expression)
        shorter = ["".join(atoms[:i]) + f"(?:{_other(atom)}[\\s\\S]*)?" for i, atom in enumerate(atoms)]
        longer = [f"{expression}[\\s\\S]+"] if expression != inner else []
        return f"^(?:{'|'.join([*shorter, *longer])})$"
    raise PatternError(f"has the lookahead (?!{inner}), whose complement is not known")


def _other(atom: str) -> str:
    """Return the class of characters that an atom does not match."""
    if atom.startswith("[^"):
        return f"[{atom[2:]}"
    return f"[^{atom[1:]}" if atom.startswith("[") else f"[^{atom}]"


def _closing(pattern: str, place: int) -> int:
    """Return the place of the parenthesis that closes a group whose inside begins at a place."""
    depth = 1
    for token in re.finditer(r"\\.|\[(?:\\.|[^\]\\])*\]|[()]", pattern[place:]):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0:
            return place + token.start()
    raise PatternError("has a group without an end")


def _has_alternatives(pattern: str) -> bool:
    depth = 0
    for token in re.finditer(r"\\.|\[(?:\\.|[^\]\\])*\]|[()|]", pattern):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if token[0] == "|" and depth == 0:
            return True
    return False
