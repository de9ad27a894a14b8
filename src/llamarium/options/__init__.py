"""Options that users give: each is declared once, as a field of a dataclass. Never torch, and nothing heavy."""
