"""A data set as one stream of token ids on disk, read and tokenized once.

    corpus-.../ids.bin       uint16 or int32 in native byte order, all documents concatenated; memory-mapped
    corpus-.../starts.bin    int64; start of each document, the first is 0
    corpus-.../tokenizer/    if it was trained on the documents
    corpus-.../corpus.json   source and tokenizer; size, modification time and SHA-256 of the files

Each document begins with the begin-of-text token if the tokenizer adds one, and ends with the end-of-text token if
there is one, so that a model learns to stop.

The source is read once into a temporary file, which is used to train the tokenizer and to write the ids, so both see
the same text even if the source changes. It is read again only if its stamp (`source_stamp`: sizes and times of files)
has changed. A running run is not affected; a run that is resumed with other documents sees another fingerprint.
"""

import hashlib
import json
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llamarium.checkpoints.tokenizers import load_tokenizer
from llamarium.datasets.sources import at_place, document_ids, ids_around, read_documents, source_name, source_stamp
from llamarium.errors import OutputError, TrainingError, counted, escape, show_value
from llamarium.file_names import CHARACTERS, TOKENIZER_CONFIG
from llamarium.io import file_sha256, sync, sync_tree, write_json
from llamarium.leftovers import remove_stale
from llamarium.tokenizer.base import Tokenizer

Progress = Callable[[str, float | None], None]
"""Called with the current activity and its completed share, None if unknown."""

_Number = type[np.uint16 | np.int32 | np.int64]

_FORMAT = "llamarium corpus 2"  # part of every fingerprint; changes with the rules and the file layout
_UNFINISHED = ".corpus-"


@dataclass(frozen=True, slots=True)
class Learner:
    """A tokenizer to train by `learn(documents, counted=)`; `name` identifies the method, e.g. "bpe 4096"."""

    name: str
    learn: Callable[..., Tokenizer]


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """A stream of token ids with the starts of its documents.

    Attributes:
        name: Name of the source, for messages.
        ids: (num_tokens,) uint16 or int32; memory-mapped.
        starts: (num_documents,) int64; ascending, the first is 0.
        fingerprint: SHA-256, hex, of the documents, the tokenizer, and the range within the corpus.
        about: Documents, bytes and tokens of the whole corpus, and the SHA-256 of text and tokenizer.
    """

    name: str
    ids: Tensor
    starts: Tensor
    tokenizer: Tokenizer
    fingerprint: str
    about: Mapping[str, Any]

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self.ids.numel()

    @property
    def num_documents(self) -> int:
        """Number of documents; the first and the last may be incomplete."""
        return self.starts.numel()

    def split(self, validation: float, *, at_least: int = 1) -> tuple["Corpus", "Corpus"]:
        """Split into a first part for training, and the last share (above 0 and below 1) for validation.

        The cut may be inside a document; for Tiny Shakespeare (1,115,394 characters) it is the usual split after
        int(0.9 · n). TrainingError if a part would have less than `at_least` tokens.
        """
        if not 0 < validation < 1:  # NaN is not, either
            raise TrainingError(f"the validation share is {show_value(validation)}; expected above 0 and below 1")
        cut = int(self.num_tokens * round(1 - validation, 12))  # 1 - 0.9 is 0.09999999999999998
        for what, length in (("training", cut), ("validation", self.num_tokens - cut)):
            if length < max(at_least, 1):
                raise TrainingError(
                    f"{self.name}: a validation share of {validation} of its "
                    f"{counted(self.num_tokens, 'token')} leaves {length} "
                    f"for {what}; expected at least {max(at_least, 1)}: use more data, another share or shorter rows"
                )
        return self._part(0, cut), self._part(cut, self.num_tokens)

    def by_source(self, names: Iterable[str]) -> list["Corpus"]:
        """Return one corpus per source, named by `names` in messages."""
        documents = [0, *accumulate(self.about["documents_of"])]
        ends = [*self.starts[documents[:-1]].tolist(), self.num_tokens]
        return [
            replace(self._part(*part), name=source_name(name)) for part, name in zip(pairwise(ends), names, strict=True)
        ]

    def _part(self, first: int, end: int) -> "Corpus":
        """Return the tokens from `first` to `end`; a document that begins earlier starts at `first`."""
        open_document = int(torch.searchsorted(self.starts, first, right=True)) - 1
        next_part = int(torch.searchsorted(self.starts, end))
        return replace(
            self,
            ids=self.ids[first:end],
            starts=(self.starts[open_document:next_part] - first).clamp(min=0),
            fingerprint=_sha256(f"{self.fingerprint} {first} {end}"),
        )


