r"""A character-level tokenizer, for training small models.

Its file, `characters.json`, has the alphabet: `{"type": "characters", "version": 1, "characters": ["\n", " ", ...]}`.
An equivalent `tokenizer.json` is written next to it for other programs; it is not read here.
"""

import json
from pathlib import Path

from llamarium.errors import TokenizerError, escape, show_value
from llamarium.file_names import CHARACTERS
from llamarium.tokenizer.backends.files import MAX_SMALL_FILE_BYTES, read_json, save_huggingface, write_json
from llamarium.tokenizer.base import Backend, Tokenizer
from llamarium.tokenizer.bpe import ByteLevelBPE
from llamarium.tokenizer.special import SpecialTokens, check_text


class CharacterTokenizer:
    """Creates character tokenizers."""

    @staticmethod
    def from_text(text: str) -> Tokenizer:
        """Return a tokenizer with the distinct characters of `text`, in code point order."""
        check_text(text)
        if not text:
            raise TokenizerError("a character tokenizer is built from a text; this one is empty")
        return CharacterTokenizer.from_characters(sorted(set(text)), "characters of a text")

    @staticmethod
    def from_characters(characters: list[str], source: str) -> Tokenizer:
        """Return a tokenizer with these distinct characters, in this order."""
        return Tokenizer(
            CharacterBackend(characters, source), SpecialTokens(), vocab_size=len(characters), source=source
        )

    @staticmethod
    def from_file(path: Path) -> Tokenizer:
        """Read a `characters.json`."""
        raw = read_json(path, MAX_SMALL_FILE_BYTES)
        characters = raw.get("characters")
        if raw.get("type") != "characters" or raw.get("version") != 1 or not isinstance(characters, list):
            raise TokenizerError(
                f'{path}: expected {{"type": "characters", "version": 1, "characters": [...]}}; '
                f"found the keys {escape(', '.join(raw))}"
            )
        for i, character in enumerate(characters):
            if not isinstance(character, str) or len(character) != 1 or "\ud800" <= character <= "\udfff":
                raise TokenizerError(f"{path}: characters[{i}] is {show_value(character)}; expected one character")
        if not characters or len(set(characters)) != len(characters):
            raise TokenizerError(
                f"{path}: {len(characters)} characters, {len(set(characters))} different ones; expected each once"
            )
        return CharacterTokenizer.from_characters(characters, str(path))


class CharacterBackend(Backend):
    """One id per character."""

    def __init__(self, characters: list[str], source: str) -> None:
        self._characters = characters
        self._ids = {character: i for i, character in enumerate(characters)}
        self._source = source

    def encode(self, text: str) -> list[int]:
        """Encode a text."""
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            (character,) = error.args
            raise TokenizerError(
                f"{self._source}: the character {escape(character)!r} (U+{ord(character):04X}) is not among the "
                f"{len(self._characters)} that this tokenizer was built from"
            ) from None

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the UTF-8 of one character."""
        return self._characters[token_id].encode("utf-8")

    def byte_level_bpe(self) -> ByteLevelBPE:
        """Return the readable implementation: each character is a piece and a token, without merges."""
        return ByteLevelBPE(
            ids={character.encode("utf-8"): i for character, i in self._ids.items()},
            rank=lambda left, right: None,
            cut=list,
            whole_pieces=True,
        )

    def save(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Write `characters.json`, and a `tokenizer.json` for other programs."""
        from tokenizers import Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Inner

        inner = Inner(models.WordLevel(self._ids, unk_token=""))
        inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        inner.decoder = decoders.Fuse()
        save_huggingface(folder, tokenizer, json.loads(inner.to_str()))
        write_json(folder / CHARACTERS, {"type": "characters", "version": 1, "characters": self._characters})
