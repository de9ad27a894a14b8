"""What a request may ask of sampling: the parameters, their ranges, and the defaults a model's publisher recommends.

Torch-free, so that a server can check a request without loading a model. What each parameter does, and in which order,
is told in `llamarium.sampling.sampler`.
"""

import difflib
import math
import secrets
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypedDict

from llamarium.errors import SamplingError, escape, show_value
from llamarium.sampling.grammar.description import OPTIONS as GRAMMAR_OPTIONS
from llamarium.sampling.grammar.description import Grammar, checked_grammar

_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-5, 1e5  # beyond, float32 cannot tell the result from greedy or uniform
_MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What one request asks of the sampler and of the loop around it.

    Attributes:
        temperature: 0 is greedy; else 1e-5 to 1e5.
        top_k: How many of the most probable tokens stay; 0 is all.
        top_p: The mass of the most probable tokens that stay, above 0 to 1; 1 is all.
        min_p: The least probability that stays, relative to the largest, 0 to 1; 0 is all.
        repetition_penalty: 0.01 to 100; 1 is none. Counts prompt and answer.
        presence_penalty: -2 to 2. Once for each token that the answer holds.
        frequency_penalty: -2 to 2. For each time that the answer holds the token.
        logit_bias: Token id to a bias of -100 to 100.
        seed: 0 to 2**63 - 1, or None for a fresh one (`SamplingRow.seed` says which).
        max_tokens: The most tokens of the answer, at least 1; with `prompt_logprobs` 0 runs the prompt alone.
        stop: Strings that end the answer and are not part of it.
        stop_token_ids: Token ids that end the answer.
        n: How many answers, 1 to 1024; above 1 only with a temperature above 0, since greedy ones are equal.
        logprobs: How many of the most probable tokens to report at each step; 0 is the chosen one only, None nothing.
        prompt_logprobs: The same for each token of the prompt but the first, which nothing comes before.
        grammar: What the answer's text may be, None for any. Without stop strings, which could end it too soon.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float], hash=False)
    seed: int | None = None
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            SamplingError: Naming the parameter, its value and its range.
        """
        for name, low, high, note in _NUMBER_RANGES:
            _check_number(name, getattr(self, name), low, high, note)
        for name, low, high, optional in _INTEGER_RANGES:
            value = getattr(self, name)
            least = 0 if name == "max_tokens" and self.prompt_logprobs is not None else low
            if not (optional and value is None):
                _check_integer(name, value, least, high)
        if 0 < self.temperature < _MIN_TEMPERATURE:
            raise SamplingError(f"temperature is {self.temperature}; expected 0 (greedy) or at least 1e-5")
        if self.top_p == 0:
            raise SamplingError("top_p is 0; expected above 0 (for the most probable token alone: temperature 0)")
        if self.n > 1 and self.temperature == 0:
            raise SamplingError(
                f"n is {self.n} at temperature 0; greedy answers are all equal: expected n 1 or a temperature above 0"
            )
        # Own copies: the caller's list or dict may change, a request may not.
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_ids(self.stop_token_ids))
        if checked_grammar(self.grammar) is not None and self.stop:
            raise SamplingError(
                f"stop is {show_value([*self.stop])} beside a grammar; the answer ends where the grammar does: give one"
            )

    @property
    def penalizes(self) -> bool:
        """Whether the tokens so far matter for the next one."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def rows(self) -> list[Self]:
        """Return `n` requests for one answer each; their seeds, where one is given, are seed, seed + 1, ..."""
        if self.n == 1:
            return [self]
        seeds = [None if self.seed is None else (self.seed + i) % (_MAX_SEED + 1) for i in range(self.n)]
        return [replace(self, n=1, seed=seed) for seed in seeds]

    @classmethod
    def from_options(cls, options: Mapping[str, Any], /, generation_config: Mapping[str, Any]) -> "SamplingParams":
        """Put a caller's options over what a model's publisher recommends, with a fresh seed where none is given.

        Args:
            options: Of `GenerationOptions`.
            generation_config: The content of `generation_config.json`; empty if there is none.

        Raises:
            SamplingError: For an unknown option, naming the one that may be meant, or a value outside its range.

        Warns:
            UserWarning: As `from_generation_config` does.
        """
        given = dict(options)
        if "max_new_tokens" in given:
            if "max_tokens" in given:
                raise SamplingError("max_new_tokens and max_tokens are the same parameter; give one")
            given["max_tokens"] = given.pop("max_new_tokens")
        _check_names(given)
        given = {name: value for name, value in given.items() if name not in GRAMMAR_OPTIONS}
        given["grammar"] = Grammar.from_options(options)
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        params = cls.from_generation_config(generation_config, **given)
        return params if params.seed is not None else replace(params, seed=secrets.randbits(32))

    @classmethod
    def from_generation_config(
        cls, raw: Mapping[str, Any], /, *, source: str = "generation_config.json", **overrides: Any
    ) -> "SamplingParams":
        """Take the defaults that a model's publisher recommends, below the caller's own.

        `do_sample: false` means temperature 0. Where `do_sample` is missing, the other fields count, as in vLLM.
        The file's `eos_token_id` and `stop_strings` are added to the caller's stops (beside a grammar, the ids alone).
        What the file does not say has this class's default: in particular top_k is off, where transformers' `generate`
        takes 50.

        Args:
            raw: The content of `generation_config.json`; empty if there is none.
            source: Its name, for messages.
            overrides: Fields of this class; those that are None count as not given.

        Raises:
            SamplingError: If the file or an override is out of range.

        Warns:
            UserWarning: Naming fields that would change the answer and are not supported, and overrides without effect.
        """
        given = {name: value for name, value in overrides.items() if value is not None}
        _warn_of_unsupported(raw, source)
        try:
            defaults = cls(**_recommended(raw))
        except SamplingError as error:
            raise SamplingError(f"{source}: {error}") from None
        idle = sorted(given.keys() & {"top_k", "top_p", "min_p", "seed"})
        if idle and defaults.temperature == 0 and "temperature" not in given:
            warnings.warn(f"{', '.join(idle)}: no effect, {source} says greedy; give a temperature", stacklevel=2)
        stop = (*defaults.stop, *_checked_stop(given.pop("stop", ())))
        if given.get("grammar") is not None:
            stop = stop[len(defaults.stop) :]  # where a free text ends
        stop_ids = (*defaults.stop_token_ids, *_checked_ids(given.pop("stop_token_ids", ())))
        return replace(
            defaults, **given, stop=tuple(dict.fromkeys(stop)), stop_token_ids=tuple(dict.fromkeys(stop_ids))
        )


