"""Read chat templates from the files of a tokenizer, or from a GGUF file.

| where they are stored                          | what it holds                                                  |
|------------------------------------------------|----------------------------------------------------------------|
| `tokenizer_config.json`, `chat_template`       | a text, a list of `{"name", "template"}`, or an object by name |
| `chat_template.jinja`                          | the default; the field above is then not read                  |
| `additional_chat_templates/NAME.jinja`         | the template of that name                                      |
| GGUF, `tokenizer.chat_template`                | the default                                                    |
| GGUF, `tokenizer.chat_template.NAME`           | the template of that name; `tokenizer.chat_templates` lists them|

Source: transformers, `from_pretrained` of tokenizers; gguf, `GGUFWriter.add_chat_template`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from llamarium.errors import TokenizerError, show_value
from llamarium.file_names import NAMED_TEMPLATES, TEMPLATE, TEMPLATE_FOLDER, TOKENIZER_CONFIG
from llamarium.tokenizer.backends.files import MAX_SMALL_FILE_BYTES, read_text
from llamarium.tokenizer.chat.templates import DEFAULT, GGUF_KEY, ChatTemplates

_MAX_TEMPLATES = 32  # of one model; published ones have three


def read_templates(folder: Path, config: Mapping[str, Any]) -> ChatTemplates:
    """Read the templates of a folder, whose tokenizer_config.json is `config`; TokenizerError if one is malformed."""
    default_file = folder / TEMPLATE
    named = {} if default_file.exists() else _of_config(config.get("chat_template"), folder / TOKENIZER_CONFIG)
    if default_file.exists():
        named[DEFAULT] = read_text(default_file, MAX_SMALL_FILE_BYTES)
    files = sorted(folder.glob(NAMED_TEMPLATES))
    if len(files) > _MAX_TEMPLATES:
        raise _too_many(str(folder / TEMPLATE_FOLDER), len(files))
    return ChatTemplates(named | {file.stem: read_text(file, MAX_SMALL_FILE_BYTES) for file in files})


def templates_of_gguf(metadata: Mapping[str, Any], source: str) -> ChatTemplates:
    """Read the templates of a GGUF file's metadata; TokenizerError if one is not text."""
    keys = {key: key.removeprefix(GGUF_KEY).removeprefix(".") or DEFAULT for key in metadata if _is_template(key)}
    if len(keys) > _MAX_TEMPLATES:
        raise _too_many(source, len(keys))
    if wrong := [key for key in keys if not isinstance(metadata[key], str)]:
        raise TokenizerError(f"{source}: {wrong[0]} is {type(metadata[wrong[0]]).__name__}; expected a string")
    return ChatTemplates({name: metadata[key] for key, name in keys.items()})


def _is_template(key: str) -> bool:
    return key == GGUF_KEY or key.startswith(f"{GGUF_KEY}.")


def _of_config(value: object, path: Path) -> dict[str, str]:
    """Read the field of tokenizer_config.json."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    pairs: list[tuple[object, object]] = []
    if isinstance(value, Mapping):
        pairs = [*cast("Mapping[object, object]", value).items()]
    elif isinstance(value, list) and all(isinstance(item, Mapping) for item in cast("list[object]", value)):
        pairs = [(item.get("name"), item.get("template")) for item in cast("list[Mapping[str, object]]", value)]
    if not pairs or not all(isinstance(text, str) for pair in pairs for text in pair):
        raise TokenizerError(
            f"{path}: chat_template is {show_value(value)}; expected a template, or a list of objects with "
            "name and template"
        )
    if len(pairs) > _MAX_TEMPLATES:
        raise _too_many(str(path), len(pairs))
    return dict(cast("list[tuple[str, str]]", pairs))


def _too_many(source: str, count: int) -> TokenizerError:
    return TokenizerError(f"{source}: {count} chat templates; at most {_MAX_TEMPLATES} are read")
