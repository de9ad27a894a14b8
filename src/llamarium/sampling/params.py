"""The sampling parameters of a request, each declared once as a field of `SamplingParams`. Never torch.

`llamarium.sampling.steps` defines what each one does. Checks, the command line, Python's keywords, the protocols'
request fields, the page and docs/reference/options.md are derived from the fields.
docs/guides/add-a-sampling-parameter.md lists the places of a new one.
"""

import functools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, Unpack

from llamarium.errors import SamplingError, escape, show_value, warn_caller
from llamarium.file_names import GENERATION_CONFIG
from llamarium.keywords import shows_options, unknown_names
from llamarium.options.declare import Option, declared
from llamarium.sampling.grammar.description import OPTIONS as GRAMMAR_OPTIONS
from llamarium.sampling.grammar.description import Grammar, checked_grammar
from llamarium.sampling.keywords import SamplingKeywords
from llamarium.sampling.parameter import (
    BUT_ANTHROPIC,
    EVERYWHERE,
    INF,
    OF_PENALTIES,
    LogitsProcessor,
    Taker,
    check_integer,
    check_number,
    integer,
    number,
    parameter,
)

_MAX_SEED = 2**63 - 1


def _is_temperature(value: float) -> bool:
    return value == 0 or value >= 1e-5  # as for 1e5: float32 cannot tell the result from greedy or uniform


