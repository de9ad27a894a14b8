"""A data set as one long stream of token ids on disk, tokenized once.

The ids lie in a file that is mapped into memory, 2 bytes a token where the vocabulary has at most 65,536 tokens and 4
where it has more; so a corpus may be larger than the memory, and a row of it costs one read. Beside them lie the places
where documents begin:

    corpus-<fingerprint>/ids.bin       uint16 or int32 in the machine's order, document after document
    corpus-<fingerprint>/starts.bin    int64, the first is 0
    corpus-<fingerprint>/corpus.json   their sizes and SHA-256

Where a tokenizer puts a begin-of-text token, each document begins with one; where it has an end-of-text token, each
document ends with it, so that a model learns to end. Characters have neither.

The fingerprint is a SHA-256 over every document and the tokenizer. Files that change later change nothing in a run that
has begun, and a run that is resumed with other data or another tokenizer sees another fingerprint.
"""

import hashlib
import json
import shutil
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llamarium.errors import OutputError, TokenizerError, TrainingError, escape, show_value
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.pieces import encode_pieces
from llamarium.train.sources import read_documents, source_name
from llamarium.weights.files import file_sha256
from llamarium.weights.save import sync, sync_tree, write_json

Progress = Callable[[int, int], None]
"""Called as `progress(num_documents, num_tokens)` with what has been read so far."""

_FORMAT = "llamarium corpus 1"  # part of every fingerprint: other rules or another layout make another corpus
_UNFINISHED = ".corpus-"
_STALE_AFTER_S = 24 * 3600


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """A stream of token ids, and where its documents begin.

    Attributes:
        name: Where it came from, for messages.
        ids: (num_tokens,) uint16 or int32; mapped from a file, of which only what is used is read.
        starts: (num_documents,) int64; where documents begin, ascending; the first is 0.
        vocab_size: The tokenizer's; every id is below it.
        fingerprint: SHA-256, hex, of the documents, the tokenizer and which part of them this is.
    """

    name: str
    ids: Tensor
    starts: Tensor
    vocab_size: int
    fingerprint: str

    @property
    def num_tokens(self) -> int:
        """Tokens in all."""
        return self.ids.numel()

    @property
    def num_documents(self) -> int:
        """Documents, the first and last of which may be parts."""
        return self.starts.numel()

    def split(self, validation: float, *, at_least: int = 1) -> tuple["Corpus", "Corpus"]:
        """Return the first part, to learn from, and the last, to measure with.

        The cut is at a token, in the middle of a document if need be: of Tiny Shakespeare's 1,115,394 characters the
        usual split keeps the first int(0.9 · n).

        Args:
            validation: The last part's share of the tokens, above 0 and below 1.
            at_least: Tokens that each part must have.

        Raises:
            TrainingError: If the share is out of range, or a part would be shorter than `at_least`.
        """
        if not 0 < validation < 1:  # NaN is not, either
            raise TrainingError(f"the validation share is {show_value(validation)}; expected above 0 and below 1")
        cut = int(self.num_tokens * round(1 - validation, 12))  # 1 - 0.9 is 0.09999999999999998
        for what, length in (("training", cut), ("validation", self.num_tokens - cut)):
            if length < max(at_least, 1):
                raise TrainingError(
                    f"{self.name}: a validation share of {validation} of its {self.num_tokens} tokens leaves {length} "
                    f"for {what}; expected at least {max(at_least, 1)}: use more data, another share or shorter rows"
                )
        return self._part(0, cut), self._part(cut, self.num_tokens)

    def _part(self, first: int, end: int) -> "Corpus":
        """Return the tokens from `first` to `end`; a document that began before counts from there."""
        open_document = int(torch.searchsorted(self.starts, first, right=True)) - 1
        next_part = int(torch.searchsorted(self.starts, end))
        return replace(
            self,
            ids=self.ids[first:end],
            starts=(self.starts[open_document:next_part] - first).clamp(min=0),
            fingerprint=_sha256(f"{self.fingerprint} {first} {end}"),
        )


