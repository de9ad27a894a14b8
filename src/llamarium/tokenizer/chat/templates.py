"""A model's chat templates: one, or several by name.

`default` is for dialogs, `tool_use` for dialogs with tools. Any other (`rag`) is used only if it is selected.

Source: transformers, `get_chat_template` and `save_chat_templates`; gguf, `GGUFWriter.add_chat_template`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DEFAULT, TOOL_USE = "default", "tool_use"
GGUF_KEY = "tokenizer.chat_template"


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """The chat templates of a model, by name; may be empty."""

    by_name: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, value: "str | ChatTemplates | None") -> "ChatTemplates":
        """Return templates from templates, the text of a single one, or None."""
        if isinstance(value, ChatTemplates):
            return value
        return cls() if value is None else cls({DEFAULT: value})

    @property
    def default(self) -> str | None:
        """The template for dialogs without tools, or None."""
        return self.by_name.get(DEFAULT)

    @property
    def with_tools(self) -> str | None:
        """The template for dialogs with tools, or None."""
        return self.by_name.get(TOOL_USE, self.default)

    @property
    def text(self) -> str | None:
        """All templates joined, to search for what any of them writes; None without templates."""
        return "\n".join(self.by_name.values()) if self.by_name else None

    @property
    def stored(self) -> str | list[dict[str, str]] | None:
        """The value of `chat_template` in tokenizer_config.json; None omits it."""
        if not self.by_name or (self.default is not None and len(self.by_name) == 1):
            return self.default
        return [{"name": name, "template": text} for name, text in self.by_name.items()]

    def to_gguf(self) -> dict[str, Any]:
        """Return the templates as metadata of a GGUF file."""
        others = {name: text for name, text in self.by_name.items() if name != DEFAULT}
        default = {} if self.default is None else {GGUF_KEY: self.default}
        listed = {f"{GGUF_KEY}s": [*others]} if others else {}
        return {**default, **listed, **{f"{GGUF_KEY}.{name}": text for name, text in others.items()}}
