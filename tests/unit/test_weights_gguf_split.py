"""Split GGUF files: any part opens the whole; parts that are missing or disagree are refused by name."""

import shutil
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch

from llamarium.checkpoints.checkpoint import expected_shapes
from llamarium.checkpoints.decode import read
from llamarium.checkpoints.gguf.file import GGUFFile, read_gguf, write_gguf
from llamarium.checkpoints.gguf.split import read_gguf_metadata, read_whole_gguf
from llamarium.checkpoints.open import open_checkpoint
from llamarium.checkpoints.tokenizers import find_tokenizer
from llamarium.errors import CheckpointError, LlamariumError, ModelNotFoundError
from llamarium.hub.gguf_names import gguf_models, part_name

pytestmark = pytest.mark.torch


def parts_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.gguf"))


def rewrite(path: Path, metadata: dict | None = None, drop: str = "", extra: dict | None = None) -> None:
    """Rewrite one part with other metadata, without the key `drop`, and with `extra` tensors."""
    file, content = read_gguf(path), path.read_bytes()
    fields = {key: value for key, value in {**file.metadata, **(metadata or {})}.items() if key != drop}
    tensors = {n: (t.type_name, t.shape, content[t.offset :][: t.num_bytes]) for n, t in file.tensors.items()}
    write_gguf(path, fields, tensors | (extra or {}))


def refused(path: Path, *words: str, error: type[LlamariumError] = CheckpointError) -> None:
    with pytest.raises(error) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert message.isprintable() and len(message) < 1500


@pytest.mark.parametrize("first_is_small", [False, True])
def test_any_part_opens_the_whole(model_files, first_is_small):
    files = model_files(tie_word_embeddings=False)
    folder = files.gguf_parts("BF16", first_is_small=first_is_small)
    parts = parts_of(folder)
    assert len(parts) == 3 + first_is_small and (len(read_gguf(parts[0]).tensors) == 0) == first_is_small
    for path in (*parts, folder):
        checkpoint = open_checkpoint(path)
        assert checkpoint.config == files.config and set(checkpoint.entries) == set(expected_shapes(files.config))
        for key, weight in files.weights.items():
            assert torch.equal(read(checkpoint, key).float(), weight.float()), key
    assert {entry.file for entry in checkpoint.entries.values()} == set(parts[first_is_small:])


def test_the_parts_metadata_and_tensors_are_those_of_the_file_that_was_split(model_files):
    files = model_files()
    whole, parts = read_gguf(files.gguf_file("Q8_0")), parts_of(files.gguf_parts("Q8_0"))
    joined = read_whole_gguf(parts[1])
    assert isinstance(joined, GGUFFile) and joined.paths == tuple(parts) and joined.path == parts[1]
    assert {k: v for k, v in joined.metadata.items() if not k.startswith("split.")} == whole.metadata
    assert {n: (t.shape, t.type_name) for n, t in joined.tensors.items()} == {
        n: (t.shape, t.type_name) for n, t in whole.tensors.items()
    }


def test_two_models_in_a_folder_need_a_name(model_files, tmp_path):
    files = model_files()
    folder = files.gguf_parts()
    shutil.copy(files.gguf_file("F16"), folder / "other.gguf")
    refused(folder, "model-00001-of-00003.gguf, other.gguf; name one", error=ModelNotFoundError)
    assert open_checkpoint(folder / "model-00003-of-00003.gguf").config == files.config


def test_a_missing_part_is_named(model_files):
    folder = model_files().gguf_parts()
    for part in parts_of(folder):
        content = part.read_bytes()
        part.unlink()
        refused(folder, part.name)
        for other in parts_of(folder):
            refused(other, f"{part.name} is missing")
        part.write_bytes(content)
    open_checkpoint(folder)


def test_a_tokenizer_needs_the_first_part_alone(model_files):
    folder = model_files().gguf_parts()
    parts = parts_of(folder)
    parts[2].unlink()
    assert read_gguf_metadata(parts[1]) == read_gguf(parts[0]).metadata
    assert find_tokenizer(parts[1]) is None and find_tokenizer(folder) is None  # this model has none
    parts[0].unlink()
    with pytest.raises(CheckpointError, match=parts[0].name):
        find_tokenizer(parts[1])


