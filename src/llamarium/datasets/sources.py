"""Reading of documents and examples from files, folders, Python objects, Hub data sets and the Python manual.

| source              | documents                                                                               |
|---------------------|-----------------------------------------------------------------------------------------|
| None                | topics of the Python manual, as `help()` shows them (`pydoc_data.topics`)               |
| a file              | one per row (formats: `datasets/files.py`); of other files one, the whole text in UTF-8 |
| a folder            | those of its `.txt`, `.md`, `.jsonl` and `.parquet` files, by name, except in runs      |
| `shakespeare`       | one: 40,000 lines of his plays, bundled with the package                                |
| `org/name[:subset]` | one per row of a Hub data set's `train` split, streamed (needs `llamarium[hub-data]`)   |
| Python rows         | one per row: an iterable of dicts, a `datasets.Dataset` or an Arrow table (`named_rows`) |

The first match is used. Files may be compressed (gzip, Zstandard). Examples are rows of the same sources.
"""

import bz2
import hashlib
import importlib
import os
import re
import stat
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from llamarium.datasets.arrow import arrow_fields
from llamarium.datasets.files import COMPRESSED, OF_ROWS, kind_of, read_file_rows, read_text
from llamarium.datasets.rows import BadRow, Reading, Row, Tally
from llamarium.errors import LlamariumError, TrainingError, escape, show_value, warn_caller
from llamarium.extras import optional
from llamarium.hub.client import data_commit
from llamarium.tokenizer.backends.words import WordBackend
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.pieces import encode_pieces

BUNDLED = ("shakespeare", "tiny-shakespeare")
"""Names of the bundled text; the second is its earlier name.

Source: the plays of William Shakespeare, which are in the public domain, as collected by Andrej Karpathy for char-rnn
(2015), where the file is called Tiny Shakespeare.
"""

_BUNDLED_FILE = Path(__file__).with_name("shakespeare.txt.bz2")

SUFFIXES = (".txt", ".md", ".jsonl", ".ndjson", ".parquet")
"""Suffixes of files in a folder that are read as documents, compressed or not; a single other file is read as text."""

Data = str | Mapping[str, float]
"""A source, or several with their weights."""

_NO_ROWS = ("dataset_info.json", "dataset_infos.json", "state.json")  # metadata of `save_to_disk`
_HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<subset>[\w.-]+))?", re.ASCII)
_OF_PYTHON = "rows-of-python:"
_HELD: dict[str, list[Row]] = {}  # Python rows, by their generated name
_USES: Counter[str] = Counter()  # active `named_rows` blocks, by name
_USES_LOCK = threading.Lock()


def read_documents(source: str | None, *, text_field: str = "text") -> Iterator[str]:
    """Return the non-empty documents of a source, in a fixed order; see the table above.

    Args:
        source: Name of the source, or None for the Python manual.
        text_field: Field or column with the text, in rows.

    Raises:
        TrainingError: If the source does not exist or, while reading, for invalid text.
        OptionError: If a package is missing.
    """
    return filter(None, (_text_of_row(row, text_field) for row in _find(source, text_field)[1]()))


def read_rows(source: str, tally: Tally | None = None) -> Iterator[Row]:
    """Yield the rows of a source of examples, in a fixed order; raises as `read_documents`.

    A `tally` counts the rows, renames their fields, and skips invalid rows or raises an error.
    """
    tally = tally or Tally(source, Reading())
    for row in read_rows_in_order(source, tally):
        if isinstance(row, BadRow):
            tally.skip(row)
        else:
            yield row


def read_rows_in_order(source: str, tally: Tally) -> Iterator[Row | BadRow]:
    """Yield the rows as `read_rows`, and also invalid rows, for which the caller must call `tally.skip`."""
    return tally.counted(_find(source)[1]())


@contextmanager
def named_rows(data: Any) -> Generator[Any]:
    """Register Python rows as a source within the `with` block, and yield its name; yield names and weights unchanged.

    `data` is an iterable of dicts, which is read once and kept in memory, a `datasets.Dataset` (or a `DatasetDict` with
    a "train" split) or an Arrow table. TrainingError for other values.
    """
    if data is None or isinstance(data, str | Path) or _are_weights(data):
        yield str(data) if isinstance(data, Path) else data
        return
    held = [Row(f"data[{i}]", _fields(row, i, data)) for i, row in enumerate(_iterated(data))]
    name = f"{_OF_PYTHON}{_digest(held)}"
    with _USES_LOCK:
        _HELD[name] = held
        _USES[name] += 1
    try:
        yield name
    finally:
        with _USES_LOCK:
            _USES[name] -= 1
            if not _USES[name]:
                del _HELD[name], _USES[name]


