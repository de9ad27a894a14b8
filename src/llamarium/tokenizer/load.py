"""Find out what kind of tokenizer a path holds, and read it."""

from pathlib import Path

from llamarium.errors import TokenizerError
from llamarium.file_names import CHARACTERS, VOCABULARIES
from llamarium.tokenizer.base import Tokenizer


def load_tokenizer_file(path: Path) -> Tokenizer:
    """Read a tokenizer from a folder or one of its files; TokenizerError if there is none, or it is refused.

    The files are `characters.json`, Hugging Face's `tokenizer.json`, and `tokenizer.model` of Llama 3 or SentencePiece.
    In a folder the first of these that is there counts.
    """
    file = _find(Path(path))
    if file.suffix == ".model":
        return _load_model(file)
    if file.name == CHARACTERS:
        from llamarium.tokenizer.backends.characters import CharacterTokenizer

        return CharacterTokenizer.from_file(file)
    from llamarium.tokenizer.backends.huggingface import load_huggingface

    return load_huggingface(file)


def _load_model(path: Path) -> Tokenizer:
    """Read a `tokenizer.model`: lines of text (Llama 3), or a message, which begins with a field's tag."""
    with path.open("rb") as file:
        is_message = file.read(1) < b" "
    if is_message:
        from llamarium.tokenizer.backends.sentencepiece_files import load_sentencepiece

        return load_sentencepiece(path)
    from llamarium.tokenizer.backends.meta import load_meta

    return load_meta(path)


def _find(path: Path) -> Path:
    if path.is_dir():
        for name in VOCABULARIES:
            if (path / name).is_file():
                return path / name
        raise TokenizerError(
            f"{path}: no tokenizer in this folder; expected {', '.join(VOCABULARIES[:-1])} or {VOCABULARIES[-1]}"
        )
    if not path.is_file():
        raise TokenizerError(f"{path}: no such file or folder")
    if path.suffix not in (".json", ".model"):
        raise TokenizerError(
            f"{path}: no tokenizer file; expected {', '.join(VOCABULARIES[:-1])} or {VOCABULARIES[-1]}"
        )
    return path
