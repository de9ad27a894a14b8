"""Edits: scale, remove or add to the output of a model component, for one pass or one generation.

    with edited(model, [ablate("head", layer=3, head=2)]) as without:
        logits = without(ids)

An edit replaces a component's output x by `factor * x + add`. Zero ablation uses factor 0; mean ablation uses factor 0
and adds the mean over a text; steering adds a vector to the residual stream. Edits apply to a shell of the model
(`runtime/shell.py`); the model itself and its other users are unaffected.

Source: Turner et al. 2023, "Activation Addition", for steering; Wang et al. 2022, "Interpretability in the Wild",
section 2.2, for ablation to the mean.
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from llamarium.errors import AnswerError, InputError, show_value
from llamarium.inspect.interventions.effect import Effect, Floor, TokenEffect
from llamarium.inspect.interventions.experiments import Experiment, begin
from llamarium.inspect.interventions.widened import in_float32
from llamarium.inspect.lens import predictions_of
from llamarium.inspect.measures.divergence import kl_of_rows
from llamarium.inspect.numbers import Floats, largest, log_softmax
from llamarium.inspect.shapes import check_finite
from llamarium.inspect.tokens import check_count, check_token, text_of
from llamarium.inspect.trace import trace
from llamarium.model import LlamaForCausalLM
from llamarium.runtime.intervention import Edit, Part, check_edit
from llamarium.runtime.loaded_model import runner_of
from llamarium.runtime.runner import Runner
from llamarium.runtime.shell import hook_edit, hook_norms
from llamarium.tokenizer.base import Tokenizer

_SEEN: dict[Part, str] = {
    "embed": "embed", "attention": "attn_out", "head": "head_out", "mlp": "mlp_out", "residual": "resid",
}  # fmt: skip
"""The activation in a trace."""


def scale(
    part: Part,
    factor: float,
    *,
    layer: int | None = None,
    head: int | None = None,
    positions: Iterable[int] | None = None,
) -> Edit:
    """Return an edit that multiplies a component's output; the arguments are those of `Edit`."""
    return Edit(part, layer, head, _as_tuple(positions), factor)


def ablate(
    part: Part, *, layer: int | None = None, head: int | None = None, positions: Iterable[int] | None = None
) -> Edit:
    """Return an edit that sets a component's output to zero; the arguments are those of `Edit`."""
    return scale(part, 0.0, layer=layer, head=head, positions=positions)


def ablate_to_mean(
    model: LlamaForCausalLM,
    part: Part,
    reference_ids: Sequence[int],
    *,
    layer: int | None = None,
    head: int | None = None,
    positions: Iterable[int] | None = None,
) -> Edit:
    """Return an edit that sets a component's output to its mean over the tokens of a reference text.

    The reference should differ from the edited text; otherwise later tokens influence earlier ones through the mean.

    Raises:
        InputError: For an unknown part, layer or head, or invalid ids.
        ContextLengthError: If the reference is longer than the context.
    """
    edit = ablate(part, layer=layer, head=head, positions=positions)
    check_edit(model.config, edit)
    values = _values(model, part, layer, reference_ids)
    mean = values.mean(dim=0)
    return Edit(part, layer, head, edit.positions, 0.0, mean if head is None else mean[head])


def steer(
    model: LlamaForCausalLM,
    toward_ids: Sequence[int],
    from_ids: Sequence[int],
    layer: int,
    *,
    scale: float = 1.0,
    positions: Iterable[int] | None = None,
) -> Edit:
    """Return an edit that adds the difference of two prompts to the residual stream; see `Inspector.steer`."""
    check_finite("scale", scale)
    check_edit(model.config, Edit("residual", layer))
    last = [_values(model, "residual", layer, ids)[-1] for ids in (toward_ids, from_ids)]
    return Edit("residual", layer, None, _as_tuple(positions), 1.0, scale * (last[0] - last[1]))


def _as_tuple(positions: Iterable[int] | None) -> tuple[int, ...] | None:
    if not isinstance(positions, Iterable | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"positions is {show_value(positions)}; expected whole numbers, or None for all")
    return None if positions is None else tuple(positions)