def tokenize_corpus(
    source: str | Mapping[str, float] | None,
    tokenizer: Tokenizer | Learner,
    folder: Path,
    *,
    text_field: str = "text",
    progress: Progress | None = None,
) -> Corpus:
    """Tokenize a source (see `read_documents`), or several concatenated, or reuse the corpus cached in `folder`.

    Several corpora may share a folder, and a corpus is written atomically. While a source is read, the folder also
    contains a copy of its text. `progress` is called after each document and each million characters.

    Raises:
        TrainingError: If a source has no text, or text that the tokenizer cannot encode.
        OptionError: As `read_documents`.
        OutputError: If the folder cannot be written.
    """
    sources = [*source] if isinstance(source, Mapping) else [source]
    name, folder = ", ".join(map(source_name, sources)), Path(folder)
    try:
        named = tokenizer.name if isinstance(tokenizer, Learner) else tokenizer_fingerprint(tokenizer)
        recipe = {"format": _FORMAT, "text_field": text_field, "tokenizer": named}
        stamp = " ".join(map(source_stamp, sources))
        for inside in folder.glob("corpus-*"):
            if (found := _kept(inside, recipe)) and found.get("stamp") == stamp:
                return _map_corpus(inside, name, tokenizer)
        folder.mkdir(parents=True, exist_ok=True)
        remove_stale(folder, f"{_UNFINISHED}*")
        with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=folder, ignore_cleanup_errors=True) as temporary:
            read = [(source_name(source), read_documents(source, text_field=text_field)) for source in sources]
            documents = _Spool(Path(temporary) / "documents", read, progress)
            inside = folder / f"corpus-{_sha256(f'{recipe} {documents.sha256} {documents.of_sources}')[:16]}"
            if found := _kept(inside, recipe):
                write_json(inside / "corpus.json", {**found, "stamp": stamp})
            else:
                fresh = Path(temporary) / "fresh"
                about = _make(fresh, documents, tokenizer, name, progress)
                _publish(fresh, inside, {"recipe": recipe, "stamp": stamp, "about": about})
        return _map_corpus(inside, name, tokenizer)
    except OSError as error:
        raise OutputError(
            f"{escape(folder)}: the tokenized data cannot be kept here: {escape(error.strerror or error)}; expected a "
            "folder that can be written, with room for the text and 2 to 4 bytes a token"
        ) from error


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Return the SHA-256, hex, of everything that determines a document's ids; saving and loading keep it.

    The chat template is not included. OutputError if the folder for temporary files cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="llamarium-") as temporary:
        tokenizer.save(Path(temporary))
        written = {path.name: path.read_bytes() for path in sorted(Path(temporary).iterdir())}
        written.pop(TOKENIZER_CONFIG, None)
        vocabulary = written.get(CHARACTERS, b"".join(written.values()))
    rules = (*ids_around(tokenizer), tokenizer.vocab_size)
    return _sha256(f"{hashlib.sha256(vocabulary).hexdigest()} {rules}")


class _Spool:
    """Copy of the documents on disk: each as its length in 8 bytes and its UTF-8; `sha256` is the file's, hex."""

    def __init__(self, path: Path, read: Iterable[tuple[str, Iterable[str]]], progress: Progress | None) -> None:
        self._path = path
        self.num_documents = self.num_bytes = self.num_characters = 0
        self.of_sources: list[int] = []
        digest = hashlib.sha256()
        with path.open("wb") as file:
            for name, documents in read:
                before = self.num_documents
                for document in documents:
                    data = document.encode("utf-8")
                    for part in (len(data).to_bytes(8, "little"), data):
                        digest.update(part)
                        file.write(part)
                    self.num_documents += 1
                    self.num_bytes += len(data)
                    self.num_characters += len(document)
                    if progress is not None:
                        progress(f"documents read: {self.num_documents:,}", None)
                if self.num_documents == before:
                    raise TrainingError(f"{name}: no text in it; expected at least one document that is not empty")
                self.of_sources.append(self.num_documents - before)
        self.sha256 = digest.hexdigest()

    def counting(self, progress: Progress) -> Callable[[int], None]:
        """Return a callback that reports the share of characters counted for a vocabulary."""
        return lambda done: progress("learning the vocabulary", min(1.0, done / self.num_characters))

    def __iter__(self) -> Iterator[str]:
        with self._path.open("rb") as file:
            while length := file.read(8):
                yield file.read(int.from_bytes(length, "little")).decode("utf-8")


