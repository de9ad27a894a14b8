"""What counts as text."""

from llamarium.errors import TokenizerError


def check_text(text: object) -> None:
    """Refuse what is no text, and a lone surrogate, half of a UTF-16 pair, which UTF-8 cannot hold: TokenizerError."""
    if not isinstance(text, str):
        raise TokenizerError(f"expected text (str), found {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text holds the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}; it is no "
            'valid Unicode: read the source with its own encoding, or use errors="replace"'
        ) from None
