"""Edits: scale, take away or add to what a part of the model computes, for one pass or one answer.

    with edited(model, [ablate("head", layer=3, head=2)]) as without:
        logits = without(ids)

An edit turns what a part computes, x, into `factor * x + add`. Taking a part away is the factor 0; setting it to its
mean over a text is 0 and that mean; steering adds a vector to the stream. Edits sit on a shell of the model
(`runtime/shell.py`); the model itself, and its other users, are unaffected.

Source: Turner et al. 2023, "Activation Addition", for steering; Wang et al. 2022, "Interpretability in the Wild",
section 2.2, for ablation to the mean.
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from llamarium.errors import AnswerError, InputError, check_choice, show_value
from llamarium.inspect.interventions.effect import Effect, Floor, TokenEffect
from llamarium.inspect.interventions.experiments import Experiment, begin
from llamarium.inspect.interventions.widened import in_float32
from llamarium.inspect.lens import predictions_of
from llamarium.inspect.measures.divergence import kl_of_rows
from llamarium.inspect.numbers import Floats, largest, log_softmax
from llamarium.inspect.shapes import check_finite, check_whole
from llamarium.inspect.tokens import check_count, check_token, text_of
from llamarium.inspect.trace import trace
from llamarium.model import LlamaForCausalLM
from llamarium.runtime.loaded_model import runner_of
from llamarium.runtime.runner import Runner
from llamarium.tokenizer.base import Tokenizer

Part = Literal["embed", "attention", "head", "mlp", "residual"]
"""The embedding's rows; what attention, one head or the MLP of a layer computes; the stream after a layer."""

_SEEN: dict[Part, tuple[str, str]] = {
    "embed": ("embed", "model.embed_tokens"),
    "attention": ("attn_out", "model.layers.{layer}.self_attn"),
    "head": ("head_out", "model.layers.{layer}.self_attn.o_proj"),
    "mlp": ("mlp_out", "model.layers.{layer}.mlp"),
    "residual": ("resid", "model.layers.{layer}"),
}
"""The activation in a trace, and the module."""


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """What a part computes, times `factor`, plus `add`.

    Attributes:
        part: Of a head, its result before `o_proj`.
        layer: None for "embed".
        head: For "head"; else None.
        positions: None is all. They count from the beginning of the text, also while an answer grows.
        factor: 1 leaves it as it is, 0 removes it.
        add: (D,), of a head (H,); None is nothing.
    """

    part: Part
    layer: int | None = None
    head: int | None = None
    positions: tuple[int, ...] | None = None
    factor: float = 1.0
    add: Tensor | None = None


def scale(
    part: Part,
    factor: float,
    *,
    layer: int | None = None,
    head: int | None = None,
    positions: Iterable[int] | None = None,
) -> Edit:
    """Return the edit that multiplies what a part computes; arguments as `Edit` has them."""
    return Edit(part, layer, head, _as_tuple(positions), factor)


def ablate(
    part: Part, *, layer: int | None = None, head: int | None = None, positions: Iterable[int] | None = None
) -> Edit:
    """Return the edit that sets what a part computes to zero; arguments as `Edit` has them."""
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
    """Return the edit that sets what a part computes to its mean over the tokens of a reference text.

    The reference should be another text than the edited one: else later tokens reach earlier ones through the mean.

    Raises:
        InputError: For an unknown part, layer or head, or invalid ids.
        ContextLengthError: If the reference is longer than the context.
    """
    edit = ablate(part, layer=layer, head=head, positions=positions)
    _check(model, edit)
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
    """Return the edit that adds the difference of two prompts to the stream after a layer; see `Inspector.steer`."""
    check_finite("scale", scale)
    _check(model, Edit("residual", layer))
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
    """Yield a model over the same weights that computes with edits within the block, for one thread at a time.

    The model itself and its other users are unaffected. The yielded model computes in float32, whatever the weights are
    stored in, so that small changes are not lost in rounding; after the block it computes without the edits. Edits are
    applied in order; an experiment is another mask or rotation for the whole pass.

    Raises:
        InputError: For an invalid edit; all are checked before anything runs.
    """
    if not isinstance(experiment, Experiment | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"experiment is {show_value(experiment)}; expected an Experiment")
    for edit in edits:
        _check(model, edit)
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
    seen: dict[str, Tensor] = {}  # where the tokens of the pass stand, for edits of some positions

    def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen["positions_BT"] = kwargs["positions_BT"] if "positions_BT" in kwargs else args[1]

    handles = [shell.model.register_forward_pre_hook(see, with_kwargs=True)]
    return handles + [_hook_one(shell, edit, seen) for edit in edits]


