"""From a tokenizer to the lists in a GGUF file's metadata, which llama.cpp encodes with.

Source: llama.cpp, `convert_hf_to_gguf.py` (`LlamaModel.set_vocab`) and `src/llama-vocab.cpp`.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarium.config import ModelConfig
from llamarium.errors import UnsupportedTokenizerError, escape, warn_caller
from llamarium.file_names import TOKENIZER
from llamarium.tokenizer.backends.files import read_json
from llamarium.tokenizer.backends.gguf_cutters import cutter_names, find_cutter
from llamarium.tokenizer.backends.gguf_longest import is_longest_match, longest_match_metadata
from llamarium.tokenizer.backends.pipeline import llama3_cutter, smollm_cutter
from llamarium.tokenizer.backends.sentencepiece import SentencePieceBackend
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.sentencepiece.piece_type import PieceType

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

_NO_SCORE = -10000.0  # of rows without a token, as llama.cpp's converter writes it
_KEY = "tokenizer.ggml."


def tokenizer_metadata(tokenizer: Tokenizer, config: ModelConfig) -> dict[str, Any]:
    """Return a tokenizer as GGUF's metadata.

    A SentencePiece vocabulary of BPE goes in as it is, and one of characters or words as a list of which the longest
    match is taken. Every byte-level BPE tokenizer can write itself as a `tokenizer.json`, from which lists are taken.

    Raises:
        UnsupportedTokenizerError: For another kind, one whose pre-tokenizer or merge rule llama.cpp has under no name
            that is known here, or one without an end token, for which llama.cpp would take token 11.
    """
    if isinstance(tokenizer.backend, SentencePieceBackend):
        return _sentencepiece(tokenizer.backend, tokenizer, config) | tokenizer.chat_templates.to_gguf()
    if is_longest_match(tokenizer.backend):
        if tokenizer.strip_first_space:
            warn_caller(
                "llama.cpp puts no space before a text, from which this vocabulary of words counts its first word: "
                "begin prompts with a space there"
            )
        return longest_match_metadata(tokenizer, config.vocab_size) | tokenizer.chat_templates.to_gguf()
    raw = _as_json(tokenizer)
    model, added = raw["model"], raw["added_tokens"]
    pre = _pre_tokenizer(raw, tokenizer)
    if not tokenizer.eos_token_ids:
        raise _refusal(tokenizer, "it has no end-of-text token, and llama.cpp would take token 11 for it")
    tokens, kinds = _unused_rows(config)
    special = set(tokenizer.special_tokens.values())
    for token, i in model["vocab"].items():
        tokens[i], kinds[i] = token, PieceType.NORMAL
    for token in added:
        tokens[token["id"]], kinds[token["id"]] = token["content"], PieceType.USER_DEFINED
    for i in special:
        kinds[i] = PieceType.CONTROL
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    metadata = {
        _KEY + "model": "gpt2",
        _KEY + "pre": pre,
        _KEY + "tokens": tokens,
        _KEY + "token_type": list(map(int, kinds)),
        _KEY + "merges": merges,
        _KEY + "add_bos_token": tokenizer.special.add_bos,
    }
    return metadata | tokenizer.chat_templates.to_gguf()


def _sentencepiece(backend: SentencePieceBackend, tokenizer: Tokenizer, config: ModelConfig) -> dict[str, Any]:
    """Return a SentencePiece vocabulary, if llama.cpp gives its ids: BPE with byte fallback, without rules."""
    model = backend.model
    if model.kind != "bpe":
        raise _refusal(tokenizer, "llama.cpp has no Unigram vocabulary for Llama models")
    if model.charsmap or model.whitespace_as_suffix or not model.escape_whitespaces:
        raise _refusal(tokenizer, "it has normalization rules, which llama.cpp would not apply")
    if not model.byte_fallback:
        raise _refusal(tokenizer, "it has no byte fallback, without which llama.cpp cannot encode every text")
    if model.remove_extra_whitespaces:
        warn_caller("llama.cpp keeps all spaces of a text, and this tokenizer one of several in a row")
    tokens, kinds = _unused_rows(config)
    scores = [_NO_SCORE] * len(tokens)
    for i, (piece, score, kind) in enumerate(zip(model.pieces, model.scores, model.types, strict=True)):
        tokens[i], scores[i], kinds[i] = piece, score, kind
    for token in backend.added:
        tokens[token.id], kinds[token.id] = token.content, PieceType.USER_DEFINED
    for text, i in tokenizer.special_tokens.items():
        tokens[i], kinds[i] = text, PieceType.UNKNOWN if i == model.unknown_id else PieceType.CONTROL
    metadata = {
        _KEY + "model": "llama",
        _KEY + "pre": "default",
        _KEY + "tokens": tokens,
        _KEY + "scores": scores,
        _KEY + "token_type": list(map(int, kinds)),
        _KEY + "add_bos_token": tokenizer.special.add_bos,
        _KEY + "add_space_prefix": model.add_dummy_prefix,
        _KEY + "remove_extra_whitespaces": model.remove_extra_whitespaces,
    }
    return metadata if model.unknown_id is None else metadata | {_KEY + "unknown_token_id": model.unknown_id}


def _unused_rows(config: ModelConfig) -> tuple[list[str], list[int]]:
    """Return tokens and types of all rows as if none had a token, named as llama.cpp's converter names those."""
    return [f"[PAD{i}]" for i in range(config.vocab_size)], [PieceType.UNUSED] * config.vocab_size


