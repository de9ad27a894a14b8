"""Reading the rows of one file: JSONL, JSON, CSV and Parquet, and the first three compressed with gzip or Zstandard.

| file                         | row                                                             | errors name the |
|------------------------------|-----------------------------------------------------------------|-----------------|
| `.jsonl`, `.ndjson`          | a line with an object; blank lines are skipped                  | line            |
| `.json`                      | an object of a list, which may be the field "data" of an object | line            |
| `.csv`, `.tsv`               | a line, or several with quoted cells; empty cells are omitted   | line            |
| `.parquet`                   | a row (needs `llamarium[data]`)                                 | row             |
| any of the first three `.gz` | the same                                                        | line            |
| ... and `.zst`               | the same (needs `llamarium[data]` before Python 3.14)           | line            |

JSON is strict: a row with a duplicate key is a bad row. Byte-order marks and both kinds of line ends are accepted.
Files with one row per line are read line by line, so memory is bounded by the longest line. A row is up to 256 MiB; for
a compressed file the limit also depends on its size on disk.
"""

import csv
import gzip
import importlib
import io
import threading
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from llamarium.datasets.arrow import arrow_fields
from llamarium.datasets.forms import has_form
from llamarium.datasets.rows import BadRow, Row
from llamarium.errors import LlamariumError, TrainingError, escape, show_value, warn_caller
from llamarium.extras import optional
from llamarium.strict_json import BrokenListError, NotJson, parse_json, parse_json_list

COMPRESSED = (".gz", ".zst")
OF_ROWS = (".jsonl", ".ndjson", ".parquet", ".json", ".csv", ".tsv")
"""Suffixes of files with rows; other files are text."""

MAX_LINE_BYTES = 2**28  # per row
MAX_WHOLE_BYTES = 2**31  # decompressed size of a file that is read as a whole

# Limits of decompressed bytes in memory: a number of bytes, or a multiple of the file's size if that is more. Text is
# usually compressed to a fifth, rarely to a twentieth; a decompression bomb reaches a thousandth.
_COMPRESSED_ROW = (2**24, 16)
_COMPRESSED_WHOLE = (2**26, 64)

_LISTS = ("data", "train", "rows", "examples", "instances")  # fields of a .json object that may hold the rows
_UNNAMED = "(a column without a name)"
_LEAST_LINE = 32  # minimum size of a line in a CSV row, in characters, because millions of empty lines are slow
_CSV_LIMIT = threading.Lock()  # held while the process-wide cell limit is changed
_ROWS_AT_ONCE = 256  # of a Parquet file; few, because a row may be a whole book
_ZSTANDARD_BYTES = 4096  # compressed bytes read at a time: four bytes can decompress to 128 KiB
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def kind_of(path: Path) -> str:
    """Return a file's suffix in lower case, without the suffix of its compression."""
    inner = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return inner.suffix.lower()


def read_file_rows(path: Path, columns: "list[str] | None" = None) -> Iterator[Row | BadRow]:
    """Yield the rows of a file, in order; a file with an unknown suffix is read as JSONL.

    Args:
        path: The file.
        columns: Columns that are needed, for files that can be read by column; None for all.

    Raises:
        TrainingError: If the rest of the file cannot be read.
        MissingPackageError: If a package is missing.
        OSError: If the file cannot be opened or read.
    """
    kind = kind_of(path)
    if kind == ".parquet":
        if path.suffix.lower() in COMPRESSED:
            raise TrainingError(f"{escape(path)}: Parquet files are compressed within; decompress it first")
        yield from _read_parquet(path, columns)
    elif kind in (".csv", ".tsv"):
        yield from _read_csv(path, "\t" if kind == ".tsv" else ",")
    elif kind == ".json":
        yield from _read_json(path)
    else:
        yield from _read_jsonl(path)


def read_text(path: Path) -> str:
    """Return a file's text; raises as `read_file_rows`."""
    name, is_compressed = escape(path), path.suffix.lower() in COMPRESSED
    limit = _bound(path, MAX_WHOLE_BYTES, _COMPRESSED_WHOLE) if is_compressed else -1
    with open_data(path) as file:
        data = file.read(limit + 1 if is_compressed else -1)
    if is_compressed and len(data) > limit:
        raise TrainingError(
            f"{name}: holds more than {limit >> 20} MiB of text, which is read as a whole; decompress it, or write it "
            "as .jsonl.gz"
        )
    return decode(data, name)


def decode(data: bytes, where: str) -> str:
    """Decode UTF-8 text without its byte-order mark; TrainingError for NUL bytes or invalid UTF-8."""
    problem, nul = "", data.find(b"\0")
    text = ""
    try:
        text = str(data[3:] if data.startswith(_UTF8_MARK) else data, "utf-8")
    except UnicodeDecodeError as error:
        start = error.start + 3 * data.startswith(_UTF8_MARK)
        problem = f"no UTF-8 at byte {start} (0x{data[start]:02x})"
    if nul >= 0:
        problem = f"a NUL byte at byte {nul}"
    if problem:
        raise TrainingError(
            f"{where}: {problem}; expected text in UTF-8 (convert text in another encoding with "
            "`iconv -t UTF-8`; take other files away)"
        )
    return text


