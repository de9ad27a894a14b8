"""File names in a model folder, which readers open, the hub client downloads and writers replace.

All modules use these names, so that every file that a reader opens is also downloaded, and no file of an old model
remains next to a new one. `docs/reference/checkpoints.md` lists them.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
GPTQ_CONFIG, AWQ_CONFIG = "quantize_config.json", "quant_config.json"
CONFIGS = (CONFIG, GENERATION_CONFIG, GPTQ_CONFIG, AWQ_CONFIG)

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
ANY_SAFETENSORS = "*.safetensors"
SAFETENSORS_FILES = (SAFETENSORS, "model-*-of-*.safetensors", SAFETENSORS_INDEX)

BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
ANY_BIN = "pytorch_model*.bin"
BIN_FILES = (BIN, "pytorch_model-*-of-*.bin", BIN_INDEX)

META_CONFIG, META_SHARDS = "params.json", "consolidated.*.pth"
META_FILES = (META_CONFIG, META_SHARDS)

CHARACTERS, TOKENIZER, TOKENIZER_MODEL = "characters.json", "tokenizer.json", "tokenizer.model"
VOCABULARIES = (CHARACTERS, TOKENIZER, TOKENIZER_MODEL)
"""Main files of tokenizers; if a folder has several, the first one is read."""

TOKENIZER_CONFIG, TOKENS_MAP, ADDED_TOKENS = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TEMPLATE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
NAMED_TEMPLATES = f"{TEMPLATE_FOLDER}/*.jinja"
TOKENIZER_FILES = (*VOCABULARIES, TOKENIZER_CONFIG, TOKENS_MAP, ADDED_TOKENS, TEMPLATE, NAMED_TEMPLATES)

MODEL_FILES = (*CONFIGS, *SAFETENSORS_FILES, *BIN_FILES, *META_FILES, *TOKENIZER_FILES)
"""Patterns of everything above, relative to the folder."""

ADAPTER_CONFIG, ADAPTER, ADAPTER_BIN = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"


def shard_name(number: int, total: int) -> str:
    """Return the name of a safetensors shard; numbers start at 1."""
    return f"model-{number:05d}-of-{total:05d}.safetensors"


def meta_shard_name(number: int) -> str:
    """Return the name of a shard in Meta's format; numbers start at 0."""
    return META_SHARDS.replace("*", f"{number:02d}")


def model_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder that match `MODEL_FILES`."""
    for pattern in MODEL_FILES:
        yield from folder.glob(pattern)


def other_files(folder: Path) -> Iterator[Path]:
    """Yield the entries of a folder that do not match `MODEL_FILES`, sorted; other subfolders are not entered."""
    for path in sorted(folder.iterdir()):
        if path.name == TEMPLATE_FOLDER and path.is_dir() and not path.is_symlink():
            yield from (inner for inner in sorted(path.iterdir()) if not _is_model_file(inner, folder))
        elif not _is_model_file(path, folder):
            yield path


def _is_model_file(path: Path, folder: Path) -> bool:
    name = path.relative_to(folder).as_posix()
    return path.is_file() and any(fnmatchcase(name, pattern) for pattern in MODEL_FILES)