def _is_positive(value: float) -> bool:
    return value > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one request.

    >>> params = llamarium.SamplingParams(temperature=0, max_tokens=6)
    >>> llama.generate("To be, or not to b", params).text
    'e so m'

    Attributes:
        seed: See also `SamplingRow.seed`.
        max_tokens: With `prompt_logprobs`, 0 runs only the prompt.
        n: Above 1 requires a temperature above 0, because greedy answers are equal.
        grammar: Cannot be combined with stop strings, which could end the answer too early, unless it allows
            unconstrained text, to which they apply.
        logits_processor: Called for every token with the ids so far, int64 (T,), and a copy of the model's logits,
            float32 (V,); returns the logits to sample from, where -inf excludes a token. It runs before all other
            parameters; its errors only end this request, with a `LogitsProcessorError`.
    """

    temperature: float = number(
        1.0,
        "randomness, 0 (greedy) or 1e-5 to 1e5; below 1 sharpens, above 1 flattens",
        0.0,
        1e5,
        "0 (greedy) or 1e-5 to 1e5",
        condition=_is_temperature,
        takers=EVERYWHERE,
        metavar="T",
    )
    top_k: int = integer(
        0, "number of most likely tokens to sample from; 0 is all", 0,
        takers=EVERYWHERE, is_idle_when_greedy=True, metavar="K",
    )  # fmt: skip
    top_p: float = number(
        1.0, "total probability of the most likely tokens to sample from; 1 is all", 0.0, 1.0,
        "above 0 to 1 (for the most likely token alone: temperature 0)",
        condition=_is_positive, takers=EVERYWHERE, is_idle_when_greedy=True, metavar="P",
    )  # fmt: skip
    min_p: float = number(
        0.0, "minimum probability relative to the most likely token, 0 to 1; 0 is none", 0.0, 1.0, "0 to 1",
        takers=BUT_ANTHROPIC, is_idle_when_greedy=True, metavar="P",
    )  # fmt: skip
    repetition_penalty: float = number(
        1.0, "penalty for tokens of prompt and answer; above 1 discourages repetition", 0.01, 100.0, "0.01 to 100",
        takers=(*OF_PENALTIES, "file"), metavar="R",
    )  # fmt: skip
    presence_penalty: float = number(
        0.0, "subtracted once from the logit of each token in the answer, -2 to 2", -2.0, 2.0, "-2 to 2",
        takers=OF_PENALTIES, metavar="X",
    )  # fmt: skip
    frequency_penalty: float = number(
        0.0, "subtracted for each occurrence of a token in the answer, -2 to 2", -2.0, 2.0, "-2 to 2",
        takers=OF_PENALTIES, metavar="X",
    )  # fmt: skip
    logit_bias: Mapping[int, float] = parameter(
        {}, "added to the logit of a token, -100 to 100", is_hashed=False, metavar="ID=BIAS", repeats=True
    )
    seed: int | None = integer(
        None, "random seed: the same one gives the same text (default: random)", 0, _MAX_SEED,
        takers=("cli", "openai", "responses", "anthropic", "page"), is_idle_when_greedy=True, metavar="S",
    )  # fmt: skip
    max_tokens: int = integer(128, "maximum number of tokens of the answer", 1, metavar="N", short="-n")
    min_tokens: int = integer(
        0,
        "minimum number of tokens before an end token or a stop text ends the answer",
        0,
        takers=("cli", "openai"),
        metavar="N",
    )
    stop: tuple[str, ...] = parameter((), "text that ends the answer and is not part of it", repeats=True)
    stop_token_ids: tuple[int, ...] = parameter(
        (), "id of a token that ends the answer", metavar="ID", flag="stop-id", repeats=True
    )
    n: int = integer(1, "number of answers to the prompt", 1, 1024, flag="num-answers")
    logprobs: int | None = integer(
        None, "number of most likely tokens to report with log-probabilities; 0 is the chosen one alone", 0, metavar="K"
    )
    prompt_logprobs: int | None = integer(
        None, "the same as logprobs, for each token of the prompt except the first", 0
    )
    grammar: Grammar | None = parameter(None, "grammar of the answer's text")
    logits_processor: LogitsProcessor | None = parameter(
        None, "function of the ids and logits so far that returns the logits to sample from", is_hashed=False
    )

    def __post_init__(self) -> None:
        """Check every field; SamplingError naming the parameter, its value and its range."""
        for name, option in PARAMETERS.items():
            if name != "max_tokens" or self.max_tokens != 0 or self.prompt_logprobs is None:
                value = getattr(self, name)
                if not option.accepts(value):
                    raise SamplingError(f"{name} is {show_value(value)}; expected {option.expected}")
        if self.n > 1 and self.temperature == 0:
            raise SamplingError(
                f"n is {self.n} at temperature 0; greedy answers are all equal: expected n 1 or a temperature above 0"
            )
        if self.min_tokens > self.max_tokens or (self.min_tokens and self.grammar is not None):
            reason = f"max_tokens {self.max_tokens}" if self.grammar is None else "a grammar, which has its own end"
            raise SamplingError(f"min_tokens is {self.min_tokens} beside {reason}; expected no more than may come")
        if self.logits_processor is not None and not callable(self.logits_processor):
            raise SamplingError(
                f"logits_processor is {show_value(self.logits_processor)}; expected a function of token ids and logits"
            )
        # Own copies: the caller's list or dict may change, a request may not.
        object.__setattr__(self, "logit_bias", {} if self.logit_bias == {} else _checked_bias(self.logit_bias))
        for name, checked in _CHECKED_LISTS.items():
            if (value := getattr(self, name)) != ():
                object.__setattr__(self, name, checked(value))
        grammar = None if self.grammar is None else checked_grammar(self.grammar)
        if grammar is not None and not grammar.has_free_text and self.stop:
            raise SamplingError(
                f"stop is {show_value([*self.stop])} beside a grammar; the answer ends where the grammar does: give one"
            )

    @shows_options(is_checked=False)
    def derived(self, **changes: Unpack[SamplingKeywords]) -> Self:
        """Return a copy with other values, which have been checked: nothing is checked again."""
        copy = object.__new__(type(self))
        for field in fields(self):
            object.__setattr__(copy, field.name, changes.get(field.name, getattr(self, field.name)))
        return copy

    @property
    def penalizes(self) -> bool:
        """Whether the next token depends on the counts of those so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def rows(self) -> list[Self]:
        """Return `n` requests for one answer each; their seeds, where one is given, are seed, seed + 1, ..."""
        if self.n == 1:
            return [self]
        seeds = [None if self.seed is None else (self.seed + i) % (_MAX_SEED + 1) for i in range(self.n)]
        return [self.derived(n=1, seed=seed) for seed in seeds]

    @classmethod
    def from_options(
        cls, options: Mapping[str, Any], /, generation_config: Mapping[str, Any], vocab_size: int | None = None
    ) -> "SamplingParams":
        """Put a caller's options over the publisher's recommendations, with a fresh seed unless one is given.

        Args:
            options: Of `SamplingKeywords`.
            generation_config: The content of `generation_config.json`; empty if there is none.
            vocab_size: Where it is known, the caller's stop ids have to be below it; a publisher's need not.

        Raises:
            SamplingError: For an unknown option, naming the one that may be meant, or a value outside its range.

        Warns:
            UserWarning: As `from_generation_config` does.
        """
        overrides = dict(options)
        if "max_new_tokens" in overrides:
            if "max_tokens" in overrides:
                raise SamplingError("max_new_tokens and max_tokens are the same parameter; give one")
            overrides["max_tokens"] = overrides.pop("max_new_tokens")
        if unknown := [name for name in overrides if name not in _NAMES]:
            raise SamplingError(unknown_names(unknown, [*_NAMES]))
        if not overrides.keys().isdisjoint(GRAMMAR_OPTIONS):
            overrides = {name: value for name, value in overrides.items() if name not in GRAMMAR_OPTIONS}
            overrides["grammar"] = Grammar.from_options(options)
        if isinstance(overrides.get("stop"), str):
            overrides["stop"] = (overrides["stop"],)
        params = cls.from_generation_config(generation_config, **overrides)
        too_large = [
            token_id
            for token_id in options.get("stop_token_ids") or ()
            if vocab_size is not None and token_id >= vocab_size
        ]
        if too_large:
            raise SamplingError(
                f"stop_token_ids names token {too_large[0]}; expected ids below the vocabulary's {vocab_size}"
            )
        if params.seed is None:
            object.__setattr__(params, "seed", secrets.randbits(32))  # frozen, but not yet shared
        return params

    @classmethod
    @shows_options(is_checked=False)
    def from_generation_config(
        cls,
        raw: Mapping[str, Any],
        /,
        *,
        source: str = GENERATION_CONFIG,
        **overrides: Unpack[SamplingKeywords],
    ) -> "SamplingParams":
        """Take the publisher's recommended defaults, below the caller's own values.

        `do_sample: false` means temperature 0. Where `do_sample` is missing, the other fields count, as in vLLM.
        The file's `eos_token_id` and `stop_strings` are added to the caller's stops (beside a grammar, the ids alone).
        Other fields have this class's defaults: top_k is off, unlike in transformers' `generate` (50).

        Args:
            raw: The content of `generation_config.json`; empty if there is none.
            source: Its name, for messages.
            overrides: Fields of this class; those that are None count as not given.

        Raises:
            SamplingError: If the file or an override is out of range.

        Warns:
            UserWarning: Naming fields that would change the answer and are not supported, and overrides without effect.
        """
        own_values: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
        recommended: dict[str, Any] = {}
        if raw:
            _warn_of_unsupported(raw, source)
            try:
                recommended = _recommended(raw)
            except SamplingError as error:
                raise SamplingError(f"{source}: {error}") from None
        idle = [name for name in _IDLE_WHEN_GREEDY if name in own_values]
        if idle and recommended.get("temperature") == 0 and "temperature" not in own_values:
            warn_caller(f"{', '.join(idle)}: no effect, {source} says greedy; give a temperature")
        if own_values.get("grammar") is not None:  # what ends a free text
            recommended.pop("stop", None)
        for name, checked in _CHECKED_LISTS.items():
            if name in own_values or name in recommended:
                joined = (*recommended.get(name, ()), *checked(own_values.get(name, ())))
                own_values[name] = tuple(dict.fromkeys(joined))
        return cls(**{**recommended, **own_values})


