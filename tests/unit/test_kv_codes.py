"""A KV cache of codes: what is kept, what attention in C and in the modules makes of it, and who shares it."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llamarium.attention.codes import encode
from llamarium.cli.main import main
from llamarium.config import ModelConfig
from llamarium.cost import kv_bytes_per_token
from llamarium.engine.engine import Engine
from llamarium.engine.request import Request
from llamarium.inspect.forward import Memory, advance
from llamarium.inspect.trace import trace
from llamarium.kernels import native
from llamarium.kv_codes import CacheDtype, hadamard, kinds_of
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.runtime.adapter import LowRank
from llamarium.runtime.batch import BLOCK_SIZE, Span, pack
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.runtime.native.cache import NativeCache
from llamarium.runtime.native.runner import NativeRunner
from llamarium.runtime.taps import Taps
from llamarium.sampling.params import SamplingParams
from native_models import CONFIG, build, native_runner, weights_of

pytestmark = pytest.mark.torch

DTYPES: tuple[CacheDtype, ...] = tuple(dtype for dtype in get_args(CacheDtype) if dtype != "auto")
NAN = float("nan")

every_dtype = pytest.mark.parametrize("dtype", DTYPES)


# --- by hand, in float64 ----------------------------------------------------------------------------------------------


def rotation(size: int) -> NDArray[np.float64]:
    """Sylvester's construction of the Hadamard matrix, orthonormal; the identity where there is none."""
    found = np.ones((1, 1))
    while len(found) < size:
        found = np.block([[found, found], [found, -found]])
    return found / np.sqrt(size) if len(found) == size else np.eye(size)


def bf16(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32).bfloat16())


def nibbles(group: NDArray[np.float64]) -> tuple[list[int], float]:
    largest = group[np.abs(group).argmax()]
    scale = bf16(largest / -8)
    return [int(np.clip(np.rint(x / scale), -8, 7)) for x in group] if scale else [0] * len(group), scale


