"""The model in the package: small, ours, and as good as its card says."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import llamarium
from llamarium.cost import count_parameters
from llamarium.datasets.sources import read_documents
from llamarium.hub.resolve import PACKAGED, packaged_path

pytestmark = pytest.mark.torch

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "shakespeare-char.jsonl"


@pytest.fixture(scope="module")
def llama() -> llamarium.Llama:
    return llamarium.load("shakespeare-char", dtype="float32", device="cpu")


def test_it_is_small_and_has_a_card(llama: llamarium.Llama) -> None:
    assert list(PACKAGED) == ["shakespeare-char", "letters"]
    folder = packaged_path("shakespeare-char")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 8_000_000
    card = (folder / "README.md").read_text()
    assert f"{count_parameters(llama.config).total:,} parameters" in card


def test_a_run_is_its_last_checkpoint() -> None:
    llama = llamarium.load("letters", device="cpu")
    assert packaged_path("letters").name == "step-00002000"
    card = (packaged_path("letters").parent / "README.md").read_text()
    assert f"{count_parameters(llama.config).total:,} parameters" in card


def test_the_card_tells_the_run_that_was_recorded() -> None:
    card = (packaged_path("shakespeare-char") / "README.md").read_text()
    events = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    losses = {event["step"]: event["loss"] for event in events if event["event"] == "validation"}
    best = min(losses, key=lambda step: losses[step])
    assert best == 1500 and f"**{losses[best]:.4f}** nats" in card
    for step, loss in losses.items():
        assert f"{loss:.4f}" in next(
            line for line in card.splitlines() if line.strip("|* ").startswith(f"{step} ") or f"**{step}**" in line
        )
    start = events[0]["settings"]
    for flag, name in (
        ("--learning-rate 4e-3", "learning_rate"),
        ("--muon-learning-rate 1e-2", "muon_learning_rate"),
        ("--weight-decay 0.3", "weight_decay"),
    ):
        assert flag in card and float(flag.split()[1]) == start[name]


def test_it_knows_english_of_that_time(llama: llamarium.Llama) -> None:
    score = llama.score("What say you to the king, my lord?\nI will not speak of it, nor shall he know.\n")
    assert score.perplexity < 5.5  # 65 would be a guess


@torch.no_grad()
def test_its_validation_loss_is_the_cards(llama: llamarium.Llama) -> None:
    ids = torch.tensor(llama.encode(next(read_documents("shakespeare"))))
    held_out = ids[int(0.9 * len(ids)) :]
    rows_BU = held_out.unfold(0, 257, 256)
    assert len(rows_BU) == 435  # all of which give the card's 1.4132, in half a minute
    rows_BU = rows_BU[::7]
    logits_BTV = llama.model(rows_BU[:, :-1].contiguous())
    loss = F.cross_entropy(logits_BTV.flatten(0, 1), rows_BU[:, 1:].flatten())
    assert float(loss) == pytest.approx(1.4397, abs=2e-4)
