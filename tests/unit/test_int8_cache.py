"""Keys and values in 8 bits: the rounding, the cache, the pass in C against the one in PyTorch, and the option."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import llamarium
from llamarium.attention import CachedAttend, EagerAttend, KVCache
from llamarium.attention.cached import to_codes
from llamarium.cli.main import main
from llamarium.config import ModelConfig
from llamarium.errors import MemoryBudgetError, OptionError
from llamarium.generation.loop import PrefixCache, decode_one, generate_tokens, new_cache, prefill
from llamarium.generation.sampler import SamplingParams
from llamarium.inspect.summary import summarize
from llamarium.kernels import native
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.quant.ggml import quantize
from llamarium.quant.packed import pack_ggml
from llamarium.quant.swap import swap_linears
from llamarium.runtime.plan import use_kernels

pytestmark = pytest.mark.alone  # with as many threads as there are cores

NAN, INF = float("nan"), float("inf")


# --- rounding ---------------------------------------------------------------------------------------------------------


def test_codes_are_the_nearest_and_ties_go_to_even() -> None:
    x = torch.tensor([[254.0, 1.0, 3.0, -5.0, -7.0, 0.0], [0.0] * 6])
    codes, scale = to_codes(x)
    assert scale.tolist() == [[2.0], [0.0]] and scale.dtype is torch.float32
    assert codes.tolist() == [[127, 0, 2, -2, -4, 0], [0] * 6] and codes.dtype is torch.int8
    x = torch.randn(5, 3, 80, dtype=torch.bfloat16)
    codes, scale = to_codes(x)
    assert ((codes * scale - x.float()).abs() <= scale * 0.5001).all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_makes_the_scale_nan(bad: float) -> None:
    codes, scale = to_codes(torch.tensor([[1.0, bad], [1.0, 2.0]]))
    assert scale[0].isnan() and scale[1].isfinite() and codes[0].tolist() == [0, 0]


def test_the_smallest_and_largest_numbers() -> None:
    codes, scale = to_codes(torch.tensor([[1e-45, 0.0], [1e-43, -1e-43], [3e38, -3e38]]))
    assert scale.isfinite().all() and codes.tolist() == [[0, 0], [71, -71], [127, -127]]  # 71 * 2^-149 is 1e-43


# --- the cache --------------------------------------------------------------------------------------------------------

B, T, N, K, H = 3, 11, 6, 2, 8


def make_cache(slots: int = 32, dtype: torch.dtype = torch.int8) -> KVCache:
    return KVCache(num_layers=1, batch_size=B, num_slots=slots, num_key_value_heads=K, head_dim=H, dtype=dtype)


def qkv(tokens: int = T) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(B, tokens, heads, H, generator=generator) * 2 for heads in (N, K, K))


def rounded(x: Tensor) -> Tensor:
    codes, scale = to_codes(x)
    return codes * scale


@pytest.mark.parametrize("chunks", [[11], [1] * 11, [4, 1, 6]])
def test_attention_sees_the_rounded_keys_and_values(chunks: list[int]) -> None:
    q, k, v = qkv()
    cache, outs, start = make_cache(), [], 0
    for count in chunks:
        part = slice(start, start + count)
        attend = CachedAttend(cache, [start] * B, count)
        outs.append(attend(0, q[:, part], k[:, part], v[:, part]))
        start += count
    expected = EagerAttend()(0, q, rounded(k), rounded(v))
    torch.testing.assert_close(torch.cat(outs, dim=1), expected, rtol=1.3e-6, atol=1e-5)
    context = attend.context(0, k, v)
    torch.testing.assert_close(context.k_BSKH, rounded(k)) and torch.testing.assert_close(context.v_BSKH, rounded(v))


def test_rows_grow_move_and_stand_at_different_places() -> None:
    q, k, v = qkv()
    cache = make_cache(T)
    CachedAttend(cache, [0] * B, T)(0, q, k, v)
    cache = cache.grown(40)
    cache.keep_rows([2, 0, 0])
    starts = [5, 11, 0]
    found = CachedAttend(cache, starts, 1)(0, q[:, :1], k[:, :1], v[:, :1])
    for row, (source, start) in enumerate(zip([2, 0, 0], starts, strict=True)):
        keys, values = (torch.cat((rounded(x[source, :start]), rounded(x[row, :1]))).unsqueeze(0) for x in (k, v))
        queries = torch.zeros(1, start + 1, N, H)
        queries[0, start] = q[row, 0]
        expected = EagerAttend()(0, queries, keys, values)[0, start]
        torch.testing.assert_close(found[row, 0], expected, rtol=1.3e-6, atol=1e-5)


def test_memory_is_counted_with_its_scales() -> None:
    vectors = 2 * B * K * 32
    assert make_cache().num_bytes == vectors * (H + 4)
    assert make_cache(dtype=torch.bfloat16).num_bytes == vectors * 2 * H
    with pytest.raises(MemoryBudgetError, match=r"takes 144,000,000\.0 GB"):
        make_cache(slots=10**15)


def test_a_key_that_is_not_finite_poisons_its_row_and_no_other() -> None:
    q, k, v = qkv()
    k[1, 4, 0, 3] = NAN
    out = CachedAttend(make_cache(), [0] * B, T)(0, q, k, v)
    assert out[1, 4:, : N // K].isnan().all() and out[[0, 2]].isfinite().all()
    assert out[1, :, N // K :].isfinite().all(), "the other kv head"


# --- the pass in C ----------------------------------------------------------------------------------------------------


def config_of(head_dim: int, heads: int, kv_heads: int, layers: int) -> ModelConfig:
    return replace(
        preset("tiny"), vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=2048,
    )  # fmt: skip


def both(config: ModelConfig, packed: bool = True) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """The same model through its modules and through a plan, with queries that tell keys apart.

    Packed Linears round their inputs to 8 bits; others have weights in bfloat16, which the modules multiply in float32.
    """
    made: list[LlamaForCausalLM] = []
    for _ in range(2):
        model = init_weights(LlamaForCausalLM(config), seed=1).requires_grad_(False).eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(8 if "q_proj" in name or "k_proj" in name else 3)
        if packed:
            swap_linears(model, lambda _, linear: pack_ggml(quantize(linear.weight, "Q8_0"), "Q8_0"), skip=())
        made.append(model)
    if not packed:
        for linears in zip(*(made_one.model.layers.modules() for made_one in made), strict=True):
            if isinstance(linears[0], nn.Linear):
                linears[0].weight.copy_(linears[1].to(torch.bfloat16).weight)
    assert use_kernels(made[1])
    return made[0], made[1]


def fill(cache: KVCache) -> KVCache:
    """Give a cache a past that is the same whoever reads it."""
    generator = torch.Generator().manual_seed(5)
    for codes in (*cache.k, *cache.v):
        codes.random_(-127, 128, generator=generator)
    for scales in (*cache.k_scales, *cache.v_scales):
        scales.uniform_(0.0, 0.02, generator=generator)
    return cache


@torch.no_grad()
@pytest.mark.parametrize("head_dim", [48, 64, 80, 128, 24])
def test_c_equals_pytorch(kernels: str, head_dim: int) -> None:
    for group in range(1, 9):
        kv_heads = 4 if head_dim == 24 else 2  # so that all heads together are a multiple of 32
        modules, planned = both(config_of(head_dim, group * kv_heads, kv_heads, layers=1), packed=False)
        for model in (modules, planned):  # the new token's key and value are 0, and so without a code that may be tied
            model.model.layers[0].self_attn.k_proj.weight.zero_()
            model.model.layers[0].self_attn.v_proj.weight.zero_()
        for position in (1, 15, 255, 256, 257, 511, 512, 700):
            found, expected = (
                decode_one(model, fill(new_cache(model, 1, 701, "int8")), [7], [position])
                for model in (planned, modules)
            )
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.std()))


@torch.no_grad()
def test_the_same_bits_cached_chunked_batched_and_on_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = both(config_of(64, 6, 2, layers=2))
    ids = torch.randint(100, (600,)).tolist()

    def last(chunk: int, count: int, others: int) -> Tensor:
        monkeypatch.setattr(native, "num_threads", lambda: count)
        cache = new_cache(model, 1 + others, 600, "int8")
        return prefill(model, cache, [ids, *([[3] * 600] * others)], chunk=chunk)[0]

    expected = last(600, 1, 0)
    for chunk, count, others in ((600, 2, 0), (600, 3, 2), (7, 1, 0), (333, 2, 1)):
        assert torch.equal(last(chunk, count, others), expected)


@torch.no_grad()
def test_c_keeps_the_codes_that_pytorch_keeps() -> None:
    models = both(config_of(48, 6, 2, layers=1))
    caches = [new_cache(model, 2, 40, "int8") for model in models]
    for model, cache in zip(models, caches, strict=True):
        prefill(model, cache, [list(range(40)), list(range(50, 90))])
    for kept in ("k", "v"):
        codes, scales = ([getattr(cache, name)[0] for cache in caches] for name in (kept, f"{kept}_scales"))
        torch.testing.assert_close(*scales, rtol=1e-5, atol=0)
        difference = (codes[0].int() - codes[1].int()).abs()
        assert difference.max() <= 1 and difference.float().mean() < 1e-3, "but for ties"
        assert codes[0].int().abs().amax(-1).eq(127).all()


@torch.no_grad()
def test_tokens_that_are_not_finite_poison_what_sees_them(kernels: str) -> None:
    for bad in (NAN, INF):
        _, model = both(config_of(64, 4, 2, layers=2))
        model.model.embed_tokens.weight[5, 3] = bad
        found = prefill(model, new_cache(model, 2, 4, "int8"), [[1, 5, 2, 3], [4, 3, 2, 1]])
        assert found[0].isnan().all() and found[1].isfinite().all()
    cache = new_cache(model, 2, 4, "int8")
    prefill(model, cache, [[1, 2], [3, 4]])
    cache.k_scales[0][0, :, 1] = INF  # a cache that somebody else made: no crash
    found = decode_one(model, cache, [6, 6], [2, 2])
    assert found[0].isnan().all() and found[1].isfinite().all()


# --- generation -------------------------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
PROMPTS = [[1, 2, 3], list(range(40, 60)), [9]]


def tokens(model: LlamaForCausalLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    rows: dict[int, list[int]] = {}
    for event in generate_tokens(model, prompts, [params] * len(prompts), kv_cache_dtype="int8"):
        rows.setdefault(event.row, []).append(event.token_id)
    return [rows[row] for row in sorted(rows)]


@pytest.mark.parametrize("which", [0, 1], ids=["modules", "plan"])
def test_a_request_gives_the_same_tokens_alone_batched_and_continued(which: int) -> None:
    model = both(config_of(32, 4, 2, layers=2))[which]
    alone = [tokens(model, [prompt])[0] for prompt in PROMPTS]
    assert tokens(model, PROMPTS) == alone
    sampled = SamplingParams(temperature=1.0, max_tokens=10, seed=4, n=2)
    assert tokens(model, PROMPTS[:1], sampled)[0] == tokens(model, PROMPTS[:1], replace(sampled, n=1))[0]
    prefix = PrefixCache(model, "int8")
    for prompt, expected in zip(PROMPTS, alone, strict=True):
        for ids in (prompt, prompt + expected[:4]):
            events = generate_tokens(model, [ids], [replace(GREEDY, max_tokens=4)], prefix=prefix)
            assert [event.token_id for event in events] == expected[len(ids) - len(prompt) :][:4]
    assert prefix.cache.k[0].dtype is torch.int8


# --- the option -------------------------------------------------------------------------------------------------------


def test_other_names_are_refused() -> None:
    model = both(config_of(32, 4, 2, layers=1))[0]
    for wrong in ("fp8", "int4", None, torch.int8):
        with pytest.raises(OptionError, match=r"kv_cache_dtype is .*; expected auto, int8"):
            new_cache(model, 1, 1, wrong)
        with pytest.raises(OptionError, match=r"kv_cache_dtype is .*; expected auto, int8"):
            llamarium.load("shakespeare-char", kv_cache_dtype=wrong)


def test_a_loaded_model_generates_and_talks_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.dtype] = []
    true = KVCache.__init__
    monkeypatch.setattr(KVCache, "__init__", lambda self, **given: made.append(given["dtype"]) or true(self, **given))
    llama = llamarium.load("shakespeare-char", device="cpu", kv_cache_dtype="int8")
    options = {"temperature": 0.0, "max_new_tokens": 5}
    text = llama.generate("ROMEO:", **options).text
    assert "".join(piece.text for piece in llama.stream("ROMEO:", **options)) == text
    llama.next_tokens("ROMEO:")
    llama.conversation()
    assert made == [torch.int8] * 4
    llama.score("ROMEO:")
    assert torch.int8 not in made[4:], "nothing is kept there"


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
