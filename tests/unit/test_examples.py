"""Examples of a data set: weights in the loss, cut examples, and lengths of runs in epochs and tokens."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import llamarium
from llamarium.cli.main import main
from llamarium.datasets.rows import Reading
from llamarium.errors import TrainingError
from llamarium.tokenizer.backends.characters import CharacterBackend
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.special import SpecialTokens
from llamarium.train.config import FinetuneConfig, GRPOConfig, PretrainConfig
from llamarium.train.data.batch import IGNORED, join
from llamarium.train.data.dialog_rows import DialogRows
from llamarium.train.data.dialogs import Example, read_dialogs
from llamarium.train.data.pairs import PairRows, read_pairs
from llamarium.train.data.prompts import PromptRows
from llamarium.train.data.survey import survey
from llamarium.train.objectives.cross_entropy import cross_entropy_sum
from llamarium.train.setup import with_steps

pytestmark = pytest.mark.torch

CHARACTERS = [chr(c) for c in range(32, 127)] + ["\n"]


@pytest.fixture
def chatml() -> Tokenizer:
    """Characters with ChatML's control tokens."""
    names = ["<|im_start|>", "<|im_end|>"]
    special = SpecialTokens(ids={name: 96 + i for i, name in enumerate(names)}, eos=(97,))
    backend = CharacterBackend([*CHARACTERS, "\ue000", "\ue001"], "characters")
    return Tokenizer(backend, special, vocab_size=98, source="characters")


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(answer: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer, **more}]


def test_weights_of_messages_and_rows(chatml: Tokenizer, tmp_path: Path) -> None:
    rows = [
        {"messages": [*asked("aa", weight=0.5), *asked("bbb"), *asked("c", train=False)]},
        {"messages": asked("dd"), "weight": 2},
        {"prompt": "q", "completion": "e"},
    ]
    weighted, doubled, plain = read_dialogs(write(tmp_path / "a.jsonl", *rows), chatml)
    assert weighted.weights is not None and doubled.weights is not None and plain.weights is None
    assert weighted.weights[weighted.learned].tolist() == [0.5] * 3 + [1.0] * 4
    assert doubled.weights[doubled.learned].tolist() == [2.0] * 3
    batch = DialogRows([weighted, doubled, plain], 256, seed=None).batch(0, [0])
    assert batch.weights_BT is not None
    assert batch.weights_BT[batch.labels_BT != IGNORED].tolist() == [0.5] * 3 + [1.0] * 4 + [2.0] * 3 + [1.0] * 2
    assert (batch.sum_of_weights, batch.num_learned) == (13.5, 12)
    assert DialogRows([plain], 256).batch(0, [0]).weights_BT is None
    both = join([batch, DialogRows([plain], 256).batch(0, [0])])
    assert both.weights_BT is not None and both.sum_of_weights == 15.5


