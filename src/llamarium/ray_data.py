"""Answer a corpus on many machines with Ray Data (`pip install 'llamarium[ray]'`).

    rows = ray.data.read_json("questions.jsonl", lines=True)  # a column `messages`, or `prompt`
    answered = rows.map_batches(
        AnswerRows,
        fn_constructor_kwargs={"model": "smollm2-135m", "max_tokens": 200},
        batch_format="pyarrow",
        batch_size=1000,
        num_cpus=16,  # all that a machine has, and so one actor on each
        compute=ray.data.ActorPoolStrategy(size=4),  # machines
    )

Columns have the names of `ray.data.llm`. `AnswerLines` takes the lines of `llamarium batch` instead.
"""

import asyncio
import io
import sys
from collections.abc import Mapping
from typing import Any, TypedDict, Unpack, cast

import llamarium
from llamarium.adapters.model_names import public_name
from llamarium.engine.engine import MAX_NUM_SEQS
from llamarium.engine.request import check_timeout
from llamarium.errors import EngineStoppedError, InputError, LlamariumError, show_value, warn_caller
from llamarium.generation.answers import Answers
from llamarium.generation.dialog import DialogOptions
from llamarium.generation.keywords import StreamKeywords
from llamarium.generation.options import EngineArguments, RequestOptions, split_options
from llamarium.generation.text_engine import TextEngine
from llamarium.generation.text_model import compiled
from llamarium.options.declare import declared
from llamarium.options.keywords import LoadKeywords
from llamarium.server.batch.answer import BatchProgress, BatchRun
from llamarium.server.batch.lines import read_lines
from llamarium.server.lifecycle.loading import ModelLoader
from llamarium.server.lifecycle.service import ServedModel, Service
from llamarium.server.settings import Settings
from llamarium.strict_json import without_nulls

Table = Any
"""A `pyarrow.Table`; the package is without types."""


class Answered(TypedDict):
    """The columns added to rows: an answer, its end ("stop" or "length") and the counts of tokens; or an error."""

    generated_text: str | None
    finish_reason: str | None
    num_input_tokens: int | None
    num_generated_tokens: int | None
    error: str | None


