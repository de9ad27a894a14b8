"""The `tokenizers` pipeline of a byte-level BPE vocabulary, built from its parts.

A GGUF file and Meta's file hold tokens and merges but name the pre-tokenizer only, or not at all. These are the
published pipelines behind the names.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level_json(
    *,
    vocab: Mapping[str, int],
    merges: list[tuple[str, str]],
    special: Mapping[str, int],
    cutter: "PreTokenizer",
    whole_pieces: bool,
    plain: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return the contents of a `tokenizer.json`; the merges are the list that was given.

    Args:
        vocab: Every ordinary token, in GPT-2's printable characters, to its id.
        merges: The pairs, the first learned first.
        special: Control tokens to their ids.
        cutter: The pre-tokenizer.
        whole_pieces: A piece that is a token becomes it without merging.
        plain: Tokens that are matched in the text before it is cut, to their ids.
    """
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [(i, content, True) for content, i in special.items()]
    added += [(i, content, False) for content, i in (plain or {}).items()]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": content, **flags, "special": kind} for i, content, kind in sorted(added)],
        "normalizer": None,
        "pre_tokenizer": json.loads(cutter.__getstate__()),
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": whole_pieces},
    }


def llama3_cutter() -> "PreTokenizer":
    """Return Llama 3's pre-tokenizer: one regular expression, with numbers in groups of up to three digits."""
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def smollm_cutter() -> "PreTokenizer":
    """Return SmolLM2's pre-tokenizer: single digits, then GPT-2's regular expression."""
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
