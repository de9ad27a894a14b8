"""The `tokenizers` pipeline of a byte-level BPE vocabulary, built from its parts.

A GGUF file and Meta's file hold tokens and merges but name the pre-tokenizer only, or not at all. These are the
published pipelines behind the names.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers
    from tokenizers.pre_tokenizers import PreTokenizer

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level_tokenizer(
    *,
    vocab: Mapping[str, int],
    merges: list[tuple[str, str]],
    special: Mapping[str, int],
    cutter: "PreTokenizer",
    whole_pieces: bool,
    plain: tuple[str, ...] = (),
) -> "tokenizers.Tokenizer":
    """Build a tokenizer of the package.

    Args:
        vocab: Every ordinary token, in GPT-2's printable characters, to its id.
        merges: The pairs, the first learned first.
        special: Control tokens to their ids; each is in `vocab`, or its id follows the last.
        cutter: The pre-tokenizer.
        whole_pieces: A piece that is a token becomes it without merging.
        plain: Tokens of `vocab` that are matched in the text before it is cut.
    """
    import tokenizers
    from tokenizers import AddedToken, decoders, models

    inner = tokenizers.Tokenizer(models.BPE(vocab=dict(vocab), merges=merges, ignore_merges=whole_pieces))
    inner.pre_tokenizer = cutter
    inner.decoder = decoders.ByteLevel()
    in_order = sorted(special, key=lambda token: special[token])
    inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in in_order])
    inner.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])
    return inner


def llama3_cutter() -> "PreTokenizer":
    """Llama 3's: one regular expression, numbers in groups of up to three digits."""
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def smollm_cutter() -> "PreTokenizer":
    """SmolLM2's: each digit alone, then GPT-2's regular expression."""
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
