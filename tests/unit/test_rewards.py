"""GRPO: the loss against its formula in float64, sampling over the memory that is trained, rewards that go wrong, and
runs that resume to the bit from a kill at any place."""

import copy
import json
import math
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import llamarium
from llamarium.cli.main import main
from llamarium.cli.training_view import view
from llamarium.errors import LlamariumError, TrainingError
from llamarium.kernels import cpu_float32
from llamarium.model import LlamaForCausalLM
from llamarium.runtime.native.runner import NativeRunner
from llamarium.tokenizer.base import Tokenizer
from llamarium.train.conduct import conduct
from llamarium.train.config import GRPOConfig
from llamarium.train.data.batch import AnswerBatch
from llamarium.train.data.bpe import train_bpe
from llamarium.train.history import read_history
from llamarium.train.journal import Event
from llamarium.train.objectives.group_policy import GroupPolicy
from llamarium.train.rewards.functions import Rewards, StoppedError, reward_of
from llamarium.train.rewards.grpo import prepare
from llamarium.train.rewards.rollouts import Group, Rollouts, adapted_runner
from llamarium.train.setup import Setup
from llamarium.train.state.signals import stop_signals
from llamarium.train.step import causal_trunk, train_step
from strong_adapters import strengthen

pytestmark = pytest.mark.torch

PROMPTS = [{"prompt": f"say {i}", "answer": f"{i}"} for i in range(12)]


