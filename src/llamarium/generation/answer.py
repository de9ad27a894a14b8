"""Answers as text, complete or streamed. Torch-free."""

from collections.abc import Iterator, Sequence
from typing import Any

from llamarium.engine.request import TokenEvent
from llamarium.errors import SamplingError
from llamarium.generation.completion import Generation, Piece, RowText, row_texts
from llamarium.generation.loop import DialogEngine, generate_tokens
from llamarium.generation.options import PassOptions, proposer_of
from llamarium.generation.text_model import TextModel, begins_text, compiled
from llamarium.sampling.params import SamplingParams
from llamarium.tokenizer.tools.request import ToolRequest


def complete(
    model: TextModel,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    pass_options: PassOptions,
    *,
    new_text: bool = False,
    tools: ToolRequest | None = None,
) -> list[Generation]:
    """Answer prompts, given as ids, in one batch with the same parameters; errors as `generate_tokens`.

    With `new_text`, answers start a new text, as in a dialog, instead of continuing the prompt's. If no token can be
    sampled, the row's completion has the error.
    """
    tokenizer = model.tokenizer
    begins = [new_text or begins_text(tokenizer, prompt) for prompt in prompts]
    rows, prompt_of = row_texts(tokenizer, [params] * len(prompts), model.stop_ids, begins, tools)
    cancelled: set[int] = set()
    for event in _events(model, prompts, params, pass_options, cancelled=cancelled):
        if rows[event.row].push(event).finish_reason is not None:
            cancelled.add(event.row)
    answers: list[list[RowText]] = [[] for _ in prompts]
    for row, prompt_idx in zip(rows, prompt_of, strict=True):
        answers[prompt_idx].append(row)
    return [
        Generation(tuple(ids), tuple(row.completion() for row in prompt_rows), prompt_rows[0].prompt_logprobs)
        for ids, prompt_rows in zip(prompts, answers, strict=True)
    ]


def stream(
    model: TextModel,
    prompt: list[int],
    params: SamplingParams,
    pass_options: PassOptions,
    *,
    new_text: bool = False,
    tools: ToolRequest | None = None,
    prefix: DialogEngine | None = None,
) -> Iterator[Piece]:
    """Answer one prompt piece by piece, as `complete`; `prefix` is the engine of a dialog.

    Raises:
        SamplingError: If `n` is not 1.
        LlamariumError: As `generate_tokens`.
        AnswerError: If no token can be sampled.
    """
    if params.n != 1:
        raise SamplingError(f"n is {params.n}; streaming gives one answer, use generate() for several")
    begins = new_text or begins_text(model.tokenizer, prompt)
    (row,), _ = row_texts(model.tokenizer, [params], model.stop_ids, [begins], tools)
    return row.pieces(_events(model, [prompt], params, pass_options, prefix=prefix))


def _events(
    model: TextModel, prompts: Sequence[list[int]], params: SamplingParams, pass_options: PassOptions, **options: Any
) -> Iterator[TokenEvent]:
    return generate_tokens(
        model.runner, prompts, [params] * len(prompts), stop_ids=model.stop_ids, use_cache=pass_options.use_cache,
        kv_cache_dtype=pass_options.kv_cache_dtype, proposer=proposer_of(model, pass_options.proposer),
        grammar=compiled(model, params), **options,
    )  # fmt: skip
