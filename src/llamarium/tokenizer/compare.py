"""Whether two models speak of the same tokens. Never torch."""

from typing import Protocol

from llamarium.config import ModelConfig
from llamarium.errors import InputError, TokenizerError, counted, escape
from llamarium.tokenizer.base import Tokenizer


class Speaker(Protocol):
    """What is needed of a model with its tokenizer."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def config(self) -> ModelConfig: ...  # noqa: D102
    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        ...


def check_same_vocabulary(first: Speaker, second: Speaker, why: str) -> None:
    """Check that two models speak of the same tokens, or raise `InputError` naming the first difference."""
    what = f"{escape(first.name)} and {escape(second.name)} have different vocabularies and {why}"
    sizes = first.config.vocab_size, second.config.vocab_size
    if sizes[0] != sizes[1]:
        raise InputError(f"{what}: {sizes[0]:,} and {counted(sizes[1], 'token')}")
    one, other = tokenizers = first.tokenizer, second.tokenizer
    if one.special.add_bos != other.special.add_bos or one.bos_token_id != other.bos_token_id:
        raise InputError(f"{what}: one puts another begin-of-sequence token before a text than the other, or none")
    for token_id in range(min(one.vocab_size, other.vocab_size)):
        spellings = [_bytes(tokenizer, token_id) for tokenizer in tokenizers]
        if spellings[0] != spellings[1] and None not in spellings:
            texts = " and ".join(f'"{escape(tokenizer.token_text(token_id))}"' for tokenizer in tokenizers)
            raise InputError(f"{what}: token {token_id} is {texts}")


def _bytes(tokenizer: Tokenizer, token_id: int) -> bytes | None:
    """Return what an id stands for; None where the vocabulary has a hole."""
    try:
        return tokenizer.token_bytes(token_id)
    except TokenizerError:
        return None