def _hook_one(shell: LlamaForCausalLM, edit: Edit, seen: dict[str, Tensor]) -> RemovableHandle:
    def change(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return _apply(edit, output, seen["positions_BT"])

    def change_head(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        heads_BTNH = args[0].unflatten(-1, (shell.config.num_attention_heads, -1)).clone()
        heads_BTNH[..., edit.head, :] = _apply(edit, heads_BTNH[..., edit.head, :], seen["positions_BT"])
        return (heads_BTNH.flatten(-2), *args[1:])

    module = shell.get_submodule(_SEEN[edit.part][1].format(layer=edit.layer))
    if edit.part == "head":
        return module.register_forward_pre_hook(change_head)
    return module.register_forward_hook(change)


def _apply(edit: Edit, x: Tensor, positions_BT: Tensor) -> Tensor:
    """Return factor * x + add at the edit's positions, x elsewhere: (B, T, D or H)."""
    y = x if edit.factor == 1 else torch.zeros_like(x) if edit.factor == 0 else edit.factor * x
    y = y if edit.add is None else y + edit.add.to(x)
    if edit.positions is None:
        return y
    at_BT = torch.isin(positions_BT, torch.tensor(edit.positions, device=positions_BT.device))
    return torch.where(at_BT.unsqueeze(-1), y, x)


def _values(model: LlamaForCausalLM, part: Part, layer: int | None, ids: Sequence[int]) -> Tensor:
    """Return what a part computes for each token of a text: (T, D), of heads (T, N, H)."""
    name, _ = _SEEN[part]
    seen = trace(runner_of(in_float32(model)), ids, names=[name], layers=None if layer is None else [layer])
    return torch.from_numpy(seen.arrays[name, layer])


def _check(model: LlamaForCausalLM, edit: Edit) -> None:
    c = model.config
    if not isinstance(edit, Edit):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"an edit is {show_value(edit)}; expected one of ablate, scale, steer or ablate_to_mean")
    check_choice("part", edit.part, get_args(Part))
    _check_index("layer", edit.layer, None if edit.part == "embed" else c.num_hidden_layers, edit.part)
    _check_index("head", edit.head, c.num_attention_heads if edit.part == "head" else None, edit.part)
    check_whole(edit.positions or (), "positions")
    for position in edit.positions or ():
        _check_index("a position", position, c.max_position_embeddings, edit.part)
    size = c.head_dim if edit.part == "head" else c.hidden_size
    if edit.add is not None and tuple(getattr(edit.add, "shape", ())) != (size,):
        found = getattr(edit.add, "shape", None)
        shown = show_value(edit.add) if found is None else tuple(found)
        raise InputError(f"what is added to {edit.part} is {shown}; expected ({size},)")
    check_finite("factor", edit.factor)


def _check_index(name: str, value: object, size: int | None, part: str) -> None:
    """Refuse anything but an index below `size`; where that is None, anything but None."""
    if size is None:
        if value is not None:
            raise InputError(f"{name} is {show_value(value)}; expected none, as there is one {part} for all")
    elif isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
        raise InputError(f"{name} is {show_value(value)}; expected one within 0..{size - 1} to edit {part}")


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

    `answering` runs the model's answers, for the floor of rounding; the modules as they are where left out.

    Raises:
        InputError: For an invalid edit, position, `k` or token.
        AnswerError: If the logits with the edits are not finite.
    """
    check_count(k, "k", model.config.vocab_size)
    if chosen_id is not None:
        check_token(chosen_id, model.config.vocab_size, "chosen_id")
    with edited(model) as plain, edited(model, edits) as other:
        runners = runner_of(plain), runner_of(other), answering or runner_of(model)
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
    tokens.sort(key=lambda one: (-one.before.logprob, one.token_id))
    logprobs = [log_softmax(logits_V.astype(np.float64)) for logits_V in (before_V, after_V, answering_V)]
    far = max(abs(logprobs[2][i] - logprobs[0][i]) for i in reported)
    floor = Floor(float(far), _kl(logprobs[0], logprobs[2]))
    return Effect(tuple(ids), runs[0].positions[0], _kl(logprobs[0], logprobs[1]), floor, tuple(tokens))


def _kl(p_V: Floats, q_V: Floats) -> float:
    return max(0.0, float(kl_of_rows(p_V[None], q_V[None])[0]))  # rounding may pass below 0