def code_at(part: str, kept: NDArray[Any], slot: int, i: int) -> NDArray[np.int64]:
    """Code i of the keys ("k") or values ("v") in a slot of each block of a `NativeCache`, (B, K, P, bytes)."""
    together = 16 if part == "k" else 2  # slots
    places = kept.reshape(*kept.shape[:2], -1, together * kept.shape[-1])[..., slot // together, :]
    nth = slot % together
    if kept.dtype == np.int8:
        return places[..., i // 2 * 32 + 2 * nth + i % 2 if part == "k" else 2 * i + nth].astype(np.int64)
    if part == "k":
        byte, is_high = i // 8 * 64 + 4 * nth + i % 2 * 2 + i % 8 // 4, i % 4 // 2
    else:
        byte, is_high = i // 32 * 32 + i % 8 * 4 + nth * 2 + i % 32 // 16, i % 16 // 8
    return (places[..., byte].astype(np.int64) >> 4 * is_high & 15) - 8


def decoded(part: str, kept: NDArray[Any], scales: NDArray[Any], head_dim: int) -> NDArray[np.float64]:
    """The unrotated vectors that a `NativeCache` keeps: (B, K, P, head_dim)."""
    numbers = np.zeros((*kept.shape[:-1], head_dim))
    is_bytes = kept.dtype == np.int8
    floats = scales if is_bytes else (scales.astype(np.uint32) << 16).view(np.float32)
    strips = floats.reshape(*floats.shape[:2], -1, floats.shape[-1], 16)
    for slot in range(kept.shape[2]):
        for i in range(head_dim):
            scale = strips[..., slot // 16, 0 if is_bytes else i // 32, slot % 16].astype(np.float64)
            numbers[..., slot, i] = code_at(part, kept, slot, i) * scale
    return numbers @ rotation(head_dim)


@pytest.mark.parametrize("head_dim", [16, 24, 32, 64, 96, 128])
def test_what_is_kept_is_what_the_definition_says(head_dim: int) -> None:
    x = np.random.default_rng(head_dim).standard_normal((50, head_dim)).astype(np.float32)
    x[0], x[1, 1:], x[2] = 0, 0, 1
    rotated = x.astype(np.float64) @ rotation(head_dim)
    np.testing.assert_allclose(hadamard(np, x), rotated, atol=2e-6)
    kept, scales = (part.float().numpy() for part in encode("int4", torch.from_numpy(x)))
    num_other = 0
    for row, bytes_, own in zip(rotated, kept.astype(int), scales, strict=True):
        for g, start in enumerate(range(0, head_dim, 32)):
            codes, scale = nibbles(row[start : start + 32])
            found = [*(bytes_[16 * g : 16 * g + 16] & 15), *(bytes_[16 * g : 16 * g + 16] >> 4)]
            assert found[len(codes) :] == [8] * (32 - len(codes))
            num_other += scale != own[g] or sum(a + 8 != b for a, b in zip(codes, found, strict=False))
    assert num_other <= 5, "but for ties, which float32 may decide otherwise"


@every_dtype
@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_what_is_not_finite_makes_its_scale_nan(dtype: CacheDtype, bad: float) -> None:
    x = torch.randn(3, 64)
    x[1, 40] = bad
    for kind in kinds_of(dtype):
        _, scales = encode(kind, x)
        assert scales[1].isnan().all() and scales[[0, 2]].isfinite().all()


# --- attention in C ---------------------------------------------------------------------------------------------------


def config_of(head_dim: int, heads: int, kv_heads: int, window: int | None = None) -> ModelConfig:
    return replace(
        preset("tiny"), vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=2048,
        sliding_window=window, rope_scaling=None,
    )  # fmt: skip


def build_of(config: ModelConfig) -> LlamaForCausalLM:
    """A model with queries that tell keys apart."""
    model = init_weights(LlamaForCausalLM(config), seed=1).requires_grad_(False).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.mul_(8 if "q_proj" in name or "k_proj" in name else 3)
    return model.bfloat16()


def ids_of(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 100, count).tolist()


@every_dtype
@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads", "window"),
    [(64, 6, 2, None), (32, 4, 4, None), (96, 10, 2, 300), (128, 3, 1, None), (64, 8, 2, 7), (80, 4, 2, None)],
)
def test_attention_is_that_of_the_rounded_keys_and_values(
    kernels: str, dtype: CacheDtype, head_dim: int, heads: int, kv_heads: int, window: int | None
) -> None:
    runner = native_runner(build_of(config_of(head_dim, heads, kv_heads, window)))
    ids, blocks = ids_of(601), list(np.random.default_rng(1).permutation(-(-601 // BLOCK_SIZE)))
    cache, found = runner.new_cache(len(blocks), dtype), dict[str, list[NDArray[np.float32]]]()
    for start, stop in ((0, 599), (599, 600), (600, 601)):
        taps = Taps([("q_rot", 0), ("head_out", 0), ("k", 0), ("v", 0)])
        runner.run(pack([Span(ids[start:stop], start, blocks, num_logits=1)]), cache, taps)
        for (name, _), parts in taps.kept.items():
            found.setdefault(name, []).extend(parts)
    q, out, v_true = (np.concatenate(found[name]).astype(np.float64) for name in ("q_rot", "head_out", "v"))
    k, v = (x.astype(np.float64) for x in cache.read(0, blocks, 601))
    for part, true in (("k", k), ("v", v)):
        kept, scales = getattr(cache, part)[0][blocks], getattr(cache, f"{part}_scales")[0][blocks]
        by_hand = np.moveaxis(decoded(part, kept, scales, head_dim), 1, 2).reshape(-1, kv_heads, head_dim)[:601]
        np.testing.assert_allclose(true, by_hand, atol=1e-5 * np.abs(by_hand).max())
    error = np.sqrt(((v - v_true) ** 2).mean() / (v_true**2).mean())
    assert error < (0.15 if kinds_of(dtype)[1] == "int4" else 0.012), "unrotated, they are near the true ones"
    for row in (0, 1, 255, 256, 300, 598, 599, 600):
        first = 0 if window is None else max(0, row + 1 - window)
        for n in range(heads):
            keys, values = (x[first : row + 1, n // (heads // kv_heads)] for x in (k, v))
            scores = keys @ q[row].reshape(heads, head_dim)[n] / np.sqrt(head_dim)
            weights = np.exp(scores - scores.max())
            expected = weights @ values / weights.sum()
            size = np.abs(v).max()
            np.testing.assert_allclose(out[row].reshape(heads, head_dim)[n], expected, rtol=0, atol=4e-4 * size)


@every_dtype
def test_c_keeps_what_the_modules_keep_and_gives_their_logits(kernels: str, dtype: CacheDtype) -> None:
    model = build_of(config_of(64, 6, 2)).float()
    kept, logits = list[NDArray[Any]](), list[NDArray[Any]]()
    ids = ids_of(300)
    for runner in (ModuleRunner(model), native_runner(model)):
        memory = Memory(runner, 512, dtype)
        sequence = memory.begin(ids, 300)
        logits.append(np.asarray(advance(runner, memory.cache, [sequence])))
        kept.append(np.stack(memory.cache.read(0, sequence.table.blocks, 300)))
    difference = np.abs(kept[0] - kept[1])
    assert (difference > 1e-4 * np.abs(kept[0]).max()).mean() < 2e-3, "but for ties"
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=0.05 * float(logits[0].std()))


@every_dtype
@pytest.mark.parametrize("head_dim", [64, 80])
def test_the_same_bits_cached_chunked_batched_and_on_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, kernels: str, dtype: CacheDtype, head_dim: int
) -> None:
    runner = native_runner(build_of(config_of(head_dim, 6, 2)))
    ids = ids_of(600)

    def last(chunk: int, count: int, others: int) -> NDArray[np.float32]:
        monkeypatch.setattr(native, "num_threads", lambda: count)
        memory = Memory(runner, (1 + others) * 640, dtype)
        sequences = [memory.begin(one, 600) for one in (ids, *([[3] * 600] * others))]
        return advance(runner, memory.cache, sequences, chunk)[0]

    expected = last(600, 1, 0)
    for chunk, count, others in ((600, 2, 0), (600, 3, 2), (7, 1, 0), (333, 2, 1)):
        assert (last(chunk, count, others) == expected).all()


@every_dtype
def test_a_token_that_is_not_finite_poisons_what_sees_it_and_nothing_else(kernels: str, dtype: CacheDtype) -> None:
    model = build_of(replace(config_of(64, 4, 2), tie_word_embeddings=False))
    model.model.embed_tokens.weight[5, 3] = NAN
    runner = native_runner(model)
    memory = Memory(runner, 256, dtype)
    found = advance(runner, memory.cache, [memory.begin(ids, 4) for ids in ([1, 5, 2, 3], [4, 3, 2, 1])])
    assert np.isnan(found[0]).all() and np.isfinite(found[1]).all()


# --- who shares it ----------------------------------------------------------------------------------------------------

ALL = SamplingParams(temperature=0.0, max_tokens=6, logprobs=20)


def answers(runner: NativeRunner, dtype: CacheDtype, prompts: Sequence[list[int]], **options: Any) -> list[list[Any]]:
    """The events of prompts that are answered side by side, each again once all have ended."""
    with closing(Engine(runner, 60, kv_cache_dtype=dtype, **options)) as engine:
        found = list[list[Any]]()
        for _ in range(2):
            requests = [Request(prompt, ALL) for prompt in prompts]
            for request in requests:
                engine.add(request)
            rows: dict[int, list[Any]] = {}
            for event in engine.run():
                rows.setdefault(event.request, []).append((event.token_id, event.top, event.num_cached))
            found.extend(rows[number] for number in sorted(rows))
        return found


@every_dtype
def test_prompts_that_begin_alike_share_blocks_and_get_the_bits_of_a_cold_run(dtype: CacheDtype) -> None:
    runner = native_runner(build("Q8_0"))
    shared = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 100).tolist()
    prompts = [[*shared, 1, 2, 3], [*shared, 9, 8]]
    cold = [answers(runner, dtype, [prompt], shares=False)[0] for prompt in prompts]
    warm = answers(runner, dtype, prompts)
    assert [[event[:2] for event in row] for row in warm] == [[event[:2] for event in row] for row in cold * 2]
    assert warm[1][0][2] in (96, 100) and warm[2][0][2] == 102, "what the first has computed, and then all"


@every_dtype
def test_an_adapters_sequence_is_as_it_is_alone(dtype: CacheDtype) -> None:
    a, b = (np.random.default_rng(3).standard_normal(shape).astype(np.float32) for shape in ((2, 96), (64, 2)))
    adapter = {"model.layers.0.self_attn.k_proj": LowRank(1.0, a, b)}
    runner = NativeRunner(CONFIG, weights_of(build(None)), [adapter])
    alone, ids = dict[int, NDArray[np.float32]](), ids_of(50)
    for which in (0, -1):
        memory = Memory(runner, 64, dtype)
        alone[which] = advance(runner, memory.cache, [memory.begin(ids, 50, adapter=which)])[0]
    memory = Memory(runner, 256, dtype)
    both = advance(runner, memory.cache, [memory.begin(ids, 50, adapter=which) for which in (0, -1)])
    assert (both[0] == alone[0]).all() and (both[1] == alone[-1]).all() and (both[0] != both[1]).any()


NAMES = ("q_rot", "v", "k", "k_rot", "pattern", "head_out")


@every_dtype
def test_a_trace_shows_unrotated_values(dtype: CacheDtype) -> None:
    runner, ids = native_runner(build("Q8_0")), ids_of(90)
    exact, found = (trace(runner, ids, kv_cache_dtype=kept) for kept in ("auto", dtype))
    exact, found = ({name: one[f"layers.0.{name}"].numpy() for name in NAMES} for one in (exact, found))
    for name in NAMES[:3]:
        assert (found[name] == exact[name]).all(), "they do not depend on the cache"
    for name in NAMES[3:]:
        error = np.sqrt(((found[name] - exact[name]) ** 2).mean() / (exact[name] ** 2).mean())
        assert 0 < error < 0.2, name


# --- the option -------------------------------------------------------------------------------------------------------


def test_what_a_token_takes_is_counted_with_its_scales() -> None:
    config = preset("llama-3.2-1b")  # 16 layers, 8 kv heads of 64
    pairs = {"bfloat16": 256, "int8": 2 * 68, "int8-k/int4-v": 68 + 36, "int4": 2 * 36}
    assert {dtype: kv_bytes_per_token(config, dtype) // 128 for dtype in pairs} == pairs
    small = config_of(80, 4, 2)
    for dtype in DTYPES:
        assert NativeCache(small, 3, dtype).num_bytes == kv_bytes_per_token(small, dtype) * 3 * BLOCK_SIZE
        assert ModuleRunner(build_of(small)).new_cache(3, dtype).num_bytes == NativeCache(small, 3, dtype).num_bytes


@every_dtype
def test_the_command_line_takes_it(capsys: pytest.CaptureFixture[str], dtype: CacheDtype) -> None:
    shared = ["-m", "shakespeare-char", "--device", "cpu", "--kv-cache-dtype", dtype]
    assert main(["generate", "ROMEO:", "-n", "4", "--temperature", "0", *shared]) == 0
    assert main(["info", *shared]) == 0
    assert f"KV cache per token, {dtype}" in capsys.readouterr().out


def test_another_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "ROMEO:", "-m", "shakespeare-char", "--kv-cache-dtype", "q8_0"]) == 2
    said = capsys.readouterr().err
    assert "q8_0" in said and all(dtype in said for dtype in DTYPES)
