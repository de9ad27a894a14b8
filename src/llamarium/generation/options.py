"""How an answer is made: the options of `Llama.generate` and its like, by name and type. Never torch."""

from dataclasses import dataclass
from typing import get_args

from llamarium.errors import check_choice
from llamarium.generation.params import GenerationOptions
from llamarium.generation.speculate import PromptLookup
from llamarium.runtime.runner import CacheDtype


class AnswerOptions(GenerationOptions, total=False):
    """The options of an answer: those of the sampler, and how its passes are run.

    Attributes:
        use_cache: False recomputes everything for every token.
        prompt_lookup: True, or a `PromptLookup`, guesses tokens from what was said before: the same answer, sooner
            where it repeats prompt or itself.
        kv_cache_dtype: What keys and values are kept in: "auto" is the model's dtype, "int8" about half of bfloat16's
            memory.
    """

    use_cache: bool
    prompt_lookup: bool | PromptLookup
    kv_cache_dtype: CacheDtype


@dataclass(frozen=True, slots=True)
class Passing:
    """How an answer's passes are run; see `AnswerOptions`."""

    use_cache: bool
    lookup: PromptLookup | None
    kv_cache_dtype: CacheDtype


def split_options(options: AnswerOptions) -> Passing:
    """Take how passes are run out of some options, and leave the sampler's.

    Raises:
        OptionError: If a value is none of those that there are.
    """
    use_cache, lookup = options.pop("use_cache", True), options.pop("prompt_lookup", False)
    kv_cache_dtype = options.pop("kv_cache_dtype", "auto")
    check_choice("use_cache", use_cache, (True, False))
    check_choice("kv_cache_dtype", kv_cache_dtype, get_args(CacheDtype))
    if not isinstance(lookup, PromptLookup):
        check_choice("prompt_lookup", lookup, (True, False, None))
        lookup = PromptLookup() if lookup else None
    return Passing(use_cache, lookup, kv_cache_dtype)