PARAMETERS = {name: option for name, option in declared(SamplingParams).items() if option.kind in (int, float)}
"""The parameters that are numbers, by name."""

_METADATA = {field.name: field.metadata for field in fields(SamplingParams)}
_IDLE_WHEN_GREEDY = sorted(name for name, metadata in _METADATA.items() if metadata["is_idle_when_greedy"])
_NAMES = dict.fromkeys((*_METADATA, "max_new_tokens", *GRAMMAR_OPTIONS))


@functools.cache
def parameters_of(taker: Taker) -> tuple[Option, ...]:
    """Return the parameters that an interface accepts."""
    return tuple(option for name, option in PARAMETERS.items() if taker in _METADATA[name]["takers"])


def _checked_bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise SamplingError(f"logit_bias is {show_value(value)}; expected a mapping of token ids to -100 to 100")
    for token_id, bias in value.items():
        check_integer("logit_bias: a token id", token_id, 0, INF, "at least 0")
        check_number(f"logit_bias[{token_id}]", bias, -100.0, 100.0, "-100 to 100")
    return dict(value)


def _checked_stop(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise SamplingError(f"stop is {show_value(value)}; expected a sequence of strings")
    for text in value:
        if not isinstance(text, str) or not text:
            raise SamplingError(f"stop holds {show_value(text)}; expected strings that are not empty")
    return tuple(value)


def _checked_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise SamplingError(f"stop_token_ids is {show_value(value)}; expected a sequence of token ids")
    for token_id in value:
        check_integer("stop_token_ids: an id", token_id, 0, INF, "at least 0")
    return tuple(value)


_CHECKED_LISTS = {"stop": _checked_stop, "stop_token_ids": _checked_ids}


# --- generation_config.json -------------------------------------------------------------------------------------------

_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "typical_p", "guidance_scale"), (1,)),
    **dict.fromkeys(("encoder_repetition_penalty",), (1,)),
    **dict.fromkeys(("min_length", "min_new_tokens", "penalty_alpha", "epsilon_cutoff", "eta_cutoff"), (0,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "diversity_penalty"), (0,)),
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "constraints", "suppress_tokens"), ([],)),
    **dict.fromkeys(("begin_suppress_tokens",), ([],)),
    **dict.fromkeys(("max_time", "top_h", "forced_bos_token_id", "forced_eos_token_id", "dola_layers"), ()),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config"), ()),
    "sequence_bias": ([], {}),
    "token_healing": (False,),
}
"""Fields that change which tokens come out, with the values at which they do nothing."""


def _recommended(raw: Mapping[str, Any]) -> dict[str, Any]:
    values = {option.name: raw[option.name] for option in parameters_of("file") if raw.get(option.name) is not None}
    if raw.get("do_sample") is not None and not isinstance(raw["do_sample"], bool):
        raise SamplingError(f"do_sample is {show_value(raw['do_sample'])}; expected true or false")
    if raw.get("do_sample") is False:
        values["temperature"] = 0.0
    if raw.get("max_new_tokens") is not None:
        values["max_tokens"] = raw["max_new_tokens"]
    for name, value in values.items():
        PARAMETERS[name].check(value, SamplingError)
    for name, ours in (("eos_token_id", "stop_token_ids"), ("stop_strings", "stop")):
        value = raw.get(name)
        if value is not None:
            values[ours] = _CHECKED_LISTS[ours](value if isinstance(value, list) else [value])
    return values


def _warn_of_unsupported(raw: Mapping[str, Any], source: str) -> None:
    active = [
        f"{name} {escape(raw[name], 40)}"
        for name, neutral in _UNSUPPORTED.items()
        if raw.get(name) is not None and raw[name] not in neutral
    ]
    if active:
        warn_caller(f"{source}: not supported and not used: {', '.join(active)}")
