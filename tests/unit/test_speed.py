"""What `llamarium bench` says of a model: the arithmetic on known numbers, and what is timed."""

import dataclasses
import json
from collections.abc import Iterator

import pytest
import torch

from llamarium.cli.bench_learn import explain
from llamarium.cli.main import main
from llamarium.engine.request import TokenEvent
from llamarium.errors import ContextLengthError
from llamarium.inspect.measures import speed
from llamarium.inspect.measures.speed import Round, Work, measure, step_bytes, summarize, weight_bytes
from llamarium.kernels import native
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.runtime.module_runner import ModuleRunner
from native_models import native_runner
from reference_tiles import pack_ggml, quantize
from swapping import swap_linears

pytestmark = [pytest.mark.torch, pytest.mark.alone]  # it measures time

needs_kernels = pytest.mark.skipif(native.library() is None, reason="the C kernels are not built")


def tiny(*, tied: bool, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    config = dataclasses.replace(
        preset("smollm2-135m"), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=320, max_position_embeddings=128, tie_word_embeddings=tied,
    )  # fmt: skip
    return init_weights(LlamaForCausalLM(config), seed=0).to(dtype).requires_grad_(False)


LAYERS = 2 * (64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 96 + 2 * 64) + 64  # weights and norms, the last norm too


@needs_kernels
@pytest.mark.parametrize("tied", [True, False])
def test_a_step_reads_every_weight_once_and_no_embedding_but_the_tied_one(tied: bool) -> None:
    assert weight_bytes(native_runner(tiny(tied=tied))) == 2 * (LAYERS + 320 * 64)


@needs_kernels
def test_a_step_reads_the_keys_and_values_of_all_rows() -> None:
    runner = native_runner(tiny(tied=True))
    per_token = 2 * 2 * 2 * 16 * 2
    weights = weight_bytes(runner)
    assert step_bytes(runner, Work(num_cached=40, num_prompt=1, num_new=10)) == weights + 46 * per_token
    assert step_bytes(runner, Work(num_rows=3, num_prompt=16, num_new=8)) == weights + 3 * 20 * per_token
    assert step_bytes(runner, Work(num_rows=9, num_prompt=16, num_new=8)) == weights + 9 * 20 * per_token
    in_8_bits = Work(num_cached=40, num_prompt=1, num_new=10, kv_cache_dtype="int8")
    assert step_bytes(runner, in_8_bits) == weights + 46 * 2 * 2 * 2 * (16 + 4)  # codes and a scale for each vector
    assert step_bytes(runner, Work(num_prompt=16)) is None  # a prompt's tokens share what is read


@needs_kernels
def test_packed_weights_count_as_they_are_kept() -> None:
    model = tiny(tied=False)
    swap_linears(model, lambda _, linear: pack_ggml(quantize(linear.weight.float(), "Q4_0"), "Q4_0"), skip=())
    norms = 5 * 2 * 64
    expected = norms + (LAYERS - 5 * 64 + 320 * 64) * 18 // 32  # 16 bytes of codes and a scale
    assert weight_bytes(native_runner(model)) == expected


@pytest.mark.parametrize("work", [Work(num_cached=10, num_new=2), Work(num_rows=2, num_prompt=3)])
def test_nothing_is_said_of_what_pytorch_reads(work: Work) -> None:
    found = measure(ModuleRunner(tiny(tied=True)), work, num_rounds=1)
    assert found.tokens_per_s > 0
    assert (found.step_bytes, found.memory_bytes_per_s, found.memory_share, found.python_share) == (None,) * 4


@needs_kernels
def test_the_kernels_time_is_a_part_of_it() -> None:
    found = measure(native_runner(tiny(tied=True)), Work(num_cached=100, num_new=4), num_rounds=2)
    assert found.memory_bytes_per_s is not None and 1e8 < found.memory_bytes_per_s < 1e12
    assert found.python_share is not None and 0 < found.python_share < 1


def test_medians_and_shares_of_known_rounds() -> None:
    rounds = [Round(0.010, 0.008, 20e9), Round(0.020, 0.019, 10e9), Round(0.012, 0.009, 20e9)]
    found = summarize(Work(num_rows=4, num_prompt=16, num_new=8), rounds, 120_000_000)
    assert found.tokens_per_s == pytest.approx(4 / 0.012)
    assert found.bytes_per_s == pytest.approx(10e9)
    assert found.memory_bytes_per_s == 20e9
    assert found.memory_share == pytest.approx(0.6)  # of 0.6, 0.6 and 0.5
    assert found.python_share == pytest.approx(0.2)  # of 0.2, 0.05 and 0.25
    prompt = summarize(Work(num_rows=2, num_prompt=50), [Round(0.5, 0.0, None)], None)
    assert prompt.tokens_per_s == pytest.approx(200)
    assert prompt.python_share is None


@pytest.mark.parametrize(
    ("work", "positions", "steps"),
    [(Work(num_prompt=7), [7], 1), (Work(num_cached=30, num_new=3), [1, 1, 1, 1], 3)],
)
def test_what_is_timed(work: Work, positions: list[int], steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is timed to its first token; a step from one token to the next, without the prompt's pass."""
    model, seen, clock = tiny(tied=True), [], iter(range(1000))
    model.model.register_forward_hook(lambda _, inputs, __: seen.append((inputs[0].shape[1], int(inputs[1][0, 0]))))
    monkeypatch.setattr(speed, "_now", lambda: (10.0 * next(clock), 0.0))
    found = measure(ModuleRunner(model), work, num_rounds=1)
    assert len(seen) == 2 * (bool(work.num_cached) + len(positions))  # a first round and this one, each fills its cache
    second = seen[-len(positions) :]
    assert [length for length, _ in second] == positions
    assert second[0][1] == work.num_cached
    assert found.seconds == 10.0  # one look at the clock a token


def test_streams_are_timed_once_all_prompts_have_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def events(*_: object, **__: object) -> Iterator[TokenEvent]:
        nonlocal now
        for row, seconds in ((0, 5.0), (0, 7.0), (1, 0.0), (0, 1.0), (1, 0.0), (1, 1.0)):
            now += seconds
            yield TokenEvent(0, row, 1)

    monkeypatch.setattr(speed, "generate_tokens", events)
    monkeypatch.setattr(speed, "_now", lambda: (now, 0.0))
    assert speed.run_round(ModuleRunner(tiny(tied=True)), Work(num_rows=2, num_new=2)).seconds == 1.0


def test_what_does_not_fit_the_context_is_refused() -> None:
    with pytest.raises(ContextLengthError, match="132 positions are needed, and the model's context holds 128"):
        measure(ModuleRunner(tiny(tied=True)), Work(num_cached=128, num_new=2), num_rounds=1)


# --- learning and writing ---------------------------------------------------------------------------------------------


def test_learning_and_writing_are_measured_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "learn-and-write", "-n", "24", "--rounds", "1"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["num_tokens"]) == ("shakespeare-char", 24)
    assert list(found["tokens_per_s"]) == ["learn", "write", "read", "answer"]
    assert all(speed > 0 for speed in found["tokens_per_s"].values())
    assert found["why"] == explain(found["tokens_per_s"], 24)
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "one text of 24 tokens, on cpu" in printed and printed.count(" µs") == 4
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize(("learn", "said"), [(300.0, "3.0 times as fast as writing"), (50.0, "2.0 times as slow as")])
def test_the_sentence_follows_what_was_measured(learn: float, said: str) -> None:
    assert said in explain({"learn": learn, "write": 100.0}, 128)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["-n", "255"], 1, "255 tokens; the model's context holds 256: use at most 254"),
        (["--lengths", "8"], 2, "has no --lengths"),
        (["--kv-cache-dtype", "int8"], 2, "has no --kv-cache-dtype"),
    ],
)
def test_what_it_cannot_measure_is_refused(
    words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "learn-and-write", *words]) == code
    assert message in capsys.readouterr().err
