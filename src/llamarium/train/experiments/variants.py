"""The experiments, and the variants of each."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llamarium.errors import TrainingError
from llamarium.model import LlamaForCausalLM
from llamarium.presets import preset
from llamarium.train.config import ExperimentConfig
from llamarium.train.experiments.swaps import with_layer_norms, without_norms, without_rope
from llamarium.train.objectives.base import Trunk
from llamarium.train.step import bidirectional_trunk, causal_trunk


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant of a run: changed settings, model, or trunk.

    `embedding_std` is the initial standard deviation of the embedding table; None is that of all matrices.
    """

    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    transform: Callable[[LlamaForCausalLM], None] | None = None
    trunk: Trunk = causal_trunk
    embedding_std: float | None = None

    @property
    def is_llama(self) -> bool:
        """Whether a Llama config describes the model, so that it is saved as one."""
        return self.transform is None and self.trunk is causal_trunk


@dataclass(frozen=True, slots=True)
class TrainingExperiment:
    """Runs that differ in one thing: title and explanation for the page, and the variants for some shared settings."""

    title: str
    note: str
    variants: Callable[[ExperimentConfig], Mapping[str, Variant]]


def _tied(config: ExperimentConfig) -> dict[str, Variant]:
    if config.tie_word_embeddings is not None:
        raise TrainingError("the experiment decides tie_word_embeddings itself; leave it out")
    arms = {"tied": True, "untied": False}
    found = {name: Variant({"tie_word_embeddings": tied}) for name, tied in arms.items()}
    if (std := config.embedding_std) is not None:
        for name, tied in arms.items():
            found[f"{name}-std-{std:g}"] = Variant({"tie_word_embeddings": tied}, embedding_std=std)
    return found


def _causal(config: ExperimentConfig) -> dict[str, Variant]:
    if config.validation == 0:
        raise TrainingError("validation is 0; expected a share above it, by which the experiment shows who cheats")
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
        "there. Its loss says nothing about writing, where the next token is not there yet. The text below is written "
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
            "layernorm": Variant(transform=with_layer_norms),
            "no-norm": Variant(transform=without_norms),
        },
    ),
}
