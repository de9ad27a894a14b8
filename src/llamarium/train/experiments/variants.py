"""The experiments with their variants, and changes to a model that a Llama config cannot express."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llamarium.errors import TrainingError
from llamarium.model import LlamaForCausalLM
from llamarium.model.norm import LlamaRMSNorm
from llamarium.model.rope import Rotary
from llamarium.presets import preset
from llamarium.train.config import ExperimentConfig
from llamarium.train.objectives.base import Trunk
from llamarium.train.step import bidirectional_trunk, causal_trunk


class NoRotary(nn.Module):
    """Replacement of `LlamaRotaryEmbedding` that rotates by zero."""

    def forward(self, positions_BT: Tensor, dtype: torch.dtype) -> Rotary:
        """Return cos 0 and sin 0 for any positions."""
        one_1111 = torch.ones(1, 1, 1, 1, dtype=dtype, device=positions_BT.device)
        return Rotary(one_1111, torch.zeros_like(one_1111))


class NoNorm(nn.Module):
    """Replacement of a `LlamaRMSNorm` by the identity.

    The weight is an unused buffer, from which the model reads device and dtype.
    """

    weight: Tensor

    def __init__(self, norm: LlamaRMSNorm) -> None:
        super().__init__()
        self.register_buffer("weight", norm.weight.detach().clone(), persistent=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return x."""
        return x_BTD


class NoPart(nn.Module):
    """Replacement of a layer's attention or MLP that adds nothing to the residual stream; runners read `layer_idx`."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, x_BTD: Tensor, *_: object) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(x_BTD)


def without_part(model: LlamaForCausalLM, part: str, norm: str) -> None:
    """Remove `self_attn` or `mlp`, and the norm before it, from every layer, in place."""
    for i, layer in enumerate(model.model.layers):
        layer.set_submodule(part, NoPart(i))
    replace_norms(model, NoNorm, named=norm)


def without_rope(model: LlamaForCausalLM) -> None:
    """Remove RoPE, in place."""
    model.model.set_submodule("rotary_emb", NoRotary())


def replace_norms(model: LlamaForCausalLM, make: Callable[[LlamaRMSNorm], nn.Module], named: str = "") -> None:
    """Replace every norm whose name ends in `named`, in place."""
    norms = [(name, module) for name, module in model.named_modules() if isinstance(module, LlamaRMSNorm)]
    for name, module in norms:
        if name.endswith(named):
            model.set_submodule(name, make(module))


def layer_norm(norm: LlamaRMSNorm) -> nn.LayerNorm:
    """Return a LayerNorm, which also subtracts the mean and has a bias."""
    return nn.LayerNorm(len(norm.weight), norm.eps).to(norm.weight)


@torch.no_grad()
def set_embedding_std(model: LlamaForCausalLM, std: float, seed: int) -> None:
    """Reinitialize the embedding table (and a tied head) from a normal distribution with this standard deviation."""
    generator = torch.Generator(model.model.embed_tokens.weight.device).manual_seed(seed)
    model.model.embed_tokens.weight.normal_(0.0, std, generator=generator)


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of a run.

    Attributes:
        changes: Changed settings.
        transform: Changes the model in place.
        trunk: Computes the hidden states.
        embedding_std: Initial standard deviation of the embedding table; None is that of all matrices.
        ngram_order: n of an n-gram model, which is counted instead of trained; None is a Llama.
    """

    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    transform: Callable[[LlamaForCausalLM], None] | None = None
    trunk: Trunk = causal_trunk
    embedding_std: float | None = None
    ngram_order: int | None = None

    @property
    def is_llama(self) -> bool:
        """True if a Llama config describes the model, so that it is saved as a Llama."""
        return self.transform is None and self.trunk is causal_trunk


@dataclass(frozen=True, slots=True)
class TrainingExperiment:
    """Runs that differ in one thing: title, explanation, and the variants for given settings."""

    title: str
    note: str
    variants: Callable[[ExperimentConfig], Mapping[str, Variant]]


def _tied(config: ExperimentConfig) -> dict[str, Variant]:
    if config.tie_word_embeddings is not None:
        raise TrainingError("the experiment decides tie_word_embeddings itself; leave it out")
    arms = {"tied": True, "untied": False}
    variants = {name: Variant({"tie_word_embeddings": tied}) for name, tied in arms.items()}
    if (std := config.embedding_std) is not None:
        for name, tied in arms.items():
            variants[f"{name}-std-{std:g}"] = Variant({"tie_word_embeddings": tied}, embedding_std=std)
    return variants


def _causal(config: ExperimentConfig) -> dict[str, Variant]:
    if config.validation == 0:
        raise TrainingError("validation is 0; expected a share above it, which shows the variants that cheat")
    return {"causal": Variant(), "bidirectional": Variant(trunk=bidirectional_trunk)}


def _heads(config: ExperimentConfig) -> dict[str, Variant]:
    base = preset(config.preset)
    heads = config.num_attention_heads or base.num_attention_heads
    between = [k for k in range(2, heads) if heads % k == 0]
    groups = config.num_key_value_heads or min(between, key=lambda k: abs(k - math.sqrt(heads)), default=0)
    if not between:
        raise TrainingError(f"num_attention_heads is {heads}; expected a number that can be grouped, such as 4 or 6")
    if groups not in between:
        raise TrainingError(
            f"num_key_value_heads is {groups}; expected one between 1 and {heads} that divides {heads} query heads: "
            f"{', '.join(map(str, between))}"
        )
    counts = {"mha": heads, "gqa": groups, "mqa": 1}
    return {name: Variant({"num_key_value_heads": count}) for name, count in counts.items()}


