"""One table of the files of a model folder: readers, downloads, writers and the reference know the same names."""

import ast
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from llamarium import file_names
from llamarium.cli.train_tokenizer import prepare_target, save_alone
from llamarium.errors import OutputError
from llamarium.hub import client as hub_client
from llamarium.hub.resolve import resolve
from llamarium.io import atomic_folder
from llamarium.tokenizer.backends.characters import CharacterTokenizer

REPOSITORY = Path(__file__).parents[2]
SOURCE = REPOSITORY / "src/llamarium"
EXAMPLES = {pattern: pattern.replace("*", "00001") for pattern in file_names.MODEL_FILES}
NAME = re.compile(r"[\w*./-]*[\w*]\.(json|safetensors|bin|model|jinja|pth)")
WEIGHTS = {
    "safetensors": file_names.SAFETENSORS_FILES,
    "bin": file_names.BIN_FILES,
    "meta": file_names.META_FILES,
}
OTHER_FILES = {  # not of a model folder
    "corpus.json", "course.json", "dataset_info.json", "dataset_infos.json", "files.json", "ids.bin",
    "manifest.json", "models.json", "optimizer.safetensors", "page.json", "progress.json", "starts.bin",
    "state.json", "translator.json", "variant.json", "variant.safetensors",
}  # fmt: skip
NO_FILES = {  # endings, wider patterns, a key of GGUF and an attribute
    ".index.json", "*.index.json", "*.safetensors.index.json", "consolidated*.safetensors", "tokenizer.ggml.model",
    "api.model",
}  # fmt: skip


def literals(path: Path) -> Iterator[str]:
    """Yield a module's constant texts, except docstrings and parts of f-strings."""
    tree = ast.parse(path.read_text())
    texts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    texts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node.value


def fill(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


def names_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_no_other_module_spells_a_file_name():
    files = {path for path in SOURCE.rglob("*.py") if path.name != "file_names.py"}
    files -= {SOURCE / "hub/builtin.py"}  # the members of other packages' wheels
    spelled = {text for path in files for text in literals(path) if NAME.fullmatch(text)}
    assert spelled - OTHER_FILES - NO_FILES == set()


def test_the_reference_names_every_file():
    text = (REPOSITORY / "docs/reference/checkpoints.md").read_text()
    patterns = [*file_names.MODEL_FILES, file_names.ADAPTER_CONFIG, file_names.ADAPTER, file_names.ADAPTER_BIN]
    assert [pattern for pattern in patterns if f"`{pattern}`" not in text] == []


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_download_brings_every_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    others = {pattern for name, patterns in WEIGHTS.items() if name != kind for pattern in patterns}
    expected = {example for pattern, example in EXAMPLES.items() if pattern not in others}
    if kind == "meta":
        expected = {EXAMPLES[pattern] for pattern in (*file_names.META_FILES, file_names.TOKENIZER_MODEL)}
    repository, cache = tmp_path / "repository", tmp_path / "cache"
    fill(repository, [*expected, "modeling_llama.py", "README.md"])

    def download(repo: str, allow: Sequence[str], ignore: Sequence[str] = ()) -> Path:
        for name in filter_repo_objects(names_in(repository), allow_patterns=[*allow], ignore_patterns=[*ignore]):
            (cache / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(repository / name, cache / name)
        return cache

    monkeypatch.setattr(hub_client, "download_snapshot", download)
    assert resolve("org/name") == cache
    assert names_in(cache) == sorted(expected)


def test_force_replaces_a_folder_of_every_file_and_keeps_none(tmp_path: Path):
    target = tmp_path / "model"
    fill(target, [*EXAMPLES.values()])
    with atomic_folder(target, replace=True) as fresh:
        fill(fresh, ["config.json", "model.safetensors"])
    assert names_in(target) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("name", ["thesis.tex", "style.safetensors", "x.gguf", "a/config.json"])
@pytest.mark.parametrize("folder", ["", "additional_chat_templates/"])
def test_force_deletes_no_other_file(folder: str, name: str, tmp_path: Path):
    target = tmp_path / "model"
    fill(target, [*EXAMPLES.values(), folder + name])
    with (
        pytest.raises(OutputError, match=re.escape(folder + name.partition("/")[0])),
        atomic_folder(target, replace=True),
    ):
        pass
    assert names_in(target) == sorted([*EXAMPLES.values(), folder + name])


@pytest.mark.parametrize("pattern", file_names.MODEL_FILES)
def test_a_model_is_not_written_beside_any_of_them(pattern: str, tmp_path: Path):
    fill(tmp_path, [EXAMPLES[pattern], "notes.txt"])
    assert [path.relative_to(tmp_path).as_posix() for path in file_names.model_files(tmp_path)] == [EXAMPLES[pattern]]


def test_a_tokenizer_replaces_every_file_of_another(tmp_path: Path):
    others = [EXAMPLES[pattern] for pattern in file_names.TOKENIZER_FILES]
    fill(tmp_path, [*others, "notes.txt"])
    prepare_target(tmp_path, force=True)
    save_alone(CharacterTokenizer.from_text("ab"), tmp_path, ["characters.json", "tokenizer.json"])
    assert names_in(tmp_path) == ["characters.json", "notes.txt", "tokenizer.json"]
    assert json.loads((tmp_path / "characters.json").read_text())["characters"] == ["a", "b"]