class KilledError(BaseException):
    """The process is gone."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe([json.dumps(PROMPTS)], 262)


@pytest.fixture
def settings(tmp_path: Path, model_files: Callable[..., Any], tokenizer: Tokenizer) -> dict[str, Any]:
    base = tmp_path / "base"
    model_files(vocab_size=280, head_dim=32).huggingface().rename(base)
    tokenizer.save(base)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Own:\n    size: int\n"
        "def short(answer, row):\n    return -Own(len(answer.encode())).size\n"
    )
    return {
        "model": str(base), "data": str(tmp_path / "prompts.jsonl"), "reward": f"{tmp_path}/mine.py:short",
        "steps": 6, "batch_rows": 8, "gradient_accumulation_steps": 2, "group_size": 4, "context": 24, "max_tokens": 8,
        "learning_rate": 1e-2, "validation": 0.25, "log_every": 1, "save_every": 2, "eval_every": 3, "sample_every": 3,
        "warmup_steps": 1, "device": "cpu", "chat_format": "none", "threads": 1,
    }  # fmt: skip


def rollouts_of(setup: Setup) -> Rollouts:
    assert isinstance(setup.rollouts, Rollouts)
    return setup.rollouts


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_the_loss_and_its_gradient_are_the_formulas(settings: dict[str, Any], beta: float) -> None:
    setup = prepare(GRPOConfig(**settings, method="full", beta=beta))
    (batch, _), _ = rollouts_of(setup).sample([(0, i) for i in range(4)], 0)
    moved = torch.Generator().manual_seed(0)  # so that ratios lie on both sides of the clip
    batch = replace(batch, sampled_N=batch.sampled_N + 0.4 * torch.randn(len(batch.sampled_N), generator=moved))
    if beta:
        assert batch.reference_E is not None
        batch = replace(batch, reference_E=batch.reference_E + 0.3)
    objective = GroupPolicy(0.2, beta)
    loss, told = objective.loss_sum(setup.model, batch, causal_trunk)
    loss.backward()
    gradient = setup.model.model.embed_tokens.weight.grad
    assert gradient is not None

    twin = prepare(GRPOConfig(**settings, method="full", beta=0.0)).model.double()
    expected, place, ratios = torch.zeros((), dtype=torch.float64), 0, list[float]()
    for ids, labels in zip(batch.ids_BT, batch.labels_BT, strict=True):  # each token alone
        logprobs_TV = twin(ids[None])[0].log_softmax(-1)
        for t in (labels >= 0).nonzero().flatten().tolist():
            new, old = logprobs_TV[t, labels[t]], batch.sampled_N[place].double()
            advantage = float(batch.advantages_N[place])
            ratio = torch.exp(new - old)
            better = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            expected = expected - better
            if batch.reference_E is not None:
                apart = torch.exp(batch.reference_E[place].double() - new)
                expected = expected + beta * (apart - torch.log(apart) - 1)
            ratios.append(ratio.item())
            place += 1
    assert place == objective.count(batch) == len(batch.sampled_N)
    assert min(ratios) < 0.8 and max(ratios) > 1.2 and 0 < float(told["clipped"]) < place
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert float(told["ratio"]) == pytest.approx(sum(ratios), rel=1e-5)
    assert float(told["largest_difference"]) == pytest.approx(max(abs(math.log(r)) for r in ratios), rel=1e-4)
    expected.backward()
    theirs = twin.model.embed_tokens.weight.grad
    assert theirs is not None
    torch.testing.assert_close(gradient.double(), theirs, rtol=1e-3, atol=1e-5 * float(theirs.abs().max()))


TABLES = {"target_modules": "embed_tokens,lm_head,q_proj"}


@pytest.mark.parametrize(
    "changes", [{"method": "full"}, {}, {"dora": True}, {"exact": True, "rank": 2}, TABLES, {**TABLES, "dora": True}]
)
def test_what_samples_is_what_trains(settings: dict[str, Any], changes: dict[str, Any]) -> None:
    setup = prepare(GRPOConfig(**settings, **changes))
    if "method" not in changes:
        strengthen(setup.model, 0.3, seed=1)  # an adapter that is lost would show
    runner = adapted_runner(setup.model)
    assert isinstance(runner, NativeRunner), "C samples"
    held = {p.data_ptr() for p in setup.model.parameters()}
    assert set(runner.addresses) <= held or "target_modules" in changes, "over the memory that is trained"
    batches, told = rollouts_of(setup).sample([(0, i) for i in range(4)], 0)

    def largest() -> float:
        found = [setup.objective.loss_sum(setup.model, batch, causal_trunk)[1] for batch in batches]
        return max(float(one["largest_difference"]) for one in found)

    if changes.get("exact"):
        assert largest() == 0
    else:
        assert largest() <= 1e-5
        learned = [parameter for parameter in setup.model.parameters() if parameter.requires_grad]
        with torch.no_grad():
            torch._foreach_add_(learned, 0.05)
        assert largest() > 1e-3, "other weights than those that sampled show"
    assert told["length"] <= 8 and 0 <= told["cut"] <= 1

    for group in rollouts_of(setup).groups:  # rewards and advantages are of the answers that are learned
        rewards = torch.tensor([-float(len(a.text.encode())) for a in group.answers])
        assert [a.reward for a in group.answers] == rewards.tolist()
        if float(rewards.std(correction=0)) > 0:
            expected = (rewards - rewards.mean()) / rewards.std(correction=0)
            torch.testing.assert_close(torch.tensor([a.advantage for a in group.answers]), expected)


@pytest.mark.parametrize("exact", [False, True])
def test_an_update_computes_as_the_pass_that_sampled(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    """With `exact` the values are that pass's own, so that the gradient's products may be the fastest."""
    setup, shapes = prepare(GRPOConfig(**settings, method="full", exact=exact)), list[torch.Size]()
    with torch.no_grad():
        for parameter in setup.model.parameters():
            parameter *= 10  # as far driven as it gets: a score that is rounded otherwise would be seen
    batches, _ = rollouts_of(setup).sample([(0, 0)], 0)
    multiply = cpu_float32.multiply_in_c
    monkeypatch.setattr(cpu_float32, "multiply_in_c", lambda x, w: shapes.append(w.shape) or multiply(x, w))
    made = train_step(setup.model, [], batches[:1], objective=setup.objective)
    linears = [module for module in setup.model.modules() if isinstance(module, nn.Linear)]
    expected = [] if exact else [linear.weight.shape for linear in linears]
    assert sorted(set(shapes)) == sorted(set(expected)) and len(shapes) >= len(expected)
    assert made.metrics["largest_difference"] <= (0 if exact else 1e-6), "log P is rounded once"


def test_with_exact_ratios_are_those_of_the_pass_in_c(settings: dict[str, Any], tmp_path: Path) -> None:
    events: list[Event] = []
    config = GRPOConfig(**{**settings, "steps": 2, "num_iterations": 3, "exact": True, "method": "full"})
    conduct(lambda: prepare(config), tmp_path / "run", resume=False, watch=nullcontext(events.append))
    steps = [event for event in events if event["event"] == "step"]
    assert all(event["largest_difference"] == 0 for event in steps), "of the first update"
    assert any(event["ratio"] != 1 for event in steps), "of the last"

    setup = prepare(config)
    (batch, _), _ = rollouts_of(setup).sample([(0, i) for i in range(4)], 0)
    with torch.no_grad():
        for parameter in setup.model.parameters():
            parameter *= 1.01
    again = rollouts_of(setup).again()[0]
    assert isinstance(again, AnswerBatch) and again.exact_N is not None
    moved = setup.objective.loss_sum(setup.model, again, causal_trunk)[1]
    expected = (again.exact_N - batch.sampled_N).exp().sum()
    assert float(moved["ratio"]) == pytest.approx(float(expected), rel=1e-6) and float(moved["largest_difference"]) > 0


@pytest.mark.parametrize("changes", [{"num_iterations": 2, "method": "full", "learning_rate": 3e-3}, {"rank": 2}])
def test_a_run_learns_and_resumes_to_the_bit(settings: dict[str, Any], tmp_path: Path, changes: dict[str, Any]) -> None:
    """Killed between a rollout and its update, and after a step that was not saved."""
    config = GRPOConfig(**{**settings, **changes})
    events: list[Event] = []

    def killing(step: int, kind: str) -> Callable[[], Setup]:
        def make() -> Setup:
            setup = prepare(config)
            rollouts = rollouts_of(setup)
            sample = rollouts.sample

            def until(places: Any, at: int) -> Any:
                made = sample(places, at)
                if at == step:
                    raise KilledError(kind)
                return made

            rollouts.sample = until  # type: ignore[method-assign]
            return setup

        return make

    whole = conduct(lambda: prepare(config), tmp_path / "whole", resume=False, watch=nullcontext(events.append))
    silent: Callable[[Event], None] = lambda event: None  # noqa: E731
    for resume, step in ((False, 1), (True, 3), (True, 5)):
        with pytest.raises(KilledError):
            conduct(killing(step, "x"), tmp_path / "parts", resume=resume, watch=nullcontext(silent))
    parts = conduct(lambda: prepare(config), tmp_path / "parts", resume=True, watch=nullcontext(silent))
    name = "model.safetensors" if changes.get("method") == "full" else "adapter_model.safetensors"
    one, other = (load_file(ending.checkpoint / name) for ending in (whole, parts))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)

    steps = [event for event in events if event["event"] == "step"]
    if config.num_iterations == 1:  # else it is that of the second update
        assert steps[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert all(event["largest_difference"] <= 1e-6 for event in steps), "log P is rounded once"
    validations = [event for event in events if event["event"] == "validation"]
    assert all(event["loss"] == -event["reward"] for event in validations)
    (first, last) = [event for event in events if event["event"] == "group"]
    assert len(first["answers"]) == 4 and "say" in last["prompt"]
    history = read_history(tmp_path / "whole")
    assert [len(group.answers) for group in history.groups] == [4, 4]
    assert history.values("validation", "reward") == tuple(event["reward"] for event in validations)
    assert history.values("step", "kl") == tuple(event["kl"] for event in steps)


def test_rewards_make_what_they_like_likelier(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def ascii(answer, row):\n    return sum(c.isascii() for c in answer) / 3\n")
    changes = {
        "reward": f"{tmp_path}/mine.py:ascii", "steps": 22, "method": "full", "learning_rate": 1e-2, "beta": 0.0,
        "max_tokens": 3, "batch_rows": 64, "group_size": 16,
    }  # fmt: skip
    events: list[Event] = []
    config = GRPOConfig(**{**settings, **changes})
    conduct(lambda: prepare(config), tmp_path / "run", resume=False, watch=nullcontext(events.append))
    rewards = [event["reward"] for event in events if event["event"] == "step"]
    assert rewards[0] < 0.55 < 0.75 < rewards[-1]


@pytest.mark.filterwarnings("ignore:reward ")
def test_a_reward_that_leaves_or_is_huge_is_none(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "import asyncio, sys\n"
        "class Mute(Exception):\n"
        "    def __str__(self): raise RuntimeError\n"
        "def leave(answer, row): sys.exit(0)\n"
        "def mute(answer, row): raise Mute\n"
        "def huge(answer, row): return 1e308\n"
        "def cancelled(answer, row): raise asyncio.CancelledError\n"
        "def generator(answer, row): raise GeneratorExit\n"
        "def closes(answer, row): print('a'); sys.stdout.close(); sys.stderr.close(); print('b', file=sys.stderr)\n"
        "def text(answer, row): return '1.5'\n"
        "def change(answer, row): row['answer'].append(1)\n"
    )
    capsys.readouterr()
    row = {"answer": [0]}
    for name in ("leave", "mute", "huge", "cancelled", "generator", "closes", "text", "change"):
        reward = reward_of(f"{tmp_path}/mine.py:{name}", tokenizer, 280)
        assert math.isnan(reward("text", row)) and reward.num_failed == 1, name
    assert capsys.readouterr() == ("", ""), "what it prints is kept from both"
    assert row == {"answer": [0]}, "lists of a row, too, are the reward's own copy"
    (tmp_path / "mine.py").write_text("raise SystemExit(0)")
    with pytest.raises(TrainingError, match="cannot be run: SystemExit: 0"):
        reward_of(f"{tmp_path}/mine.py:leave", tokenizer, 280)


@pytest.mark.filterwarnings("ignore:reward ")
def test_rewards_that_go_wrong_are_counted_and_weigh_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "calls = 0\n"
        "def odd(answer, row):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    print('here', answer)\n"
        "    row.clear()\n"
        "    if calls % 4 == 1: raise RuntimeError('no\\x1b[2J')\n"
        "    return [None, None, float('nan'), 1.0, 2][calls % 4 + 1] if calls % 4 else 'much'\n"
        "def nothing(answer, row):\n"
        "    pass\n"
        "def same(answer, row):\n"
        "    return 1\n"
    )
    setup = prepare(GRPOConfig(**{**settings, "reward": f"{tmp_path}/mine.py:odd"}))
    with pytest.warns(UserWarning, match=r"mine.py:odd: raised RuntimeError: no\\x1b") as warned:
        batches, told = rollouts_of(setup).sample([(0, 0), (0, 1)], 0)
    assert all(group.prompt.row["answer"] for group in rollouts_of(setup).groups), "a row is the reward's own copy"
    assert told["rewards_failed"] > 0 and len(warned) <= 4 and math.isfinite(told["reward"])
    for group in rollouts_of(setup).groups:
        assert all(a.advantage == 0 for a in group.answers if math.isnan(a.reward))
    assert all(bool(batch.advantages_N.isfinite().all()) for batch in batches)

    setup = prepare(GRPOConfig(**{**settings, "reward": f"{tmp_path}/mine.py:nothing"}))
    with pytest.raises(TrainingError, match="no answer of step 1 got a reward"):
        rollouts_of(setup).sample([(0, 0)], 0)

    changes = {"reward": f"{tmp_path}/mine.py:same", "steps": 1, "method": "full", "beta": 0.0}
    events: list[Event] = []
    config = GRPOConfig(**{**settings, **changes})
    ending = conduct(lambda: prepare(config), tmp_path / "same", resume=False, watch=nullcontext(events.append))
    before, after = (load_file(Path(f) / "model.safetensors") for f in (config.model, ending.checkpoint))
    assert all(torch.equal(before[key].float(), after[key]) for key in after), "equal groups teach nothing"
    assert next(event for event in events if event["event"] == "step")["equal_groups"] == 1


@pytest.mark.parametrize(("calls", "words"), [(20, "step 2 begins anew"), (50, "the validation of step 3 begins")])
def test_a_signal_ends_a_reward_that_hangs_and_the_run_resumes_to_the_bit(
    settings: dict[str, Any], tmp_path: Path, calls: int, words: str
) -> None:
    """Of 16 answers a step, and 3 of the validation after the third."""
    (tmp_path / "mine.py").write_text(
        "import os, signal, time\n"
        "calls = 0\n"
        "def hang(answer, row):\n"
        "    global calls\n"
        "    calls += 1\n"
        f"    if calls == {calls} and not os.path.exists({str(tmp_path / 'hung')!r}):\n"
        f"        open({str(tmp_path / 'hung')!r}, 'w').close()\n"
        "        signal.signal(signal.SIGALRM, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))\n"
        "        signal.setitimer(signal.ITIMER_REAL, 0.05)\n"
        "        while True: time.sleep(1)\n"
        "    return -len(answer)\n"
    )
    config = GRPOConfig(**{**settings, "reward": f"{tmp_path}/mine.py:hang"})
    silent: Callable[[Event], None] = lambda event: None  # noqa: E731
    before = signal.getsignal(signal.SIGALRM)
    with pytest.warns(UserWarning, match=f"stopped while rewards were computed: {words}"):
        ending = conduct(lambda: prepare(config), tmp_path / "parts", resume=False, watch=nullcontext(silent))
    signal.signal(signal.SIGALRM, before)
    assert ending.signal == signal.SIGTERM and ending.position.step == calls // 16
    parts = conduct(lambda: prepare(config), tmp_path / "parts", resume=True, watch=nullcontext(silent))
    whole = conduct(lambda: prepare(config), tmp_path / "whole", resume=False, watch=nullcontext(silent))
    one, other = (load_file(ending.checkpoint / "adapter_model.safetensors") for ending in (whole, parts))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert whole.position.best_loss == parts.position.best_loss and whole.position.best_step == parts.position.best_step


@pytest.mark.parametrize("kind", ["py", "schema"])
def test_a_reward_whose_file_changed_is_refused(settings: dict[str, Any], tmp_path: Path, kind: str) -> None:
    file = tmp_path / ("mine.py" if kind == "py" else "s.json")
    file.write_text("def f(answer, row): return 1.0" if kind == "py" else '{"type": "string"}')
    asked = f"{file}:f" if kind == "py" else f"schema:{file}"
    silent: Callable[[Event], None] = lambda event: None  # noqa: E731

    def train(steps: int, **how: bool) -> Any:
        config = GRPOConfig(**{**settings, "reward": asked, "steps": 4, "eval_every": 1, "save_every": 1})
        group = nullcontext(stopping(steps))
        return conduct(lambda: prepare(config), tmp_path / "run", resume=steps > 2, watch=group, **how)

    def stopping(steps: int) -> Callable[[Event], None]:
        def watch(event: Event) -> None:
            if event["event"] == "validation" and event["step"] == steps:
                signal.raise_signal(signal.SIGTERM)

        return watch if steps < 4 else silent

    assert train(2).position.step == 2
    file.write_text("def f(answer, row): return 0.5" if kind == "py" else '{"type": "number"}')
    with pytest.raises(TrainingError, match=r"other settings \(the file of the reward holds something else\)"):
        train(3)
    ending = train(3, allow_changes=True)
    assert ending.position.step == 3 and ending.position.best_step == 3, "the loss by the former reward counts no more"


def test_a_signal_ends_an_expression_that_backtracks(tokenizer: Tokenizer) -> None:
    reward = reward_of("regex:(.*.*.*.*.*.*.*.*.*)*q", tokenizer, 280)
    with stop_signals(Rewards([reward], [1.0])) as came:
        before = signal.signal(signal.SIGALRM, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
        signal.setitimer(signal.ITIMER_REAL, 0.05)  # a thread would wait for the interpreter's lock
        with pytest.raises(StoppedError):
            reward("a" * 200, {})
        signal.signal(signal.SIGALRM, before)
        assert came == [signal.SIGTERM]
        with pytest.raises(StoppedError):  # a signal that came before it
            reward("a", {})


@pytest.mark.parametrize("then", ["pass", "raise ValueError"])
def test_a_signal_that_a_reward_has_caught_ends_the_run_all_the_same(
    tokenizer: Tokenizer, tmp_path: Path, then: str
) -> None:
    (tmp_path / "mine.py").write_text(
        "import signal\n"
        "def rude(answer, row):\n"
        f"    try: signal.raise_signal(signal.SIGTERM)\n    except: {then}\n"
        "    return 1.0\n"
    )
    reward = reward_of(f"{tmp_path}/mine.py:rude", tokenizer, 280)
    with stop_signals(Rewards([reward], [1.0])) as came, pytest.raises(StoppedError):
        reward("answer", {})
    assert came == [signal.SIGTERM] and reward.num_failed == 0


def test_a_third_ctrl_c_ends_a_reward_that_catches_all(tmp_path: Path) -> None:
    program = (
        "import signal\n"
        "from llamarium.train.rewards.functions import Reward, Rewards\n"
        "from llamarium.train.state.signals import stop_signals\n"
        "def rude(answer, row):\n"
        "    while True:\n"
        "        try: signal.raise_signal(signal.SIGINT)\n"
        "        except: pass\n"
        "reward = Reward('rude', rude)\n"
        "with stop_signals(Rewards([reward], [1.0])): reward('', {})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == -signal.SIGINT


def test_a_reward_that_takes_long_is_named_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr("llamarium.train.rewards.functions._SLOW_S", 0.0)
    reward = reward_of("length:3", tokenizer, 280)
    assert [reward("abc", {}), reward("abc", {})] == [1, 1]
    assert [str(w.message) for w in recwarn] == [
        "reward length:3: took 0 s for the answer 'abc'; a run waits for every reward"
    ]


def test_the_rewards_that_are_there(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}')
    cases: list[tuple[str, str, float]] = [
        ("exact", " 42\n", 1), ("exact", "43", 0), ("regex:[0-9]+", "12", 1), ("regex:[0-9]+", "12a", 0),
        (f"schema:{tmp_path}/s.json", '{"a": 3}', 1), (f"schema:{tmp_path}/s.json", '{"a": "3"}', 0),
        (f"schema:{tmp_path}/s.json", '{"a": 3', 0), (f"schema:{tmp_path}/s.json", "", 0),
        ("length:4", "abcd", 1), ("length:4", "abc", 0.75), ("length:4", "", 0), ("length:4", "x" * 40, 0),
    ]  # fmt: skip
    for asked, answer, expected in cases:
        assert reward_of(asked, tokenizer, 280)(answer, {"answer": "42"}) == expected, (asked, answer)
    (tmp_path / "bad.py").write_text("raise ValueError('x')")
    (tmp_path / "none.py").write_text("def a(b, c): ...")
    wrong = [
        ("", "expected exact, regex"), ("length:٣", "expected"), ("length:1_0", "expected"),
        ("reverse", "expected exact"), ("length:0", "expected"),
        ("regex:(", "no regular"),
        (f"{tmp_path}/bad.py:f", "bad.py cannot be run: ValueError: x"), (f"{tmp_path}/no.py:f", "cannot be run"),
        (f"{tmp_path}/none.py:f", "has no function f; there are: a"), (f"schema:{tmp_path}/no.json", "cannot be read"),
    ]  # fmt: skip
    for asked, words in wrong:
        with pytest.raises(TrainingError, match=words):
            reward_of(asked, tokenizer, 280)


@pytest.mark.parametrize(
    ("lines", "changes", "words"),
    [
        ('{"question": "a"}', {}, r"prompts.jsonl:1: has the keys"),
        ('{"prompt": 3}', {}, r"prompts.jsonl:1: prompt is 3"),
        ('{"messages": [{"role": "user", "content": "a"}]}', {}, "has no dialog format; write prompts"),
        ('{"prompt": "a"}\n{"prompt": "a", "messages": []}', {}, r"prompts.jsonl:2: has the keys"),
        ('{"prompt": "a"}\n[1]', {}, "prompts.jsonl:2: .* is no JSON object"),
        ("", {}, "holds no prompt"),
        (
            '{"prompt": "a"}\n{"prompt": "b"}',
            {"reward": "exact"},
            r"prompts.jsonl:1: .* the reward exact reads 'answer'",
        ),
        ('{"prompt": "aaaaaaaaaaaaaaaaaaaaaaaaa"}\n{"prompt": "b"}', {}, "1 of 2 prompts leaves no room .*:1, has"),
        (
            '{"prompt": "a"}',
            {"validation": 0.5},
            "of 1 example, validation 0.5 takes 1; expected at least one to validate ",
        ),
        (None, {"reward": ""}, "no reward; expected exact"),
        (None, {"group_size": 3}, "is 16; expected a multiple of group_size, which is 3"),
        (None, {"dropout": 0.1}, "dropout is 0.1; expected 0"),
        (None, {"sample_prompt": "hi"}, "sample_prompt: of no effect on groups"),
        (None, {"epsilon": 0.1}, "epsilon: of no effect where num_iterations is 1"),
        (None, {"max_tokens": 24}, "max_tokens is 24; expected less than context"),
        (None, {"stop": "say no"}, "tokens; expected a text of one token"),
        (None, {"quantize": "NF4", "exact": True}, "exact needs the C kernels"),
    ],
)
def test_what_does_not_fit_is_refused(
    settings: dict[str, Any], lines: str | None, changes: dict[str, Any], words: str
) -> None:
    if lines is not None:
        Path(settings["data"]).write_text(lines)
    with pytest.raises(LlamariumError, match=words):
        prepare(GRPOConfig(**{**settings, **({"validation": 0} if lines else {}), **changes}))


def test_the_shell_and_python(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    assert main(["grpo", *words, "--preview"]) == 0
    assert "to be answered 4 times\n<|begin_of_text|>say 0\n" in capsys.readouterr().out
    assert main(["grpo", *words, "--steps=2", "--out=run"]) == 0
    told = capsys.readouterr().err
    assert "answers sampled by C" in told and "validation reward -" in told and ", length " in told
    assert ", log P differs by " in told
    assert "continue a text with it: llamarium generate --adapter run/best TEXT\n" in told, "it has no form of dialogs"
    (tmp_path / "mine.py").write_text(
        "import os\ndef short(answer, row):\n    os.chdir('/')\n    return -len(answer)\n"
    )
    ending = llamarium.grpo("py", **{**settings, "steps": 1})
    assert ending.position.step == 1 and ending.checkpoint.is_relative_to(tmp_path / "py"), "not where the reward went"
    monkeypatch.chdir(tmp_path)
    assert main(["grpo", *words, "--steps=1", "--out=shell"]) == 0
    assert (tmp_path / "shell" / "best").is_dir()


# --- what has no reward or no signal ----------------------------------------------------------------------------------


def float64_step(
    model: LlamaForCausalLM, groups: Sequence[Group], epsilon: float, beta: float, reference: LlamaForCausalLM
) -> float:
    """Return the gradient norm of a GRPO step, from the answers and rewards alone: each token by itself, in float64."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        rewarded = [answer for answer in group.answers if not math.isnan(answer.reward)]
        rewards = torch.tensor([answer.reward for answer in rewarded], dtype=torch.float64)
        spread = rewards.std(correction=0)
        for answer, reward in zip(rewarded, rewards, strict=True):
            advantage = (reward - rewards.mean()) / spread if spread > 0 else torch.zeros(())
            ids = torch.tensor([[*group.prompt.ids, *answer.ids]])
            ours, theirs = (m(ids[:, :-1])[0].log_softmax(-1) for m in (model, reference))
            for t in range(len(group.prompt.ids) - 1, ids.shape[1] - 1):
                new, base = ours[t, ids[0, t + 1]], theirs[t, ids[0, t + 1]].detach()
                ratio = torch.exp(new - new.detach())
                better = torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage)
                total = total - better + beta * (torch.exp(base - new) - (base - new) - 1)
                count += 1
    (total / count).backward()
    return float(torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt())


