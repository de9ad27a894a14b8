"""DPO: the loss against its formula in float64, pairs from JSONL, the reference, and runs that resume to the bit."""

import importlib.util
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

from llamarium.adapters.config import LoRAConfig
from llamarium.adapters.lora import apply_lora, without_adapters
from llamarium.cli.main import main
from llamarium.errors import TrainingError
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.load import load_tokenizer_file
from llamarium.train.conduct import conduct
from llamarium.train.config import DPOConfig
from llamarium.train.data.batch import IGNORED
from llamarium.train.data.bpe import train_bpe
from llamarium.train.data.dialog_rows import DialogRows
from llamarium.train.data.pairs import PairRows, read_pairs
from llamarium.train.dpo import Preference, answer_logprobs, dpo_loss, prepare, set_reference
from llamarium.train.journal import Event
from llamarium.train.objectives.logprobs import token_logprobs
from llamarium.train.setup import Setup
from llamarium.train.step import causal_trunk, computing_in, measure
from strong_adapters import strengthen

pytestmark = pytest.mark.torch

PAIRS = [{"prompt": f"say {i}", "chosen": f" {i} {i}", "rejected": f" no {i}"} for i in range(12)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe([json.dumps(PAIRS)], 262)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return path


def small(seed: int = 0) -> LlamaForCausalLM:
    return init_weights(LlamaForCausalLM(replace(preset("tiny"), vocab_size=280)), seed)


def with_adapters() -> LlamaForCausalLM:
    model = small()
    apply_lora(model, LoRAConfig(r=2))
    strengthen(model, 0.2, seed=1)
    return model


def by_hand(model: LlamaForCausalLM, rows: PairRows) -> torch.Tensor:
    """log P of every answer, each example alone, in float64."""
    found: list[torch.Tensor] = []
    for ids, learned, *_ in rows.examples:
        row = torch.from_numpy(ids).long()
        logprobs = model(row[None])[0].double().log_softmax(-1)
        found.append(sum((logprobs[t - 1, row[t]] for t in range(1, len(row)) if learned[t]), torch.zeros(())))
    return torch.stack(found)


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_the_loss_and_its_gradient_are_the_formulas(file: Path, tokenizer: Tokenizer, beta: float) -> None:
    rows = PairRows.from_file(file, tokenizer, 96)
    batch = rows.batch(0, range(rows.num_rows(0)))
    order = rows.examples_of(0, range(rows.num_rows(0)))
    objective = Preference(beta)
    model, twin = with_adapters().double(), with_adapters().double()  # attention's rounding has tests of its own
    assert rows.num_rows(0) < len(PAIRS) == objective.count(batch)
    loss, told = objective.loss_sum(model, batch, causal_trunk)

    policy = by_hand(twin, rows)[order]
    with torch.no_grad():
        reference = by_hand(small().double(), rows)[order]
    rewards = beta * (policy - reference)
    margin = rewards[0::2] - rewards[1::2]
    expected = -torch.log(1 / (1 + torch.exp(-margin))).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert float(told["reward_chosen"]) == pytest.approx(rewards[0::2].sum().item(), rel=1e-4, abs=1e-4)
    assert float(told["reward_margin"]) == pytest.approx(margin.sum().item(), rel=1e-4, abs=1e-4)
    assert float(told["reward_accuracy"]) == int((margin > 0).sum())

    loss.backward()
    expected.backward()
    grads = [(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True) if p.requires_grad]
    for ours, theirs in grads:
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-5 * float(theirs.abs().max()) + 1e-9)


