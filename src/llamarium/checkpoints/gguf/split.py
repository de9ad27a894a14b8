"""A GGUF model in several files, as llama.cpp's `llama-gguf-split` and `GGUFWriter` write it.

Each part is a GGUF file with a tensor table for its own tensors, and says which part of how many it is. The first part
has the metadata. Any part opens the whole.

Source: llama.cpp, `tools/gguf-split/README.md` and `gguf-split.cpp` (keys `split.*`).
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llamarium.checkpoints.checkpoint import list_some
from llamarium.checkpoints.gguf.file import GGUFFile, GGUFTensor, read_gguf
from llamarium.errors import CheckpointError, counted, escape, show_value
from llamarium.hub.gguf_names import PartName, part_name

_NUMBER, _COUNT, _NUM_TENSORS = "split.no", "split.count", "split.tensors.count"
_MOST_PARTS = 4096
_OTHER_PARTS_SLACK = 6 * 2**20  # for the headers of all parts after the first, besides their size


def read_whole_gguf(path: Path) -> GGUFFile:
    """Read the headers of a GGUF model by its file or any of its parts, and check that the parts make one model.

    The result's metadata are those of the first part; its tensors lie in `paths`.

    Raises:
        LlamariumError: As `read_gguf`, for any of the parts.
        CheckpointError: If a part is missing, or the parts disagree on their count, numbers, metadata or tensors.
    """
    file = read_gguf(path)
    count = _split_integer(file, _COUNT, default=1)
    if count in (0, 1):
        return file
    part = _checked_name(file, count)
    paths = [path.with_name(part.of(number)) for number in range(1, count + 1)]
    missing = [item.name for item in paths if not item.exists()]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise CheckpointError(
            f"{escape(path)}: part {part.number} of {count}; {list_some(missing)} {verb} missing; put all parts into "
            "one folder"
        )

    slack = _OTHER_PARTS_SLACK // count
    files = [read_gguf(paths[0])]
    files += [read_gguf(other_path, slack_bytes=slack) for other_path in paths[1:]]
    return _join(files, path)


def read_gguf_metadata(path: Path) -> Mapping[str, Any]:
    """Return a GGUF model's metadata by its file or any of its parts; only the first part must be there."""
    file = read_gguf(path)
    count = _split_integer(file, _COUNT, default=1)
    if count in (0, 1):
        return file.metadata
    part = _checked_name(file, count)
    if part.number == 1:
        return file.metadata
    first = path.with_name(part.first)
    if not first.exists():
        raise CheckpointError(
            f"{escape(path)}: part {part.number} of {count}; {escape(first.name)} is missing, which has the metadata"
        )
    return read_gguf(first).metadata


def _checked_name(file: GGUFFile, count: int) -> PartName:
    """Return the part's name, which is how the others are found, if it fits what the file says."""
    part = part_name(file.path.name)
    number = _split_integer(file, _NUMBER) + 1
    if count > _MOST_PARTS:
        raise CheckpointError(f"{escape(file.path)}: {_COUNT} is {count}; expected up to {_MOST_PARTS} parts")
    if part is None:
        raise CheckpointError(
            f"{escape(file.path)}: part {number} of {count}, under a name by which the other parts cannot be found; "
            f"rename it to <name>-{number:05d}-of-{count:05d}.gguf, as llama-gguf-split names parts"
        )
    if (part.number, part.total) != (number, count):
        raise CheckpointError(
            f"{escape(file.path)}: is named as part {part.number} of {part.total}, and the file says part {number} of "
            f"{count}; restore the parts' original names"
        )
    return part


def _join(files: list[GGUFFile], path: Path) -> GGUFFile:
    """Return the parts as one file; they must agree."""
    first = files[0]
    tensors: dict[str, GGUFTensor] = {}
    for file in files:
        _checked_name(file, _split_integer(file, _COUNT, default=1))
        if file is not first:
            _check_same_metadata(first, file)
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"{escape(file.path)}: tensor {escape(name, 80)} is in {escape(tensors[name].path.name)} as well; "
                    "the parts do not belong together"
                )
            tensors[name] = tensor

    total = _split_integer(first, _NUM_TENSORS, default=len(tensors))
    if total != len(tensors):
        raise CheckpointError(
            f"{escape(first.path)}: {_NUM_TENSORS} is {total}, and the "
            f"{counted(len(files), 'part holds', 'parts hold')} {counted(len(tensors), 'tensor')}; "
            "the parts do not belong together"
        )
    return replace(first, path=path, tensors=tensors, paths=tuple(file.path for file in files))


def _check_same_metadata(first: GGUFFile, file: GGUFFile) -> None:
    """Check that a part does not contradict the first one, of which it may repeat some or all metadata."""
    for key, value in file.metadata.items():
        if key in (_NUMBER, "general.alignment") or key not in first.metadata:
            continue
        if first.metadata[key] != value:
            raise CheckpointError(
                f"{escape(file.path)}: metadata {escape(key, 80)} is {show_value(value)}, and in "
                f"{escape(first.path.name)} {show_value(first.metadata[key])}; the parts do not belong together"
            )


def _split_integer(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        problem = f"is {show_value(value)}" if key in file.metadata else "is missing"
        raise CheckpointError(f"{escape(file.path)}: metadata {key} {problem}; expected a count")
    return value