class GenerationOptions(TypedDict, total=False):
    """The options of an answer that are `SamplingParams` fields, as keyword arguments; None counts as not given.

    `max_new_tokens` is another name of `max_tokens`, and `stop` may be one string. `json_schema` (an object, or its
    JSON text), `json_object` (True), `regex` and `choice` are short for a `grammar`; one of the five at most.
    """

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    max_tokens: int | None
    max_new_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    n: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    grammar: Grammar | None
    json_schema: Mapping[str, Any] | str | None
    json_object: bool | None
    regex: str | None
    choice: Sequence[str] | None


_INF = math.inf
_NUMBER_RANGES = (
    ("temperature", 0.0, _MAX_TEMPERATURE, "0 (greedy) or 1e-5 to 1e5"),
    ("top_p", 0.0, 1.0, "above 0 to 1"),
    ("min_p", 0.0, 1.0, "0 to 1"),
    ("repetition_penalty", 0.01, 100.0, "0.01 to 100"),
    ("presence_penalty", -2.0, 2.0, "-2 to 2"),
    ("frequency_penalty", -2.0, 2.0, "-2 to 2"),
)
_INTEGER_RANGES = (
    ("top_k", 0, _INF, False),
    ("seed", 0, _MAX_SEED, True),
    ("max_tokens", 1, _INF, False),
    ("n", 1, 1024, False),  # each is a row of the batch
    ("logprobs", 0, _INF, True),
    ("prompt_logprobs", 0, _INF, True),
)


def _check_number(name: str, value: object, low: float, high: float, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:  # false for NaN
        raise SamplingError(f"{name} is {show_value(value)}; expected a number, {expected}")


def _check_integer(name: str, value: object, low: int, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        expected = f"at least {low}" if high == _INF else f"{low} to {high}"
        raise SamplingError(f"{name} is {show_value(value)}; expected a whole number, {expected}")


def _check_names(given: Mapping[str, object]) -> None:
    known = [field.name for field in fields(SamplingParams)]
    unknown = sorted(str(name) for name in given.keys() - {*known, *GRAMMAR_OPTIONS})
    if not unknown:
        return
    names = [*known, "max_new_tokens", *GRAMMAR_OPTIONS]
    meant = [near[0] for name in unknown if (near := difflib.get_close_matches(name, names, n=1))]
    hint = f"did you mean {', '.join(dict.fromkeys(meant))}? There are" if meant else "there are"
    shown = ", ".join(escape(name, 40) for name in unknown)
    raise SamplingError(f"unknown sampling parameters: {shown}; {hint}: {', '.join(known)}")


def _checked_bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise SamplingError(f"logit_bias is {show_value(value)}; expected a mapping of token ids to -100 to 100")
    for token_id, bias in value.items():
        _check_integer("logit_bias: a token id", token_id, 0, _INF)
        _check_number(f"logit_bias[{token_id}]", bias, -100.0, 100.0, "-100 to 100")
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
        _check_integer("stop_token_ids: an id", token_id, 0, _INF)
    return tuple(value)


# --- generation_config.json -------------------------------------------------------------------------------------------

# Fields that change which tokens come out, with the values at which they do nothing.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "max_time": (),
    "penalty_alpha": (0,),
    "top_h": (),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "diversity_penalty": (0,),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ([], {}),
    "token_healing": (False,),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "dola_layers": (),
}
_SAME_NAME = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def _recommended(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a generation config's fields into `SamplingParams` fields."""
    fields = {name: raw[name] for name in _SAME_NAME if raw.get(name) is not None}
    if raw.get("do_sample") is not None and not isinstance(raw["do_sample"], bool):
        raise SamplingError(f"do_sample is {show_value(raw['do_sample'])}; expected true or false")
    if raw.get("do_sample") is False:
        fields["temperature"] = 0.0
    if raw.get("max_new_tokens") is not None:
        fields["max_tokens"] = raw["max_new_tokens"]
    for name, ours in (("eos_token_id", "stop_token_ids"), ("stop_strings", "stop")):
        value = raw.get(name)
        if value is not None:
            fields[ours] = value if isinstance(value, list) else [value]
    return fields


def _warn_of_unsupported(raw: Mapping[str, Any], source: str) -> None:
    active = [
        f"{name} {escape(raw[name], 40)}"
        for name, neutral in _UNSUPPORTED.items()
        if raw.get(name) is not None and raw[name] not in neutral
    ]
    if active:
        warnings.warn(f"{source}: not supported and not used: {', '.join(active)}", stacklevel=3)
