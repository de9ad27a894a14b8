r"""The pre-tokenizers of GGUF files (`tokenizer.ggml.pre`), which split a text before byte-level merging.

Each is a list of regular expressions. The first splits the text into matches and the text between them; each of the
others splits the pieces of the previous one. The names, the expressions and their options (whether a whole piece may
become a token without merging, whether a text begins with BOS) are a convention of llama.cpp. Some are used by other
model families, and by Llama models with another vocabulary.

Source: llama.cpp, `src/llama-vocab.cpp`.
"""

# ruff: noqa: RUF001 - letters of many scripts are meant

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamarium.errors import UnsupportedTokenizerError, escape, show_value, warn_caller
from llamarium.tokenizer.backends.pipeline import LLAMA3_PATTERN

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

_SUFFIXES = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SINGLE_DIGITS = rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_ANY_DIGITS = rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_NO_CAPITALS, _NO_SMALLS = r"((?=[\p{L}])([^a-z]))", r"((?=[\p{L}])([^A-Z]))"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_NO_CAPITALS}*{_NO_SMALLS}+%s|[^\r\n\p{{L}}\p{{N}}]?{_NO_CAPITALS}+{_NO_SMALLS}*%s"
    rf"|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
)
_PUNCTUATED = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _BLANKS
)
_LATIN_RANGES = (  # letters with case, as DeepSeek's tokenizer lists them
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c "
    "38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b "
    "1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 "
    "1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 "
    "2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b "
    "2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 "
    "fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df "
    "1e900-1e943"
)
_LATIN = "".join("-".join(rf"\x{{{end}}}" for end in part.split("-")) for part in _LATIN_RANGES.split())
_CJK = "[一-龥ࠀ-一가-퟿]+"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutter:
    """A pre-tokenizer.

    Attributes:
        names: Names in files, separated by spaces.
        patterns: Regular expressions.
        whole_pieces: A piece that is a token becomes that token without merging.
        add_bos: Default of whether a text begins with BOS.
    """

    names: str
    patterns: tuple[str, ...]
    whole_pieces: bool = False
    add_bos: bool = False

    def build(self) -> "PreTokenizer":
        """Return the pre-tokenizer for the `tokenizers` package."""
        from tokenizers import Regex, pre_tokenizers

        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_DEFAULT = Cutter(names="default", patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
CUTTERS = (
    _DEFAULT,
    Cutter(
        names="llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        patterns=(LLAMA3_PATTERN,),
        whole_pieces=True,
        add_bos=True,
    ),
    Cutter(names="smaug-bpe dbrx glm4 chatglm-bpe", patterns=(LLAMA3_PATTERN,)),
    Cutter(
        names="deepseek-llm",
        patterns=("[\r\n]", rf"\s?[{_LATIN}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, r"\p{N}+"),
    ),
    Cutter(names="deepseek-coder", patterns=("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    Cutter(
        names="deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        patterns=(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _PUNCTUATED),
    ),
    Cutter(names="falcon", patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    Cutter(names="smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", patterns=(r"\p{N}", _GPT2)),
    Cutter(
        names="gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4 modern-bert",
        patterns=(_GPT2,),
    ),
    Cutter(
        names="qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2",
        patterns=(_SINGLE_DIGITS,),
    ),
    Cutter(names="tekken", patterns=(_CASED % ("", "", r"\p{N}"),), whole_pieces=True, add_bos=True),
    Cutter(
        names="gpt-4o llama4 kanana2 talkie minimax-m2",
        patterns=(_CASED % (_SUFFIXES + "?", _SUFFIXES + "?", r"\p{N}{1,3}"),),
    ),
    Cutter(names="minicpm5", patterns=(r"\p{N}{1,3}", _ANY_DIGITS), whole_pieces=True),
)

# Other pre-tokenizers of llama.cpp, which need more than such regular expressions.
OTHERS = frozenset(
    "afmoe bailingmoe bailingmoe2 chameleon cohere2moe exaone-moe gemma4 granite-embed-multi-311m "
    "granite-embed-multi-97m jais-2 kimi-k2 laguna llada-moe qwen35 sarvam-moe seed-coder spark2_5 superbpe "
    "tiny_aya ufakzeka viking poro-chat bloom gpt3-finnish whitespace youtu jina-v1-en "
    "jina-v2-code roberta-bpe jina-es jina-de jina-v2-es jina-v2-de".split()
)


def find_cutter(name: object, source: str) -> Cutter:
    """Return a pre-tokenizer by name; a missing or unknown name gives the default with a warning, as in llama.cpp.

    UnsupportedTokenizerError for a known pre-tokenizer that is not supported here.
    """
    if isinstance(name, str):
        for cutter in CUTTERS:
            if name in cutter.names.split():
                return cutter
        if name in OTHERS:
            raise UnsupportedTokenizerError(
                f"{source}: tokenizer.ggml.pre is {name}, of models of another family; supported are "
                f"{', '.join(cutter_names())}"
            )
    problem = "is missing" if name is None else f"is {show_value(name)}, which is not known"
    warn_caller(
        f"{escape(source, 4096)}: tokenizer.ggml.pre {problem}; texts are cut as llama.cpp's default does, which may "
        "not be what the model was trained with. Convert the model again"
    )
    return _DEFAULT


def cutter_names() -> Iterator[str]:
    """Yield the names of all supported pre-tokenizers."""
    for cutter in CUTTERS:
        yield from cutter.names.split()
