"""Answers as lines of JSON, from which they can be computed again token by token (`llamarium replay`). Never torch.

A file is a line about the model and its runner at each start of the server, and a line for each prompt: its ids, and of
each answer the parameters with the seed, the ids that end it, and its tokens. Texts follow from the ids.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, BinaryIO, cast, get_args

from llamarium.config import ModelConfig
from llamarium.errors import InputError, LlamariumError, escape
from llamarium.generation.answers import Answers
from llamarium.sampling.grammar.description import MAX_BYTES, Grammar, Kind
from llamarium.sampling.params import SamplingParams
from llamarium.strict_json import NotJson, parse_json

FORMAT = 1
MAX_LINE = 2**26
"""Bytes of a line."""

_HEADER = "llamarium_record"
_MAX_VALUES = 2**22


@dataclass(frozen=True, slots=True)
class RecordedStart:
    """A start of the server that recorded.

    Attributes:
        shape: The model's config in short: type, layers, width, vocabulary.
        runner: What computed, such as "C (avx2)".
    """

    shape: str
    runner: str
    kv_cache_dtype: str


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """One answer; `params` have its seed."""

    params: SamplingParams
    stop_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """A prompt and its answers; `name` is the HTTP request's id, and `line` its line in the file."""

    name: str
    line: int
    prompt_ids: tuple[int, ...]
    adapter: str | None
    answers: tuple[RecordedAnswer, ...]


def shape_of(config: ModelConfig) -> str:
    """Return a model's config in short."""
    sizes = config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.vocab_size
    return "x".join(map(str, sizes))


def start_line(start: RecordedStart) -> bytes:
    """Return the line of a start."""
    return _line({_HEADER: FORMAT, **asdict(start)})


def prompt_line(name: str, answers: Answers) -> bytes | None:
    """Return the line of a prompt, or None if it has no answer that came to its end, or one that cannot be recomputed.

    A request that changes what the model computes, or has a logits processor, is not recorded.
    """
    rows = [row for row in answers.rows if row.finish_reason not in (None, "error") and row.token_ids]
    if answers.is_edited or not rows or rows[0].params.logits_processor is not None:
        return None
    recorded = [
        {"params": _params(row.params), "stop_ids": sorted(row.stop_ids), "token_ids": row.token_ids} for row in rows
    ]
    return _line({"id": name, "adapter": answers.adapter, "prompt_ids": answers.prompt_ids, "answers": recorded})


def _params(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that are not the defaults, without those that only report or end an answer by its text."""
    unused = ("logprobs", "prompt_logprobs", "stop", "max_tokens")
    usual = SamplingParams()
    values = {one.name: getattr(params, one.name) for one in fields(params) if one.name not in unused}
    found = {name: value for name, value in values.items() if value != getattr(usual, name)}
    if params.grammar is not None:
        grammar = params.grammar
        found["grammar"] = {"kind": grammar.kind, "text": grammar.text, "openings": grammar.openings}
    if params.logit_bias:
        found["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    return found


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def read_record(file: BinaryIO, name: str) -> Iterator[RecordedStart | RecordedPrompt | InputError]:
    """Yield what a file holds, line by line; an InputError stands for a line that cannot be read.

    InputError is raised for a file that is no record.
    """
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        where = f"{name}: line {number}"
        if number == 1 and not line.startswith(f'{{"{_HEADER}":'.encode()):
            raise InputError(f"{name}: is not a record of `llamarium serve --record`; expected a line with {_HEADER}")
        if len(line) > MAX_LINE:
            raise InputError(f"{where}: is longer than {MAX_LINE:,} bytes")
        if not line.strip():
            continue
        try:
            yield _entry(parse_json(line, max_values=_MAX_VALUES, max_levels=16, portable=True), number)
        except (NotJson, KeyError, TypeError, ValueError, LlamariumError) as error:
            what = f"has no {escape(error)}" if isinstance(error, KeyError) else escape(error)
            yield InputError(f"{where}: cannot be replayed: {what}; it may have been cut off")


def _entry(value: Any, line: int) -> RecordedStart | RecordedPrompt:
    if not isinstance(value, dict):
        raise TypeError("it is not an object")
    found = cast("dict[str, Any]", value)
    if _HEADER in found:
        if found[_HEADER] != FORMAT:
            raise ValueError(f"it is of format {escape(found[_HEADER])}, and this version reads {FORMAT}")
        return RecordedStart(**{one.name: _text(found[one.name]) for one in fields(RecordedStart)})
    adapter = None if found["adapter"] is None else _text(found["adapter"])
    answers = tuple(map(_answer, _list(found["answers"])))
    return RecordedPrompt(_text(found["id"]), line, _ids(found["prompt_ids"]), adapter, answers)


def _answer(value: Any) -> RecordedAnswer:
    given: dict[str, Any] = dict(value["params"])
    token_ids = _ids(value["token_ids"])
    if not token_ids:
        raise ValueError("an answer has no tokens")
    if "grammar" in given:
        given["grammar"] = _grammar(given["grammar"])
    if "logit_bias" in given:
        given["logit_bias"] = {int(token_id): bias for token_id, bias in dict(given["logit_bias"]).items()}
    given["stop_token_ids"] = _ids(given.get("stop_token_ids", ()))
    given["max_tokens"] = max(len(token_ids), int(given.get("min_tokens", 0)))
    params = SamplingParams(**given)
    return RecordedAnswer(params, _ids(value["stop_ids"]), token_ids)


def _grammar(value: Any) -> Grammar:
    kind, text, openings = value["kind"], _text(value["text"]), tuple(map(_text, _list(value["openings"])))
    if kind not in get_args(Kind) or len(text) > MAX_BYTES:
        raise ValueError("its grammar is of an unknown kind, or too large")
    return Grammar(kind, text, openings)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, found {escape(value, 40)}")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"expected a list, found {escape(value, 40)}")
    return list(cast("list[Any]", value))


def _ids(value: Any) -> tuple[int, ...]:
    ids = tuple(_list(value))
    if not all(type(one) is int and 0 <= one < 2**31 for one in ids):
        raise TypeError("expected token ids")
    return ids