def _as_json(tokenizer: Tokenizer) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        path = Path(folder, TOKENIZER)
        if not path.exists():
            raise _refusal(tokenizer, "it is not byte-level BPE")
        return read_json(path)


def _pre_tokenizer(raw: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    if (raw.get("decoder") or {}).get("type") != "ByteLevel":
        raise _refusal(tokenizer, "it is not byte-level BPE")
    if raw.get("normalizer") is not None:
        raise _refusal(tokenizer, "it has a normalizer, which llama.cpp would not apply")
    rules = _rules(raw["pre_tokenizer"])
    names = [name for name, cutter in _named_cutters() if _rules(_cutter_as_json(cutter)) == rules]
    if not names:
        raise _refusal(
            tokenizer, "llama.cpp has no name for its pre-tokenizer, so a reader would cut texts differently"
        )
    whole_pieces = bool(raw["model"].get("ignore_merges"))
    fitting = [name for name in names if find_cutter(name, tokenizer.source).whole_pieces == whole_pieces]
    if names[0] not in fitting and _merges_make_all(raw["model"]):
        return names[0]
    if not fitting:
        raise _refusal(tokenizer, f"llama.cpp's {names[0]} has the other ignore_merges, which matters here")
    return fitting[0]


def _named_cutters() -> Iterator[tuple[str, "PreTokenizer"]]:
    """Yield pre-tokenizers under llama.cpp's names; those that were published in another spelling, in both."""
    yield "llama-bpe", llama3_cutter()
    yield "smollm", smollm_cutter()
    for name in cutter_names():
        yield name, find_cutter(name, "").build()


def _merges_make_all(model: Mapping[str, Any]) -> bool:
    """Whether merging makes each token out of its own characters; then taking it at once is the same."""
    from tokenizers.models import BPE

    merges: Any = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    bpe = BPE(vocab=model["vocab"], merges=merges, ignore_merges=False)
    return all([part.id for part in bpe.tokenize(token)] == [i] for token, i in model["vocab"].items())


def _cutter_as_json(cutter: "PreTokenizer") -> Any:
    from tokenizers import Tokenizer as Inner
    from tokenizers.models import BPE

    inner = Inner(BPE())
    inner.pre_tokenizer = cutter
    return json.loads(inner.to_str())["pre_tokenizer"]


def _rules(step: Any) -> list[Any]:
    """Return a pre-tokenizer's steps without what has no effect on the pieces."""
    if not isinstance(step, dict):
        return []
    if step.get("type") == "Sequence":
        return [rule for part in step["pretokenizers"] for rule in _rules(part)]
    return [{key: value for key, value in step.items() if key != "trim_offsets"}]


def _refusal(tokenizer: Tokenizer, why: str) -> UnsupportedTokenizerError:
    return UnsupportedTokenizerError(
        f"{escape(tokenizer.source)}: this tokenizer cannot go into a GGUF file: {why}. Export in Hugging Face's "
        "format, or the weights alone (--no-tokenizer)"
    )