@contextmanager
def edited(
    model: LlamaForCausalLM, edits: Sequence[Edit] = (), experiment: Experiment | None = None
) -> Generator[LlamaForCausalLM]:
    """Yield a model with the same weights that applies edits within the block, for one thread at a time.

    The model itself and its other users are unaffected. The yielded model computes in float32, whatever the weights are
    stored in, so that small changes are not lost in rounding; after the block it computes without the edits. Edits are
    applied in order; an experiment replaces the mask or the rotation of the whole pass.
    InputError for an invalid edit; all are checked before anything runs.
    """
    if not isinstance(experiment, Experiment | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"experiment is {show_value(experiment)}; expected an Experiment")
    for edit in edits:
        check_edit(model.config, edit)
    shell = in_float32(model)
    rotary_emb = shell.model.rotary_emb
    handles: list[RemovableHandle] = []
    try:
        if experiment is not None:
            handles += begin(shell, experiment)
        if edits:
            handles += _hook(shell, edits)
        yield shell
    finally:
        for handle in handles:
            handle.remove()
        shell.model.rotary_emb = rotary_emb


def _hook(shell: LlamaForCausalLM, edits: Sequence[Edit]) -> list[RemovableHandle]:
    arguments: dict[str, Tensor] = {}  # where the tokens of the pass stand, for edits of some positions

    def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments["positions_BT"] = kwargs["positions_BT"] if "positions_BT" in kwargs else args[1]

    handles = [shell.model.register_forward_pre_hook(see, with_kwargs=True)]

    def where(edit: Edit) -> Tensor | None:
        positions_BT = arguments["positions_BT"]
        chosen = None if edit.positions is None else torch.tensor(edit.positions, device=positions_BT.device)
        return None if chosen is None else torch.isin(positions_BT, chosen)

    return handles + hook_norms(shell) + [hook_edit(shell, edit, partial(where, edit)) for edit in edits]


def _values(model: LlamaForCausalLM, part: Part, layer: int | None, ids: Sequence[int]) -> Tensor:
    """Return a component's output for each token of a text: (T, D), or (T, N, H) for heads."""
    name = _SEEN[part]
    traced = trace(runner_of(in_float32(model)), ids, names=[name], layers=None if layer is None else [layer])
    return torch.from_numpy(traced.arrays[name, layer])


def effect_of(
    model: LlamaForCausalLM,
    ids: Sequence[int],
    edits: Sequence[Edit],
    *,
    position: int = -1,
    k: int = 10,
    chosen_id: int | None = None,
    tokenizer: Tokenizer | None = None,
    answering: Runner | None = None,
) -> Effect:
    """Run a text without edits and with them, both in float32, and compare the next token; see `Inspector.effect`.

    `answering` is the runner used for generation, which gives the rounding floor; default: the modules as they are.

    Raises:
        InputError: For an invalid edit, position, `k` or token.
        AnswerError: If the logits with the edits are not finite.
    """
    check_count(k, "k", model.config.vocab_size)
    if chosen_id is not None:
        check_token(chosen_id, model.config.vocab_size, "chosen_id")
    with edited(model) as plain, edited(model, edits) as changed:
        runners = runner_of(plain), runner_of(changed), answering or runner_of(model)
        runs = [trace(runner, ids, names=["logits"], positions=[position]) for runner in runners]
    before_V, after_V, answering_V = (run.arrays["logits", None][0] for run in runs)
    if not np.isfinite(after_V).all():
        raise AnswerError("with these edits the logits are not finite; use smaller factors or strengths")
    reported: set[int] = {*largest(before_V, k).tolist(), *largest(after_V, k).tolist()}
    reported |= set() if chosen_id is None else {chosen_id}
    tokens = [
        TokenEffect(i, text_of(i, tokenizer), *(next(predictions_of(x_V[None], i)) for x_V in (before_V, after_V)))
        for i in reported
    ]
    tokens.sort(key=lambda token: (-token.before.logprob, token.token_id))
    logprobs = [log_softmax(logits_V.astype(np.float64)) for logits_V in (before_V, after_V, answering_V)]
    far = max(abs(logprobs[2][i] - logprobs[0][i]) for i in reported)
    floor = Floor(float(far), _kl(logprobs[0], logprobs[2]))
    return Effect(tuple(ids), runs[0].positions[0], _kl(logprobs[0], logprobs[1]), floor, tuple(tokens))


def _kl(p_V: Floats, q_V: Floats) -> float:
    return max(0.0, float(kl_of_rows(p_V[None], q_V[None])[0]))  # rounding may pass below 0
