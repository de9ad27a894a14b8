"""Learning from one sentence: its loss per token, the gradient on its embedding rows, and one step of training on it.

All of it happens on a float32 copy of the modules; the model is unchanged. Packed weights cannot be changed by a step;
with `unpack` their copy is unpacked.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import get_total_norm

from llamarium.adapters.lora import adapted_modules
from llamarium.adapters.merge import merge_adapters
from llamarium.config import ModelConfig
from llamarium.cost import count_parameters
from llamarium.errors import InputError, MemoryBudgetError, check_choice
from llamarium.inspect.numbers import as_json
from llamarium.inspect.shapes import check_finite
from llamarium.inspect.tokens import Candidate, check_count, check_ids, name_candidates, top_candidates
from llamarium.model import LlamaForCausalLM
from llamarium.quant.base import QuantizedModule
from llamarium.runtime.shell import on_host
from llamarium.tokenizer.base import Tokenizer

Optimizer = Literal["SGD", "AdamW"]
PartName = Literal["embedding", "attention", "MLP", "norms", "head"]

_PATHS: tuple[tuple[PartName, str], ...] = (  # what the names of the others' parameters hold
    ("attention", ".self_attn."),
    ("MLP", ".mlp."),
    ("embedding", "embed_tokens"),
    ("head", "lm_head"),
)


@dataclass(frozen=True, slots=True)
class LearnedPart:
    """The weights of one part of the model in a step of training.

    Attributes:
        layer: None for the embedding, the final norm, and a head that is not tied to the embedding.
        gradient: The length of the gradient.
        moved: The length of the weights' change.
    """

    name: PartName
    layer: int | None
    gradient: float
    moved: float


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """What one step of training on a text does.

    Attributes:
        losses: -log P of each token but the first, before the step.
        losses_after: After it.
        row_ids: The text's tokens, each once, in order of first appearance.
        row_gradients_RD: The gradient of the mean loss on their rows of the embedding table; of a tied model both as
            embedding and as head.
        row_moves: The length of each row's change in the step.
        parts: What the step did to each part of the model, in the order of the forward pass.
        before: The most probable tokens to follow the text.
        num_unpacked: Modules whose packed weights were unpacked for the step.
    """

    token_ids: tuple[int, ...]
    losses: tuple[float, ...]
    losses_after: tuple[float, ...]
    row_ids: tuple[int, ...]
    row_gradients_RD: Tensor
    row_moves: tuple[float, ...]
    parts: tuple[LearnedPart, ...]
    gradient_norm: float
    before: tuple[Candidate, ...]
    after: tuple[Candidate, ...]
    num_unpacked: int

    @property
    def loss(self) -> float:
        """The mean of `losses`, whose gradient it is."""
        return sum(self.losses) / len(self.losses)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON values; of the rows' gradients the lengths."""
        names = list(map(str, self.row_ids))
        rows = {
            "rows": dict(zip(names, self.row_gradients_RD.norm(dim=-1).tolist(), strict=True)),
            "row_moves": dict(zip(names, self.row_moves, strict=True)),
        }
        return {name: value for name, value in as_json(self).items() if not name.startswith("row_")} | rows


def learn(
    model: LlamaForCausalLM,
    ids: Sequence[int],
    *,
    optimizer: Optimizer = "SGD",
    learning_rate: float = 1e-2,
    k: int = 10,
    tokenizer: Tokenizer | None = None,
    unpack: bool = False,
    budget_mb: float = math.inf,
) -> Lesson:
    """Take one step of training on a text, on a copy of the model; see `Inspector.learn`.

    `budget_mb` limits the step's memory, in megabytes of 10^6 bytes (`lesson_bytes`).

    Raises:
        InputError: For a text of one token, an invalid rate, or a model with packed weights and no `unpack`.
        ContextLengthError: If there are more ids than the context holds.
        MemoryBudgetError: If the step needs more than the budget; nothing has been copied then.
    """
    check_count(k, "k", model.config.vocab_size)
    ids = _checked_ids(model.config, ids, optimizer, learning_rate, budget_mb)
    pupil, num_unpacked = _copy(model, unpack=unpack)
    with torch.enable_grad():
        losses_T, before_V = _read(pupil, ids)
        losses_T.mean().backward()
    rows, table = list(dict.fromkeys(ids)), pupil.model.embed_tokens.weight
    assert table.grad is not None
    gradients_RD, was_RD = table.grad[rows].clone(), table.detach()[rows].clone()
    norm = get_total_norm(p.grad for p in pupil.parameters() if p.grad is not None).item()  # sync: to show
    parts = _step(pupil, optimizer, learning_rate)
    with torch.no_grad():
        after_T, after_V = _read(pupil, ids)
        moves_R = (table[rows] - was_RD).norm(dim=-1)
    is_finite = bool(after_V.isfinite().all())  # sync: a step too large predicts nothing
    logits = [before_V, after_V] if is_finite else [before_V]
    best = [name_candidates(top_candidates(on_host(x_V)[None], k)[0], tokenizer) for x_V in logits]
    before, after = (*best, ())[:2]
    losses, losses_after, moves = (tuple(values.tolist()) for values in (losses_T, after_T, moves_R))
    return Lesson(
        tuple(ids), losses, losses_after, tuple(rows), gradients_RD, moves, parts, norm, before, after, num_unpacked
    )