def tokenize_corpus(
    source: str | None,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    text_field: str = "text",
    progress: Progress | None = None,
) -> Corpus:
    """Return a source as token ids, from the file in `folder` if it holds them already.

    Where an earlier corpus lies in `folder` the source is read to see whether it is the same; otherwise it is read
    once. Several sources may share a folder. What is written is complete or absent.

    Args:
        source: As for `read_documents`.
        tokenizer: What encodes it.
        folder: Where the ids are kept; made if missing.
        text_field: As for `read_documents`.
        progress: Told how far it is, after each document and each million characters.

    Raises:
        TrainingError: If the source holds no text, what is no text, or what the tokenizer cannot encode.
        DownloadError, OptionError: As `read_documents`.
        OutputError: If the folder cannot be written.
    """
    name, folder = source_name(source), Path(folder)

    def documents(content: _Content) -> Iterator[str]:
        return content.watch(read_documents(source, text_field=text_field))

    try:
        vocabulary = tokenizer_fingerprint(tokenizer)
        if any(folder.glob("corpus-*")):
            deque(documents(content := _Content()), maxlen=0)  # reads them and keeps none
            fingerprint = content.fingerprint(vocabulary)
            if _is_intact(_corpus_folder(folder, fingerprint), fingerprint, tokenizer):
                return _map_corpus(folder, name, tokenizer, fingerprint)
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=folder, ignore_cleanup_errors=True) as temporary:
            fresh = Path(temporary) / "fresh"
            fresh.mkdir()
            _write_ids(fresh, documents(content := _Content()), tokenizer, name, progress)
            fingerprint = content.fingerprint(vocabulary)
            _publish(fresh, folder, fingerprint, tokenizer)
        return _map_corpus(folder, name, tokenizer, fingerprint)
    except OSError as error:
        raise OutputError(
            f"{escape(folder)}: the tokenized data cannot be kept here: {escape(error.strerror or error)}; expected a "
            "folder that can be written, with 2 to 4 bytes free a token"
        ) from error


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Return a SHA-256, hex, over everything that decides which ids a document becomes.

    A tokenizer that is saved and read again has the same one; its chat template does not count.

    Raises:
        OutputError: If the folder for temporary files cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="llamarium-") as temporary:
        tokenizer.save(Path(temporary))
        vocabulary = b"".join(
            path.read_bytes() for path in sorted(Path(temporary).iterdir()) if path.name != "tokenizer_config.json"
        )
    rules = (_before(tokenizer), _after(tokenizer), tokenizer.vocab_size)
    return _sha256(f"{hashlib.sha256(vocabulary).hexdigest()} {rules}")


# --- writing ----------------------------------------------------------------------------------------------------------