@pytest.mark.parametrize(
    ("which", "change", "words"),
    {
        "another count": (2, {"metadata": {"split.count": 4}}, ("part 3 of 3", "part 3 of 4")),
        "another number": (1, {"metadata": {"split.no": 2}}, ("part 2 of 3", "part 3 of 3")),
        "no number": (1, {"drop": "split.no"}, ("split.no is missing",)),
        "a number that is none": (1, {"metadata": {"split.no": "one"}}, ("split.no is 'one'",)),
        "a negative number": (1, {"metadata": {"split.no": -1}}, ("split.no is -1",)),
        "no count": (1, {"drop": "split.count"}, ("part 2 of 3", "part 2 of 1")),
        "another total": (2, {"metadata": {"split.tensors.count": 7}}, ("split.tensors.count is 7",)),
        "of another model": (1, {"metadata": {"llama.context_length": 7}}, ("llama.context_length is 7",)),
        "a tensor twice": (1, {"extra": {"output_norm.weight": ("F32", (1,), bytes(4))}}, ("output_norm.weight",)),
        "a tensor too many": (1, {"extra": {"more": ("F32", (1,), bytes(4))}}, ("split.tensors.count is",)),
    }.values(),
    ids=lambda value: None,
)
def test_parts_that_disagree(model_files, which, change, words):
    folder = model_files().gguf_parts()
    parts = parts_of(folder)
    rewrite(parts[which], **change)
    refused(parts[0], parts[which].name if "split.tensors.count is" not in words else "", *words)


def test_the_total_of_the_tensors_may_be_left_out_but_not_be_wrong(model_files):
    folder = model_files().gguf_parts()
    for part in parts_of(folder):
        rewrite(part, drop="split.tensors.count")
    open_checkpoint(folder)
    for part in parts_of(folder):
        rewrite(part, metadata={"split.tensors.count": 1000})
    refused(folder, "split.tensors.count is 1000")


def test_parts_under_other_names(model_files):
    folder = model_files().gguf_parts()
    parts = parts_of(folder)
    shutil.copy(parts[0], folder.parent / "renamed.gguf")
    refused(folder.parent / "renamed.gguf", "part 1 of 3", "-00001-of-00003.gguf")
    parts[0].rename(folder / "swap")
    parts[1].rename(parts[0])
    (folder / "swap").rename(parts[1])
    refused(folder, "part 1 of 3", "part 2 of 3")


def test_a_count_of_one_is_a_whole_file(model_files):
    for count in (0, 1):
        path = model_files().gguf_file("F32", split__count=count)
        assert open_checkpoint(path).entries


def test_a_huge_count_is_refused_at_once(model_files):
    folder = model_files().gguf_parts()
    part = parts_of(folder)[0]
    rewrite(part, metadata={"split.count": 99999})
    refused(part.rename(folder / "x-00001-of-99999.gguf"), "split.count is 99999", "4096")


def test_the_parts_share_one_budget(tmp_path):
    """A hundred parts of items that are tiny in the file may not take a hundred times what one may."""
    count = 100
    for i in range(count):
        split = {"split.no": i, "split.count": count}
        path = tmp_path / f"x-{i + 1:05d}-of-{count:05d}.gguf"
        write_gguf(path, {**split, f"many{i}": ["" for _ in range(20000)]}, {})
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="more than a header"):
        read_whole_gguf(tmp_path / f"x-00001-of-{count:05d}.gguf")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size + 64 * 2**20


def test_names():
    assert part_name("a/b-00002-of-00003.gguf") == ("a/b", 2, 3)
    assert part_name("a/b-00002-of-00003.gguf").first == "a/b-00001-of-00003.gguf"
    for name in ("b.gguf", "b-00000-of-00003.gguf", "b-00004-of-00003.gguf", "b-2-of-3.gguf", "-00001-of-00003.gguf"):
        assert part_name(name) is None
    names = ["b-00002-of-00002.gguf", "b-00001-of-00002.gguf", "a.gguf", "b-00003-of-00003.gguf", "readme"]
    assert gguf_models(names) == ["a.gguf", "b-00001-of-00002.gguf", "b-00003-of-00003.gguf"]


def test_a_raw_piece_is_no_part(tmp_path):
    (tmp_path / "a-00001-of-00002.gguf").write_bytes(b"GGUF" + struct.pack("<I", 3))
    (tmp_path / "a-00002-of-00002.gguf").write_bytes(bytes(100))
    refused(tmp_path, "8 bytes")
    refused(tmp_path / "a-00002-of-00002.gguf", "is no GGUF file")