def test_it_begins_at_log_two_and_knows_which_answer_is_which() -> None:
    equal = torch.tensor([-3.0, -7.0])
    assert float(dpo_loss(equal, equal, 0.5)[0]) == pytest.approx(math.log(2))
    better, worse = torch.tensor([-2.0, -8.0]), torch.tensor([-4.0, -6.0])
    assert float(dpo_loss(better, equal, 0.5)[0]) < math.log(2) < float(dpo_loss(worse, equal, 0.5)[0])


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_label_smoothing_is_the_expectation_over_exchanged_answers(smoothing: float) -> None:
    """TRL's `label_smoothing`: (1 - e) of the loss as labelled and e of the loss the other way round, in float64."""
    generator = torch.Generator().manual_seed(0)
    policy, reference = (-9 * torch.rand(8, generator=generator) for _ in range(2))
    policy.requires_grad_()
    loss, rewards = dpo_loss(policy, reference, 0.7, smoothing)

    values = policy.detach().double().requires_grad_()
    ratios = (values - reference.double()).view(4, 2)
    logits = 0.7 * (ratios[:, 0] - ratios[:, 1])
    chosen, exchanged = torch.log1p(torch.exp(-logits)), torch.log1p(torch.exp(logits))
    expected = (1 - smoothing) * chosen + smoothing * exchanged
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rewards.double(), 0.7 * ratios, rtol=1e-5, atol=1e-6)
    ours, theirs = torch.autograd.grad(loss.sum(), policy)[0], torch.autograd.grad(expected.sum(), values)[0]
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-7)

    best = torch.full((2,), math.log((1 - smoothing) / smoothing) if smoothing else 50.0) * torch.tensor([0.5, -0.5])
    best.requires_grad_()
    pull = torch.autograd.grad(dpo_loss(best, torch.zeros(2), 1.0, smoothing)[0].sum(), best)[0]
    assert float(pull.abs().max()) < 1e-6, "nothing pulls at the margin that the labels' noise makes likeliest"


def test_logits_are_made_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 8, generator=generator, requires_grad=True)
    head = torch.randn(11, 8, generator=generator, requires_grad=True)
    labels = torch.arange(9)
    expected = (hidden @ head.T).log_softmax(-1)[torch.arange(9), labels]
    wanted = torch.autograd.grad(expected.sum(), (hidden, head))
    monkeypatch.setattr("llamarium.train.objectives.logprobs._CHUNK_LOGITS", 22)
    found = token_logprobs(hidden, head, labels)
    torch.testing.assert_close(found, expected)
    for one, other in zip(torch.autograd.grad(found.sum(), (hidden, head)), wanted, strict=True):
        torch.testing.assert_close(one, other)


@torch.no_grad()
def test_the_reference_is_the_base_whether_measured_before_or_beside(file: Path, tokenizer: Tokenizer) -> None:
    rows, model = PairRows.from_file(file, tokenizer, 96), with_adapters()
    batch = rows.batch(0, [0, 1])
    with without_adapters(model):
        beside = answer_logprobs(model, batch)
    assert not torch.allclose(beside, answer_logprobs(model, batch))
    set_reference(rows, small(), 2)
    before = rows.batch(0, [0, 1]).reference_E
    assert before is not None
    torch.testing.assert_close(beside, before)
    kept, other = (measure(model, r, batch_rows=2, objective=Preference(0.1)) for r in (rows, _again(rows)))
    assert kept.loss == pytest.approx(other.loss, rel=1e-5) and kept.metrics.keys() == other.metrics.keys()


