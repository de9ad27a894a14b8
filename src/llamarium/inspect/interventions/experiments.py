"""Experiments: the same weights with another attention mask or rotation.

Without the causal mask every token attends to the whole text, as in an encoder (the weights were not trained for that).
Without rotation, only the mask carries information about order. Without RoPE scaling, or with another one, the
low-frequency pairs rotate as they did before the model's context was extended.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from llamarium.attention.base import Attend, causal_mask
from llamarium.config import RopeScaling
from llamarium.errors import InputError, MemoryBudgetError, counted, show_value
from llamarium.inspect.shapes import TracePlan, check_names, check_whole
from llamarium.inspect.trace import Trace, look, trace
from llamarium.model import LlamaForCausalLM, LlamaRotaryEmbedding, Rotary
from llamarium.runtime.loaded_model import runner_of


@dataclass(frozen=True, slots=True)
class Experiment:
    """Changes to the mask or rotation of a pass.

    Attributes:
        bidirectional: Whether every token attends to the whole text.
        hidden: Positions that no other token attends to.
        rotation: Whether queries and keys are rotated.
        rope_scaling: "model" for the model's setting, "off" for none, or another scaling.
    """

    bidirectional: bool = False
    hidden: tuple[int, ...] = ()
    rotation: bool = True
    rope_scaling: RopeScaling | Literal["model", "off"] = "model"

    def visible(self, num_tokens: int, window: int | None, device: torch.device | str) -> Tensor:
        """Return the mask, (T, T): True where the row's query attends to the column's key.

        `window` is the model's; it is ignored if every token attends to the whole text.
        """
        positions_T = torch.arange(num_tokens, device=device)
        visible_TT = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device)
        visible_TT = visible_TT if self.bidirectional else causal_mask(positions_T, positions_T, window)
        visible_TT[:, list(self.hidden)] = False
        return visible_TT | torch.eye(num_tokens, dtype=torch.bool, device=device)

    @property
    def has_mask(self) -> bool:
        """Whether the mask differs from the model's."""
        return self.bidirectional or bool(self.hidden)


class _NoRotation(nn.Module):
    def forward(self, positions_BT: Tensor, dtype: torch.dtype) -> Rotary:
        zeros_BT11 = torch.zeros(*positions_BT.shape, 1, 1, dtype=dtype, device=positions_BT.device)
        return Rotary(zeros_BT11.cos(), zeros_BT11)


class _Masked:
    """An `Attend` over the tokens of one call, with an experiment's mask.

    The inner object is called too, because it stores and returns other values; its output is not used.
    """

    def __init__(self, inner: Attend, visible_TT: Tensor) -> None:
        self._inner, self._visible_TT = inner, visible_TT

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        self._inner(layer_idx, q_BTNH, k_BTKH, v_BTKH)
        q, k, v = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self._visible_TT, enable_gqa=True).transpose(1, 2)


def begin(shell: LlamaForCausalLM, experiment: Experiment) -> list[RemovableHandle]:
    """Apply an experiment to a shell, and return the hooks to remove afterwards.

    Its `rotary_emb` may be replaced; the caller restores it.
    InputError for invalid hidden positions, or a contradictory rotation.
    """
    limit = shell.config.max_position_embeddings
    check_whole(experiment.hidden, "hidden")
    for position in experiment.hidden:
        if not 0 <= position < limit:
            raise InputError(f"hidden is {list(experiment.hidden)}; expected positions within 0..{limit - 1}")
    if not experiment.rotation:
        if experiment.rope_scaling != "model":
            raise InputError("rope_scaling is given beside rotation=False, where nothing is turned; give one")
        shell.model.rotary_emb = cast(Any, _NoRotation())
    elif experiment.rope_scaling != "model":
        scaling = None if experiment.rope_scaling == "off" else experiment.rope_scaling
        if not isinstance(scaling, RopeScaling | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"rope_scaling is {show_value(scaling)}; expected 'model', 'off' or a RopeScaling")
        shell.model.rotary_emb = LlamaRotaryEmbedding(replace(shell.config, rope_scaling=scaling))
    if not experiment.has_mask:
        return []
    window = shell.config.sliding_window

    def mask(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids_BT, positions_BT, attend = args
        _check_whole(positions_BT, experiment)
        return ids_BT, positions_BT, _Masked(attend, experiment.visible(ids_BT.shape[1], window, ids_BT.device))

    return [shell.model.register_forward_pre_hook(mask)]


def _check_whole(positions_BT: Tensor, experiment: Experiment) -> None:
    num_tokens = positions_BT.shape[1]
    if not (positions_BT == torch.arange(num_tokens, device=positions_BT.device)).all():  # sync: an experiment
        raise InputError(
            "with another mask a text is run as a whole, from position 0 on: call the model, or trace a text of at "
            "most 2,048 tokens; answers cannot be made"
        )
    if max(experiment.hidden, default=0) >= num_tokens:
        raise InputError(f"hidden is {list(experiment.hidden)}; the text has {counted(num_tokens, 'token')}")


def trace_experiment(
    model: LlamaForCausalLM,
    ids: Sequence[int],
    experiment: Experiment,
    *,
    names: Collection[str] | None = None,
    layers: Collection[int] | None = None,
    positions: Sequence[int] | None = None,
    budget_mb: float = 1024,
) -> Trace:
    """Trace a text with a model from `edited`; scores and attention weights use the experiment's mask.

    The arguments and errors are those of `trace`.
    """
    if not isinstance(experiment, Experiment):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"experiment is {show_value(experiment)}; expected an Experiment")
    options: dict[str, Any] = {"layers": layers, "positions": positions, "budget_mb": budget_mb}
    selected = check_names(names)
    attention_names = [name for name in selected if name in ("scores", "pattern")]
    if not experiment.has_mask or not attention_names:
        return trace(runner_of(model), ids, names=names, **options)
    traced_names = {*selected, "q_rot", "k_rot"} - set(attention_names)
    plan = TracePlan.of(model.config, len(ids), selected, layers, positions)
    sizes = plan.sizes
    # scores or weights, with two copies
    num_bytes = 3 * 4 * sizes["N"] * sizes["T"] * sizes["S"] * sum(name in attention_names for name, _ in plan.keys)
    if num_bytes > budget_mb * 1e6:
        raise MemoryBudgetError(
            f"{' and '.join(attention_names)} of {len(ids)} tokens need {num_bytes / 1e6:,.1f} MB and the budget is "
            f"{budget_mb:,.1f} MB. Restrict layers or positions, or raise budget_mb"
        )
    traced = trace(runner_of(model), ids, names=traced_names, **options)
    visible_TT = experiment.visible(len(ids), model.config.sliding_window, "cpu").numpy()
    arrays, visible_TS = dict(traced.arrays), visible_TT[list(traced.positions)]
    for layer in traced.layers:
        arrays |= look(arrays["q_rot", layer], arrays["k_rot", layer], visible_TS, layer, plan.keys)
    return Trace(traced.token_ids, traced.positions, {key: arrays[key] for key in plan.keys})