def _depth(config: ExperimentConfig) -> dict[str, Variant]:
    middle = config.num_hidden_layers or preset(config.preset).num_hidden_layers
    counts = sorted({max(1, middle // 2), middle, 2 * middle})
    return {f"{n}-layer{'s' if n > 1 else ''}": Variant({"num_hidden_layers": n}) for n in counts}


def _width(config: ExperimentConfig) -> dict[str, Variant]:
    if config.intermediate_size is not None or config.head_dim is not None:
        raise TrainingError("the experiment decides intermediate_size and head_dim itself; leave them out")
    base = preset(config.preset)
    width, heads = config.hidden_size or base.hidden_size, config.num_attention_heads or base.num_attention_heads
    widths = [w for w in (width // 4, width // 2, width, 2 * width) if w and w % (2 * heads) == 0]
    if len(widths) < 3:
        raise TrainingError(
            f"hidden_size is {width}; expected a multiple of {4 * heads}, so that half of it gives each of {heads} "
            "heads an even number"
        )
    return {f"width-{w}": Variant({"hidden_size": w}) for w in widths}


def _ngrams(config: ExperimentConfig) -> dict[str, Variant]:
    if config.validation == 0:
        raise TrainingError("validation is 0; expected a share above it, on which the models are compared")
    return {**{f"{n}-gram": Variant(ngram_order=n) for n in (2, 4, 6)}, "llama": Variant()}


EXPERIMENTS: Mapping[str, TrainingExperiment] = {
    "tied": TrainingExperiment(
        "Tied against untied embeddings",
        "Tied, one table both reads and writes tokens: fewer parameters, and every row learns from both sides. The "
        "smaller the model, the larger is the table's share of it, and the more of its parameters tying saves. A table "
        "drawn with standard deviation 1, as an nn.Embedding is, makes a tied head whose logits are as large as the "
        "square root of the width: --embedding-std 1 shows it in the first steps.",
        _tied,
    ),
    "rope": TrainingExperiment(
        "RoPE against none",
        "Without RoPE nothing tells the model where a token stands. It is not quite blind: under the causal mask a "
        "token sees only those before it, and what several layers make of that hints at the order.",
        lambda config: {"rope": Variant(), "no-rope": Variant(transform=without_rope)},
    ),
    "causal": TrainingExperiment(
        "Causal against bidirectional attention",
        "An encoder sees its whole row. Asked for the next token, it need not predict it: the token stands right "
        "there. Its loss says nothing about writing, where the next token is not there yet: the samples are written "
        "one token after the other, so each sees only those before it.",
        _causal,
    ),
    "heads": TrainingExperiment(
        "MHA against GQA against MQA",
        "Query heads that share key-value heads need a smaller cache: of N query heads MHA (multi-head) has N "
        "key-value heads, MQA (multi-query) one for all, and GQA (grouped-query) some number between. What is saved "
        "stands in the table beside what it costs. The speed is that of training; the cache counts in generation.",
        _heads,
    ),
    "norm": TrainingExperiment(
        "RMSNorm against LayerNorm and none",
        "RMSNorm gives each block inputs of the same size, whatever the layers before have added to the stream. "
        "Without it the size is left to the weights: compare how fast the loss falls, and the gradients' norms. "
        "LayerNorm takes the mean away besides and has a bias: it costs more and learns about the same.",
        lambda config: {
            "rmsnorm": Variant(),
            "layernorm": Variant(transform=partial(replace_norms, make=layer_norm)),
            "no-norm": Variant(transform=partial(replace_norms, make=NoNorm)),
        },
    ),
    "depth": TrainingExperiment(
        "Half as many layers, and twice as many",
        "A layer can only use what the layers before it have written. One layer can look at other tokens, but not at "
        "what those have found by looking; two can copy what followed the last time (an induction head). Deeper models "
        "also have more parameters and cost more: the table says how many, and the speed.",
        _depth,
    ),
    "width": TrainingExperiment(
        "A narrower and a wider residual stream",
        "All that a token carries from layer to layer is as many numbers as the stream is wide. Most matrices grow "
        "with the square of it. Each variant's checkpoints are models like any other: one Llama at a few sizes.",
        _width,
    ),
    "parts": TrainingExperiment(
        "Layers of attention alone, of an MLP alone, and of both",
        "Attention is the only part that moves anything between tokens. With MLPs alone a token sees itself and "
        "nothing else, so the model can be no better than a table of which token follows which: a 2-gram model (see "
        "the experiment ngrams). With attention alone tokens are mixed, and the only thing computed from the mixture "
        "is where to look next.",
        lambda config: {
            "both": Variant(),
            "attention": Variant(transform=partial(without_part, part="mlp", norm="post_attention_layernorm")),
            "mlp": Variant(transform=partial(without_part, part="self_attn", norm="input_layernorm")),
        },
    ),
    "ngrams": TrainingExperiment(
        "n-grams before Llamas",
        "An n-gram model counts which token follows each n - 1 others (with Kneser-Ney smoothing). It is counted, not "
        "trained: no seed changes it, its parameters are its counts, and its curve is level. A longer n finds ever "
        "fewer of its contexts again. A Llama sees its whole row, and what it learns of one context serves similar "
        "ones; with steps enough (--steps) it passes the best of them.",
        _ngrams,
    ),
}
