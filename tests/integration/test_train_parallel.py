"""Two processes on the CPU: what they learn is what one learns, and neither knows the other's files from its own.

The processes are started once and go through all scenarios one after another, as starting takes longer than training.
Each scenario is a function that both run, given its folder; what single processes do is done here, in the tests.
"""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import llamarium
from llamarium.cli.main import main
from llamarium.errors import TrainingError
from llamarium.train.conduct import init_process_group
from llamarium.train.config import PretrainConfig, RunConfig
from llamarium.train.journal import read_journal
from llamarium.train.pretrain import prepare
from llamarium.train.run import run
from llamarium.train.state import checkpoint

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(1000),  # the first test waits for two processes, on a busy machine for long
]
SHAPE = (
    "--preset tiny --hidden-size 32 --intermediate-size 48 --num-hidden-layers 2 --num-attention-heads 4 "
    "--num-key-value-heads 2 --head-dim 8 --context 16"
)
RECIPE = (
    "--steps 6 --batch-rows 4 --gradient-accumulation-steps 2 --warmup-steps 2 --learning-rate 0.01 --device cpu "
    "--log-every 1 --eval-every 3 --eval-rows 5 --save-every 3 --sample-every 0 --precision float32"
)
UNTIED_MUON = "--no-tie-word-embeddings --optimizer muon --checkpoint-activations"
LORA = "--chat-format none --context 32 --rank 4 --steps 4 --save-every 2 --eval-every 4"
FULL = "--method full --chat-format none --context 32 --steps 2"


# --- what both processes do -------------------------------------------------------------------------------------------


def _pretrain(folder: Path, more: str = "") -> int:
    return main(f"pretrain --data {folder}/data.jsonl {SHAPE} {RECIPE} --json {more}".split())


def _finetune(folder: Path, more: str) -> int:
    recipe = f"{RECIPE} --model {folder}/base --data {folder}/examples.jsonl --json"
    return main(f"finetune {recipe} {more}".split())


def _go_on(folder: Path, out: str) -> int:
    """Go on from a model, on a mixture."""
    data = f"{folder}/data.jsonl=1,{folder}/more.txt=3"
    return main(f"pretrain -m {folder}/base --data {data} --context 16 {RECIPE} --json --out {folder}/{out}".split())


def _mixed(folder: Path) -> int:
    return _go_on(folder, "mixed-two")


def _by_twos(folder: Path) -> int:
    return _pretrain(folder, f"--out {folder}/two")


def _by_muon(folder: Path, more: str) -> int:
    """Train by Muon whose matrices are orthogonalised in float32.

    PyTorch's rounds them to bfloat16, by which runs that add up in another order drift apart as far as the processor
    will have it; so nothing could be said of what the division itself changes.
    """
    with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
        return _pretrain(folder, f"{more} {UNTIED_MUON}")


def _divided(folder: Path) -> int:
    return _by_muon(folder, f"--out {folder}/divided --tensor-parallel 2")


def _on_from_one(folder: Path) -> int:
    return _pretrain(folder, f"--out {folder}/from-one --resume")


def _adapters(folder: Path) -> int:
    return _finetune(folder, f"--out {folder}/lora-two {LORA}")


def _full(folder: Path) -> int:
    return _finetune(folder, f"--out {folder}/full-two {FULL}")


def _terminated(folder: Path) -> int:
    """The second process gets SIGTERM after some steps."""
    if os.environ["RANK"] == "1":
        threading.Thread(target=_terminate_later, args=(folder / "stopped",), daemon=True).start()
    return _pretrain(folder, f"--out {folder}/stopped --steps 100000 --eval-every 100000 --save-every 100000")


