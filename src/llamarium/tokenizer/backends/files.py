"""Read tokenizer files with size limits, and write them atomically."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from llamarium.errors import LlamariumError, TokenizerError, escape
from llamarium.file_names import TOKENIZER, TOKENIZER_CONFIG
from llamarium.io import atomic_file, unwritable
from llamarium.strict_json import NotJson, parse_json

if TYPE_CHECKING:
    from llamarium.tokenizer.base import Tokenizer

_T = TypeVar("_T")
_PATTERN_GAVE_UP = "Regex search error"  # the package's panic when Oniguruma reaches its retry limit

# Eight times the largest published vocabularies (262,144 tokens), and the size of their tokenizer.json (33.4 MB).
MAX_TOKENS = 2**21
MAX_FILE_BYTES = 32 * 2**20
MAX_SMALL_FILE_BYTES = 2 * 2**20
"""Maximum size of tokenizer_config.json, chat_template.jinja and similar files. Llama 3.1's has 55 kB."""

# Parsed JSON takes up to 60 times the memory of its text, in the worst case of empty lists. A vocabulary of 262,144
# tokens with merges has 1.7 million values.
_MAX_JSON_VALUES = 2**22


def read_bytes(path: Path, limit: int = MAX_FILE_BYTES) -> bytes:
    """Read a whole file; TokenizerError if it cannot be read, is empty, or has more than `limit` bytes."""
    try:
        size = path.stat().st_size
        if not 0 < size <= limit:
            raise TokenizerError(f"{path}: {size} bytes; expected 1 to {limit} for a tokenizer file")
        return path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read: {error.strerror}") from None


def read_text(path: Path, limit: int = MAX_FILE_BYTES) -> str:
    """Read a whole UTF-8 file; TokenizerError as `read_bytes`, and for other bytes."""
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path}: no UTF-8 at byte {error.start}; expected a text file") from None


def read_json(path: Path, limit: int = MAX_FILE_BYTES) -> dict[str, Any]:
    """Read a JSON object; TokenizerError as `read_text` and `read_json_text`."""
    return read_json_text(read_text(path, limit), path)


def read_json_text(text: str, path: Path) -> dict[str, Any]:
    """Parse a JSON object; TokenizerError if it is another value, too large, or has a duplicate key."""
    try:
        value: Any = parse_json(text, max_values=_MAX_JSON_VALUES)
    except NotJson as error:
        raise TokenizerError(f"{path}: cannot be read as JSON: {escape(error)}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def write_text(path: Path, text: str) -> None:
    """Write JSON text atomically."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write(text.encode(errors="backslashreplace"))  # half a surrogate pair as JSON's \udcff
    except OSError as error:
        raise unwritable(path, error) from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object atomically; OutputError if that fails."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def guard_rust(call: Callable[[], _T], source: str) -> _T:
    """Call into a Rust package; its errors, including panics, become `TokenizerError`.

    The package prints a panic to stderr, which cannot be turned off; redirecting stderr would hide the output of other
    threads.
    """
    try:
        return call()
    except BaseException as error:
        if (refusal := of_rust(error, source)) is None:
            raise
        raise refusal from None


def of_rust(error: BaseException, source: str) -> TokenizerError | None:
    """Convert an error of a Rust package; None for any other error, which must be raised unchanged."""
    if isinstance(error, LlamariumError | ImportError):  # of texts that are read meanwhile; the package is missing
        return None
    # A panic derives from BaseException, and no public class names it.
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        return None
    if _PATTERN_GAVE_UP in str(error):
        return TokenizerError(
            f"{source}: a regular expression of the pre-tokenizer or normalizer gives up on this text "
            f"({escape(error)}); expected a pattern without nested repetition, such as (a+)+"
        )
    return TokenizerError(f"{source}: the tokenizers package refuses it: {escape(error)}")


def save_huggingface(folder: Path, tokenizer: "Tokenizer", contents: Mapping[str, Any]) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, as transformers reads them.

    `contents` is the content of the `tokenizer.json`; the BOS rule becomes its post-processor. The first end-of-text id
    becomes `eos_token`; the full list belongs in the model's `generation_config.json`.
    """
    spelling = {i: text for text, i in tokenizer.special.ids.items()}
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_ids[:1], tokenizer.pad_token_id
    prefix = bos if tokenizer.special.add_bos else None
    raw = {**contents, "post_processor": None if prefix is None else _bos_first(spelling[prefix], prefix)}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": tokenizer.special.add_bos,
        "add_eos_token": False,
        "bos_token": None if bos is None else spelling[bos],
        "eos_token": spelling[eos[0]] if eos else None,
        "pad_token": None if pad is None else spelling[pad],
        "clean_up_tokenization_spaces": False,
        "chat_template": tokenizer.chat_templates.stored,
    }
    write_text(folder / TOKENIZER, json.dumps(raw, ensure_ascii=False))
    write_json(folder / TOKENIZER_CONFIG, {key: value for key, value in config.items() if value is not None})


def _bos_first(spelling: str, token_id: int) -> dict[str, Any]:
    def bos(type_id: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": spelling, "type_id": type_id}}

    first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [bos(0), first],
        "pair": [bos(0), first, bos(1), second],
        "special_tokens": {spelling: {"id": spelling, "ids": [token_id], "tokens": [spelling]}},
    }
