"""Keys and values in 8 bits: the rounding, the caches, the pass in C against the one in PyTorch, and the option."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import llamarium
from llamarium.attention import EagerAttend
from llamarium.attention.codes import decode, encode, spread, to_bytes
from llamarium.attention.paged import PagedAttend, PagedCache, Segment, find_slots
from llamarium.cli.main import main
from llamarium.config import ModelConfig
from llamarium.errors import MemoryBudgetError, OptionError
from llamarium.generation.loop import DialogEngine, generate_tokens
from llamarium.inspect.forward import KeptSequence, Memory, advance
from llamarium.inspect.summary import summarize
from llamarium.kernels import native
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.quant.packed import EmbeddingPacked, LinearPacked
from llamarium.runtime.batch import BLOCK_SIZE, Span, pack
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.runtime.native.cache import NativeCache
from llamarium.runtime.native.runner import NativeRunner
from llamarium.runtime.runner import CacheDtype, Runner
from llamarium.runtime.taps import Taps
from llamarium.sampling.params import SamplingParams
from native_models import native_runner
from reference_codes import attend_codes
from reference_tiles import pack_ggml, quantize
from swapping import swap_linears

pytestmark = [pytest.mark.torch, pytest.mark.alone]  # with as many threads as there are cores

NAN, INF = float("nan"), float("inf")


# --- rounding ---------------------------------------------------------------------------------------------------------


def test_codes_are_the_nearest_and_ties_go_to_even() -> None:
    x = torch.tensor([[254.0, 1.0, 3.0, -5.0, -7.0, 0.0], [0.0] * 6])
    codes, scale = to_bytes(x)
    assert scale.tolist() == [[2.0], [0.0]] and scale.dtype is torch.float32
    assert codes.tolist() == [[127, 0, 2, -2, -4, 0], [0] * 6] and codes.dtype is torch.int8
    x = torch.randn(5, 3, 80, dtype=torch.bfloat16)
    codes, scale = to_bytes(x)
    assert ((codes * scale - x.float()).abs() <= scale * 0.5001).all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_makes_the_scale_nan(bad: float) -> None:
    codes, scale = to_bytes(torch.tensor([[1.0, bad], [1.0, 2.0]]))
    assert scale[0].isnan() and scale[1].isfinite() and codes[0].tolist() == [0, 0]


def test_the_smallest_and_largest_numbers() -> None:
    codes, scale = to_bytes(torch.tensor([[1e-45, 0.0], [1e-43, -1e-43], [3e38, -3e38]]))
    assert scale.isfinite().all() and codes.tolist() == [[0, 0], [71, -71], [127, -127]]  # 71 * 2^-149 is 1e-43


# --- the cache --------------------------------------------------------------------------------------------------------

B, T, N, K, H = 3, 11, 6, 2, 8


def qkv(tokens: int = T) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(B, tokens, heads, H, generator=generator) * 2 for heads in (N, K, K))


def rounded(x: Tensor) -> Tensor:
    return spread(decode(*encode("int8", x), x.shape[-1]))


P = 4


def paged(blocks: int, kept: CacheDtype = "int8") -> PagedCache:
    return PagedCache(
        num_layers=1, num_blocks=blocks, block_size=P, num_key_value_heads=K, head_dim=H, dtype=torch.float32, kept=kept
    )  # fmt: skip


def see(
    cache: PagedCache, runs: list[tuple[list[int], int, int]], parts: list[tuple[Tensor, Tensor, Tensor]]
) -> Tensor:
    """One packed row of (blocks, start, count) runs and their queries, keys and values."""
    made, row = list[Segment](), 0
    for blocks, start, count in runs:
        made.append(Segment(slice(row, row + count), start, find_slots(blocks, P, start + count, "cpu")))
        row += count
    attend = PagedAttend(cache, made)
    return attend(0, *(torch.cat(which).unsqueeze(0) for which in zip(*parts, strict=True)))[0]


@pytest.mark.parametrize("chunks", [[11], [1] * 11, [4, 1, 6]])
@pytest.mark.parametrize("table", [[0, 1, 2], [4, 0, 3]], ids=["side by side", "apart"])
def test_paged_attention_sees_the_rounded_keys_and_values(chunks: list[int], table: list[int]) -> None:
    q, k, v = (x[0] for x in qkv())
    cache, outs, start = paged(5), list[Tensor](), 0
    for count in chunks:
        part = slice(start, start + count)
        out = see(cache, [(table, start, count)], [(q[part], k[part], v[part])])
        outs.append(out)
        start += count
    expected = EagerAttend()(0, q[None], rounded(k)[None], rounded(v)[None])[0]
    torch.testing.assert_close(torch.cat(outs), expected, rtol=1.3e-6, atol=1e-5)
    kept_k, kept_v = cache.read(0, table, T)
    torch.testing.assert_close(torch.from_numpy(kept_k), rounded(k))
    torch.testing.assert_close(torch.from_numpy(kept_v), rounded(v))


def test_a_key_that_is_not_finite_poisons_its_sequence_and_no_other() -> None:
    q, k, v = qkv()
    k[1, 4, 0, 3] = NAN
    runs = [([3 * b, 3 * b + 1, 3 * b + 2], 0, T) for b in range(B)]
    out = see(paged(9), runs, [(q[b], k[b], v[b]) for b in range(B)]).view(q.shape)
    assert out[1, 4:, : N // K].isnan().all() and out[[0, 2]].isfinite().all()
    assert out[1, :, N // K :].isfinite().all(), "the other kv head"


def test_sequences_grow_fork_and_stand_at_different_places() -> None:
    q, k, v = qkv()
    cache = paged(9)
    see(cache, [([3 * b, 3 * b + 1, 3 * b + 2], 0, T) for b in range(B)], [(q[b], k[b], v[b]) for b in range(B)])
    cache.grow(12)
    cache.copy_block(1, 10)  # the second row's first tokens are the first one's: a shared block, and a copy of one
    sources, starts, tables = [2, 0, 1], [11, 5, 0], [[6, 7, 8], [0, 10], [11]]
    new = [(q[b, :1], k[b, :1], v[b, :1]) for b in range(3)]
    found = see(cache, [(table, start, 1) for table, start in zip(tables, starts, strict=True)], new)
    for row, (source, start) in enumerate(zip(sources, starts, strict=True)):
        keys, values = (torch.cat((rounded(x[source, :start]), rounded(x[row, :1]))).unsqueeze(0) for x in (k, v))
        queries = torch.zeros(1, start + 1, N, H)
        queries[0, start] = q[row, 0]
        expected = EagerAttend()(0, queries, keys, values)[0, start]
        torch.testing.assert_close(found[row], expected, rtol=1.3e-6, atol=1e-5)


def test_memory_of_blocks_is_counted_with_its_scales() -> None:
    vectors = 2 * K * 8 * P
    assert paged(8).num_bytes == vectors * (H + 4) and paged(8, "auto").num_bytes == vectors * 4 * H
    with pytest.raises(MemoryBudgetError, match=r"tokens takes 192,000,000\.0 GB"):
        paged(10**15)
    config = config_of(32, 4, 2, layers=3)
    assert NativeCache(config, 5, "int8").num_bytes == 2 * 3 * 2 * 5 * BLOCK_SIZE * (32 + 4)
    with pytest.raises(
        MemoryBudgetError, match=f"KV cache for {BLOCK_SIZE * 10**15} tokens takes 55,296,000,000\\.0 GB"
    ):
        NativeCache(config, 10**15, "int8")


# --- the pass in C ----------------------------------------------------------------------------------------------------


def config_of(head_dim: int, heads: int, kv_heads: int, layers: int) -> ModelConfig:
    return replace(
        preset("tiny"), vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=2048,
    )  # fmt: skip


def build(config: ModelConfig, packed: bool = True) -> LlamaForCausalLM:
    """A model with queries that tell keys apart.

    Packed Linears round their inputs to 8 bits; others have weights in bfloat16, which C multiplies in float32.
    """
    model = init_weights(LlamaForCausalLM(config), seed=1).requires_grad_(False).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.mul_(8 if "q_proj" in name or "k_proj" in name else 3)
    if not packed:
        return model.bfloat16()
    swap_linears(model, lambda _, linear: pack_ggml(quantize(linear.weight, "Q8_0"), "Q8_0"), skip=())
    assert isinstance(model.lm_head, LinearPacked)
    model.model.embed_tokens = EmbeddingPacked(model.lm_head, torch.float32)
    return model


def both(config: ModelConfig, packed: bool = True) -> tuple[Runner, Runner]:
    """The same weights through the modules, in float32, and through C."""
    return ModuleRunner(build(config, packed).float()), native_runner(build(config, packed))


def begin(runner: Runner, prompts: Sequence[Sequence[int]], room: int) -> tuple[Memory, list[KeptSequence]]:
    memory = Memory(runner, len(prompts) * -(-room // BLOCK_SIZE) * BLOCK_SIZE, "int8")
    return memory, [memory.begin(prompt, room) for prompt in prompts]


def of_sequence(cache: Any, which: str, blocks: list[int], count: int) -> np.ndarray:
    """A layer's codes (count, K, H) or scales (count, K, 1), whichever way the cache keeps them."""
    kept = getattr(cache, which)[0]
    if isinstance(kept, Tensor):
        return kept.unflatten(0, (-1, BLOCK_SIZE))[blocks].flatten(0, 1)[:count].numpy()
    kept = kept[blocks]
    if which == "v":  # two slots' codes in turn
        kept = kept.reshape(*kept.shape[:2], -1, kept.shape[3], 2).swapaxes(3, 4).reshape(kept.shape)
    elif which == "k":  # two codes of each of 16 slots in turn
        kept = kept.reshape(*kept.shape[:2], -1, kept.shape[3] // 2, 16, 2).swapaxes(3, 4).reshape(kept.shape)
    by_slot = np.moveaxis(kept, 2, 1)
    return by_slot.reshape(-1, *by_slot.shape[2:])[:count].reshape(count, kept.shape[1], -1)


def fill(cache: Any) -> None:
    """Give a cache a past that is the same whoever reads it."""
    random = np.random.default_rng(5)
    slots, config = cache.num_blocks * BLOCK_SIZE, config_shape(cache)
    for name in ("k", "v", "k_scales", "v_scales"):
        for kept in getattr(cache, name):
            is_codes = not name.endswith("scales")
            shape = (slots, config[0], config[1] if is_codes else 1)
            most = 0.002 if name == "k_scales" else 0.02  # with larger scores float32 itself is less exact
            values = random.integers(-127, 128, shape, np.int8) if is_codes else random.uniform(0, most, shape)
            if isinstance(kept, Tensor):
                kept.copy_(torch.from_numpy(values))
            else:
                by_head = np.moveaxis(values.reshape(-1, BLOCK_SIZE, *shape[1:]), 1, 2)
                if name == "v":  # two slots' codes in turn
                    by_head = by_head.reshape(*by_head.shape[:2], -1, 2, shape[2]).swapaxes(3, 4)
                elif name == "k":  # two codes of each of 16 slots in turn
                    by_head = by_head.reshape(*by_head.shape[:2], -1, 16, shape[2] // 2, 2).swapaxes(3, 4)
                kept[:] = by_head.reshape(kept.shape)


def config_shape(cache: Any) -> tuple[int, int]:
    """Return K and H."""
    if isinstance(cache, PagedCache):
        return cache.k[0].shape[1], cache.k[0].shape[2]
    return cache.config.num_key_value_heads, cache.config.head_dim


@pytest.mark.parametrize("head_dim", [48, 64, 80, 128, 24])
def test_c_rounds_queries_and_weights_as_the_reference(
    kernels: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = list[np.ndarray]()

    class Attend(PagedAttend):
        """Sees what C should see; with the queries of C, of which the modules' differ in the last bits."""

        def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
            super().__call__(layer_idx, q_BTNH, k_BTKH, v_BTKH)  # keeps the new ones
            q_NH = queries.pop(0).reshape(q_BTNH.shape[2:])
            torch.testing.assert_close(q_BTNH[0, 0], torch.from_numpy(q_NH), rtol=0, atol=1e-5 * float(q_NH.std()))
            kept = (self.cache.k, self.cache.k_scales, self.cache.v, self.cache.v_scales)
            k_SKH, k_scales, v_SKH, v_scales = (part[layer_idx][self.segments[0].slots].numpy() for part in kept)
            seen = attend_codes(q_NH, k_SKH, k_scales[..., 0], v_SKH, v_scales[..., 0])
            return torch.from_numpy(seen).view_as(q_BTNH)

    monkeypatch.setattr("llamarium.runtime.module_runner.PagedAttend", Attend)
    blocks = [3, 9, 1, 0, 2, 11, 5, 4, 10, 6, 7, 8]
    for group in range(1, 9):
        kv_heads = 4 if head_dim == 24 else 2  # so that all heads together are a multiple of 32
        model = build(config_of(head_dim, group * kv_heads, kv_heads, layers=1), packed=False).float()
        model.model.layers[0].self_attn.k_proj.weight.zero_()  # the new token's key and value are 0, and so without a
        model.model.layers[0].self_attn.v_proj.weight.zero_()  # code that may be tied
        runners = native_runner(model), ModuleRunner(model)
        caches = [runner.new_cache(12, "int8") for runner in runners]
        for cache in caches:
            fill(cache)
        for position in (700, 512, 511, 257, 256, 255, 15, 1):  # a later one does not see an earlier one's key
            batch, taps = pack([Span([7], position, blocks)]), Taps([("q_rot", 0)])
            found = runners[0].run(batch, caches[0], taps)[0]
            queries.append(taps.kept["q_rot", 0][0])
            expected = runners[1].run(batch, caches[1])[0]
            np.testing.assert_allclose(found, expected, rtol=0, atol=3e-5 * float(expected.std()))


def test_the_same_bits_cached_chunked_batched_and_on_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    _, runner = both(config_of(64, 6, 2, layers=2))
    ids = torch.randint(100, (600,)).tolist()

    def last(chunk: int, count: int, others: int) -> np.ndarray:
        monkeypatch.setattr(native, "num_threads", lambda: count)
        memory, sequences = begin(runner, [ids, *([[3] * 600] * others)], 600)
        return advance(runner, memory.cache, sequences, chunk)[0]

    expected = last(600, 1, 0)
    for chunk, count, others in ((600, 2, 0), (600, 3, 2), (7, 1, 0), (333, 2, 1)):
        assert (last(chunk, count, others) == expected).all()


def test_c_keeps_the_codes_that_pytorch_keeps() -> None:
    kept = []
    for runner in both(config_of(48, 6, 2, layers=1)):
        memory, sequences = begin(runner, [list(range(40)), list(range(10, 90))], 80)
        advance(runner, memory.cache, sequences)
        names = ("k", "v", "k_scales", "v_scales")
        parts = [
            [of_sequence(memory.cache, name, s.table.blocks, len(s.ids)) for s in sequences] for name in names
        ]  # fmt: skip
        kept.append([np.concatenate(part) for part in parts])
        read = memory.cache.read(0, sequences[1].table.blocks, 80)
        np.testing.assert_allclose(np.asarray(read[0]), (kept[-1][0] * kept[-1][2])[40:], rtol=1e-6)
    (*codes_of_modules, k_scales, v_scales), (*codes_of_c, k_scales_c, v_scales_c) = kept
    np.testing.assert_allclose(k_scales_c, k_scales, rtol=1e-5)
    np.testing.assert_allclose(v_scales_c, v_scales, rtol=1e-5)
    for expected, found in zip(codes_of_modules, codes_of_c, strict=True):
        difference = np.abs(expected.astype(int) - found.astype(int))
        assert difference.max() <= 1 and difference.mean() < 1e-3, "but for ties"
        assert (np.abs(expected.astype(int)).max(-1) == 127).all()


def test_tokens_that_are_not_finite_poison_what_sees_them(kernels: str) -> None:
    for bad in (NAN, INF):
        model = build(replace(config_of(64, 4, 2, layers=2), tie_word_embeddings=False), packed=False)
        model.model.embed_tokens.weight[5, 3] = bad
        runner = native_runner(model)
        memory, sequences = begin(runner, [[1, 5, 2, 3], [4, 3, 2, 1]], 4)
        found = advance(runner, memory.cache, sequences)
        assert np.isnan(found[0]).all() and np.isfinite(found[1]).all()
    memory, sequences = begin(runner, [[1, 2], [3, 4]], 4)
    advance(runner, memory.cache, sequences)
    assert isinstance(memory.cache, NativeCache)
    memory.cache.k_scales[0][sequences[0].table.blocks[0], :, 1] = INF  # a cache that somebody else made: no crash
    for sequence in sequences:
        sequence.ids.append(6)
    found = advance(runner, memory.cache, sequences)
    assert np.isnan(found[0]).all() and np.isfinite(found[1]).all()


# --- generation -------------------------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
PROMPTS = [[1, 2, 3], list(range(40, 60)), [9]]


def tokens(runner: Runner, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    rows: dict[int, list[int]] = {}
    for event in generate_tokens(runner, prompts, [params] * len(prompts), kv_cache_dtype="int8"):
        rows.setdefault(event.row, []).append(event.token_id)
    return [rows[row] for row in sorted(rows)]


@pytest.mark.parametrize("which", [0, 1], ids=["modules", "C"])
def test_a_request_gives_the_same_tokens_alone_batched_and_continued(which: int) -> None:
    runner = both(config_of(32, 4, 2, layers=2))[which]
    alone = [tokens(runner, [prompt])[0] for prompt in PROMPTS]
    assert tokens(runner, PROMPTS) == alone
    sampled = SamplingParams(temperature=1.0, max_tokens=10, seed=4, n=2)
    assert tokens(runner, PROMPTS[:1], sampled)[0] == tokens(runner, PROMPTS[:1], replace(sampled, n=1))[0]
    prefix = DialogEngine(runner, "int8")
    for prompt, expected in zip(PROMPTS, alone, strict=True):
        for ids in (prompt, prompt + expected[:4]):
            wanted = [replace(GREEDY, max_tokens=4)]
            events = generate_tokens(runner, [ids], wanted, prefix=prefix, kv_cache_dtype="int8")
            assert [event.token_id for event in events] == expected[len(ids) - len(prompt) :][:4]
    cache = prefix.engine.cache
    assert (cache.kept if isinstance(cache, PagedCache) else cache.dtype) == "int8"  # pyright: ignore


# --- the option -------------------------------------------------------------------------------------------------------


def test_other_names_are_refused() -> None:
    runner = both(config_of(32, 4, 2, layers=1))[0]
    llama = llamarium.load("shakespeare-char")
    wrong: Any
    for wrong in ("fp8", "int3", "int4-k/int8-v", None, torch.int8):
        with pytest.raises(OptionError, match=r"kv_cache_dtype is .*; expected auto, int8, int8-k/int4-v, int4$"):
            generate_tokens(runner, [[1]], [GREEDY], kv_cache_dtype=wrong)
        for ask in (llama.generate, llama.stream, llama.conversation().say):
            with pytest.raises(OptionError, match=r"kv_cache_dtype is .*; expected auto, int8, int8-k/int4-v, int4$"):
                list(ask("ROMEO:", kv_cache_dtype=wrong))


@pytest.mark.parametrize("runner", [NativeRunner, ModuleRunner])
def test_a_loaded_model_generates_and_talks_over_it(runner: type, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    true = runner.new_cache
    monkeypatch.setattr(
        runner,
        "new_cache",
        lambda self, num_blocks, dtype="auto", *size: made.append(dtype) or true(self, num_blocks, dtype, *size),
    )
    method = None if runner is NativeRunner else "NF4"
    llama = llamarium.load("shakespeare-char", device="cpu", quantize=method)
    assert type(llama.runner) is runner
    options: Any = {"temperature": 0.0, "max_new_tokens": 5, "kv_cache_dtype": "int8"}
    text = llama.generate("ROMEO:", **options).text
    assert "".join(piece.text for piece in llama.stream("ROMEO:", **options)) == text
    assert made == ["int8"] * 2
    prefix = DialogEngine(llama.runner)
    prefix.use(llama.runner, "int8")
    assert made == ["int8"] * 2 + ["auto", "int8"], "a dialog goes on in 8 bits, over a cache of its own"
    del made[2:]
    llama.score("ROMEO:")
    llama.generate("ROMEO:", max_new_tokens=2)
    assert len(made) > 2 and "int8" not in made[2:], "it is the request's"


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    shared = ["-m", "shakespeare-char", "--device", "cpu", "--kv-cache-dtype"]
    assert main(["generate", "ROMEO:", "-n", "4", "--temperature", "0", *shared, "int8"]) == 0
    assert main(["info", *shared, "int8"]) == 0
    assert "KV cache per token, int8" in capsys.readouterr().out
    assert main(["generate", "ROMEO:", *shared, "int8", "--no-cache"]) == 2
    assert "there is no cache with --no-cache" in capsys.readouterr().err
    for command in (["generate", "ROMEO:", *shared, "fp8"], ["score", "ROMEO:", *shared, "int8"]):
        assert main(command) == 2  # not where it would be ignored
    capsys.readouterr()


def test_info_counts_its_scales() -> None:
    found = summarize(preset("llama-3.2-1b"), kv_cache_dtype="int8")
    assert (found.kv_dtype, found.kv_bytes_per_token) == ("int8", 2 * 16 * 8 * (64 + 4))
