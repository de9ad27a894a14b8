"""Recorded answers, as lines of JSON from which `llamarium replay` recomputes every token. Torch-free.

A file has a line with the model and its runner for each start of the server, and a line for each prompt: its ids and,
for each answer, the sampling parameters with the seed, the stop ids and the tokens. It contains no text.
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
"""Maximum size of a line, in bytes."""

_HEADER = "llamarium_record"
_MAX_VALUES = 2**22


@dataclass(frozen=True, slots=True)
class RecordedStart:
    """A start of the recording server.

    Attributes:
        shape: The model's main sizes; see `shape_of`.
        runner: Display name of the runner, such as "C (avx2)".
        kv_cache_dtype: KV cache dtype.
    """

    shape: str
    runner: str
    kv_cache_dtype: str


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """A recorded answer; `params` include its seed."""

    params: SamplingParams
    stop_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """A recorded prompt and its answers; `name` is the id of the HTTP request, `line` its line number in the file."""

    name: str
    line: int
    prompt_ids: tuple[int, ...]
    adapter: str | None
    answers: tuple[RecordedAnswer, ...]


def shape_of(config: ModelConfig) -> str:
    """Return a model's main sizes: layers, hidden size, intermediate size and vocabulary, joined by "x"."""
    sizes = config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.vocab_size
    return "x".join(map(str, sizes))


def start_line(start: RecordedStart) -> bytes:
    """Return the line of a server start."""
    return _line({_HEADER: FORMAT, **asdict(start)})


def prompt_line(name: str, answers: Answers) -> bytes | None:
    """Return the line of a prompt, or None if it has no finished answer, or one that cannot be recomputed.

    Requests with activation edits or a logits processor cannot be recomputed.
    """
    rows = [row for row in answers.rows if row.finish_reason not in (None, "error") and row.token_ids]
    if answers.is_edited or not rows or rows[0].params.logits_processor is not None:
        return None
    recorded = [
        {"params": _params(row.params), "stop_ids": sorted(row.stop_ids), "token_ids": row.token_ids} for row in rows
    ]
    return _line({"id": name, "adapter": answers.adapter, "prompt_ids": answers.prompt_ids, "answers": recorded})


def _params(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that differ from the defaults and affect which tokens are sampled."""
    unused = ("logprobs", "prompt_logprobs", "stop", "max_tokens")
    usual = SamplingParams()
    values = {
        param_field.name: getattr(params, param_field.name)
        for param_field in fields(params)
        if param_field.name not in unused
    }
    changed = {name: value for name, value in values.items() if value != getattr(usual, name)}
    if params.grammar is not None:
        grammar = params.grammar
        changed["grammar"] = {"kind": grammar.kind, "text": grammar.text, "openings": grammar.openings}
    if params.logit_bias:
        changed["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    return changed


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def read_record(file: BinaryIO, name: str) -> Iterator[RecordedStart | RecordedPrompt | InputError]:
    """Yield the entries of a file, line by line, with an InputError in place of each invalid line.

    Raises:
        InputError: If the file is not a record.
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
            reason = f"has no {escape(error)}" if isinstance(error, KeyError) else escape(error)
            yield InputError(f"{where}: cannot be replayed: {reason}; it may have been cut off")


def _entry(value: Any, line: int) -> RecordedStart | RecordedPrompt:
    if not isinstance(value, dict):
        raise TypeError("it is not an object")
    fields_by_name = cast("dict[str, Any]", value)
    if _HEADER in fields_by_name:
        if fields_by_name[_HEADER] != FORMAT:
            raise ValueError(f"its format is {escape(fields_by_name[_HEADER])}, but this version reads {FORMAT}")
        return RecordedStart(
            **{start_field.name: _text(fields_by_name[start_field.name]) for start_field in fields(RecordedStart)}
        )
    adapter = None if fields_by_name["adapter"] is None else _text(fields_by_name["adapter"])
    answers = tuple(map(_answer, _list(fields_by_name["answers"])))
    return RecordedPrompt(_text(fields_by_name["id"]), line, _ids(fields_by_name["prompt_ids"]), adapter, answers)


def _answer(value: Any) -> RecordedAnswer:
    params_by_name: dict[str, Any] = dict(value["params"])
    token_ids = _ids(value["token_ids"])
    if not token_ids:
        raise ValueError("an answer has no tokens")
    if "grammar" in params_by_name:
        params_by_name["grammar"] = _grammar(params_by_name["grammar"])
    if "logit_bias" in params_by_name:
        params_by_name["logit_bias"] = {
            int(token_id): bias for token_id, bias in dict(params_by_name["logit_bias"]).items()
        }
    params_by_name["stop_token_ids"] = _ids(params_by_name.get("stop_token_ids", ()))
    params_by_name["max_tokens"] = max(len(token_ids), int(params_by_name.get("min_tokens", 0)))
    params = SamplingParams(**params_by_name)
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
    if not all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in ids):
        raise TypeError("expected token ids")
    return ids