def _step(pupil: LlamaForCausalLM, optimizer: Optimizer, learning_rate: float) -> tuple[LearnedPart, ...]:
    """Take the step one parameter at a time, so that only one is held as it was and only its moments are."""
    squares = dict[tuple[PartName, int | None], Tensor]()
    for name, weights in pupil.named_parameters():
        if weights.grad is None:
            continue
        was = weights.detach().clone()
        getattr(torch.optim, optimizer)([weights], lr=learning_rate, weight_decay=0.0).step()
        lengths_2 = torch.stack([weights.grad.norm(), (weights.detach() - was).norm()])
        part = _part_of(name)
        squares[part] = squares.get(part, torch.zeros_like(lengths_2)) + lengths_2.square()
    lengths = {part: on_host(total_2.sqrt()).tolist() for part, total_2 in squares.items()}
    return tuple(LearnedPart(*part, gradient, moved) for part, (gradient, moved) in lengths.items())


def _part_of(name: str) -> tuple[PartName, int | None]:
    """Return which part a parameter belongs to, and its layer."""
    layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
    for part, path in _PATHS:
        if path in name:
            return part, layer
    return "norms", layer


def lesson_bytes(config: ModelConfig, num_tokens: int, optimizer: Optimizer) -> int:
    """Return about what a step holds at once, in float32.

    That is the weights, their gradients, the table once more while its gradient is summed or it is moved, with
    AdamW's two moments of it, the logits with their probabilities and gradients, and what the layers keep for the way
    back. Only one parameter's moments are held at a time, and the table is the largest.
    """
    c = config
    weights = 2 * count_parameters(c).total + (3 if optimizer == "AdamW" else 1) * c.vocab_size * c.hidden_size
    heads = 3 * c.num_attention_heads + 2 * c.num_key_value_heads
    saved = c.num_hidden_layers * (8 * c.hidden_size + 4 * c.intermediate_size + heads * c.head_dim)
    return 4 * (weights + num_tokens * (3 * c.vocab_size + saved))


def _checked_ids(
    config: ModelConfig, ids: Sequence[int], optimizer: Optimizer, learning_rate: float, budget_mb: float
) -> list[int]:
    check_choice("optimizer", optimizer, get_args(Optimizer))
    token_ids = check_ids(config, ids)
    if len(token_ids) < 2:
        raise InputError("a text of one token has no loss, as nothing comes before it; expected at least two")
    check_finite("learning_rate", learning_rate, is_positive=True)
    num_bytes = lesson_bytes(config, len(token_ids), optimizer)
    if num_bytes > budget_mb * 1e6:
        raise MemoryBudgetError(
            f"a step of training needs about {num_bytes / 1e6:,.0f} MB and the budget is {budget_mb:,.0f} MB; take a "
            "smaller model, a shorter text or SGD, which keeps no moments, or raise budget_mb"
        )
    return token_ids


def _copy(model: LlamaForCausalLM, *, unpack: bool) -> tuple[LlamaForCausalLM, int]:
    packed = [name for name, module in model.named_modules() if isinstance(module, QuantizedModule)]
    if packed and not unpack:
        raise InputError(
            f"{len(packed)} modules have packed weights ({packed[0]} is one), which no step can change; load the model "
            'with dtype="float32", or let a copy be unpacked with unpack=True'
        )
    pupil = copy.deepcopy(model)
    pupil = merge_adapters(pupil, torch.float32) if packed or any(adapted_modules(pupil)) else pupil.float()
    pupil.tie_weights()
    return pupil.requires_grad_(True).eval(), len(packed)


def _read(model: LlamaForCausalLM, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return -log P of each token but the first (T-1,), and the logits after the last (V,)."""
    ids_1T = torch.tensor([ids], device=model.device)
    logits_TV = model(ids_1T)[0]
    return F.cross_entropy(logits_TV[:-1], ids_1T[0, 1:], reduction="none"), logits_TV[-1]
