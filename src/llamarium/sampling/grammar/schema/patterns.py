r"""Regular expressions of JSON Schema, translated into those that llguidance reads.

A schema's `pattern` is a JavaScript expression; llguidance's are those of Rust's crate regex. A few mean another thing
there: `[[a]]` is a nested class in Rust, `[a&&b]` an intersection, `\<` the beginning of a word, and `.`, `\d`, `\w`
and `\s` are other sets. Those are translated, or refused.

Sources: ECMA-262, 22.2 (RegExp); https://docs.rs/regex/latest/regex/#syntax.
"""

import re

_SPACE = r"[\t\n\x0b\x0c\r \u00a0\ufeff\u2028\u2029\p{Zs}]"
_ESCAPES = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": _SPACE,
    "S": f"[^{_SPACE[1:]}",
    "t": r"\t",
    "n": r"\n",
    "v": r"\x0b",
    "f": r"\x0c",
    "r": r"\r",
}
_ANY = r"[^\n\r\u2028\u2029]"
_PUNCTUATION = frozenset(r"^$\.*+?()[]{}|/-" + "\"'#%&,:;=@_`~! ")  # `\<` and `\>` are borders of words in Rust
_CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_]+(=[A-Za-z_]+)?\}")
_GROUP = re.compile(r"\?(:|<[A-Za-z_]\w*>)")


class PatternError(ValueError):
    """Why an expression cannot be translated."""


def translated(pattern: str) -> str:
    """Return a JavaScript expression in Rust's syntax; llguidance refuses lookarounds and inner anchors."""
    parts: list[str] = []
    place, in_class = 0, False
    while place < len(pattern):
        part, length = _next(pattern, place, in_class)
        in_class = part == "[" or (in_class and part != "]")
        parts.append(part)
        place += length
    return "".join(parts)


def _next(pattern: str, place: int, in_class: bool) -> tuple[str, int]:
    """Return the translation of the element at a place, and its number of characters."""
    character = pattern[place]
    if character == "\\":
        return _escape(pattern, place + 1)
    if in_class:
        if character == "[":
            raise PatternError(f"has a [ within a class, at character {place}; write \\[")
        if pattern[place : place + 2] in ("&&", "--", "~~"):
            raise PatternError(f"has {pattern[place : place + 2]} within a class, at character {place}; escape it")
        return character, 1
    if character == ".":
        return _ANY, 1
    if character == "[" and pattern[place + 1 :].removeprefix("^").startswith("]"):
        raise PatternError(f"has an empty class, at character {place}")
    if character == "(" and pattern[place + 1 : place + 2] == "?" and not _GROUP.match(pattern, place + 1):
        raise PatternError(f"has {pattern[place : place + 3]} at character {place}; of groups ( and (?: are supported")
    return character, 1


def _escape(pattern: str, place: int) -> tuple[str, int]:
    """Translate the escape whose backslash stands before `place`."""
    letter = pattern[place : place + 1]
    if letter in _ESCAPES:
        return _ESCAPES[letter], 2
    if code := _CODE.match(pattern, place):
        return f"\\u{int(code[1] or code[2], 16):04x}", 1 + len(code[0])
    if unicode_class := _PROPERTY.match(pattern, place):
        return "\\" + unicode_class[0], 1 + len(unicode_class[0])
    if letter and letter in _PUNCTUATION:
        return "\\" + letter if letter in r"^$\.*+?()[]{}|-&~#" else letter, 2
    raise PatternError(f"has the escape \\{letter} at character {place - 1}, which is not supported")
