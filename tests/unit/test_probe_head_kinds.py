"""Kinds of heads: against loops over scores of our own, on patterns made by hand, and by what happens without them."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import llamarium
from llamarium.errors import InputError, OptionError
from llamarium.inspect.interventions.edits import ablate
from llamarium.inspect.measures.head_kinds import head_kinds, repeats
from llamarium.inspect.trace import Trace, trace
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.runtime.module_runner import ModuleRunner

pytestmark = pytest.mark.torch

CONFIG = replace(preset("tiny"), num_hidden_layers=2, vocab_size=200, initializer_range=0.3)
IDS = [7, 3, 150, 7, 3, 3, 42, 7]


def by_hand(ids: list[int], pattern: Any) -> tuple[float, float, float, float]:
    """Previous, first, itself, induction of one head, key by key."""
    queries = range(1, len(ids))
    shares = []
    for t in range(len(ids)):
        keys = [s + 1 for s in range(t - 1) if ids[s] == ids[t]]
        if keys:
            shares.append(sum(pattern[t][key] for key in keys))
    return (
        sum(pattern[t][t - 1] for t in queries) / len(queries),
        sum(pattern[t][0] for t in queries) / len(queries),
        sum(pattern[t][t] for t in queries) / len(queries),
        sum(shares) / len(shares),
    )


def test_shares_are_means_over_the_softmax_of_the_scores() -> None:
    model = init_weights(LlamaForCausalLM(CONFIG), seed=0).requires_grad_(False)
    found = head_kinds(trace(ModuleRunner(model), IDS, names=["pattern"]))
    seen = trace(ModuleRunner(model), IDS, names=["q_rot", "k_rot"])
    group = CONFIG.num_attention_heads // CONFIG.num_key_value_heads
    assert len(found.heads) == 2 * CONFIG.num_attention_heads and found.num_repeated == 4
    for one in found.heads:
        q = seen[f"layers.{one.layer}.q_rot"][:, one.head].tolist()
        k = seen[f"layers.{one.layer}.k_rot"][:, one.head // group].tolist()
        pattern = []
        for t in range(len(IDS)):
            weights = [
                math.exp(sum(a * b for a, b in zip(q[t], k[s], strict=True)) / math.sqrt(CONFIG.head_dim))
                for s in range(t + 1)
            ]
            pattern.append([weight / sum(weights) for weight in weights])
        told = (one.previous, one.first, one.itself, one.induction)
        assert told == pytest.approx(by_hand(IDS, pattern), rel=1e-4)


def test_each_kind_is_found_where_a_head_does_nothing_else() -> None:
    ids = [5, 6, 7, 5, 6, 7]
    keys = [[0, 0, 1, 2, 3, 4], [0] * 6, range(6), [0, 0, 0, 1, 2, 3]]  # a head each
    found = head_kinds(
        Trace(tuple(ids), tuple(range(6)), {("pattern", 0): np.eye(6, dtype=np.float32)[np.array(keys)]})
    )
    best = [(kind, found.by(kind)[0]) for kind in ("previous", "first", "itself", "induction")]
    assert [(one.head, getattr(one, kind)) for kind, one in best] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert found.heads[0].induction == 0


def test_what_repeats_nothing_has_no_induction() -> None:
    model = init_weights(LlamaForCausalLM(CONFIG), seed=0).requires_grad_(False)
    found = head_kinds(trace(ModuleRunner(model), [7, 3, 3, 42], names=["pattern"]))  # "3 3": nothing lies between
    assert found.num_repeated == 0 and {one.induction for one in found.heads} == {None}
    with pytest.raises(InputError, match="no token recurs"):
        found.by("induction")
    with pytest.raises(OptionError, match="kind is 'who'"):
        found.by("who")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="one token"):
        head_kinds(trace(ModuleRunner(model), [7], names=["pattern"]))
    with pytest.raises(InputError, match="all positions"):
        head_kinds(trace(ModuleRunner(model), IDS, names=["pattern"], positions=[2]))
    with pytest.raises(InputError, match="num_tokens is 1"):
        repeats(200, 1, 0)


def test_without_its_induction_heads_the_model_forgets_what_it_has_read(smollm2: llamarium.Llama) -> None:
    """The five of one pass over random tokens: on another text that repeats, they alone are missed."""
    found = smollm2.inspect.head_kinds()
    best = found.by("induction")[:5]
    assert [(one.layer, one.head) for one in best[:1]] == [(18, 6)] and best[-1].induction > 0.4  # pyright: ignore
    ids = repeats(smollm2.config.vocab_size, 24, seed=7)

    def logprob(heads: Any) -> float:
        with smollm2.inspect.edited(*(ablate("head", layer=one.layer, head=one.head) for one in heads)) as other:
            logits = other.trace(ids, names=["logits"])["logits"][24:-1].log_softmax(-1)
        return logits.gather(1, torch.tensor(ids[25:])[:, None]).mean().item()

    plain = logprob([])
    assert plain > -5  # of random tokens: guessing among 49,152 would be -10.8
    assert (
        logprob(best) < plain - 5 and logprob(found.by("previous")[:2]) < plain - 5
    )  # which tell them what came before
    assert logprob(found.by("first")[:5]) > plain - 0.2