@torch.no_grad()
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_the_first_rewards_are_zero_and_not_rounding(
    names: list[str], packing: bool, file: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Rows of one source hold the same when the reference is computed, and so do rows of one pair, of a mixture too."""
    weights = {str(tmp_path / f"{name}.jsonl"): 1.0 + i for i, name in enumerate(names)}
    for name in weights:
        Path(name).write_text(file.read_text())
    rows, model = PairRows.from_file(weights, tokenizer, 96, seed=1, packing=packing), small()
    set_reference(rows, model, 2)
    assert rows.once().num_rows(0) == (len(names) * len(PAIRS) if not packing else rows.num_rows(0))
    with computing_in(model.device, "float32"):
        told = Preference(0.1).loss_sum(model, rows.batch(0, [0, 1]), causal_trunk)[1]
    found = float(told["reward_chosen"].abs() + told["reward_rejected"].abs())
    assert found < 1e-4 and (found == 0 or (len(names) == 2 and packing))


def _again(rows: PairRows) -> PairRows:
    """The same rows, in the same order, without a reference."""
    return PairRows(rows.examples, rows.context, seed=0, pad_id=rows._pad_id)


def test_only_the_answers_count_and_the_prompt_is_the_same(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "say 1", "chosen": " 1 1", "rejected": " no"}) + "\n")
    chosen, rejected = read_pairs(file, tokenizer)
    for example, answer in ((chosen, " 1 1"), (rejected, " no")):
        end = tokenizer.decode(tokenizer.eos_token_ids[:1], skip_special_tokens=False)
        learned = tokenizer.decode(example.ids[example.learned].tolist(), skip_special_tokens=False)
        assert learned == answer + end
    assert tokenizer.decode(chosen.ids[~chosen.learned]) == tokenizer.decode(rejected.ids[~rejected.learned])


def test_an_earlier_answer_of_the_dialog_is_no_preference(tmp_path: Path, smollm2_path: Path) -> None:
    from llamarium.checkpoints.tokenizers import load_tokenizer

    chat = load_tokenizer(str(smollm2_path))
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "an earlier answer"},
        {"role": "user", "content": "Yes?"},
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"messages": messages, "chosen": "Indeed.", "rejected": "Nope."}))
    for example, answer in zip(read_pairs(file, chat), ("Indeed.", "Nope."), strict=True):
        learned = chat.decode(example.ids[example.learned].tolist(), skip_special_tokens=False)
        assert learned.startswith(f"{answer}<|im_end|>") and "earlier" not in learned


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"chosen": "a", "rejected": "b"}, "no words in common at their beginning"),
        ({"prompt": "p", "chosen": "a"}, "expected chosen and rejected"),
        ({"conversations": [], "messages": [], "chosen": "a", "rejected": "b"}, "one of prompt, messages"),
        ({"prompt": "p", "chosen": ["a"], "rejected": "b"}, r"chosen\[0\] is 'a'; expected an object"),
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "the same tokens"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "prompt is 3; expected text"),
        ({"messages": [], "chosen": "a", "rejected": "b"}, "ends with what is to be answered"),
        (
            {"messages": [{"role": "assistant", "content": "x"}], "chosen": "a", "rejected": "b"},
            "ends with what is to be answered",
        ),
        ({"prompt": "p", "system": "s", "chosen": "a", "rejected": "b"}, "is a dialog, and .* has no dialog format"),
    ],
)
def test_lines_that_are_no_pairs(line: dict[str, Any], message: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(PAIRS[0]) + "\n" + json.dumps(line))
    with pytest.raises(TrainingError, match=rf"pairs.jsonl:2: .*{message}"):
        read_pairs(file, tokenizer)


def test_pairs_stay_together_and_those_that_fit_no_row_are_refused(file: Path, tokenizer: Tokenizer) -> None:
    rows = PairRows.from_file(file, tokenizer, 48)
    for epoch in (0, 1):
        for row in range(rows.num_rows(epoch)):
            numbers = rows.examples_of(epoch, [row])
            assert numbers[0::2] == [number - 1 for number in numbers[1::2]]
    train, held_out = rows.split(0.25)
    assert (len(train.examples), len(held_out.examples)) == (18, 6)
    assert (rows.batch(0, [0]).labels_BT != IGNORED).any()
    with pytest.raises(TrainingError, match=r"pairs.jsonl: 12 of 12 pairs are longer than a row of 12 tokens"):
        PairRows.from_file(file, tokenizer, 12)


def test_pairs_are_other_rows_than_dialogs_of_the_same_examples(file: Path, tokenizer: Tokenizer) -> None:
    read = PairRows.from_file(file, tokenizer, 96)
    made = _again(read)
    assert made.fingerprint == read.fingerprint
    assert made.fingerprint != DialogRows(read.examples, 96, seed=0, pad_id=read._pad_id).fingerprint
    assert len({rows.fingerprint for rows in (read, *read.split(0.25), *read.split(0.5))}) == 5


# --- runs -------------------------------------------------------------------------------------------------------------


class KilledError(Exception):
    pass


def preferring(file: Path, tmp_path: Path, model_files: Callable[..., Any], **changes: Any) -> Callable[[], Setup]:
    base = tmp_path / "base"
    if not base.exists():
        model_files(vocab_size=280).huggingface().rename(base)
        train_bpe([json.dumps(PAIRS)], 262).save(base)
    shape = {"steps": 8, "batch_rows": 2, "context": 64, "save_every": 3, "eval_every": 4, "sample_every": 0}
    settings = {
        "learning_rate": 1e-2,
        "validation": 0.25,
        "log_every": 1,
        "warmup_steps": 1,
        "device": "cpu",
        "beta": 2.0,
    }
    config = DPOConfig(model=str(base), data=str(file), **{**shape, **settings, **changes})
    return lambda: prepare(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": 0.2},
        {"method": "full", "learning_rate": 1e-3},
        {"method": "full", "learning_rate": 1e-3, "batch_rows": 5, "seed": 3},
    ],
)
def test_a_run_learns_the_preference_and_resumes_to_the_bit(
    changes: dict[str, Any], file: Path, tmp_path: Path, model_files: Callable[..., Any]
) -> None:
    make = preferring(file, tmp_path, model_files, **changes)
    events: list[Event] = []

    def kill(event: Event) -> None:
        if event["event"] == "step" and event["step"] == 5:
            raise KilledError

    whole = conduct(make, tmp_path / "whole", resume=False, watch=nullcontext(events.append))
    with pytest.raises(KilledError):
        conduct(make, tmp_path / "parts", resume=False, watch=nullcontext(kill))
    parts = conduct(make, tmp_path / "parts", resume=True, watch=nullcontext(lambda event: None))
    name = "model.safetensors" if changes.get("method") == "full" else "adapter_model.safetensors"
    one, other = (load_file(ending.checkpoint / name) for ending in (whole, parts))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)

    steps = [event for event in events if event["event"] == "step"]
    assert steps[0]["loss"] == pytest.approx(math.log(2), rel=1e-6) and steps[0]["reward_margin"] == 0
    assert steps[0]["reward_chosen"] == steps[0]["reward_rejected"] == 0, "the same pass for both"
    assert steps[-1]["loss"] < 0.6 and steps[-1]["reward_accuracy"] == 1.0
    assert steps[-1]["reward_chosen"] - steps[-1]["reward_rejected"] == pytest.approx(
        steps[-1]["reward_margin"], abs=1e-6
    )
    assert [event["reward_accuracy"] for event in events if event["event"] == "validation"][-1] >= 0.5


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_model_and_its_reference_are_the_same_in_the_runs_precision(
    precision: Literal["float32", "bfloat16"], file: Path, tmp_path: Path, model_files: Callable[..., Any]
) -> None:
    setup = preferring(file, tmp_path, model_files, method="full", precision=precision)()
    found = {
        name: measure(setup.model, setup.train, batch_rows=2, precision=name, objective=setup.objective)
        for name in ("float32", "bfloat16")
    }
    margins = {name: evaluation.metrics["reward_margin"] for name, evaluation in found.items()}
    assert margins.pop(precision) == 0 and found[precision].loss == pytest.approx(math.log(2))
    assert all(margin != 0 for margin in margins.values()), "the other precision rounds otherwise"


def test_the_shell_previews_trains_and_refuses(
    file: Path,
    tmp_path: Path,
    model_files: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preferring(file, tmp_path, model_files)
    monkeypatch.chdir(tmp_path)
    words = ["dpo", "--data", str(file), "-m", str(tmp_path / "base"), "--context", "64", "--device", "cpu"]
    assert main([*words, "--preview"]) == 0
    assert "⟦" in capsys.readouterr().out
    more = ["--steps", "2", "--batch-rows", "1", "--sample-every", "0", "--out", str(tmp_path / "run")]
    assert main([*words, *more, "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy"} <= told[-4].keys() | told[1].keys()
    adapter = ["--adapter", str(tmp_path / "run" / "step-00000002")]
    assert main([*words[:3], *adapter, *words[5:], "--preview"]) == 0, "as its base reads the rows"
    assert "⟦" in capsys.readouterr().out
    assert (
        main([*words[:-2], "--device", "cpu", "--steps", "1", "--log-every", "1", "--sample-every", "0", "--out", "r"])
        == 0
    )
    assert "of pairs right, margin 0.000" in capsys.readouterr().err
    smoothed = [
        "--label-smoothing",
        "0.4",
        "--steps",
        "8",
        "--learning-rate",
        "0.1",
        "--batch-rows",
        "2",
        "--beta",
        "2",
    ]
    assert main([*words, *smoothed, "--log-every", "1", "--sample-every", "0", "--json", "--out", "smoothed"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    losses = [event["loss"] for event in told if event["event"] == "step"]
    assert min(losses) > 0.67, "no margin makes the loss lower than the labels' own entropy"
    assert main([*words, "--label-smoothing", "0.6", "--out", "none"]) == 1
    assert "label-smoothing is 0.6" in capsys.readouterr().err
    assert main([*words, "--beta", "0"]) == 1
    assert "beta is 0" in capsys.readouterr().err


def test_answers_that_nothing_stands_before_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "", "chosen": "a", "rejected": "b"}))
    if tokenizer.encode(""):  # a token that begins every text
        assert len(read_pairs(file, tokenizer, chat=False)) == 2
    else:
        with pytest.raises(TrainingError, match=r"pairs.jsonl:1: nothing stands before the answers"):
            read_pairs(file, tokenizer, chat=False)


def test_answers_that_differ_in_blanks_alone_are_the_same_where_the_dialog_format_strips_them(
    tmp_path: Path, llama3_tokenizer_path: Path
) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "p", "chosen": "a", "rejected": "a\n"}))
    with pytest.raises(TrainingError, match=r"pairs.jsonl:1: chosen and rejected are the same tokens"):
        read_pairs(file, load_tokenizer_file(llama3_tokenizer_path))


def test_the_drawing_of_the_loss_is_what_its_script_draws() -> None:
    """Its points are the formula's."""
    script = Path(__file__).parents[2] / "docs/images/dpo.py"
    spec = importlib.util.spec_from_file_location("dpo", script)
    assert spec is not None and spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    assert script.with_suffix(".svg").read_text(encoding="utf-8") == draw.picture()
    for margin, loss, pull in zip(*draw.curves(5), strict=True):
        assert loss == pytest.approx(math.log1p(math.exp(-margin))) and pull == pytest.approx(
            1 / (1 + math.exp(margin))
        )


def test_log_probabilities_of_a_large_vocabulary_are_float64s() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_ND, head_VD = 4 * torch.eye(64)[:8], torch.randn(128_256, 64, generator=generator)
    labels_N = torch.randint(128_256, (8,), generator=generator)
    expected_NV = (hidden_ND.double() @ head_VD.double().T).log_softmax(-1)
    found_N = token_logprobs(hidden_ND, head_VD, labels_N)
    torch.testing.assert_close(found_N.double(), expected_NV.gather(1, labels_N[:, None])[:, 0], rtol=0, atol=4e-6)


def test_log_probabilities_are_rounded_once() -> None:
    """Of logits that float32 subtracts exactly, most of whose P is one token's: there a sum's error would be seen."""
    logits_NV = (512 * torch.randn(64, 20_000, generator=torch.Generator().manual_seed(0))).round() / 1024
    logits_NV[:, 7] = 11
    expected_N = logits_NV.double().log_softmax(-1)[:, 7].float()
    found_N = token_logprobs(torch.eye(64), logits_NV.T.contiguous(), torch.full((64,), 7))
    assert (found_N == expected_N).float().mean() > 0.9
