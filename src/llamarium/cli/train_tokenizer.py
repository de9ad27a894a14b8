"""Learn a vocabulary from texts, and write it as a tokenizer's files.

  bpe          bytes and merges, with Llama 3's way to cut texts; spells any text
  words        one token for each word and punctuation mark; a word that is not
               in the vocabulary cannot be written
  chars        one token for each character

The folder is what --tokenizer of `llamarium pretrain` takes.

  llamarium train-tokenizer --vocab-size 1024 --out manual-1k
  llamarium train-tokenizer --data novels/ --vocab-size 8192 --out novels-8k
  llamarium train-tokenizer --data shakespeare --kind words --out words
"""

import argparse
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llamarium.cli.options import UsageError, add_json, positive
from llamarium.cli.output import emit, progress, say
from llamarium.errors import OutputError, TrainingError, counted, escape
from llamarium.file_names import CHARACTERS, CONFIG, TOKENIZER, TOKENIZER_CONFIG, TOKENIZER_FILES
from llamarium.train.config import DATA_HELP

if TYPE_CHECKING:
    from llamarium.tokenizer.base import Tokenizer
    from llamarium.train.data.bpe import Counted

_DEFAULT_VOCAB = 4096
_BPE_FILES = (TOKENIZER, TOKENIZER_CONFIG)
_SAMPLE_CHARACTERS = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--data", metavar="SOURCE", help=DATA_HELP)
    parser.add_argument("--text-field", default="text", metavar="NAME", help="the field with the text (default: text)")
    parser.add_argument("--kind", choices=("bpe", "words", "chars"), default="bpe", help="of tokens (default: bpe)")
    text = f"tokens; of words, at most (default: {_DEFAULT_VOCAB})"
    parser.add_argument("--vocab-size", type=positive, metavar="N", help=text)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the files go; has to be given")
    parser.add_argument("--force", action="store_true", help="replace a tokenizer that is there")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Learn it, write it and say how short it makes texts."""
    if args.out is None:  # argparse would ask for it before it says what is wrong with the rest
        raise UsageError("argument --out: has to be given, the folder for the tokenizer's files")
    if args.kind == "chars" and args.vocab_size is not None:
        raise UsageError("argument --vocab-size: of no effect with --kind chars, which keeps every character")
    from llamarium.datasets.sources import read_documents, source_name
    from llamarium.tokenizer.backends.words import UNKNOWN

    prepare_target(args.out, force=args.force)
    name, sample = source_name(args.data), list[str]()
    with progress(f"learning a vocabulary from {name}") as report:
        texts = _with_sample(read_documents(args.data, text_field=args.text_field), sample, name)
        tokenizer = _learn(args, texts, lambda done: report(f"{counted(done, 'character')}", None))
        save_alone(tokenizer, args.out, [*_BPE_FILES, CHARACTERS][: 3 if args.kind == "chars" else 2])
        result = {"vocab_size": tokenizer.vocab_size, **_measure(tokenizer, sample)}
    if args.json:
        emit({"path": str(args.out), "kind": args.kind, "data": name, **result})
    else:
        unknown = f", {result['unknown']:.1%} of them {UNKNOWN}" if result.get("unknown") else ""
        length = f"{result['bytes_per_token']:.2f} bytes long{unknown}"
        say(f"{args.out}: {counted(tokenizer.vocab_size, 'token')}; in {name} a token is {length}")
    return 0


def _learn(args: argparse.Namespace, texts: Iterable[str], counted: "Counted") -> "Tokenizer":
    from llamarium.train.data.bpe import train_bpe, train_characters, train_words

    if args.kind == "chars":
        return train_characters(texts, counted)
    return (train_bpe if args.kind == "bpe" else train_words)(texts, args.vocab_size or _DEFAULT_VOCAB, counted)


def _measure(tokenizer: "Tokenizer", sample: list[str]) -> dict[str, float]:
    """Return how long a token of the sample is, and for words the share that the vocabulary lacks."""
    from llamarium.tokenizer.backends.words import WordBackend

    backend = tokenizer.backend
    num_bytes = sum(len(text.encode("utf-8")) for text in sample)
    if not isinstance(backend, WordBackend):
        return {"bytes_per_token": num_bytes / sum(len(ids) for ids in map(backend.encode, sample))}
    ids = [i for text in sample for part in backend.encode_with_unknown(text) for i in part]
    return {"bytes_per_token": num_bytes / len(ids), "unknown": ids.count(backend.unknown_id) / len(ids)}


def prepare_target(folder: Path, *, force: bool) -> None:
    """Make the folder, or refuse it before any work is done."""
    existing = [path.relative_to(folder) for path in _tokenizer_files(folder)]
    if (folder / CONFIG).exists():
        raise OutputError(
            f"{escape(folder)}: a model is here (config.json), whose ids another vocabulary would give other meanings; "
            "choose another folder"
        )
    if existing and not force:
        raise OutputError(
            f"{escape(folder)}: {escape(existing[0])} is here; choose another folder, or replace it (--force)"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{escape(folder)}: cannot be made: {escape(error.strerror or error)}") from None


def save_alone(tokenizer: "Tokenizer", folder: Path, written: Collection[str]) -> None:
    """Write a tokenizer's files (`written`), and remove another's that were there: they would be read in its place."""
    tokenizer.save(folder)
    try:
        for path in _tokenizer_files(folder):
            if path.name not in written:
                path.unlink(missing_ok=True)
    except OSError as error:
        why = escape(error.strerror or error)
        raise OutputError(f"{escape(folder)}: an old file cannot be removed: {why}") from None


def _tokenizer_files(folder: Path) -> list[Path]:
    return [path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)]


def _with_sample(texts: Iterable[str], sample: list[str], name: str) -> Iterator[str]:
    """Pass texts on, and keep the first million characters of them in `sample`."""
    missing = _SAMPLE_CHARACTERS
    for text in texts:
        if missing > 0:
            sample.append(text[:missing])
            missing -= len(sample[-1])
        yield text
    if not sample:
        raise TrainingError(f"{name}: no text in it; expected at least one document that is not empty")