def test_the_weighted_loss_and_its_gradient_are_the_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 8, generator=generator, requires_grad=True)
    head = torch.randn(11, 8, generator=generator, requires_grad=True)
    labels, weights = torch.arange(9), torch.rand(9, generator=generator)
    labels[2] = IGNORED
    found = cross_entropy_sum(hidden, head, labels, weights)
    each = F.cross_entropy(hidden @ head.T, labels, ignore_index=IGNORED, reduction="none")
    torch.testing.assert_close(found, (each * weights).sum())
    expected = torch.autograd.grad((each * weights).sum(), (hidden, head))
    for one, other in zip(torch.autograd.grad(found, (hidden, head)), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_bad_rows_are_skipped_wherever_they_turn_out_bad(chatml: Tokenizer, tmp_path: Path) -> None:
    good = {"messages": asked("a")}
    path = write(tmp_path / "a.jsonl", good, {"messages": [{"role": "king", "content": "x"}]}, good, {"a": 1}, good)
    with pytest.raises(TrainingError, match=r"a\.jsonl:2: messages\[0\].role is 'king'"):
        read_dialogs(path, chatml)
    with pytest.warns(UserWarning, match=r"2 of 5 rows skipped: .*a\.jsonl:[24]"):
        assert len(read_dialogs(path, chatml, reading=Reading(skip_bad=True))) == 3
    with pytest.raises(TrainingError, match=r"holds no example: .*b\.jsonl:1: has the keys"):
        read_dialogs(write(tmp_path / "b.jsonl", {"a": 1}), chatml, reading=Reading(skip_bad=True))


def test_examples_are_cut_where_it_is_asked_for() -> None:
    long = Example(np.arange(20, dtype=np.int32), np.arange(20) >= 15, weights=np.arange(20, dtype=np.float32))
    short = Example(np.arange(5, dtype=np.int32), np.arange(5) > 2)
    with pytest.warns(UserWarning, match="1 of 2 examples .* lose their beginning"):
        kept = DialogRows([long, short], 10, truncate="keep-end").examples
    assert kept[0].ids.tolist() == list(range(9, 20)) and int(kept[0].learned.sum()) == 5
    assert kept[0].weights is not None and kept[0].weights.tolist() == list(range(9, 20))
    with pytest.warns(UserWarning, match="lose their end, and 1 of them, with nothing left to learn, are left out"):
        assert DialogRows([long, short], 10, truncate="keep-start").examples == [short]


def test_both_answers_of_a_pair_lose_the_same_beginning() -> None:
    """The prompt is 0 to 11; what is learned stays whole, after the same rest of the prompt."""
    prompt = np.arange(12, dtype=np.int32)
    chosen, rejected = np.append(prompt, [50, 51, 52]).astype(np.int32), np.append(prompt, 60).astype(np.int32)
    pair = [Example(ids, np.arange(len(ids)) >= 12) for ids in (chosen, rejected)]
    with pytest.warns(UserWarning, match="1 of 1 pair .* lose their beginning$"):
        kept = PairRows(pair, 13, truncate="keep-end").examples  # 14 and 12 share a row of 13: each loses 7
    assert [part.ids.tolist() for part in kept] == [[*range(7, 12), 50, 51, 52], [*range(7, 12), 60]]
    assert [part.ids[part.learned].tolist() for part in kept] == [[50, 51, 52], [60]]
    with pytest.warns(UserWarning, match="lose their beginning$"):
        assert [part.ids[0] for part in PairRows(pair, 4, truncate="keep-end").examples] == [11, 11]
    fits = [Example(np.array([0, answer], np.int32), np.array([False, True])) for answer in (50, 60)]
    with pytest.warns(UserWarning, match="and 1 of them, .* are left out"):  # 12 were lost, and the prompt with them
        kept = PairRows([*pair, *fits], 3, truncate="keep-end").examples
    assert [part.ids.tolist() for part in kept] == [[0, 50], [0, 60]]


def test_the_ends_of_a_pair_are_cut_alone() -> None:
    long = Example(np.arange(20, dtype=np.int32), np.arange(20) >= 3)
    short = Example(np.array([0, 1, 2, 90, 91], dtype=np.int32), np.arange(5) > 2)
    with pytest.warns(UserWarning, match="lose their end$"):
        pair = PairRows([long, short], 14, truncate="keep-start").examples
    assert [part.ids.tolist() for part in pair] == [[*range(11)], [0, 1, 2, 90, 91]]


def test_prompts_lose_their_beginning(chatml: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "x" * 50}, {"question": "y"})
    how: Any = {"chat": False, "reading": Reading.parse("prompt=question")}
    with pytest.warns(UserWarning, match="1 of 2 prompts .* lose their beginning"):
        rows = PromptRows.from_file(path, chatml, 20, 8, truncate="keep-end", **how)
    assert [len(prompt.ids) for prompt in rows.prompts] == [12, 1] and rows.prompts[1].row == {"prompt": "y"}
    with pytest.raises(TrainingError, match="no room for an answer"):
        PromptRows.from_file(path, chatml, 20, 8, truncate="error", **how)
    with pytest.raises(TrainingError, match="keep-start"):
        PromptRows.from_file(path, chatml, 200, 8, truncate="keep-start", **how)


def test_epochs_and_tokens_are_steps() -> None:
    examples = [Example(np.arange(9, dtype=np.int32), np.arange(9) > 3)] * 20
    rows: Any = DialogRows(examples, 8)
    assert rows.num_rows(0) == 20
    for given, steps in (({"epochs": 2}, 10), ({"epochs": 0.3}, 2), ({"tokens": 65}, 3), ({"steps": 7}, 7)):
        found = with_steps(FinetuneConfig(data="a", batch_rows=4, **given), rows)
        assert (found.steps, found.epochs, found.tokens) == (steps, None, None)
    assert with_steps(GRPOConfig(data="a", reward="exact", epochs=1, group_size=8, batch_rows=16), rows).steps == 3
    for epochs in (10, 12.5, 1e6):
        assert with_steps(FinetuneConfig(data="a", batch_rows=4, epochs=epochs), rows).steps == math.ceil(5 * epochs)
    for given in ({"epochs": 1, "steps": 5}, {"epochs": 1, "tokens": 5}):
        with pytest.raises(TrainingError, match="expected one of steps, epochs, tokens"):
            PretrainConfig(**given)  # pyright: ignore[reportArgumentType]


