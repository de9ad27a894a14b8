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
    if named := _PROPERTY.match(pattern, place):
        return "\\" + named[0], 1 + len(named[0])
    if letter and letter in _PUNCTUATION:
        return "\\" + letter if letter in r"^$\.*+?()[]{}|-&~#" else letter, 2
    raise PatternError(f"has the escape \\{letter} at character {place - 1}, which is not supported")


# --- formats ----------------------------------------------------------------------------------------------------------
#
# Each expression accepts nothing that its standard does not: leap years are counted, a second 60 is not written.

_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]+)?(?:Z|[+-]{_HOUR_MINUTE})"
_CLOCK = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_CALENDAR = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_HEX = "[0-9A-Fa-f]{1,4}"
_IPV6 = "(?:" + "|".join(
    [
        f"(?:{_HEX}:){{7}}{_HEX}",
        f"(?:{_HEX}:){{1,7}}:",
        *(f"(?:{_HEX}:){{1,{7 - after}}}(?::{_HEX}){{1,{after}}}" for after in range(1, 7)),
        f":(?::{_HEX}){{1,7}}",
        "::",
    ]
) + ")"  # fmt: skip
_PLAIN = r"[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2}"
_SEGMENT = f"(?:{_PLAIN}|[:@])"
_AUTHORITY = rf"(?:(?:{_PLAIN}|:)*@)?(?:\[{_IPV6}\]|(?:{_PLAIN})*)(?::[0-9]*)?"
_PATH = f"(?://{_AUTHORITY}(?:/{_SEGMENT}*)*|/?(?:{_SEGMENT}+(?:/{_SEGMENT}*)*)?)"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:[0-9]+W|{_CALENDAR}(?:{_CLOCK})?|{_CLOCK})",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})+",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:{_PATH}(?:\?(?:{_SEGMENT}|[/?])*)?(?:\#(?:{_SEGMENT}|[/?])*)?",
}
"""Enforced formats of JSON Schema, as Rust's expressions for the whole string.

Sources: RFC 3339 (date, time, date-time; appendix A for duration), RFC 5321 4.1.2 (email), RFC 1123 2.1 (hostname),
RFC 4291 2.2 (ipv6), RFC 4122 (uuid), RFC 3986 appendix A (uri).
"""
FORMAT_LENGTHS = {"email": 254, "hostname": 253}
"""Maximal characters of a format's string, by its standard."""