class _Content:
    """A SHA-256 over documents, whatever kind of file they come from."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def watch(self, documents: Iterable[str]) -> Iterator[str]:
        """Pass documents on and count them in."""
        for document in documents:
            data = document.encode("utf-8")
            self._digest.update(len(data).to_bytes(8, "little"))
            self._digest.update(data)
            yield document

    def fingerprint(self, vocabulary: str) -> str:
        """Return the fingerprint of the documents so far as ids."""
        return _sha256(f"{_FORMAT} {self._digest.hexdigest()} {vocabulary}")


def _write_ids(
    folder: Path, documents: Iterable[str], tokenizer: Tokenizer, name: str, progress: Progress | None
) -> None:
    """Write `ids.bin` and `starts.bin`, one document at a time.

    Raises:
        TrainingError: If there is no document, or one that the tokenizer cannot encode.
    """
    dtype = np.uint16 if _fits_uint16(tokenizer) else np.int32
    starts, num_tokens = array("q"), 0
    with (folder / "ids.bin").open("wb") as file:
        for document in documents:
            starts.append(num_tokens)
            for ids in _document_ids(tokenizer, document, f"{name}: document {len(starts)}"):
                file.write(np.asarray(ids, dtype).tobytes())
                num_tokens += len(ids)
                if progress is not None:
                    progress(len(starts), num_tokens)
    if not num_tokens:
        raise TrainingError(f"{name}: no text in it; expected at least one document that is not empty")
    with (folder / "starts.bin").open("wb") as file:
        starts.tofile(file)


def _document_ids(tokenizer: Tokenizer, document: str, where: str) -> Iterator[list[int]]:
    """Encode a document between its begin- and end-of-text tokens.

    Raises:
        TrainingError: If the tokenizer cannot encode it.
    """
    yield _before(tokenizer)
    try:
        yield from encode_pieces(tokenizer, document)
    except TokenizerError as error:
        raise TrainingError(f"{where}: {error}") from error
    yield _after(tokenizer)


def _before(tokenizer: Tokenizer) -> list[int]:
    """Return what stands before each document, by the tokenizer's own rule."""
    return [tokenizer.special.bos] if tokenizer.special.add_bos and tokenizer.special.bos is not None else []


def _after(tokenizer: Tokenizer) -> list[int]:
    """Return what stands after each document; of several end-of-text tokens the main one."""
    return list(tokenizer.eos_token_ids[:1])


def _publish(fresh: Path, folder: Path, fingerprint: str, tokenizer: Tokenizer) -> None:
    """Give a complete corpus its name; one of that name that is damaged makes way."""
    write_json(fresh / "corpus.json", _description(fresh, fingerprint, tokenizer))
    sync_tree(fresh)
    target = _corpus_folder(folder, fingerprint)
    try:
        fresh.rename(target)  # fails where one with files in it is there
    except OSError:
        if _is_intact(target, fingerprint, tokenizer):
            return  # another process was faster, and may have mapped it
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
    sync(folder)


def _description(folder: Path, fingerprint: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what `corpus.json` says of the two files beside it."""
    files = {name: file_sha256(folder / name) for name in ("ids.bin", "starts.bin")}
    return {"fingerprint": fingerprint, "vocab_size": tokenizer.vocab_size, "sha256": files}


def _remove_stale(folder: Path) -> None:
    """Remove what a process that was killed has left; not what another may still be writing."""
    for old in folder.glob(f"{_UNFINISHED}*"):
        if old.stat().st_mtime < time.time() - _STALE_AFTER_S:
            shutil.rmtree(old, ignore_errors=True)


# --- reading ----------------------------------------------------------------------------------------------------------


def _is_intact(inside: Path, fingerprint: str, tokenizer: Tokenizer) -> bool:
    """Tell whether a corpus is there, complete and what was written; else it is made again."""
    try:
        found: Any = json.loads((inside / "corpus.json").read_bytes())
        return found == _description(inside, fingerprint, tokenizer)
    except (OSError, ValueError, RecursionError):
        return False


def _map_corpus(folder: Path, name: str, tokenizer: Tokenizer, fingerprint: str) -> Corpus:
    inside = _corpus_folder(folder, fingerprint)
    ids = _map(inside / "ids.bin", torch.uint16 if _fits_uint16(tokenizer) else torch.int32)
    return Corpus(name, ids, _map(inside / "starts.bin", torch.int64), tokenizer.vocab_size, fingerprint)


def _map(path: Path, dtype: torch.dtype) -> Tensor:
    """Map a file of numbers; private, so that nothing can write through the tensor into it."""
    return torch.from_file(str(path), shared=False, size=path.stat().st_size // dtype.itemsize, dtype=dtype)


def _fits_uint16(tokenizer: Tokenizer) -> bool:
    return tokenizer.vocab_size <= 1 << 16


def _corpus_folder(folder: Path, fingerprint: str) -> Path:
    return folder / f"corpus-{fingerprint[:16]}"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