@pytest.mark.filterwarnings("ignore:reward ")
@pytest.mark.parametrize("is_exact", [False, True])
def test_answers_without_a_reward_are_no_part_of_the_update(
    settings: dict[str, Any], tmp_path: Path, is_exact: bool
) -> None:
    """7 of 16 fail; weights have moved, so KL counts as well."""
    (tmp_path / "mine.py").write_text(
        "calls = 0\n"
        "def some(answer, row):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    return None if calls % 16 in (1, 2, 5, 8, 9, 11, 14) else len(answer) + calls % 3\n"
    )
    config = GRPOConfig(
        **{**settings, "reward": f"{tmp_path}/mine.py:some", "method": "full", "beta": 0.5, "exact": is_exact}
    )
    setup, twin, reference = prepare(config), prepare(config).model.double(), prepare(config).model.double()
    with torch.no_grad():
        for p, q in zip(setup.model.parameters(), twin.parameters(), strict=True):
            p *= 1.05
            q.copy_(p)
    batches, told = rollouts_of(setup).sample([(0, i) for i in range(4)], 0)
    assert told["rewards_failed"] == 7
    assert sum(len(batch.ids_BT) for batch in batches) == 9
    found = train_step(setup.model, [], batches, objective=setup.objective, max_grad_norm=0.0)
    expected = float64_step(twin, rollouts_of(setup).groups, config.epsilon, config.beta, reference)
    assert found.grad_norm == pytest.approx(expected, rel=1e-4)
    assert expected > 0.05