def _bound(path: Path, limit: int, compressed: tuple[int, int]) -> int:
    """Return the maximum bytes of a file in memory: `limit`, or less for a small compressed file."""
    if path.suffix.lower() not in COMPRESSED:
        return limit
    always, ratio = compressed
    return min(limit, max(always, ratio * path.stat().st_size))


def _row_too_long(where: str, limit: int, lines: str = "") -> TrainingError:
    hint = "one row a line" if limit == MAX_LINE_BYTES else "less of a compressed file of this size; decompress it"
    return TrainingError(f"{where}: a row of more than {limit >> 20} MiB{lines}; expected {hint}")


# --- bytes ------------------------------------------------------------------------------------------------------------


@contextmanager
def open_data(path: Path) -> Generator[IO[bytes]]:
    """Open a file for reading decompressed bytes; TrainingError if its compressed data is damaged or truncated."""
    suffix = path.suffix.lower()
    broken: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    with path.open("rb") as raw:
        file: Any = raw
        if suffix == ".gz":
            file = gzip.GzipFile(fileobj=raw)
        elif suffix == ".zst":
            file, broken = _zstandard(raw, path)
        try:
            yield file
        except broken as error:
            raise TrainingError(
                f"{escape(path)}: its {suffix[1:]} data is damaged or cut off: {escape(error)}; expected a whole file, "
                "so nothing of it is used"
            ) from None


def _zstandard(raw: IO[bytes], path: Path) -> tuple[IO[bytes], tuple[type[Exception], ...]]:
    """Return a file that decompresses `raw`, and the types of errors that it raises for damaged data."""
    try:
        own: Any = importlib.import_module("compression.zstd")  # Python 3.14's
        return own.ZstdFile(raw), (EOFError, own.ZstdError)
    except ImportError:
        pass
    package = optional("zstandard", "data", f"reading {escape(path)}")
    return io.BufferedReader(_Frames(raw, package)), (EOFError, package.ZstdError)