def _digest(rows: Iterable[Row]) -> str:
    """Return a hash of the rows' fields, in order, including the full contents of arrays."""
    digest = hashlib.sha256()
    for row in rows:
        fields = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in row.fields.items()}
        digest.update(repr(fields).encode("utf-8", "backslashreplace"))
    return digest.hexdigest()[:16]


def _are_weights(data: Any) -> bool:
    """Return whether data is a mapping of sources to weights, and not a `DatasetDict`."""
    return isinstance(data, Mapping) and not any(hasattr(value, "column_names") for value in data.values())


def _iterated(data: Any) -> Iterable[Any]:
    if isinstance(data, Mapping):
        splits = cast("Mapping[str, Any]", data)
        if "train" not in splits:
            raise TrainingError(f"data has the splits {show_value([*splits])}, and no train; give one of them")
        return splits["train"]
    if hasattr(data, "to_pylist"):  # an Arrow table
        return data.to_pylist()
    if not isinstance(data, Iterable):
        raise TrainingError(f"data is {show_value(data)}; expected a source's name, or an iterable of dicts")
    return cast("Iterable[Any]", data)


def _fields(row: Any, number: int, data: Any) -> Mapping[str, Any]:
    if not isinstance(row, Mapping):
        hint = '; of a DataFrame give .to_dict("records")' if hasattr(data, "to_dict") else ""
        raise TrainingError(f"data[{number}] is {show_value(row)}; expected a dict of fields{hint}")
    fields = cast("Mapping[str, Any]", row)
    from_arrow = hasattr(data, "to_pylist") or type(data).__module__.partition(".")[0] == "datasets"
    return arrow_fields(fields) if from_arrow else dict(fields)


@contextmanager
def at_place(place: str) -> Generator[None]:
    """Convert errors in the `with` block to TrainingError, with the document's place."""
    try:
        yield
    except LlamariumError as error:
        raise TrainingError(f"{place}: {error}") from None


def document_ids(tokenizer: Tokenizer, document: str) -> Iterator[list[int]]:
    """Yield the token ids of a document in parts, with BOS and EOS; TokenizerError if it cannot be encoded."""
    before, after = ids_around(tokenizer)
    yield before
    words = tokenizer.backend if isinstance(tokenizer.backend, WordBackend) else None
    yield from words.encode_with_unknown(document) if words else encode_pieces(tokenizer, document)
    yield after


def ids_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids before each document (BOS, if the tokenizer adds it) and after it (the first EOS token)."""
    special = tokenizer.special
    return [special.bos] if special.add_bos and special.bos is not None else [], list(tokenizer.eos_token_ids[:1])


def source_stamp(source: str | None) -> str:
    """Return a hash that changes with a source, without reading it: of file names, sizes and times, or a Hub commit."""
    return hashlib.sha256(repr(_find(source)[0]()).encode("utf-8", "surrogateescape")).hexdigest()


def source_name(source: str | None) -> str:
    """Return a source's name for messages."""
    return "the Python manual" if source is None else escape(source)


def parse_data(data: Any) -> Any:
    """Parse `data` into a source's name, or the weights of several sources by name; an existing path is not parsed.

    Values of other types are returned unchanged. TrainingError for an invalid or missing weight, or a duplicate source.
    """
    data = str(data) if isinstance(data, Path) else data
    if isinstance(data, Mapping):
        pairs = cast("Mapping[Any, Any]", data).items()
        sources = [(str(name) if isinstance(name, Path) else name, weight) for name, weight in pairs]
    elif isinstance(data, str) and ("," in data or "=" in data) and not os.path.exists(os.path.expanduser(data)):  # noqa: PTH110, PTH111 - Path's raise on odd names
        sources = [_weighted(part.strip(), data) for part in data.split(",")]
    else:
        return data
    if not sources:
        raise TrainingError("data has no source; expected at least one, with its weight")
    names: set[str] = set()
    for name, weight in sources:
        _check_weight(name, weight, names)
    return sources[0][0] if len(sources) == 1 else {name: float(weight) for name, weight in sources}