def _terminate_later(out: Path) -> None:
    while not any(event["event"] == "step" and event["step"] >= 3 for event in read_journal(out / "metrics.jsonl")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def _looked_into(folder: Path) -> int:
    """The weights while they are spread: tied, and half of everything each."""
    for tensor_parallel in (1, 2):
        config = PretrainConfig(
            data=str(folder / "data.jsonl"), preset="tiny", hidden_size=32, num_hidden_layers=1, context=16, steps=2,
            batch_rows=2, device="cpu", save_every=1, eval_every=1, tensor_parallel=tensor_parallel,
            sample_every=1,
        )  # fmt: skip
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + tensor_parallel - 1)
        out = folder / f"looked-into-{tensor_parallel}"
        with init_process_group(config) as process_group:
            setup = process_group.rank_zero_first(lambda: prepare(config, out, process_group=process_group))  # noqa: B023 - called at once
            run(setup, out, resume=False, emit=lambda event: None)
        model = setup.model
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert isinstance(model.lm_head.weight, DTensor)
        parts = {key: p.to_local().numel() / p.numel() for key, p in model.named_parameters()}  # type: ignore[operator]
        assert parts["model.layers.0.self_attn.q_proj.weight"] == parts["model.layers.0.mlp.down_proj.weight"] == 0.5
        assert parts["model.norm.weight"] == (0.5 if tensor_parallel == 1 else 1)
    return 0


def _uneven(folder: Path) -> int:
    return _pretrain(folder, f"--out {folder}/uneven --batch-rows 3")


def _three_of_two(folder: Path) -> int:
    return _pretrain(folder, f"--out {folder}/three --tensor-parallel 3")


def _compiled(folder: Path) -> int:
    return _pretrain(folder, f"--out {folder}/compiled --compile")


def _undivided_heads(folder: Path) -> int:
    return _pretrain(
        folder, f"--out {folder}/heads --tensor-parallel 2 --num-attention-heads 3 --num-key-value-heads 3"
    )


def _other_data(folder: Path) -> int:
    mine = folder / f"mine-{os.environ['RANK']}"
    mine.mkdir()
    (mine / "data.jsonl").write_text(json.dumps({"text": os.environ["RANK"] + "abcd" * 100}))
    return _pretrain(mine, f"--out {folder}/other")


def _rank_zero_fails(folder: Path) -> int:
    return _pretrain(folder / "missing" if os.environ["RANK"] == "0" else folder, f"--out {folder}/failed")


def _cannot_save(folder: Path) -> int:
    """The disk refuses what the first process writes."""
    words = f"--out {folder / 'full-disk'}"
    if os.environ["RANK"] != "0":
        return _pretrain(folder, words)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch.object(checkpoint, "_seal", side_effect=full):
        return _pretrain(folder, words)


SCENARIOS: list[Callable[[Path], int]] = [
    _by_twos, _mixed, _divided, _on_from_one, _adapters, _full, _terminated, _looked_into, _uneven, _three_of_two,
    _compiled, _undivided_heads, _other_data, _rank_zero_fails, _cannot_save,
]  # fmt: skip


def _work(folder: Path, first_port: int) -> None:
    """Go through the scenarios; how each ended is written into a file of this process."""
    torch.set_num_threads(1)
    ended = {}
    for number, scenario in enumerate(SCENARIOS):
        os.environ["MASTER_PORT"] = str(first_port + 2 * number)
        print(f"--- {scenario.__name__}", file=sys.stderr, flush=True)
        ended[scenario.__name__] = scenario(folder)
    (folder / f"ended-{os.environ['RANK']}.json").write_text(json.dumps(ended))


# --- the tests --------------------------------------------------------------------------------------------------------


