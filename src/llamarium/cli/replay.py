r"""Compute recorded answers again, and compare them token by token.

The server writes the file with `llamarium serve --record FILE`. On the same
set of kernels all answers are equal, whatever the number of threads; on
another set rounding differs, and the first different token is shown. The exit
code is 1 if an answer differs or a line cannot be read.

  llamarium replay answers.jsonl -m model.gguf
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from llamarium.cli.disk_cache import size
from llamarium.cli.flags import add_flags
from llamarium.cli.options import add_json, add_kv_cache, add_model, check_adapters, load_llama
from llamarium.cli.output import emit, note, show
from llamarium.errors import InputError, LlamariumError, counted, escape
from llamarium.kv_codes import CacheDtype
from llamarium.options.serving import EngineOptions

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.generation.record import RecordedAnswer, RecordedPrompt, RecordedStart
    from llamarium.generation.text_engine import TextEngine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("file", metavar="FILE", type=Path, help="record of `llamarium serve --record`")
    add_json(parser)
    add_flags(parser, EngineOptions, "kv_memory", parsers={"kv_memory": size})
    add_kv_cache(parser, default="the record's")
    add_model(parser, names_adapters=True)


def run(args: argparse.Namespace) -> int:
    """Compute the answers again, and say of each whether it is equal."""
    check_adapters(args)
    start = _first(args.file)
    llama = load_llama(args, falls_back=False)
    _check_model(start, llama, escape(args.file))
    recorded = "auto" if start is None else start.kv_cache_dtype
    dtype = args.kv_cache_dtype or (cast("CacheDtype", recorded) if recorded in get_args(CacheDtype) else "auto")
    engine = llama.engine(adapters=args.adapters, kv_memory=args.kv_memory, kv_cache_dtype=dtype)
    counts = {"equal": 0, "different": 0, "unreadable": 0}
    with engine:
        for result in _replay(args, llama, engine):
            counts[result["result"]] += 1
            _report(args, result)
    note(", ".join(f"{number} {kind}" for kind, number in counts.items() if number or kind == "equal"))
    return 1 if counts["different"] or counts["unreadable"] else 0


def _first(file: Path) -> "RecordedStart | None":
    """Return what a record's server ran with; refuse what is no record, before the model is loaded."""
    from llamarium.generation.record import RecordedStart, read_record

    try:
        with file.open("rb") as stream:
            first = next(read_record(stream, escape(file)), None)
    except OSError as error:
        raise InputError(f"{escape(file)}: cannot be read: {error.strerror}; expected a record") from None
    if first is None:
        raise InputError(f"{escape(file)}: is empty; expected a record of `llamarium serve --record`")
    return first if isinstance(first, RecordedStart) else None


def _check_model(start: "RecordedStart | None", llama: "Llama", file: str) -> None:
    """Refuse a model of another shape, whose tokens mean other things."""
    from llamarium.generation.record import shape_of

    if start is not None and start.shape != (shape := shape_of(llama.config)):
        raise InputError(
            f"{file}: recorded with a model of the shape {escape(start.shape)}; this one has {shape}; give the other "
            "one with -m"
        )


def _replay(args: argparse.Namespace, llama: "Llama", engine: "TextEngine") -> Iterator[dict[str, Any]]:
    """Yield the result of each answer, and of each line that cannot be read."""
    from llamarium.generation.record import RecordedStart, read_record

    with args.file.open("rb") as stream:
        for entry in read_record(stream, escape(args.file)):
            if isinstance(entry, InputError):
                yield {"result": "unreadable", "reason": str(entry)}
            elif isinstance(entry, RecordedStart):
                _note_differences(entry, llama, engine)
            else:
                for row, answer in enumerate(entry.answers):
                    yield {"request": entry.name, "row": row, "line": entry.line, **_compared(engine, entry, answer)}


def _note_differences(start: "RecordedStart", llama: "Llama", engine: "TextEngine") -> None:
    """Say what differs from the server that recorded, and so may change tokens."""
    from llamarium.generation.record import shape_of

    for subject, recorded, current in (
        ("model of the shape", start.shape, shape_of(llama.config)),
        ("runner", start.runner, engine.runner.name),
        ("KV cache dtype", start.kv_cache_dtype, engine.kv_cache_dtype),
    ):
        if recorded != current:
            note(f"recorded with the {subject} {escape(recorded)}, replayed with {current}: tokens may differ")


def _compared(engine: "TextEngine", prompt: "RecordedPrompt", answer: "RecordedAnswer") -> dict[str, Any]:
    """Compute an answer again, and return where it differs."""
    try:
        answers = engine.begin(
            prompt.prompt_ids, answer.params, new_text=True, stop_ids=answer.stop_ids, adapter=prompt.adapter
        )
        replayed = answers.result().completions[0].token_ids
    except LlamariumError as error:
        return {"result": "unreadable", "reason": f"line {prompt.line}: cannot be replayed: {error}"}
    recorded = answer.token_ids
    if replayed[: len(recorded)] == recorded:
        return {"result": "equal", "num_tokens": len(recorded)}
    pairs = zip(recorded, replayed, strict=False)
    place = next((i for i, (old, new) in enumerate(pairs) if old != new), min(len(replayed), len(recorded)))
    ends = [ids[place] if place < len(ids) else None for ids in (recorded, replayed)]
    return {"result": "different", "num_tokens": len(recorded), "token": place, "recorded": ends[0], "now": ends[1]}


def _report(args: argparse.Namespace, result: dict[str, Any]) -> None:
    if args.json:
        emit(result)
        return
    if result["result"] == "unreadable":
        show(escape(result["reason"], 400))
        return
    name = escape(result["request"], 80) + (f" row {result['row']}" if result["row"] else "")
    if result["result"] == "equal":
        show(f"{name}: equal, {counted(result['num_tokens'], 'token')}")
        return
    recorded, replayed = (
        "the end" if token_id is None else str(token_id) for token_id in (result["recorded"], result["now"])
    )
    show(f"{name}: token {result['token']} of {result['num_tokens']} differs: {recorded} was recorded, now {replayed}")
