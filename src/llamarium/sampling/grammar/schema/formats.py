"""Formats of strings that a grammar enforces, as regular expressions of the whole string.

Each accepts nothing that its standard does not: leap years are counted, a second 60 is not written. Each comes to an
end: where a standard has no longest text, a bound is set that texts in use keep.
"""

from typing import Any

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"  # clocks begin with the year 1
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR_MINUTE})"
_COUNT = "[0-9]{1,9}"
_CLOCK = f"T(?:{_COUNT}H(?:{_COUNT}M(?:{_COUNT}S)?)?|{_COUNT}M(?:{_COUNT}S)?|{_COUNT}S)"
_CALENDAR = f"(?:{_COUNT}Y(?:{_COUNT}M(?:{_COUNT}D)?)?|{_COUNT}M(?:{_COUNT}D)?|{_COUNT}D)"
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

_BASE64 = "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"


def _uuid(version: int) -> str:
    digits = f"XXXXXXXX-XXXX-{version}XXX-VXXX-XXXXXXXXXXXX"
    return digits.replace("X", "[0-9A-Fa-f]").replace("V", "[89ABab]")


FORMATS = {
    "base64": _BASE64,
    "byte": _BASE64,
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_COUNT}W|{_CALENDAR}(?:{_CLOCK})?|{_CLOCK})",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})+",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    **{f"uuid{version}": _uuid(version) for version in range(1, 9)},
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:{_PATH}(?:\?(?:{_SEGMENT}|[/?])*)?(?:\#(?:{_SEGMENT}|[/?])*)?",
}
"""Enforced formats of JSON Schema, as Rust's expressions for the whole string.

Sources: RFC 3339 (date, time, date-time; appendix A for duration), RFC 5321 4.1.2 (email), RFC 1123 2.1 (hostname),
RFC 4291 2.2 (ipv6), RFC 9562 (uuid), RFC 3986 appendix A (uri), RFC 4648 4 (base64, byte).
"""
FORMAT_LENGTHS = {"email": 254, "hostname": 253, "uri": 2048}
"""Maximal characters of a format's string: by its standard, or what servers and browsers take."""
RANGES = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32)},
}
"""Formats of whole numbers, with the least and the greatest; those of 64 bits say no more than `type` does."""


def with_format(lowered: dict[str, Any]) -> dict[str, Any]:
    """Return a lowered schema with its format replaced by a regular expression; unknown formats are ignored."""
    name = lowered.get("format")
    if name is None:
        return lowered
    others = {key: value for key, value in lowered.items() if key != "format"}
    if name in RANGES and {"integer", "number"} & set(others.get("type", ())):
        low, high = RANGES[name]
        nearer = max(low, others.get("minimum", low)), min(high, others.get("maximum", high))
        return {**others, "minimum": nearer[0], "maximum": nearer[1]}
    if name not in FORMATS:
        return others
    restriction: dict[str, Any] = {"pattern": f"^(?:{FORMATS[name]})$"}
    if name in FORMAT_LENGTHS:
        restriction["maxLength"] = FORMAT_LENGTHS[name]
    if not restriction.keys() & others.keys():
        return others | restriction
    return {**others, "allOf": [*others.get("allOf", []), restriction]}
