"""Interventions in a pass: edits, steering, activations of a second prompt; all on the modules."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from llamarium.engine.request import check_prompt, too_long
from llamarium.errors import AnswerError, LlamariumError, QuestionError, counted
from llamarium.extras import need_torch
from llamarium.inspect.interventions.effect import PatchCell
from llamarium.page.executor import Pass
from llamarium.page.open_pass import OpenPass
from llamarium.page.probes.text import token_view
from llamarium.page.schema import interventions as schema
from llamarium.page.schema.text import TokenView
from llamarium.page.selection import check_index
from llamarium.server.errors import of_library
from llamarium.server.lifecycle.service import Service
from llamarium.server.lifecycle.threads import check_wanted

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.inspect.interventions.edits import Edit
    from llamarium.inspect.interventions.patching import PatchGrid

MAX_CELLS = 4096
"""Of one grid: each is a pass from its layer on."""

MAX_PATCHED = 256
"""Tokens of the prompts of a grid."""


def edited(context: OpenPass, body: schema.EditedRequest) -> schema.EditedView:
    """Return the next token without the edits and with them, and how the text goes on."""
    forward_pass, position, llama = _plain(context.forward_pass), context.position(body.position), context.llama
    service: Service = context.state.service
    context.check_token("token_id", body.token_id)
    most = llama.config.max_position_embeddings
    if position + 1 + body.max_tokens > most:
        raise of_library(too_long(position + 1, body.max_tokens, most), field="max_tokens")
    edits = [_edit(llama, forward_pass, fields, f"edits[{place}]") for place, fields in enumerate(body.edits)]
    if body.steering is not None:
        edits.append(_steering(llama, forward_pass, body.steering, service.max_tokens))
    try:
        return _view(llama, forward_pass, edits, body, position)
    except AnswerError as error:
        raise QuestionError(str(error), code="not_finite", param="edits") from None


def _view(
    llama: "Llama", forward_pass: Pass, edits: "Sequence[Edit]", body: schema.EditedRequest, position: int
) -> schema.EditedView:
    k = min(body.k, llama.config.vocab_size)
    effect = llama.inspect.effect(forward_pass.ids, *edits, word=body.token_id, position=position, k=k)
    ids = forward_pass.ids[: position + 1]
    check_wanted()
    with llama.inspect.edited() as plain, llama.inspect.edited(*edits) as other:
        return schema.EditedView(
            position=position,
            runner=other.runner.name,
            divergence=effect.divergence,
            floor=effect.floor,
            tokens=effect.tokens,
            answer_before=_goes_on(plain, ids, body.max_tokens),
            answer_after=_goes_on(other, ids, body.max_tokens),
        )


def _goes_on(llama: "Llama", ids: Sequence[int], max_tokens: int) -> tuple[TokenView, ...]:
    if not max_tokens:
        return ()
    answer = llama.generate(list(ids), max_tokens=max_tokens, temperature=0.0).completions[0]
    return tuple(token_view(llama.tokenizer, token_id) for token_id in answer.token_ids)


def patches(context: OpenPass, body: schema.PatchRequest) -> Iterator[schema.PatchBeginView | schema.PatchCellsView]:
    """Stream the pass with one place after the other from a second prompt, layer by layer."""
    forward_pass, llama = _plain(context.forward_pass), context.llama
    _check_patches(forward_pass, body)
    config = llama.config
    check_prompt(config, body.source_ids, room=0)
    context.check_token("token_id", body.token_id)
    context.check_token("against_id", body.against_id)
    for place, layer in enumerate(body.layers or ()):
        check_index(f"layers[{place}]", layer, config.num_hidden_layers)
    count = len(body.layers or range(config.num_hidden_layers)) * len(body.positions or forward_pass.ids)
    if count > MAX_CELLS:
        message = f"{count} cells; {MAX_CELLS} at most are computed at once: ask for fewer layers or positions"
        raise QuestionError(message, code="invalid_parameter", param="positions")
    grid = llama.inspect.patch_grid(
        forward_pass.ids, body.source_ids, body.token_id, against=body.against_id, part=body.part, layers=body.layers,
        positions=body.positions,
    )  # fmt: skip
    return _events(grid)


def _plain(forward_pass: Pass) -> Pass:
    """Refuse an experiment, which is an intervention itself."""
    if forward_pass.experiment is not None:
        message = "the pass is an experiment already; ask for a pass without one"
        raise QuestionError(message, code="experiment_unsupported", param="id")
    return forward_pass


def _edit(llama: "Llama", forward_pass: Pass, fields: schema.EditFields, path: str) -> "Edit":
    need_torch("an edit")
    from llamarium.inspect.interventions.edits import scale

    config = llama.config
    _check_given(f"{path}.layer", fields.layer, None if fields.part == "embed" else config.num_hidden_layers)
    _check_given(f"{path}.head", fields.head, config.num_attention_heads if fields.part == "head" else None)
    _check_positions(f"{path}.positions", fields.positions, forward_pass)
    return scale(fields.part, fields.factor, layer=fields.layer, head=fields.head, positions=fields.positions)


def _steering(llama: "Llama", forward_pass: Pass, fields: schema.SteeringFields, most: int) -> "Edit":
    check_index("steering.layer", fields.layer, llama.config.num_hidden_layers)
    _check_positions("steering.positions", fields.positions, forward_pass)
    toward, away = (_prompt(llama, getattr(fields, name), f"steering.{name}", most) for name in ("toward", "away"))
    return llama.inspect.steer(toward, away, fields.layer, scale=fields.strength, positions=fields.positions)


def _prompt(llama: "Llama", text: str, path: str, most: int) -> list[int]:
    try:
        llama.tokenizer.check_length(text, most)
        ids = llama.encode(text)
        check_prompt(llama.config, ids, room=0)
    except LlamariumError as error:
        raise of_library(error, field=path, source=llama.tokenizer.source) from None
    return ids


def _check_given(path: str, value: int | None, size: int | None) -> None:
    """Refuse an index that is out of range, missing, or of something that there is one of for all."""
    if size is None and value is not None:
        raise QuestionError(f"{path} is {value}, and this part has none; leave it out", param=path)
    if size is not None and value is None:
        raise QuestionError(f"{path} is missing; expected 0 to {size - 1}", param=path)
    check_index(path, value, size or 0)


def _check_positions(path: str, positions: Sequence[int] | None, forward_pass: Pass) -> None:
    for place, position in enumerate(positions or ()):
        check_index(f"{path}[{place}]", position, len(forward_pass.ids))


def _check_patches(forward_pass: Pass, body: schema.PatchRequest) -> None:
    if len(body.source_ids) != len(forward_pass.ids):
        message = (
            f"the second prompt has {counted(len(body.source_ids), 'token')} and the first "
            f"{len(forward_pass.ids)}; expected as many, so "
            "that each token has one to take its place"
        )
        raise QuestionError(message, code="invalid_parameter", param="source_ids")
    if len(forward_pass.ids) > MAX_PATCHED:
        message = f"{len(forward_pass.ids)} tokens; {MAX_PATCHED} at most are patched: use shorter prompts"
        raise QuestionError(message, code="invalid_parameter", param="source_ids")
    _check_positions("positions", body.positions, forward_pass)


def _events(grid: "PatchGrid") -> Iterator[schema.PatchBeginView | schema.PatchCellsView]:
    """Yield the grid's events: its beginning, and the cells that were run side by side."""
    total = len(grid.layers) * len(grid.positions)
    yield schema.PatchBeginView(
        base=grid.base, source=grid.source, floor=grid.floor, layers=grid.layers, positions=grid.positions, total=total
    )
    row: list[PatchCell] = []
    for cell in grid.cells():
        check_wanted()
        row.append(cell)
        if len(row) == len(grid.positions):
            yield schema.PatchCellsView(cells=tuple(row), done=cell.done)
            row = []