def _check_weight(name: Any, weight: Any, seen: set[str]) -> None:
    if not isinstance(name, str) or not name:
        raise TrainingError(f"data names the source {show_value(name)}; expected a file, a folder or a name")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 1e-9 <= weight <= 1e9:
        raise TrainingError(
            f"data: the weight of {escape(name)} is {show_value(weight)}; expected a number from 1e-9 to 1e9"
        )
    path = os.path.expanduser(name)  # noqa: PTH111 - Path's raise on odd names, as realpath does
    if (path := os.path.realpath(path) if os.path.exists(path) else os.path.abspath(path)) in seen:  # noqa: PTH100, PTH110
        raise TrainingError(f"data names {escape(name)} twice; give it once, with the sum of both weights")
    seen.add(path)


def _weighted(part: str, data: str) -> tuple[str, Any]:
    name, _, weight = part.rpartition("=")
    if not name:
        raise TrainingError(
            f"data is {show_value(data)}, which is no file or folder, and no mixture, as {show_value(part)} has no "
            "weight; expected NAME=WEIGHT,NAME=WEIGHT (names with commas as a table in --config or Python)"
        )
    try:
        return name, float(weight) if weight.isascii() and "_" not in weight else weight
    except ValueError:
        return name, weight


def _find(
    source: str | None, text_field: str = ""
) -> tuple[Callable[[], object], Callable[[], Iterable[Row | BadRow]]]:
    """Return a function that returns a source's stamp, and one that reads its rows.

    With `text_field` only the columns that documents need are read.
    """
    if source is None:
        return _python_manual, lambda: [Row(source_name(None), {text_field: text}) for text in _python_manual()]
    if source in _HELD:
        return lambda: source, lambda: _HELD[source]
    if source and os.path.exists(path := os.path.expanduser(source)):  # noqa: PTH110, PTH111 - Path's raise on odd names
        return partial(_stamp_path, Path(path)), partial(_read_path, Path(path), text_field)
    if source in BUNDLED:
        data = _BUNDLED_FILE.read_bytes
        return data, lambda: [Row(source, {text_field or "text": bz2.decompress(data()).decode("utf-8")})]
    if (hub := _HUB_NAME.fullmatch(source)) and not source.endswith(
        (*SUFFIXES, *OF_ROWS, *COMPRESSED)
    ):  # with such a suffix it is a missing file
        return partial(_stamp_hub, *hub.group("repo", "subset")), partial(_read_hub, *hub.group("repo", "subset"))
    if source.startswith(_OF_PYTHON):
        raise TrainingError("data is rows of Python, which are not kept; give them again, in Python (data=...)")
    raise TrainingError(
        f"no data called {show_value(source)}: no file or folder of that name, no text in the package (there is "
        f"{BUNDLED[0]}), and not spelled like a hub data set (org/name or org/name:subset)"
    )


def _python_manual() -> list[str]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        raise TrainingError(
            "this Python comes without its manual (pydoc_data.topics), which is learned from where no data is named; "
            "name a text file or folder"
        ) from None
    return [topics[name] for name in sorted(topics)]


# --- files and folders ------------------------------------------------------------------------------------------------


def _stamp_path(path: Path) -> object:
    try:
        files = [(file, file.stat()) for file in (_files_of(path, SUFFIXES)[0] if path.is_dir() else [path])]
        return os.path.realpath(path), [(os.path.relpath(f, path), s.st_size, s.st_mtime_ns) for f, s in files]
    except OSError as error:
        where = escape(error.filename or path)
        raise TrainingError(f"{where}: cannot be read: {escape(error.strerror or error)}") from None


def _read_path(path: Path, text_field: str) -> Iterator[Row | BadRow]:
    suffixes = SUFFIXES if text_field else OF_ROWS
    files, left_out = _files_of(path, suffixes) if path.is_dir() else ([path], "")
    if str(path) in BUNDLED:
        warn_caller(f"{path}: read from here, as something of this name is here; it is also a text in the package")
    if left_out:
        warn_caller(f"{escape(path)}: left out {left_out}")
    for file in files:
        try:
            yield from _read_file(file, text_field)
        except OSError as error:
            raise TrainingError(f"{escape(file)}: cannot be read: {escape(error.strerror or error)}") from None


