"""Perplexity through a sliding window: against transformers window by window, against `score`, and from the shell."""

import io
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM as TransformersLlama

import llamarium
from llamarium.cli.main import main
from llamarium.errors import InputError, LlamariumError
from llamarium.inspect import forward
from llamarium.inspect.measures.perplexity import windows
from llamarium.inspect.numbers import as_array
from llamarium.tokenizer import pieces as pieces_module
from llamarium.train.data.bpe import train_bpe

pytestmark = pytest.mark.torch

TEXT = "".join(random.Random(7).choices("abc d\ne\u00e9", k=150)) + "\n"


@pytest.fixture
def folder(model_files: Callable[..., Any]) -> Path:
    """A random model whose vocabulary fits the text: bytes, a few merges, and BOS before every text."""
    tokenizer = train_bpe([TEXT], 264)
    assert tokenizer.bos_token_id is not None and tokenizer.special.add_bos
    files = model_files(
        vocab_size=tokenizer.vocab_size,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_ids,
        max_position_embeddings=512,
    )
    folder: Path = files.huggingface()
    tokenizer.save(folder)
    return folder


@pytest.fixture
def llama(folder: Path) -> llamarium.Llama:
    return llamarium.load(folder, dtype="float32", device="cpu")


@pytest.fixture
def theirs(folder: Path) -> TransformersLlama:
    return TransformersLlama.from_pretrained(folder, dtype=torch.float32)


def as_the_guide_does(model: TransformersLlama, ids: list[int], context: int, stride: int) -> tuple[float, int]:
    """The loop of "Perplexity of fixed-length models": summed loss and number of labels."""
    nats, count, previous_end = 0.0, 0, 0
    ids_1T = torch.tensor([ids])
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        labels = ids_1T[:, begin:end].clone()
        labels[:, : -(end - previous_end)] = -100
        num_labels = int((labels[:, 1:] != -100).sum())
        with torch.inference_mode():
            nats += float(model(ids_1T[:, begin:end], labels=labels).loss) * num_labels
        count += num_labels
        previous_end = end
        if end == len(ids):
            return nats, count
    raise AssertionError


@pytest.mark.parametrize(("context", "stride"), [(16, 8), (16, 15), (16, 1), (33, 7), (512, 100)])
def test_it_is_what_transformers_gives_window_by_window(
    llama: llamarium.Llama, theirs: TransformersLlama, context: int, stride: int
):
    found = llama.perplexity(TEXT, context=context, stride=stride)
    ids = llama.tokenizer.encode(TEXT)
    nats, count = as_the_guide_does(theirs, ids, context, stride)
    assert found.num_tokens == count == len(ids) - 1
    assert found.nats == pytest.approx(nats, rel=2e-6)
    assert found.perplexity == pytest.approx(math.exp(nats / count), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / len(TEXT.encode()), rel=1e-5)
    assert (found.context, found.stride, found.bos) == (context, stride, True)


@pytest.mark.parametrize("context", [2, 16, 33])
def test_windows_side_by_side_share_one_token(llama: llamarium.Llama, theirs: TransformersLlama, context: int) -> None:
    found = llama.perplexity(TEXT, context=context, stride=context)
    ids, nats, end = llama.tokenizer.encode(TEXT), 0.0, 1
    while end < len(ids):
        begin, end = end, min(end + context - (end == 1), len(ids))
        with torch.inference_mode():
            logits = theirs(torch.tensor([ids[begin - 1 : end - 1]])).logits[0]
        nats -= float(logits.log_softmax(-1)[range(end - begin), ids[begin:end]].sum())
    assert found.nats == pytest.approx(nats, rel=2e-6)
    assert (found.num_tokens, found.stride) == (len(ids) - 1, context)


def test_a_text_of_one_window_has_the_perplexity_of_score(llama: llamarium.Llama):
    found = llama.perplexity(TEXT)
    assert found.perplexity == pytest.approx(llama.score(TEXT).perplexity, rel=1e-6)  # not summed in the same order
    assert (found.context, found.stride, found.num_windows) == (512, 256, 1)


def test_less_context_is_less_to_look_at(llama: llamarium.Llama):
    assert llama.perplexity(TEXT, context=8, stride=4).nats != llama.perplexity(TEXT, context=16, stride=8).nats


@settings(deadline=None, max_examples=200)
@given(st.integers(2, 60), st.integers(2, 20), st.data())
def test_every_token_is_scored_once_with_enough_before_it(num_tokens: int, context: int, data: st.DataObject):
    stride = data.draw(st.integers(1, context))
    scored: list[int] = []
    for window in windows(num_tokens, context, stride):
        assert window.end - 1 - window.begin <= context, "its last token is not read"
        for token in range(window.first, window.end):
            assert token - window.begin >= max(1, min(context - stride, token))
        scored += range(window.first, window.end)
    assert scored == list(range(1, num_tokens))


