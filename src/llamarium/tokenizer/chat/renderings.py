"""What is rendered of a dialog: its variants, with marks in what people wrote and without."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from llamarium.tokenizer.chat.messages import REASONING
from llamarium.tokenizer.chat.values import map_text
from llamarium.tokenizer.special import split_spellings

Prefix = tuple[int, bool]
"""How many messages of a dialog, and whether the header of an answer follows."""


class Rendering(NamedTuple):
    """What is rendered for one list of ids.

    Attributes:
        mark: The mark that is set into the texts.
        variants: The template's variables: the marked dialog, and for each of `proofs` another of the same dialog.
        proofs: "plain" and "swapped", as far as they differ from the marked one.
        tools: The names that have to be in what the template writes.
    """

    mark: str
    variants: list[dict[str, Any]]
    proofs: list[str]
    tools: list[str]


class Dialog(NamedTuple):
    """What a template is given; tools are as OpenAI's API has them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]

    def changed(self, change: Callable[[str], str], sought: Mapping[str, int]) -> "Dialog":
        """Apply `change` to every text that people wrote; roles, types and names of fields are the template's.

        In an answer, which a model wrote, the tokens stay that the template looks for (`sought`): by them it tells
        reasoning from the rest.
        """

        def changed_answer(text: str) -> str:
            pieces = split_spellings(text, sought)
            return "".join(piece if place % 2 else change(piece) for place, piece in enumerate(pieces))

        messages = [
            {
                key: value if key == "role" else map_text(value, changed_answer if _is_answer(message, key) else change)
                for key, value in message.items()
            }
            for message in self.messages
        ]
        return Dialog(messages, map_text(self.tools, change), map_text(self.variables, change))


def _is_answer(message: Mapping[str, Any], key: str) -> bool:
    return message["role"] == "assistant" and key in ("content", *REASONING)


class Marked(NamedTuple):
    """A dialog in the three forms that are rendered."""

    mark: str
    marked: Dialog
    plain: Dialog
    swapped: Dialog

    def call(self, count: int, add_generation_prompt: bool) -> Rendering:
        """Return what to render for the first `count` messages."""
        forms = {"marked": self.marked, "plain": self.plain, "swapped": self.swapped}
        cut = {name: dialog._replace(messages=dialog.messages[:count]) for name, dialog in forms.items()}
        kept = {name: dialog for name, dialog in cut.items() if name == "marked" or dialog != cut["marked"]}
        begins = {"add_generation_prompt": add_generation_prompt}
        variants = [{**one.variables, "messages": one.messages, "tools": one.tools, **begins} for one in kept.values()]
        names = [tool["function"]["name"] for tool in self.plain.tools or ()]
        return Rendering(self.mark, variants, list(kept)[1:], names)
