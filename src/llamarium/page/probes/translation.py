"""The small encoder-decoder of the package: a translation, with the attention that made it. Never torch."""

from pydantic import Field

from llamarium.inspect.probes.translation import packaged_translator
from llamarium.inspect.tokens import Candidate
from llamarium.page.open_pass import OpenModel
from llamarium.page.schema.base import PageRequest, View

Patterns = tuple[tuple[tuple[tuple[float, ...], ...], ...], ...]
"""By layer, head, query and key."""


class TranslationRequest(PageRequest):
    """`POST /inspect/translations`: a sentence, words apart."""

    text: str = Field(max_length=1000)


class TranslationView(View):
    """A `Translation`, and what is known of its model.

    Attributes:
        known: The words that it reads.
        learned: Sentences that it learned from.
        asked: Other sentences that it was asked for, and `right` of them are translated word for word.
    """

    source: tuple[str, ...]
    written: tuple[str, ...]
    candidates: tuple[tuple[Candidate, ...], ...]
    encoder: Patterns
    decoder: Patterns
    cross: Patterns
    known: tuple[str, ...]
    learned: int
    asked: int
    right: int


def translations(context: OpenModel, body: TranslationRequest) -> TranslationView:
    """Translate a sentence from English to French, with the patterns of all three kinds of attention."""
    translator = packaged_translator()
    about = {name: translator.about[name] for name in ("learned", "asked", "right")}
    translation = translator.translate(body.text).to_dict()
    return TranslationView.model_validate({**translation, "known": translator.about["english"], **about})