def test_memory_does_not_grow_with_the_text(llama: llamarium.Llama, monkeypatch: pytest.MonkeyPatch):
    whole = llama.perplexity(TEXT)
    rows: list[int] = []
    monkeypatch.setattr(forward, "CHUNK_BYTES", 5 * 4 * llama.config.vocab_size)
    monkeypatch.setattr(pieces_module, "_PIECE_CHARACTERS", 30)
    monkeypatch.setattr(forward, "as_array", lambda logits: rows.append(len(logits)) or as_array(logits))
    assert llama.perplexity(TEXT).nats == pytest.approx(whole.nats, rel=1e-6)
    assert max(rows) == 5 and sum(rows) == whole.num_tokens


def test_bos_is_put_once_and_not_scored(llama: llamarium.Llama):
    found = llama.perplexity("a", context=2)
    assert (found.num_tokens, found.num_bytes, found.bos, found.stride) == (1, 1, True, 1)
    spelled = llama.perplexity("<|begin_of_text|>a")  # a text is only text
    assert spelled.num_tokens > 2


def test_without_bos_the_first_token_has_no_probability(
    llama: llamarium.Llama, theirs: TransformersLlama, monkeypatch: pytest.MonkeyPatch
):
    special = llama.tokenizer.special
    without = SimpleNamespace(add_bos=False, bos=special.bos, ids=special.ids, eos=special.eos, pad=special.pad)
    monkeypatch.setattr(llama.tokenizer, "special", without)
    found = llama.perplexity(TEXT, context=16)
    ids = llama.tokenizer.encode(TEXT)
    assert (found.num_tokens, found.bos) == (len(ids) - 1, False)
    assert found.nats == pytest.approx(as_the_guide_does(theirs, ids, 16, 8)[0], rel=2e-6)
    with pytest.raises(InputError, match="no token with another before it"):
        llama.perplexity("a")


def test_progress_ends_at_all_tokens(llama: llamarium.Llama):
    seen: list[tuple[int, int]] = []
    llama.perplexity(TEXT, context=32, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == seen[-1][1] == len(llama.tokenizer.encode(TEXT))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"context": 513}, r"context is 513; expected a whole number within 1\.\.512"),
        ({"context": 1}, "context is 1; expected at least 2"),
        ({"context": True}, "context is True"),
        ({"context": 16, "stride": 17}, r"stride is 17; expected a whole number within 1\.\.16"),
        ({"stride": 0}, "stride is 0"),
        ({"stride": 1.5}, "stride is 1.5"),
    ],
)
def test_windows_that_cannot_be_are_refused(llama: llamarium.Llama, options: dict[str, Any], what: str):
    with pytest.raises(InputError, match=what):
        llama.perplexity(TEXT, **options)


def test_damaged_weights_are_an_error_and_no_number(llama: llamarium.Llama, folder: Path):
    whole = llamarium.load(folder, dtype="float32", device="cpu")
    with torch.no_grad():
        llama.model.model.norm.weight[0] = float("nan")
    with pytest.raises(LlamariumError, match="the model returns NaN for this text"):
        llama.perplexity(TEXT)
    with pytest.raises(LlamariumError, match="measured against returns NaN"):
        whole.divergence(TEXT, against=llama)


def test_from_the_shell(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], llama: llamarium.Llama):
    file = tmp_path / "text.txt"
    file.write_bytes(TEXT.encode())
    words = ["perplexity", str(file), "-m", str(folder), "--dtype", "float32", "--device", "cpu", "--context", "32"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"file": str(file), "model": str(folder), **llama.perplexity(TEXT, context=32).to_dict()}
    assert main([*words, "--stride", "8"]) == 0
    shown = capsys.readouterr()
    expected = llama.perplexity(TEXT, context=32, stride=8)
    assert f"{expected.perplexity:,.4f}" in shown.out and "after BOS" in shown.out
    assert shown.err == ""


def test_standard_input_is_taken_as_it_is(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(TEXT.encode())))
    assert main(["perplexity", "-", "-m", str(folder), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_bytes"] == len(TEXT.encode())


@pytest.mark.parametrize(
    ("content", "what"), [(b"ab\xff", "no UTF-8 text: byte 2 is 0xff"), (b"", "empty; expected text"), (None, "cannot")]
)
def test_files_that_are_no_text_are_named(
    content: bytes | None, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    assert main(["perplexity", str(file)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"llamarium: error: {file}: {what}") and error.count("\n") == 1


def test_ctrl_c_leaves_at_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("llamarium.inspect.measures.perplexity._window_nats", interrupted)
    assert main(["perplexity", str(file), "-m", str(folder), "--device", "cpu"]) == 130