def test_many_epochs_are_counted_by_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows are counted as they are trained on, and a million epochs pack no more than ten."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(3, 40, 60).tolist()
    rows = DialogRows([Example(np.arange(n, dtype=np.int32), np.arange(n) > 1) for n in lengths], 48)
    counts = [rows.num_rows(epoch) for epoch in range(10)]
    assert len({*counts}) > 1
    packed: list[int] = []
    count = DialogRows.num_rows
    monkeypatch.setattr(DialogRows, "num_rows", lambda rows, epoch: packed.append(epoch) or count(rows, epoch))

    def steps(epochs: float) -> int:
        return with_steps(FinetuneConfig(data="a", batch_rows=1, epochs=epochs), rows).steps

    assert [steps(epochs) for epochs in range(1, 11)] == np.cumsum(counts).tolist()
    assert steps(2.5) == math.ceil(sum(counts[:2]) + counts[2] / 2)
    packed.clear()
    assert steps(1e6) == sum(counts) * 10**5 and len(packed) == 10


def test_a_flag_takes_the_place_of_a_files_length(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text('data = "a"\nsteps = 30\ntoo_long = "drop"\n')
    found = FinetuneConfig.resolve(file, {"epochs": 2.0})
    assert (found.epochs, found.steps, found.truncate) == (2.0, FinetuneConfig.default("steps"), "drop")
    assert FinetuneConfig.resolve(file, {}).steps == 30
    assert FinetuneConfig.resolve(file, {}).differences({"data": "a", "steps": 30, "too_long": "drop"}) == []


def test_rows_of_python_are_trained_on(tmp_path: Path) -> None:
    rows = [{"text": f"{name}:"} for name in ("ROMEO", "JULIET", "PARIS", "PETER", "TYBALT", "SAMPSON")]
    how: Any = {
        "model": "shakespeare-char", "method": "full", "chat_format": "none", "context": 16, "batch_rows": 4,
        "validation": 0, "sample_every": 0, "precision": "float32", "threads": 1, "epochs": 1, "packing": False,
    }  # fmt: skip
    ended = llamarium.finetune(tmp_path / "rows", data=(row for row in rows), **how)
    file = llamarium.finetune(tmp_path / "file", data=str(write(tmp_path / "a.jsonl", *rows)), **how)
    assert ended.position.step == file.position.step == 2
    weights = [folder.checkpoint / "model.safetensors" for folder in (ended, file)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    with pytest.raises(TrainingError, match="rows of Python, which are not kept"):
        llamarium.finetune(tmp_path / "rows", resume=True, allow_changes=True, steps=3)


def test_data_shows_what_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    pair = {"question": "q", "chosen": "good", "rejected": "bad", "id": 3}
    path = write(tmp_path / "pairs.jsonl", pair, pair, {"question": "q"})
    command = ["data", str(path), "-m", "smollm2-135m", "--columns", "prompt=question"]
    assert main(command) == 1
    shown = capsys.readouterr().out
    assert "2 of 3 can be used by dpo" in shown and "id 4" not in shown and "id 2" in shown
    wrapped_anywhere = "".join(shown.split())
    assert "pairs.jsonl:2,rejected" in wrapped_anywhere, "pairs are shown whole, and named"
    assert "⟦good<|im_end|>⟧" in shown and "⟦bad<|im_end|>⟧" in shown and "pairs.jsonl:3:" in wrapped_anywhere
    assert max(map(len, shown.splitlines())) <= 80 and "\x1b" not in shown
    assert main([*command, "--json", "--skip-bad", "--context", "10"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert (counts["rows"], counts["bad_rows"], counts["not_read"], counts["longer"]) == (3, 1, {"id": 2}, 2)
    assert counts["problems"][0]["place"].endswith(":3") and counts["purpose"] == "dpo"


@pytest.mark.parametrize("kind", ["finetune", "dpo", "grpo"])
def test_too_long_is_what_training_finds_too_long(
    chatml: Tokenizer, tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row: dict[str, Any] = {"prompt": "q" * 20}
    row |= {"finetune": {"completion": "a"}, "dpo": {"chosen": "aa", "rejected": "b"}, "grpo": {}}[kind]
    path = write(tmp_path / "a.jsonl", row)

    def fits(context: int) -> bool:
        how: Any = {"truncate": "error"}
        make: Any = {"finetune": DialogRows, "dpo": PairRows, "grpo": PromptRows}[kind]
        try:
            make.from_file(path, chatml, context, *([7] if kind == "grpo" else []), chat=True, **how)
        except TrainingError:
            return False
        return True

    found = survey(str(path), chatml, purpose=kind)
    shortest = next(context for context in range(8, 200) if fits(context))
    assert [found.num_longer(context, 7) for context in (shortest - 1, shortest)] == [1, 0] and found.num_units == 1

    monkeypatch.setattr("llamarium.checkpoints.tokenizers.load_tokenizer", lambda _: chatml)
    room = ["--max-tokens", "7"] if kind == "grpo" else []
    for context in (shortest - 1, shortest):
        assert main(["data", str(path), "--for", kind, "--context", str(context), *room, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["longer"] == (context < shortest)
    if not room:
        assert main(["data", str(path), "--for", kind, "--max-tokens", "7"]) == 2, "it has no effect there"


def test_problems_come_in_the_order_of_the_rows(chatml: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b"}, {"other": 1})
    path.write_text(path.read_text() + 'no JSON\n{"messages": 3}\n')
    found = survey(str(path), chatml, purpose="finetune")
    assert [bad.place.rpartition(":")[2] for bad in found.tally.problems] == ["2", "3", "4"]
    with pytest.raises(TrainingError, match=r"a\.jsonl:2: .*skip_bad"):
        read_dialogs(path, chatml)


@pytest.mark.parametrize(
    ("lines", "purpose", "usable"),
    [
        ("no JSON\nnor this\n", "finetune", 0),
        ('{"prompt": "a", "completion": "b", "weight": -1}\n' * 3, "finetune", 0),
        (
            '{"prompt": "a", "completion": "b", "weight": -1}\n{"prompt": "a", "chosen": "b", "rejected": "c"}\n',
            "dpo",
            1,
        ),
        ("no JSON\n" * 1000 + '{"prompt": "a", "chosen": "b", "rejected": "c"}\n', "dpo", 1),
        ('{"prompt": ""}\n{"prompt": "a"}\n', "grpo", 2),
        ("", "finetune", 0),
    ],
)
def test_a_data_set_is_for_the_command_that_can_use_its_first_good_row(
    chatml: Tokenizer, tmp_path: Path, lines: str, purpose: str, usable: int
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines)
    found = survey(str(path), chatml)
    assert (found.purpose, found.tally.num_rows - found.tally.num_skipped) == (purpose, usable)


def test_why_no_row_can_be_used_is_what_most_of_them_lack(chatml: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[{"messages": asked("b")}] * 4)
    path.write_text("no JSON\n" + path.read_text())
    with pytest.raises(TrainingError, match=r"a\.jsonl:2: .*expected chosen and rejected.*1 more") as caught:
        read_pairs(path, chatml, reading=Reading(skip_bad=True))
    assert "no JSON" not in str(caught.value)
    empty, unweighted = write(tmp_path / "empty.jsonl"), write(tmp_path / "0.jsonl", {"text": "a", "weight": 0})
    for source, why in ((empty, "expected a JSON object"), (unweighted, "weight 0")):
        with pytest.raises(TrainingError, match=f"holds no example.*{why}"):
            read_dialogs(source, chatml)


def test_data_without_a_row_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", str(write(tmp_path / "empty.jsonl")), "-m", "shakespeare-char", "--skip-bad"]) == 1
    assert "0 of 0" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--rows", "--context", "--max-tokens"])
@pytest.mark.parametrize("value", ["-1", "0"])
def test_numbers_out_of_range_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "a.jsonl", f"{option}={value}"]) == 2
    assert option in capsys.readouterr().err
    with pytest.raises(TrainingError, match="max_rows is 0"):
        survey("a.jsonl", None, max_rows=0)  # pyright: ignore[reportArgumentType]