def _read_file(path: Path, text_field: str) -> Iterator[Row | BadRow]:
    if not stat.S_ISREG(path.stat().st_mode):
        raise TrainingError(f"{escape(path)}: neither a file nor a folder; expected text, which can be read twice")
    if text_field and kind_of(path) not in OF_ROWS:
        yield Row(escape(path), {text_field: read_text(path)})
    else:
        yield from read_file_rows(path, [text_field] if text_field else None)


def _files_of(folder: Path, suffixes: tuple[str, ...]) -> tuple[list[Path], str]:
    """Return the files below `folder` with one of the suffixes, without hidden ones, and a summary of the others.

    Folders of training runs, which have `.jsonl` logs, are skipped: a run may be in the folder of its data.
    """

    def refuse(error: OSError) -> None:
        where = escape(error.filename or folder)
        raise TrainingError(f"{where}: the folder cannot be read: {escape(error.strerror or error)}") from None

    files: list[Path] = []
    others: Counter[str] = Counter()
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        if ".lock" in names or {"train.toml", "metrics.jsonl"} <= {*names}:  # a run
            others["run"] += 1
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            _refuse_loop(Path(parent, name), folder)
        for path in (Path(parent, name) for name in names if not name.startswith(".")):
            if kind_of(path) in suffixes and path.name not in _NO_ROWS:
                files.append(path)
            else:
                others[path.suffix or path.name] += 1
    left_out = ", ".join(f"{count} {escape(kind)}" for kind, count in others.most_common(5))
    if not files:
        raise TrainingError(
            f"{escape(folder)}: nothing to read in this folder; expected {', '.join(suffixes)} files, found "
            f"{left_out or 'no files at all'}"
        )
    files.sort(key=lambda path: path.relative_to(folder).as_posix())
    return files, f"{others.total()} other files ({left_out})" if others else ""


def _refuse_loop(path: Path, root: Path) -> None:
    """Raise TrainingError for a link to a parent folder, with which the walk would not end."""
    if not path.is_symlink():
        return
    target = os.path.realpath(path)
    walked = [path.parent, *path.parent.parents]
    if any(os.path.realpath(parent) == target for parent in walked[: len(path.relative_to(root).parts)]):
        raise TrainingError(f"{escape(path)}: a link back to {escape(target)}, which holds it; remove the link")


def _text_of_row(found: Row | BadRow, text_field: str) -> str:
    if isinstance(found, BadRow):
        raise TrainingError(f"{found.place}: {found.problem}")
    where, row = found.place, found.fields
    if text_field not in row:
        names = escape(", ".join(map(repr, row))) or "none"
        raise TrainingError(
            f"{where}: no field {text_field!r}; the fields are {names}: name the one that holds the text"
        )
    text = row[text_field]
    if not isinstance(text, str):
        raise TrainingError(f"{where}: {text_field!r} is {show_value(text)}; expected a text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X} at character {error.start}"
        raise TrainingError(
            f"{where}: {text_field!r} holds half of a surrogate pair ({half}), which is no text"
        ) from None
    return text


# --- optional packages ------------------------------------------------------------------------------------------------


def _stamp_hub(repo: str, subset: str | None) -> object:
    try:
        return repo, subset, data_commit(repo)
    except LlamariumError as error:
        raise _hub_refused(repo, str(error)) from error


def _read_hub(repo: str, subset: str | None) -> Iterator[Row | BadRow]:
    """Stream the `train` split; `datasets` 4 and newer does not run code from the repository."""
    datasets = optional("datasets", "hub-data", f"reading {repo} from the hub")
    try:
        for number, row in enumerate(datasets.load_dataset(repo, subset, split="train", streaming=True), start=1):
            yield Row(f"{repo}: row {number}", arrow_fields(row))
    except TrainingError:
        raise
    except Exception as error:  # datasets' own, huggingface_hub's, the HTTP library's
        raise _hub_refused(repo, f"{type(error).__name__}: {escape(error, 300)}") from error


def _hub_refused(repo: str, why: str) -> TrainingError:
    return TrainingError(f"{repo} could not be read from the hub, nor is there a file or folder of that name: {why}")
