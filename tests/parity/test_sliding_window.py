"""Attention within a window against transformers' Mistral, over texts of several windows: passes, answers, training."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from closeness import assert_close_to_reference, model_reference
from hash_runner import answers
from llamarium.config import ModelConfig
from llamarium.cost import flops
from llamarium.engine.engine import Engine
from llamarium.engine.proposers.draft import DraftModel
from llamarium.engine.proposers.lookup import PromptLookup
from llamarium.engine.request import Request
from llamarium.generation.loop import generate_tokens
from llamarium.inspect.forward import Memory, advance
from llamarium.inspect.interventions.edits import edited
from llamarium.inspect.interventions.experiments import Experiment, trace_experiment
from llamarium.inspect.interventions.patching import PatchGrid
from llamarium.inspect.score import score
from llamarium.inspect.trace import trace
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.runtime.batch import Span, pack
from llamarium.runtime.intervention import Edit
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.runtime.runner import Runner
from llamarium.sampling.params import SamplingParams
from llamarium.train.data.batch import TrainingBatch
from llamarium.train.optim import make_optimizers
from llamarium.train.step import train_step
from native_models import native_runner

pytestmark = pytest.mark.torch

WINDOWS = [1, 5, 16, 17, 40, 256, 300]  # of a token, within a block, a block, more than a KV chunk
NUM_TOKENS = 310
IDS = torch.randint(0, 200, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))
RUNNERS = {"modules": ModuleRunner, "C": native_runner}
TOLERANCE = {"rtol": 1.3e-6, "atol": 1e-5}

both_runners = pytest.mark.parametrize("runner_of", RUNNERS.values(), ids=RUNNERS)
RunnerOf = Callable[[LlamaForCausalLM], Runner]


@dataclass(frozen=True)
class Pair:
    """One model twice, in float32."""

    ours: LlamaForCausalLM
    theirs: Any  # transformers.MistralForCausalLM


@cache
def pair_of(window: int | None) -> Pair:
    raw: dict[str, Any] = {
        "vocab_size": 200,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "sliding_window": window,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    theirs = transformers.MistralForCausalLM(transformers.MistralConfig(**raw, attn_implementation="eager")).eval()
    for parameter in theirs.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
    config = ModelConfig.from_hf({**raw, "model_type": "mistral", "architectures": ["MistralForCausalLM"]})
    assert config.sliding_window == window
    ours = LlamaForCausalLM(config).requires_grad_(False).eval()
    ours.load_state_dict(theirs.state_dict())
    return Pair(ours, theirs)


def last_logits(runner: Runner, ids: list[int], chunk: int) -> np.ndarray:
    memory = Memory(runner, len(ids))
    return np.asarray(advance(runner, memory.cache, [memory.begin(ids, len(ids))], chunk))[0]


@pytest.mark.parametrize("window", [*WINDOWS, 2000, None])
@torch.no_grad()
def test_logits_of_every_token(window: int | None) -> None:
    pair = pair_of(window)
    ids_1T = IDS.unsqueeze(0)
    assert_close_to_reference(pair.ours(ids_1T), pair.theirs(ids_1T).logits, model_reference(pair.ours, ids_1T))


@pytest.mark.parametrize("window", WINDOWS)
@both_runners
@torch.no_grad()
def test_a_prompt_however_it_is_cut(runner_of: RunnerOf, window: int) -> None:
    pair = pair_of(window)
    runner, expected = runner_of(pair.ours), pair.theirs(IDS.unsqueeze(0)).logits[0].numpy()
    for chunk, end in ((2048, NUM_TOKENS), (37, NUM_TOKENS), (1, NUM_TOKENS), (16, 50)):
        found = last_logits(runner, IDS[:end].tolist(), chunk)
        np.testing.assert_allclose(found, expected[end - 1], rtol=0, atol=1e-5 * float(expected.std()))


@pytest.mark.parametrize("window", [1, 5, 17, 40])
@both_runners
@torch.no_grad()
def test_greedy_answers_with_and_without_a_cache(runner_of: RunnerOf, window: int) -> None:
    pair, prompts = pair_of(window), [IDS[:60].tolist(), IDS[100:103].tolist()]
    runner, count = runner_of(pair.ours), 40
    params = [SamplingParams(temperature=0.0, max_tokens=count)] * 2
    for use_cache in (True, False):
        made: list[list[int]] = [[], []]
        for event in generate_tokens(runner, prompts, params, use_cache=use_cache):
            made[event.request].append(event.token_id)
        for prompt, answer in zip(prompts, made, strict=True):
            assert answer == theirs_greedy(pair, prompt, count)


def theirs_greedy(pair: Pair, prompt: list[int], count: int) -> list[int]:
    """Without their cache, which keeps all tokens where the window is 1."""
    ids_1T = torch.tensor([prompt])
    whole = pair.theirs.generate(
        ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=count, do_sample=False, eos_token_id=None,
        pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("num_blocks", "kind"), [(200, "plain"), (14, "preempted"), (200, "lookup"), (200, "draft")])
@both_runners
@torch.no_grad()
def test_an_engines_answers(runner_of: RunnerOf, num_blocks: int, kind: str) -> None:
    """From a prefix cache, after preemption, and with drafts, of which some are right."""
    pair = pair_of(17)
    runner = runner_of(pair.ours)
    proposer = {"lookup": PromptLookup(), "draft": DraftModel(runner_of(pair_of(40).ours))}.get(kind)
    engine = Engine(runner, num_blocks, block_size=16, max_num_seqs=4, chunk=45, proposer=proposer)
    shared, own = IDS[:70].tolist(), IDS[70:].tolist()
    prompts = [[*shared, *own[9 * i : 9 * i + 5]] for i in range(6)] + [own[:3], 5 * own[10:22]]
    params = SamplingParams(temperature=0.0, max_tokens=30)
    numbers = [engine.add(Request(prompt, params)) for prompt in prompts]
    found = answers(list(engine.run()), numbers)
    assert found == [[theirs_greedy(pair, prompt, 30)] for prompt in prompts]
    assert engine.counts.cached_tokens > 0 and (engine.counts.preempted > 0) == (kind == "preempted")
    assert engine.snapshot().used_blocks == 0


@pytest.mark.parametrize("window", [5, 40])
@both_runners
@torch.no_grad()
def test_traces_and_scores(runner_of: RunnerOf, window: int) -> None:
    pair, ids_1T = pair_of(window), IDS[:90].unsqueeze(0)
    runner = runner_of(pair.ours)
    theirs = pair.theirs(ids_1T, labels=ids_1T, output_hidden_states=True, output_attentions=True)
    ours = trace(runner, IDS[:90])
    for i, pattern in enumerate(theirs.attentions):
        torch.testing.assert_close(ours[f"layers.{i}.pattern"], pattern[0], **TOLERANCE)
        scores = ours[f"layers.{i}.scores"]
        assert scores.isneginf().equal((pattern[0] == 0) & scores.isneginf()), "a score that is not seen has no share"
        assert int(scores[0].isfinite().sum()) == sum(min(t + 1, window) for t in range(90))
    for i, hidden in enumerate(theirs.hidden_states[1:-1]):
        torch.testing.assert_close(ours[f"layers.{i}.resid"], hidden[0], **TOLERANCE)
    assert score(runner, IDS[:90]).total_logprob == pytest.approx(-float(theirs.loss) * 89, rel=1e-5)


@pytest.mark.parametrize("window", [1, 7, 40, 260])
def test_gradients_of_a_training_step(window: int) -> None:
    """Whole layers and their modules; each tensor as a share of its largest number."""
    theirs, config = pair_of(window).theirs, pair_of(window).ours.config
    ours = init_weights(LlamaForCausalLM(config), 1)
    ours.load_state_dict(theirs.state_dict())
    ids_BT = torch.stack([IDS[:270], IDS[40:]])
    batch = TrainingBatch(ids_BT[:, :-1], ids_BT[:, 1:].contiguous(), torch.arange(269).expand(2, 269), None)
    optimizers = make_optimizers(ours, "adamw", learning_rate=0.0, weight_decay=0.0, betas=(0.9, 0.95))
    kept: dict[str, torch.Tensor] = {}
    optimizers[0].register_step_pre_hook(
        lambda *_: kept.update({name: p.grad.clone() for name, p in ours.named_parameters() if p.grad is not None})
    )
    found = train_step(ours, optimizers, [batch], max_grad_norm=float("inf"))
    theirs.zero_grad()
    loss = theirs(input_ids=batch.ids_BT, labels=batch.labels_BT, shift_labels=batch.labels_BT).loss
    loss.backward()
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    assert len(kept) == len(list(theirs.parameters()))
    for name, parameter in theirs.named_parameters():
        largest = float(parameter.grad.abs().max())  # of queries and keys 0, where each token sees itself alone
        torch.testing.assert_close(kept[name], parameter.grad, rtol=0, atol=5e-5 * largest + 1e-9, msg=name)


@torch.no_grad()
def test_edits_and_experiments_keep_the_window() -> None:
    """An edited pass in C as in the modules; a mask that hides a token besides; a grid of patches as plain hooks do."""
    model = pair_of(6).ours
    ids, other = IDS[:40].tolist(), [*IDS[:20].tolist(), 7, *IDS[21:40].tolist()]
    edits = (Edit("head", 1, 2, factor=0.0), Edit("mlp", 0, factor=2.0, positions=(38,)))
    found = [
        runner.run(pack([Span(ids, 0, [0], edits=edits)]), runner.new_cache(1))
        for runner in (native_runner(model), ModuleRunner(model))
    ]
    np.testing.assert_allclose(*found, rtol=0, atol=1e-5 * float(np.std(found[0])))

    with edited(model, [], Experiment(hidden=(30,))) as shell:
        seen = trace_experiment(shell, ids, Experiment(hidden=(30,)), names=["pattern"])["layers.2.pattern"][0]
    for t in range(40):
        expected = {s for s in range(t - 5, t + 1) if s >= 0 and (s != 30 or t == 30)}
        assert set(seen[t].nonzero().flatten().tolist()) == expected

    grid = PatchGrid(model, ids, other, 5, layers=[0], positions=[20, 33])
    source = trace(ModuleRunner(model), other, names=["resid"], layers=[0])["layers.0.resid"]
    for cell in grid.cells():

        def patch(_: torch.nn.Module, __: Any, out_BTD: torch.Tensor, at: int = cell.position) -> torch.Tensor:
            out_BTD[0, at] = source[at]
            return out_BTD

        handle = model.model.layers[0].register_forward_hook(patch)
        expected = model(torch.tensor([ids]))[0, -1, 5]
        handle.remove()
        assert cell.logit == pytest.approx(float(expected), abs=1e-5)


def test_operations_are_counted_within_the_window() -> None:
    config = pair_of(17).ours.config
    whole = replace(config, sliding_window=None)
    per_pair = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    for num_new, num_cached in ((1, 0), (1, 99), (50, 0), (50, 7), (5, 90)):
        hidden = sum(max(0, t + 1 - 17) for t in range(num_cached, num_cached + num_new))
        assert flops(whole, num_new, num_cached) - flops(config, num_new, num_cached) == per_pair * hidden