class _Frames(io.RawIOBase):
    """The decompressed bytes of a Zstandard file, over all its frames; EOFError if the last frame is truncated."""

    def __init__(self, raw: IO[bytes], package: Any) -> None:
        self._raw, self._package = raw, package
        self._frame: Any = None  # the current frame, if any
        self._compressed, self._held = b"", b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Read into a buffer; return the number of bytes, 0 at the end."""
        while not self._held:
            if not self._compressed:
                self._compressed = self._raw.read(_ZSTANDARD_BYTES)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("the file ends within a frame")
                return 0
            self._frame = self._frame or self._package.ZstdDecompressor().decompressobj()
            self._held = self._frame.decompress(self._compressed)
            self._compressed = b""
            if self._frame.eof:
                self._frame, self._compressed = None, self._frame.unused_data
        count = min(len(buffer), len(self._held))
        buffer[:count], self._held = self._held[:count], self._held[count:]
        return count


# --- formats ----------------------------------------------------------------------------------------------------------


def _read_jsonl(path: Path) -> Iterator[Row | BadRow]:
    name, limit = escape(path), _bound(path, MAX_LINE_BYTES, _COMPRESSED_ROW)
    with open_data(path) as file:
        number = 0
        while line := file.readline(limit + 1):
            number += 1
            where = f"{name}:{number}"
            if number == 1 and line.startswith(_UTF16_MARKS):
                decode(line, where)
            if len(line) > limit:
                raise _row_too_long(where, limit)
            if not line.isspace():
                yield _parsed(line, where)


def _parsed(line: bytes, where: str) -> Row | BadRow:
    try:
        row = parse_json(decode(line, where))
    except NotJson as error:
        return BadRow(where, f"no JSON: {escape(error)}; expected one object a line")
    except TrainingError as error:
        return BadRow(where, str(error).removeprefix(f"{where}: "))
    if not isinstance(row, dict):
        return BadRow(where, f"{show_value(row)} is no JSON object; expected one a line")
    return Row(where, cast("dict[str, Any]", row))


def _read_json(path: Path) -> Iterator[Row | BadRow]:
    """Yield the objects of a list or of a list in an object, a single object, or the lines if the file is JSONL."""
    name, text = escape(path), read_text(path)
    start = len(text) - len(text.lstrip(" \t\r\n"))
    if text[start : start + 1] != "[":
        try:
            whole = parse_json(text)
        except NotJson as error:
            if "Extra data" in str(error):
                yield from _read_jsonl(path)
                return
            raise TrainingError(f"{name}: no JSON: {escape(error)}; expected a list of objects, or .jsonl") from None
        yield from _rows_of(whole, name)
        return

    line, before = 1, 0
    try:
        for number, (place, row) in enumerate(parse_json_list(text, start), start=1):
            line, before = line + text.count("\n", before, place), place
            if row is None and text[place - 1 : place] == "]":
                if text[place:].strip(" \t\r\n"):
                    raise TrainingError(f"{name}:{line}: there is text behind the list; expected its end")
                return
            where = f"{name}:{line}"
            if isinstance(row, dict):
                yield Row(where, cast("dict[str, Any]", row))
            else:
                yield BadRow(where, f"element {number} is {show_value(row)}; expected an object")
    except BrokenListError as error:
        line = text.count("\n", 0, error.place) + 1
        raise TrainingError(
            f"{name}:{line}: no JSON: {escape(error)}; expected a list of objects. Where a list goes on behind a fault "
            "is not known, so nothing of the file is used (a .jsonl file loses one line)"
        ) from None


def _rows_of(whole: Any, name: str) -> Iterator[Row | BadRow]:
    if not isinstance(whole, dict):
        raise TrainingError(f"{name}: {show_value(whole)} is no row; expected a list of objects")
    fields = cast("dict[str, Any]", whole)
    lists = [key for key in _LISTS if isinstance(fields.get(key), list)]
    if not lists or has_form(fields):
        yield Row(f"{name}:1", fields)
        return
    if len(lists) > 1:
        others = ", ".join(map(show_value, lists[1:]))
        warn_caller(f"{name}: has several lists; its rows are those of {show_value(lists[0])}, without {others}")
    for number, row in enumerate(fields[lists[0]], start=1):
        where = f"{name}: {lists[0]}[{number - 1}]"
        yield Row(where, row) if isinstance(row, dict) else BadRow(where, f"{show_value(row)} is no object")


def _read_csv(path: Path, delimiter: str) -> Iterator[Row | BadRow]:
    name = escape(path)
    with open_data(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        rows = _CsvRows(text, delimiter, name, _bound(path, MAX_LINE_BYTES, _COMPRESSED_ROW))
        try:
            header = _header(next(rows, []), name)
            for cells in rows:
                where = f"{name}:{rows.first_line}"
                if not cells:
                    continue
                if len(cells) != len(header):
                    yield BadRow(where, f"{len(cells)} cells; expected {len(header)}, as in the first line")
                elif "\0" in "".join(cells):
                    yield BadRow(where, "a NUL character; expected text")
                else:
                    yield Row(where, {key: cell for key, cell in zip(header, cells, strict=True) if cell})
        except UnicodeDecodeError as error:
            raise TrainingError(
                f"{name}: no UTF-8 after line {rows.last_line} (0x{error.object[error.start]:02x}); expected text in "
                "UTF-8 (convert it with `iconv -t UTF-8`)"
            ) from None
        except csv.Error as error:
            raise TrainingError(
                f"{name}:{rows.last_line}: no CSV: {escape(error)}; where the next row begins is not known, so "
                "nothing of the file is used"
            ) from None
        finally:
            text.detach()


class _CsvRows(Iterator[list[str]]):
    """The rows of a CSV file as lists of cells; TrainingError for a row of more than `limit` characters, or csv.Error.

    Python's limit of 128 kB per cell is process-wide, so it is raised only while a row is parsed.
    """

    def __init__(self, text: io.TextIOWrapper, delimiter: str, name: str, limit: int) -> None:
        self._text, self._name, self._limit = text, name, limit
        self._length = 0  # of the current row, in characters
        self.first_line = 1
        self._reader = csv.reader(iter(self._line, ""), delimiter=delimiter, strict=True)

    @property
    def last_line(self) -> int:
        """Number of the last line that was read."""
        return self._reader.line_num

    def _line(self) -> str:
        line = self._text.readline(self._limit + 1)
        self._length += max(len(line), _LEAST_LINE)
        if self._length > self._limit:
            most = f" or {self._limit // _LEAST_LINE:,} lines"
            raise _row_too_long(f"{self._name}:{self.first_line}", self._limit, most)
        return line

    def __next__(self) -> list[str]:
        self._length, self.first_line = 0, self.last_line + 1
        with _CSV_LIMIT:
            others = csv.field_size_limit(self._limit)
            try:
                return next(self._reader)
            finally:
                csv.field_size_limit(others)


def _header(cells: list[str], name: str) -> list[str]:
    """Return the column names; columns without a name, as spreadsheets write them, get a placeholder."""
    if twice := [cell for i, cell in enumerate(cells) if cell and cell in cells[:i]]:
        raise TrainingError(f"{name}:1: the column {show_value(twice[0])} stands twice; rename one of them")
    if not any(cells):
        raise TrainingError(f"{name}:1: no names of columns; expected them in the first line")
    return [cell or _UNNAMED for cell in cells]


def _read_parquet(path: Path, names: list[str] | None) -> Iterator[Row | BadRow]:
    name = escape(path)
    parquet = optional("pyarrow.parquet", "data", f"reading {name}")
    try:
        with parquet.ParquetFile(path) as file:
            held = file.schema_arrow.names
            columns = names if names and all(column in held for column in names) else None
            batches = file.iter_batches(_ROWS_AT_ONCE, columns=columns)
            for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
                yield Row(f"{name}: row {number}", arrow_fields(row))
    except LlamariumError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged files raise Arrow's errors, OSError, KeyError, UnicodeDecodeError, ...
        raise TrainingError(f"{name}: no parquet file that can be read: {escape(error)}") from None