def _make(
    fresh: Path, documents: _Spool, tokenizer: Tokenizer | Learner, name: str, progress: Progress | None
) -> dict[str, Any]:
    fresh.mkdir()
    if isinstance(tokenizer, Learner):
        tokenizer = tokenizer.learn(documents, counted=progress and documents.counting(progress))
        tokenizer.save(fresh / "tokenizer")
    return {
        "documents": documents.num_documents,
        "bytes": documents.num_bytes,
        "tokens": _write_ids(fresh, documents, tokenizer, name, progress),
        "text": documents.sha256,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "documents_of": documents.of_sources,
    }


def _write_ids(
    folder: Path, documents: Iterable[str], tokenizer: Tokenizer, name: str, progress: Progress | None
) -> int:
    """Write `ids.bin` and `starts.bin` one document at a time, and return the number of tokens."""
    dtype = _ids_dtype(tokenizer)
    starts, num_tokens = array("q"), 0
    with (folder / "ids.bin").open("wb") as file:
        for document in documents:
            starts.append(num_tokens)
            with at_place(f"{name}: document {len(starts)}"):
                for ids in document_ids(tokenizer, document):
                    file.write(np.asarray(ids, dtype).tobytes())
                    num_tokens += len(ids)
                    if progress is not None:
                        progress(f"{counted(len(starts), 'document')}, {counted(num_tokens, 'token')}", None)
    with (folder / "starts.bin").open("wb") as file:
        starts.tofile(file)
    return num_tokens


def _publish(fresh: Path, target: Path, description: dict[str, Any]) -> None:
    """Write the description of a complete corpus and rename it into place; a damaged corpus there is replaced."""
    written = {path.relative_to(fresh).as_posix(): path for path in fresh.rglob("*") if path.is_file()}
    files = {
        name: (s := path.stat()) and [s.st_size, s.st_mtime_ns, file_sha256(path)] for name, path in written.items()
    }
    write_json(fresh / "corpus.json", {**description, "files": files})
    sync_tree(fresh)
    try:
        fresh.rename(target)  # fails if the folder exists and is not empty
    except OSError:
        if _kept(target, description["recipe"]):
            return  # another process wrote it first, and may have mapped it
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
    sync(target.parent)


def _kept(inside: Path, recipe: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the content of `corpus.json` if the folder has an intact corpus of this recipe, else None."""
    try:
        saved: Any = json.loads((inside / "corpus.json").read_bytes())
        if saved["recipe"] != recipe:
            return None
        for name, (num_bytes, mtime_ns, sha256) in saved["files"].items():
            status = (inside / name).stat()  # the content is compared only if the modification time differs
            if status.st_size != num_bytes or (status.st_mtime_ns != mtime_ns and file_sha256(inside / name) != sha256):
                return None
        return saved
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None


def _map_corpus(inside: Path, name: str, tokenizer: Tokenizer | Learner) -> Corpus:
    about = json.loads((inside / "corpus.json").read_bytes())["about"]
    if isinstance(tokenizer, Learner):
        tokenizer = load_tokenizer(inside / "tokenizer")
    ids, starts = _map(inside / "ids.bin", _ids_dtype(tokenizer)), _map(inside / "starts.bin", np.int64)
    _check_numbers(inside / "ids.bin", ids, tokenizer.vocab_size)
    _check_numbers(inside / "starts.bin", starts, len(ids) + 1)
    fingerprint = _sha256(f"{_FORMAT} {about['text']} {about['tokenizer']}")
    return Corpus(name, ids, starts, tokenizer, fingerprint, about)


def _check_numbers(path: Path, numbers: Tensor, stop: int) -> None:
    """Raise TrainingError unless all numbers are from 0 to `stop` - 1; damage may leave a file's time unchanged."""
    lowest, highest = (int(f(numbers.numpy())) if len(numbers) else 0 for f in (np.min, np.max))
    if lowest < 0 or highest >= stop:
        raise TrainingError(
            f"{escape(path)}: is damaged: it has numbers from {lowest} to {highest}; expected 0 to {stop - 1}. Remove "
            f"{escape(path.parent)}, and it is made again"
        )


def _map(path: Path, dtype: _Number) -> Tensor:
    """Map a file of numbers copy-on-write, so that writing to the tensor does not change the file."""
    return torch.from_numpy(np.memmap(path, dtype, "c") if path.stat().st_size else np.empty(0, dtype))


def _ids_dtype(tokenizer: Tokenizer) -> _Number:
    return np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