class AnswerRows:
    """Answers the rows of batches: an actor of Ray Data, with a model and an engine of its own.

    A row has `messages`, a dialog, or `prompt`, a text or ids to continue; `sampling_params`, if present, has its own
    options. Null fields count as missing. All rows of a batch run at once. A row that cannot be answered gets `error`.

    Args:
        model: As for `llamarium.load`.
        loading: Its other arguments.
        engine: The options of `Llama.engine`.
        **options: Those of `TextEngine.stream`, the defaults of rows.

    Raises:
        LlamariumError: If the model cannot be loaded so, or an option is unknown or has an invalid value.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        loading: LoadKeywords | None = None,
        engine: EngineArguments | None = None,
        **options: Unpack[StreamKeywords],
    ) -> None:
        _check(options)  # before the model is loaded
        self._options = options
        llama = llamarium.load(model, **(loading or {}))
        copied = options.copy()
        check_timeout(split_options(copied, RequestOptions).get("timeout_s"))
        compiled(llama, llama.sampling_params(**copied))
        self._engine = llama.engine(**(engine or EngineArguments()))

    def __call__(self, batch: Table) -> Table:
        """Return the batch with the columns of `Answered`.

        InputError if it is no table of pyarrow's, EngineStoppedError if the engine breaks; Ray starts another actor.
        """
        import pyarrow

        _check_table(batch)
        started = [self._begin(row) for row in batch.to_pylist()]
        counts: dict[str, Any] = dict.fromkeys(("num_input_tokens", "num_generated_tokens"), pyarrow.int64())
        schema = pyarrow.schema([(name, counts.get(name, pyarrow.string())) for name in Answered.__annotations__])
        results = pyarrow.Table.from_pylist([_finish(started_row) for started_row in started], schema)
        columns = {name: batch[name] for name in batch.column_names}
        return pyarrow.table(columns | {name: results[name] for name in results.column_names})

    def close(self) -> None:
        """Stop the engine; Ray ends an actor with its process."""
        self._engine.close(timeout_s=0)

    def _begin(self, row: dict[str, Any]) -> "Answers | LlamariumError":
        # a table has every field that one of its rows has
        messages, prompt = without_nulls(row.get("messages")), row.get("prompt")
        row_options = without_nulls(row.get("sampling_params")) or {}
        try:
            if not isinstance(row_options, dict):
                raise InputError(f"sampling_params is {show_value(row_options)}; expected options by their names")
            options = cast(StreamKeywords, {**self._options, **cast(dict[str, Any], row_options)})
            _check(options)
            if messages is not None and prompt is None:
                return self._engine.stream_chat(messages, **options)
            if prompt is not None and messages is None:
                return self._engine.stream(prompt, **options)
            raise InputError("expected messages or prompt, one of them")
        except EngineStoppedError:
            raise
        except LlamariumError as error:
            return error


class AnswerLines:
    """Answers lines in OpenAI's batch format, like `llamarium batch`, in an actor.

    A batch has a column `text`, as `ray.data.read_text` makes it, a request in each row. The result has a column
    `answer`: the lines of `llamarium batch`, in the order of completion. Line numbers in errors count within the batch.

    `served_model_name` is the model's name in requests and answers, None its own; other arguments as of `AnswerRows`.
    LlamariumError if the model cannot be loaded so.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        loading: LoadKeywords | None = None,
        engine: EngineArguments | None = None,
        served_model_name: str | None = None,
    ) -> None:
        llama = llamarium.load(model, **(loading or {}))
        arguments = engine or EngineArguments()
        self._engine = llama.engine(**arguments)
        loader = ModelLoader[tuple[ServedModel, TextEngine]](lambda _: (llama, self._engine))
        loader.wait()
        max_num_seqs = arguments.get("max_num_seqs", MAX_NUM_SEQS)
        self._service = Service(
            loader, Settings(max_num_seqs=max_num_seqs, max_queue=sys.maxsize, request_timeout_s=None)
        )
        self._names = (served_model_name or public_name(model, (loading or {}).get("adapter"), {}),)

    def __call__(self, batch: Table) -> Table:
        """Return the answers.

        InputError if it is no table of pyarrow's, or has no texts; EngineStoppedError if the engine breaks; Ray starts
        another actor.
        """
        import pyarrow

        _check_table(batch)
        texts: list[Any] = batch["text"].to_pylist() if "text" in batch.column_names else [None]
        if not all(isinstance(text, str) for text in texts):
            raise InputError(f"a batch has {batch.column_names}; expected a column text, with a line in each row")
        answers: list[bytes] = []
        lines = read_lines(io.BytesIO("\n".join(texts).encode()))
        batch_of_lines = BatchRun(self._service, self._names, answers.append, warn_caller, BatchProgress(len(texts)))
        asyncio.run(batch_of_lines.run(lines))
        return pyarrow.table(
            {"answer": pyarrow.array([answer.decode().rstrip() for answer in answers], pyarrow.string())}
        )

    def close(self) -> None:
        """Stop the engine; Ray ends an actor with its process."""
        self._engine.close(timeout_s=0)


def _check_table(batch: Table) -> None:
    import pyarrow

    if not isinstance(batch, pyarrow.Table):
        kind = type(batch).__name__
        raise InputError(f'a batch is {kind}; expected a pyarrow.Table: map_batches(..., batch_format="pyarrow")')


def _check(options: Mapping[str, object]) -> None:
    """Refuse options whose answers no column could hold; InputError."""
    if options.get("n") not in (None, 1):
        raise InputError(f"n is {show_value(options.get('n'))}; a row has one answer")
    if options.get("adapter") is not None:
        raise InputError("adapter: all rows have the model's; put it on with loading={'adapter': FOLDER}")
    for name in declared(DialogOptions):
        if name in options:
            raise InputError(f"{name}: a row is a text, without tools and documents; `llamarium batch` takes them")


def _finish(started: "Answers | LlamariumError") -> Answered:
    try:
        if isinstance(started, LlamariumError):
            raise started
        generation = started.result()
    except EngineStoppedError:
        raise
    except LlamariumError as error:
        return {**dict.fromkeys(Answered.__annotations__), "error": str(error)}  # pyright: ignore[reportReturnType]
    answer = generation.completions[0]
    return {
        "generated_text": answer.text,
        "finish_reason": answer.finish_reason,
        "num_input_tokens": len(generation.prompt_ids),
        "num_generated_tokens": len(answer.token_ids),
        "error": None,
    }
