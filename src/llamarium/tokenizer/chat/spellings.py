"""How control tokens are spelled, and what keeps a text apart from them."""

import re
from collections.abc import Mapping


class Spellings:
    """How control tokens are spelled, and where a text comes near to one."""

    def __init__(self, spellings: Mapping[str, int]) -> None:
        self._whole = list(spellings)
        self._heads = {text[:i] for text in spellings for i in range(1, len(text))}
        self._tails = {text[i:] for text in spellings for i in range(1, len(text))}
        self._longest = max(map(len, spellings), default=0)
        alternatives = "|".join(map(re.escape, spellings)) or "(?!)"
        self._begin = re.compile(f"(?={alternatives})(.)", re.DOTALL)
        ends = re.escape("".join({text[0] for text in spellings} | {text[-1] for text in spellings}))
        self._ends = re.compile(f"[{ends}]" if ends else "(?!)")

    def mark(self, text: str, mark: str) -> str:
        """Break every spelling inside `text`, and every beginning or end of one at its edges."""
        body = text.strip()
        left, right = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
        if not body:
            return text
        begins = {match.start() for match in self._begin.finditer(body)}
        begins |= {i for i in range(max(0, len(body) - self._longest), len(body)) if body[i:] in self._heads}
        broken = "".join(c + mark if i in begins else c for i, c in enumerate(body)) if begins else body
        return left + (mark if self._may_continue(body) else "") + broken + right

    def _may_continue(self, body: str) -> bool:
        """Tell whether a control token that began before the text could go on in it."""
        heads = (body[:i] for i in range(1, min(len(body), self._longest) + 1))
        inside = len(body) < self._longest and any(body in spelling[1:] for spelling in self._whole)
        return inside or any(head in self._tails for head in heads)

    def swap_ends(self, text: str, mark: str) -> str:
        """Replace the characters with which control tokens begin and end."""
        return self._ends.sub(mark, text)