@pytest.mark.parametrize(
    "changes",
    [{"method": "full"}, {"rank": 2}, {"dora": True}, {"exact": True}, {"precision": "bfloat16"},
     {"dtype": "bfloat16"}, {"method": "full", "exact": True}, {"quantize": "Q8_0"}, {"checkpoint_activations": True}],
    ids=str,
)  # fmt: skip
def test_a_run_without_a_signal_changes_no_bit_and_says_so(
    settings: dict[str, Any], tmp_path: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("def same(answer, row): return 1\n")
    wanted = {"reward": f"{tmp_path}/mine.py:same", "steps": 3, "weight_decay": 0.5, "beta": 0.04, "num_iterations": 2}
    config, events, setups = GRPOConfig(**{**settings, **wanted, **changes}), list[Event](), list[Setup]()
    before: dict[str, torch.Tensor] = {}

    def make() -> Setup:
        setup = prepare(config)
        if "method" not in changes:
            strengthen(setup.model, 0.3, seed=1)
            setup = replace(setup, rollouts=with_reference(setup))
        before.update({name: p.detach().clone() for name, p in setup.model.named_parameters()})
        setups.append(setup)
        return setup

    with view(3, quiet=False) as show:
        ending = conduct(make, tmp_path / "run", resume=False, watch=nullcontext(lambda e: (events.append(e), show(e))))
    assert all(torch.equal(p, before[name]) for name, p in setups[0].model.named_parameters())
    steps = [event for event in events if event["event"] == "step"]
    assert len(steps) == 3
    assert all(event["kl"] == 0 and event["grad_norm"] == 0 for event in steps), "the same pass for both"
    skipped = [event for event in events if event["event"] == "skipped"]
    assert [(event["reason"], event["in_a_row"]) for event in skipped] == [("no signal", i) for i in (1, 2, 3)]
    assert events[-1]["event"] == "end" and events[-1]["without_signal"] == 3
    assert ending.position.num_without_signal == 3
    assert capsys.readouterr().err.count("no learning signal") == 1, "once in a row"
    state = load_file(ending.checkpoint / "resume" / "optimizer.safetensors")
    assert not state, "no step at all: no moments, no counters"
    assert read_history(tmp_path / "run").skipped == {"no signal": 3}


def with_reference(setup: Setup) -> Rollouts:
    """Return the run's rollouts with a reference that has the adapters as they are now."""
    rollouts = rollouts_of(setup)
    rollouts._reference = copy.deepcopy(setup.model).requires_grad_(False).eval()
    return rollouts


def test_a_step_without_a_signal_leaves_moments_and_counters(settings: dict[str, Any], tmp_path: Path) -> None:
    """After an update: momentum alone would move the weights further."""
    (tmp_path / "mine.py").write_text(
        "calls = 0\ndef once(answer, row):\n    global calls\n    calls += 1\n    return calls if calls <= 16 else 1\n"
    )
    wanted = {"reward": f"{tmp_path}/mine.py:once", "steps": 3, "weight_decay": 0.5, "beta": 0.0, "save_every": 1}
    config = GRPOConfig(**{**settings, **wanted, "save_total_limit": 3, "method": "full", "validation": 0})
    events: list[Event] = []
    conduct(lambda: prepare(config), tmp_path / "run", resume=False, watch=nullcontext(events.append))
    for name in ("model.safetensors", "resume/optimizer.safetensors"):
        one, two, three = (load_file(tmp_path / "run" / f"step-0000000{i}" / name) for i in (1, 2, 3))
        assert one and all(torch.equal(one[key], two[key]) and torch.equal(one[key], three[key]) for key in one)
    assert [event["step"] for event in events if event["event"] == "skipped"] == [2, 3]


# --- several functions ------------------------------------------------------------------------------------------------

SEVERAL = """
def short(answer, row): return -len(answer)
def even(answer, row): return row["number"] % 2 and len(answer) % 2 if row["number"] < 6 else None
def broken(answer, row):
    if len(answer) % 3 == 0: raise ValueError
    return 1.0 if len(answer) % 3 == 1 else None
"""


@pytest.fixture
def several(settings: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "several.py").write_text(SEVERAL)
    Path(settings["data"]).write_text("".join(json.dumps({**row, "number": i}) + "\n" for i, row in enumerate(PROMPTS)))
    return settings


def named(tmp_path: Path, *names: str) -> list[str]:
    return [f"{tmp_path}/several.py:{name}" for name in names]


@pytest.mark.filterwarnings("ignore:reward ")
def test_rewards_are_weighted_sums_and_none_for_a_whole_prompt_does_not_apply(
    several: dict[str, Any], tmp_path: Path
) -> None:
    short, even = named(tmp_path, "short", "even")
    setup = prepare(GRPOConfig(**{**several, "reward": {short: 0.5, even: -2.0, "length:4": 0.0}}))
    _, told = rollouts_of(setup).sample([(0, i) for i in (0, 1, 7, 8)], 0)
    groups, sums = rollouts_of(setup).groups, list[float]()
    assert {group.prompt.row["number"] < 6 for group in groups} == {True, False}
    for group in groups:
        number = group.prompt.row["number"]
        for answer in group.answers:
            parity = 0 if number >= 6 else number % 2 and len(answer.text) % 2
            sums.append(-0.5 * len(answer.text) - 2 * parity)
            assert answer.reward == sums[-1]
            assert (even in answer.parts) == (number < 6) and answer.parts["length:4"] >= 0
    assert told["reward"] == pytest.approx(sum(sums) / len(sums)) and told["rewards_failed"] == 0
    lengths = [-len(answer.text) for group in groups for answer in group.answers]
    assert told[f"reward/{short}"] == pytest.approx(sum(lengths) / len(lengths))

    setup = prepare(GRPOConfig(**{**several, "reward": named(tmp_path, "short", "broken")}))
    _, told = rollouts_of(setup).sample([(0, i) for i in (0, 1, 7, 8)], 0)
    answers = [answer for group in rollouts_of(setup).groups for answer in group.answers]
    for answer in answers:  # what raised has no reward, nor what has none where others of its group have one
        expected = 1.0 - len(answer.text) if len(answer.text) % 3 == 1 else math.nan
        assert answer.reward == expected or (math.isnan(answer.reward) and math.isnan(expected))
    assert told["rewards_failed"] == sum(math.isnan(answer.reward) for answer in answers) > 0


@pytest.mark.filterwarnings("ignore:reward ")
def test_a_run_with_several_rewards_shows_each_and_resumes(
    several: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [f"--{n.replace('_', '-')}={v}" for n, v in {**several, "steps": 4}.items() if n != "reward"]
    asked = [f"--reward={name}" for name in ("several.py:short", "several.py:even", "regex:a=1,b")]
    assert main(["grpo", *words, *asked, "--reward-weights=1,0.5,-1", "--out=run"]) == 0
    assert "by function several.py:short -" in capsys.readouterr().err
    toml = tomllib.loads((tmp_path / "run" / "train.toml").read_text())
    assert toml["reward"] == {"several.py:short": 1.0, "several.py:even": 0.5, "regex:a=1,b": -1.0}
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    step = next(event for event in events if event["event"] == "step")
    assert {name for name in step if name.startswith("reward/")} == {f"reward/{name}" for name in toml["reward"]}
    (group, *_) = [event for event in events if event["event"] == "group"]
    assert all(a["parts"]["several.py:short"] == -len(a["text"]) for a in group["answers"])
    history = read_history(tmp_path / "run")
    assert (
        history.values("step", "reward/several.py:short") and "several.py:short" in history.groups[0].answers[0].parts
    )

    again = ["grpo", "--config=run/train.toml", "--out=run", "--resume", "--allow-changes", "--steps=5"]
    assert main(again) == 0
    assert main([*again[:-2], "--steps=6", "--reward-weights=1,1,1"]) == 1
    assert "reward: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reward", "weights", "expected"),
    [
        ("exact", "", "exact"), (["exact"], "", "exact"), ({"exact": 1}, "", "exact"), ("exact", "2", {"exact": 2.0}),
        (["exact", "length:3"], "", {"exact": 1.0, "length:3": 1.0}),
        (("exact", "length:3"), "1, -0.5", {"exact": 1.0, "length:3": -0.5}),
        ({"exact": 3.0, "length:3": 0}, "", {"exact": 3.0, "length:3": 0.0}),
        ({"exact": 3.0, "length:3": 0}, "1,2", {"exact": 1.0, "length:3": 2.0}),
    ],
)  # fmt: skip
def test_ways_to_name_rewards(reward: Any, weights: str, expected: Any) -> None:
    config = GRPOConfig(reward=reward, reward_weights=weights)
    assert config.reward == expected and config.reward_weights == ""
    assert GRPOConfig(**tomllib.loads(config.to_toml().replace('data = ""', ""))).reward == expected


@pytest.mark.parametrize(
    ("reward", "weights", "words"),
    [
        (["exact", "exact"], "", "names 'exact' twice"), (["exact", "length:3"], "1", "1 number; expected 2"),
        (["exact", "length:3"], "1,x", "length:3' is 'x'"), ({"exact": math.nan}, "", "'exact' is nan"),
        (["exact", 3], "", "reward has 3"),
        ("exact", 2.0, "reward_weights is 2"), ({"exact": True}, "", "is True"), (3, "", "reward is 3"),
        ({"exact": 1e300}, "", "expected a number up to"),
    ],
)  # fmt: skip
def test_rewards_that_are_named_wrongly(reward: Any, weights: str, words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        GRPOConfig(reward=reward, reward_weights=weights)