class Both:
    """What the two processes have left.

    Attributes:
        folder: With all runs.
        codes: Exit codes by scenario, of both.
        said: What each wrote to stderr, by scenario.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ended = [json.loads((folder / f"ended-{rank}.json").read_text()) for rank in range(2)]
        self.codes = {name: (ended[0][name], ended[1][name]) for name in ended[0]}
        self.said = {
            name: [
                (folder / f"stderr-{rank}").read_text().partition(f"--- {name}\n")[2].partition("---")[0]
                for rank in (0, 1)
            ]
            for name in ended[0]
        }


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp("two")
    _make_data(folder)
    assert _pretrain(folder, f"--out {folder}/one") == 0
    bpe = f"--out {folder}/base-run --tokenizer bpe --vocab-size 262 --context 32 --steps 1 --warmup-steps 1"
    assert _pretrain(folder, bpe) == 0  # characters lack an end-of-text token, with which answers end
    shutil.copytree(folder / "base-run/step-00000001", folder / "base")
    shutil.copytree(folder / "one", folder / "from-one", symlinks=True)
    shutil.rmtree(folder / "from-one/step-00000006")
    port = _free_ports(2 * len(SCENARIOS))
    processes = []
    for rank in range(2):
        env = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with (folder / f"stdout-{rank}").open("w") as out, (folder / f"stderr-{rank}").open("w") as err:
            command = [sys.executable, __file__, str(folder), str(port)]
            processes.append(subprocess.Popen(command, env=env, stdout=out, stderr=err))
    try:
        codes = [process.wait(timeout=900) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "\n".join((folder / f"stderr-{rank}").read_text()[-3000:] for rank in (0, 1))
    return Both(folder)


def test_losses_and_norms_are_those_of_one_process(both: Both) -> None:
    """With accumulation, rows of unequal numbers of learned tokens, and a validation whose last batch is one row."""
    assert both.codes["_by_twos"] == (0, 0)
    _expect_same_history(both.folder / "one", both.folder / "two", 6)
    _expect_close(both.folder / "one", both.folder / "two", "step-00000006/model.safetensors")


def test_two_go_on_from_a_model_on_a_mixture(both: Both) -> None:
    assert both.codes["_mixed"] == (0, 0) and _go_on(both.folder, "mixed-one") == 0
    _expect_same_history(both.folder / "mixed-one", both.folder / "mixed-two", 6)
    _expect_close(both.folder / "mixed-one", both.folder / "mixed-two", "step-00000006/model.safetensors")


def test_the_data_has_rows_of_unequal_learned_tokens(both: Both) -> None:
    config = PretrainConfig(data=str(both.folder / "data.jsonl"), preset="tiny", context=16, device="cpu")
    rows = prepare(config, both.folder / "looked-at").train
    assert len({rows.batch(0, [i]).num_learned for i in range(8)}) > 1


def test_divided_matrices_learn_the_same(both: Both) -> None:
    assert both.codes["_divided"] == (0, 0)
    assert _by_muon(both.folder, f"--out {both.folder}/undivided") == 0
    _expect_same_history(both.folder / "undivided", both.folder / "divided", 6)
    _expect_close(both.folder / "undivided", both.folder / "divided", "step-00000006/model.safetensors")


def test_two_go_on_from_the_checkpoint_of_one(both: Both) -> None:
    assert both.codes["_on_from_one"] == (0, 0)
    _expect_same_history(both.folder / "one", both.folder / "from-one", 6)


@pytest.mark.parametrize("name", ["two", "divided"])
def test_one_goes_on_from_the_checkpoint_of_two(both: Both, name: str) -> None:
    out = both.folder / f"{name}-alone"
    shutil.copytree(both.folder / name, out, symlinks=True)
    shutil.rmtree(out / "step-00000006")
    if name == "divided":
        assert _by_muon(both.folder, f"--out {out} --resume --tensor-parallel 1") == 0
    else:
        assert _pretrain(both.folder, f"--out {out} --resume") == 0
    _expect_same_history(both.folder / name, out, 6)


def test_what_two_have_saved_is_a_model(both: Both) -> None:
    one, two = (
        llamarium.load(both.folder / name / "best", dtype="float32", device="cpu").model for name in ("one", "two")
    )
    ids = torch.arange(8).unsqueeze(0)
    torch.testing.assert_close(one(ids), two(ids), rtol=1e-4, atol=1e-5)
    assert two.lm_head.weight.data_ptr() == two.model.embed_tokens.weight.data_ptr()
    assert "lm_head.weight" not in load_file(both.folder / "two/best/model.safetensors")
    files = [
        {str(path.relative_to(both.folder / name)) for path in (both.folder / name).rglob("*")}
        for name in ("one", "two")
    ]
    assert files[0] == files[1]


def test_tied_weights_stay_tied_and_each_has_half(both: Both) -> None:
    assert both.codes["_looked_into"] == (0, 0)


def test_adapters_and_full_finetuning_learn_the_same(both: Both) -> None:
    assert both.codes["_adapters"] == both.codes["_full"] == (0, 0)
    assert _finetune(both.folder, f"--out {both.folder}/lora-one {LORA}") == 0
    assert _finetune(both.folder, f"--out {both.folder}/full-one {FULL}") == 0
    _expect_same_history(both.folder / "lora-one", both.folder / "lora-two", 4)
    _expect_same_history(both.folder / "full-one", both.folder / "full-two", 2)
    _expect_close(both.folder / "lora-one", both.folder / "lora-two", "step-00000004/adapter_model.safetensors")
    shutil.rmtree(both.folder / "lora-two/step-00000004")
    assert _finetune(both.folder, f"--out {both.folder}/lora-two --resume {LORA}") == 0
    _expect_same_history(both.folder / "lora-one", both.folder / "lora-two", 4)


def test_sigterm_to_one_ends_both_with_a_checkpoint(both: Both) -> None:
    assert both.codes["_terminated"] == (143, 143)
    *_, saved, end = read_journal(both.folder / "stopped/metrics.jsonl")
    assert (end["event"], end["signal"], saved["event"]) == ("end", signal.SIGTERM, "saved")
    assert 3 <= end["step"] == saved["step"] < 100000
    out, steps = both.folder / "stopped", f"--steps {end['step'] + 1} --allow-changes"
    assert _pretrain(both.folder, f"--out {out} --resume {steps}") == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("_uneven", ["--batch-rows is 3; expected a multiple of the 2 shards"] * 2),
        ("_three_of_two", ["2 processes cannot form groups of tensor_parallel 3"] * 2),
        ("_compiled", ["compile is for one device"] * 2),
        ("_undivided_heads", ["num_attention_heads 3 is no multiple"] * 2),
        ("_other_data", ["see different data"] * 2),
        ("_rank_zero_fails", ["missing/data.jsonl", "another process of this run has failed"]),
        ("_cannot_save", ["cannot be written", "another process of this run has failed"]),
    ],
)
def test_what_fails_on_one_ends_both(both: Both, name: str, said: list[str]) -> None:
    assert both.codes[name] == (1, 1)
    for found, expected in zip(both.said[name], said, strict=True):
        assert expected in found


def test_dividing_among_one_is_refused() -> None:
    with (
        pytest.raises(TrainingError, match="torchrun --nproc-per-node 2"),
        init_process_group(RunConfig(tensor_parallel=2)),
    ):
        pass


# --- helpers ----------------------------------------------------------------------------------------------------------


def _make_data(folder: Path) -> None:
    texts = [f"{i} sheep " + "jump over the fence " * (i % 4) + "and sleep." for i in range(60)]
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "more.txt").write_text("".join(f"{i} more sheep jump.\n" for i in range(60)))
    examples = [{"prompt": f"{i} sheep", "completion": "sleep over " * (1 + i % 2)} for i in range(48)]
    (folder / "examples.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))


def _free_ports(count: int) -> int:
    """Return the first of so many ports in a row that nobody listens at."""
    for first in range(20000 + os.getpid() % 10000, 60000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def _history(run: Path) -> list[dict[str, Any]]:
    return [event for event in read_journal(run / "metrics.jsonl") if event["event"] in ("step", "validation")]


def _expect_same_history(one: Path, two: Path, num_steps: int, rtol: float = 1e-5) -> None:
    first, second = _history(one), _history(two)
    assert sum(event["event"] == "step" for event in first) == num_steps
    assert len(first) == len(second)
    for left, right in zip(first, second, strict=True):
        for name in ("event", "step", "num_tokens", "epoch", "learning_rate", "best"):
            assert left.get(name) == right.get(name)
        for name in ("loss", "grad_norm"):
            assert left.get(name, 0) == pytest.approx(right.get(name, 0), rel=rtol)


def _expect_close(one: Path, two: Path, file: str, atol: float = 1e-5) -> None:
    first, second = load_file(one / file), load_file(two / file)
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        torch.testing.assert_close(tensor, second[key], rtol=1e-4, atol=atol)


if __name__ == "__main__":
    _work(Path(sys.argv[1]), int(sys.argv[2]))
